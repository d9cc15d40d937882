"""Test that checkpoints of a pipeline resume in every other layout and vice versa, with the same weights and losses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import (
    FullShardStrategy,
    HybridShardStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    full_parameters,
)
from lightning_dist.parallel_module import parallelized
from lightning_dist.run.parity import whole_parameters
from tests.distributed.fit import make_trainer
from tests.models import build
from tests.parity.run import PLANS
from tests.pipeline_models import PIPELINE_MODELS
from tests.pool import WorkerPool
from tests.thorough import one_in

STRATEGIES: dict[str, tuple[int, Any]] = {
    "pp2": (2, lambda: PipelineParallelStrategy(num_microbatches=4)),
    "tp2": (2, lambda: TensorParallelStrategy(plan=PLANS["gpt"])),
    "2x2": (4, lambda: HybridShardStrategy(2, 2)),
    "one": (1, lambda: FullShardStrategy()),
    "pp4": (4, lambda: PipelineParallelStrategy(num_microbatches=4)),
    "pp2 x shard2": (4, lambda: PipelineParallelStrategy(2, num_microbatches=2)),
    "pp2 x tp2, zbv": (4, lambda: NDParallelStrategy(2, tp_size=2, schedule="zbv", num_microbatches=4)),
}
STEPS = 2


class Losses(pl.Callback):
    """Record the loaded weights and optimizer state, and the loss of every step over all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.loaded: dict[str, np.ndarray] = {}
        self.moments: dict[str, np.ndarray] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parallel = parallelized(pl_module)
        assert parallel is not None
        with parallel.without_hook_views():
            self.loaded, self.moments = state_of(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, *args: Any) -> None:
        loss = torch.tensor(float(out["loss"]), dtype=torch.float64)
        self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


def state_of(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the whole weights of all stages, and the whole optimizer state of the parameters on this rank."""
    names = {param: name for name, param in module.named_parameters()}
    moments = {}
    for optimizer in trainer.optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                moments[f"{names[param]}/{key}"] = whole(value).detach().clone().cpu().numpy()
    return {name: weight.numpy() for name, weight in whole_parameters(module).items()}, moments


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(model_name: str, name: str, start: Path | None, end: Path, num_steps: int) -> tuple[Any, ...]:
    """Resume from ``start``, train until step ``num_steps``, and save to ``end``.

    Returns:
        The losses, the loaded weights and optimizer state, and the final weights and optimizer state.
    """
    assert model_name in PIPELINE_MODELS
    model, losses = build(model_name, optimizer="adamw", global_batch_size=8), Losses()
    trainer = make_trainer(
        "auto",
        strategy=STRATEGIES[name][1](),
        use_distributed_sampler=True,
        precision="64-true",
        max_steps=num_steps,
        callbacks=[losses],
    )
    batch_size = 8 // trainer.distributed_sampler_kwargs["num_replicas"]
    trainer.fit(model, DataLoader(TensorDataset(*model.data()), batch_size), ckpt_path=start)
    trainer.save_checkpoint(end)
    return losses.losses, losses.loaded, losses.moments, *state_of(trainer, model)


CHAINS = [
    ("deep_gpt", ["pp2", "tp2", "2x2", "one", "pp4"]),
    ("deep_gpt", ["2x2", "pp2 x shard2", "pp2 x tp2, zbv", "pp2"]),
    ("deep_batch_norm", ["pp2", "one", "pp2 x shard2", "2x2"]),
]


@functools.cache
def losses_in_one_process(pool: WorkerPool, folder: Path) -> list[float]:
    """Train without interruption in one process for as many steps as the longest chain, and return the losses."""
    num_steps = STEPS * max(len(chain) for _, chain in CHAINS)
    losses: list[float] = pool.run(train, 1, "deep_gpt", "one", None, folder / "stayed", num_steps)[0][0]
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "chain"), one_in(3, CHAINS))
def test_any_layout_resumes_the_checkpoint_of_any_other(
    pool: WorkerPool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: str, chain: list[str]
) -> None:
    losses: list[float] = []
    start, saved = None, ({}, {})
    for hop, name in enumerate(chain):
        end = tmp_path / f"{hop}"
        ranks = pool.run(train, STRATEGIES[name][0], model, name, start, end, STEPS * (hop + 1))
        losses += ranks[0][0]
        for _, loaded, moments, *_ in ranks if start is not None else ():
            assert loaded.keys() == saved[0].keys()
            for key, weight in loaded.items():
                np.testing.assert_array_equal(weight, saved[0][key])
            for key, moment in moments.items():
                np.testing.assert_array_equal(moment, saved[1][key])
        start, saved = end, (ranks[0][3], {key: value for rank in ranks for key, value in rank[4].items()})
    if model == "deep_gpt":
        expected = losses_in_one_process(pool, tmp_path_factory.getbasetemp())
        np.testing.assert_allclose(losses, expected[: len(losses)], rtol=1e-10)
        assert len(losses) == STEPS * len(chain)


def statistics(folder: Path) -> list[dict[str, np.ndarray]]:
    """Train a model on two stages, and return this stage's buffers, and those that FSDP reads from the checkpoint."""
    path = folder / "saved"
    model = build("deep_batch_norm", global_batch_size=8)
    trainer = make_trainer("auto", strategy=PipelineParallelStrategy(num_microbatches=4), max_steps=2)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    own = {name: buffer.cpu().numpy() for name, buffer in model.named_buffers() if not buffer.is_meta}
    read = build("deep_batch_norm", seed=1)
    make_trainer("auto", strategy=HybridShardStrategy(1, 2), max_steps=2).fit(read, ckpt_path=path)
    return [own, {name: buffer.cpu().numpy() for name, buffer in read.named_buffers()}]


def test_each_stage_saves_its_buffers(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(statistics, 2, tmp_path)
    for own, read in ranks:
        assert own
        for name, buffer in own.items():
            np.testing.assert_array_equal(buffer, read[name])
    assert {name for own, _ in ranks for name in own} == ranks[0][1].keys()


class Remembers(torch.optim.SGD):
    """Keep a plain tensor (not a DTensor) with one dimension as optimizer state of each parameter."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("memory", torch.zeros(2)).add_(1.0)
        return result


class Counting(PIPELINE_MODELS["deep_gpt"]):  # type: ignore[misc]  # The class is looked up by name.
    """Count samples in a buffer after the model was called, a part of the step that only the last stage reaches."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen += len(batch[0])
        return loss

    def configure_optimizers(self) -> Any:
        return Remembers(self.parameters(), lr=0.01)


def remembered(name: str, path: Path, num_steps: int, start: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Train until step ``num_steps`` and save; return the count, and the optimizer's memory by parameter name."""
    model = Counting(global_batch_size=8)
    trainer = make_trainer("auto", strategy=STRATEGIES[name][1](), max_steps=num_steps, precision="64-true")
    trainer.fit(model, ckpt_path=start)
    trainer.save_checkpoint(path)
    names = {param: name for name, param in model.named_parameters()}
    states = trainer.optimizers[0].state.items()
    return int(model.seen), {names[param]: float(whole(state["memory"]).sum()) for param, state in states if state}


@pytest.mark.thorough
@pytest.mark.parametrize("name", one_in(2, ["pp2", "pp2 x tp2, zbv"]))
def test_buffers_and_optimizer_state_of_a_single_stage_are_saved(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    pool.run(remembered, STRATEGIES[name][0], name, tmp_path / "first", 2)
    ranks = pool.run(remembered, STRATEGIES[name][0], name, tmp_path / "second", 3, tmp_path / "first")
    alone = pool.run(remembered, 1, "one", tmp_path / "alone", 4, tmp_path / "second")[0]
    assert alone[0] == 4 * 8
    assert set(alone[1].values()) == {2 * 4.0}
    assert {key: value for _, memory in ranks for key, value in memory.items()} == dict.fromkeys(alone[1], 2 * 3.0)


def call_alone() -> float:
    """Call the whole model on rank 0 alone, and return the largest difference to one process."""
    model, reference = build("deep_gpt"), build("deep_gpt", seed=1).double()
    trainer = make_trainer(
        "auto", strategy=PipelineParallelStrategy(num_microbatches=4), max_steps=2, precision="64-true"
    )
    trainer.fit(model)
    reference.load_state_dict(
        whole_parameters(model), strict=False
    )  # Loading is not strict, because tied parameters have only one name.
    tokens = next(iter(reference.data()))[:3]
    error = 0.0
    with full_parameters(model):
        if trainer.is_global_zero:
            error = float((model.model(tokens) - reference.model(tokens)).abs().max())
    trainer.validate(model, model.val_dataloader(), verbose=False)  # The model is cut into stages again.
    return error


def test_a_rank_may_call_the_whole_model_alone(pool: WorkerPool) -> None:
    assert max(pool.run(call_alone, 2)) < 1e-12
