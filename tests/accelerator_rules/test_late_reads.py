"""What the host reads from a device late is still honoured, or an error that names it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist import DataParallelStrategy, FullShardStrategy, NDParallelStrategy
from lightning_dist._compat import local_of
from lightning_dist.parallel_module import parallelized
from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.compression import Compression, Int8
from tests.distributed.fit import make_trainer
from tests.models import GPT
from tests.pool import RankFailed, WorkerPool


def overflow(**options: bool) -> tuple[list[bool], int, list[str]]:
    """Train by AdamW with ``options``, with a gradient that is not finite in the third step of one rank."""
    changed: list[bool] = []

    class Poisoned(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 and self.trainer.global_rank == 1 else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, **options)

    class Record(pl.Callback):
        before: Any = None

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            now = [local_of(param.detach()).cpu().clone() for param in pl_module.parameters()]
            if self.before is not None:
                changed.append(any(not torch.equal(a, b) for a, b in zip(self.before, now, strict=True)))
            self.before = now

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Poisoned()
        strategy = DataParallelStrategy(compression=Int8(block_size=64, min_numel=64))
        make_trainer("auto", strategy=strategy, max_steps=9, callbacks=[Record()]).fit(model)
    compression = parallelized(model).get(Compression)  # type: ignore[union-attr]
    assert compression is not None
    assert all(torch.isfinite(param.detach().cpu()).all() for param in model.parameters())
    texts = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    return changed, compression.num_skipped_steps, texts


@pytest.mark.parametrize("options", [{"fused": True}, {}])
def test_fused_optimizers_skip_a_step_with_a_gradient_that_is_not_finite(
    simulated: WorkerPool, options: dict[str, bool]
) -> None:
    for rank, (changed, num_skipped, texts) in enumerate(simulated.run(overflow, 2, **options)):
        assert changed[0] and not changed[1]  # The third step, of which the second change is the result, is skipped.
        assert changed[-2:] == [True, True]  # The compressor has forgotten what was not finite.
        assert num_skipped == changed.count(False) >= 1
        assert len(texts) == (num_skipped if rank == 0 else 0)


def choose(folder: Path) -> list[Any]:
    """Train with compression by optimizers that leave the choice to torch, or do not, and resume a run without it.

    Returns:
        For each optimizer, the option ``fused`` of its group after the run; then, of the resumed run, the option, the
        kind of device of a parameter's number of steps, and this number.
    """
    seen: list[Any] = []
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adam(params, foreach=False),
        lambda params: torch.optim.AdamW(params, fused=False),
        lambda params: torch.optim.RMSprop(params),
    ):
        model = GPT()
        model.make_optimizer = make  # type: ignore[method-assign]
        trainer = make_trainer("auto", strategy=DataParallelStrategy(compression="bf16"), max_steps=1)
        trainer.fit(model)
        seen.append(trainer.optimizers[0].param_groups[0].get("fused"))
    trainer = make_trainer("auto", strategy=DataParallelStrategy(), max_steps=2)
    trainer.fit(GPT(optimizer="adamw"))
    trainer.save_checkpoint(folder / "run.ckpt")
    trainer = make_trainer("auto", strategy=DataParallelStrategy(compression="bf16"), max_steps=4)
    trainer.fit(GPT(optimizer="adamw"), ckpt_path=folder / "run.ckpt")
    (optimizer,) = trainer.optimizers
    step = next(iter(optimizer.state.values()))["step"]
    return [*seen, optimizer.param_groups[0]["fused"], step.device.type != "cpu", float(step)]


def test_optimizers_become_fused_where_torch_may_choose(simulated: WorkerPool, tmp_path: Path) -> None:
    for of_rank in simulated.run(choose, 2, tmp_path):
        assert of_rank == [True, None, False, None, True, True, 4.0]


class TrainsOneStage(GPT):
    """Train the last block alone, which is on one stage of a pipeline."""

    def configure_optimizers(self) -> Any:
        for name, param in self.named_parameters():
            param.requires_grad_(name.startswith(f"model.blocks.{len(self.model.blocks) - 1}."))
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-3)


def choose_on_one_stage() -> bool:
    strategy = NDParallelStrategy(2, dp_replicate_size=2, num_microbatches=2, compression="bf16")
    trainer = make_trainer("auto", strategy=strategy, max_steps=2)
    trainer.fit(TrainsOneStage())
    return bool(trainer.optimizers[0].param_groups[0]["fused"])


def test_ranks_agree_on_the_choice_although_one_stage_has_all_parameters(simulated: WorkerPool) -> None:
    """A fused step exchanges nothing, so that ranks with other choices would wait for each other."""
    assert simulated.run(choose_on_one_stage, 4) == [True] * 4


class Clamped(GPT):
    """Clamp a weight through ``.data`` where the steps from ``first`` on use it, or in each step outside of its block.

    Args:
        first: Number of the first step that clamps the weight.
        is_inside: Whether the weight is clamped in the forward of its block.
    """

    def __init__(self, first: int, is_inside: bool = True) -> None:
        super().__init__(optimizer="plain_sgd")
        self.first, self.is_inside, self.step = first, is_inside, -1
        self.model.blocks[0].mlp[0].register_forward_pre_hook(lambda *args: self.clamp(True))

    def clamp(self, is_inside: bool) -> None:
        if is_inside is self.is_inside and self.step >= self.first:
            self.model.blocks[0].mlp[0].weight.data.clamp_(-0.01, 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step = batch_idx
        self.clamp(False)
        return super().training_step(batch, batch_idx)


def train_clamped(is_sharded: bool, first: int, is_inside: bool, max_steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Clamped(first, is_inside)
    strategy: Any = FullShardStrategy() if is_sharded else DataParallelStrategy()
    make_trainer("auto", strategy=strategy, max_steps=max_steps, precision="64-true").fit(model)
    return {name: weight.cpu().numpy() for name, weight in whole_parameters(model).items()}


@pytest.mark.parametrize("is_inside", [True, False])
def test_changes_through_data_are_written_back_if_the_first_steps_make_some(
    simulated: WorkerPool, is_inside: bool
) -> None:
    replicated = simulated.run(train_clamped, 2, False, 1, is_inside, 9)[0]
    sharded = simulated.run(train_clamped, 2, True, 1, is_inside, 9)[0]
    for name, weight in replicated.items():
        assert abs(weight - sharded[name]).max() <= 1e-10, name


def test_a_late_change_through_data_is_an_error(simulated: WorkerPool) -> None:
    message = r"'model\.blocks\.0\.mlp\.0\.weight' through \.data, which it had not done"
    with pytest.raises(RankFailed, match=message):
        simulated.run(train_clamped, 2, True, 40, True, 200)
