"""Test linear layers that compute in float8, by torchao's emulation."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import Float8Precision, full_parameters
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.run.parity import whole_parameters
from tests.distributed.fit import Weights, make_strategy, make_trainer, refused
from tests.models import GPT, Transformer
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

NUM_STEPS = 2

Options = tuple[tuple[str, Any], ...]
"""The names and values of arguments."""


class Wide(GPT):
    """Have layers whose features are multiples of 16, also when two ranks split them.

    Scales depend on the part of a batch that a rank has. The batch is run in ``chunks`` parts, so that one process
    scales each part as that many ranks would.
    """

    def __init__(self, chunks: int = 1) -> None:
        torch.manual_seed(0)
        super().__init__(chunks=chunks)
        self.model = Transformer(dim=32, tied=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chunks = self.hparams.chunks
        parts = [self.loss([part[rank::chunks] for part in batch]) for rank in range(chunks)]  # type: ignore[arg-type]
        loss = torch.stack(parts).mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


class Resumable(Wide):
    """Have a loader that Lightning distributes, and whose position is in checkpoints."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2)


def small(options: dict[str, Any]) -> Float8Precision:
    return Float8Precision(**{"min_size": 16, "emulate": True, **options})


def fit(
    layout: str,
    options: dict[str, Any] | None,
    chunks: int = 1,
    model: type[Wide] = Wide,
    num_steps: int = NUM_STEPS,
    strategy_kwargs: dict[str, Any] | None = None,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[Weights, list[float]]:
    """Return the weights and the training losses.

    Args:
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        options: Arguments of Float8Precision besides those that small models need; None: bf16-mixed.
        chunks: Number of parts in which one process runs a batch.
        model: Class of the module.
        num_steps: Number of the last step.
        strategy_kwargs: Further arguments of the strategy.
        save: Path at which a checkpoint is saved at the end.
        resume: Path of a checkpoint from which the training goes on.
    """
    losses: list[float] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    precise = {"precision": "bf16-mixed"} if options is None else {"plugins": [small(options)]}
    trainer = make_trainer(
        "auto",
        strategy=make_strategy(layout, **(strategy_kwargs or {})),
        max_steps=num_steps,
        use_distributed_sampler=model is Resumable,
        callbacks=[Record()],
        **precise,
    )
    module = model(chunks)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.wait_for_checkpoints()
    return {name: weight.float().numpy() for name, weight in whole_parameters(module).items()}, losses


@functools.cache
def trained(
    pool: WorkerPool, world_size: int, layout: str, options: Options | None, chunks: int = 1, **strategy_kwargs: Any
) -> tuple[Weights, list[float]]:
    """Return the weights of all stages, and the losses, of :func:`fit`, once for all tests."""
    own = None if options is None else dict(options)
    results = pool.run(fit, world_size, layout, own, chunks, strategy_kwargs=strategy_kwargs)
    return {name: weight for weights, _ in results for name, weight in weights.items()}, results[0][1]


def difference(actual: Weights, expected: Weights) -> float:
    """Return how far the updates differ, as a fraction of the expected updates."""
    start = {name: param.detach().numpy() for name, param in Wide().named_parameters()}
    assert actual.keys() == expected.keys() == start.keys()
    wrong = sum(float(((actual[name] - expected[name]) ** 2).sum()) for name in start)
    return float(np.sqrt(wrong / sum(float(((expected[name] - start[name]) ** 2).sum()) for name in start)))


# Under FSDP2, all parameters are rounded to bfloat16 when they are gathered, and a tensor that tensor parallelism
# splits has a factor for each part: float8 rounds some numbers to a neighbour then.
@pytest.mark.parametrize(
    ("layout", "recipe", "chunks", "tolerance"),
    one_in(
        3,
        [
            ("2x1", "tensorwise", 2, 1e-6),
            ("2x1", "rowwise", 2, 1e-6),
            ("pp2-1", "tensorwise", 8, 1e-6),
            ("1x2", "tensorwise", 2, 0.03),
            ("tp2-1", "tensorwise", 1, 0.03),
            ("tp2-1", "rowwise", 1, 0.03),
        ],
    ),
)
def test_layouts_compute_what_one_process_computes(
    pool: WorkerPool, reference_pool: WorkerPool, layout: str, recipe: str, chunks: int, tolerance: float
) -> None:
    options = (("recipe", recipe),)
    (actual, own_losses), (expected, losses) = in_parallel(
        lambda: trained(pool, 2, layout, options), lambda: trained(reference_pool, 1, "auto", options, chunks)
    )
    assert difference(actual, expected) < tolerance
    assert own_losses == pytest.approx(losses, rel=max(0.1 * tolerance, 1e-6))


def test_float8_is_computed(pool: WorkerPool) -> None:
    weights, _ = trained(pool, 2, "2x1", (("recipe", "tensorwise"),))
    other, _ = trained(pool, 2, "2x1", None)
    assert 0.005 < difference(weights, other) < 0.05


@pytest.mark.parametrize("mode", [False, "offload"])
def test_gathering_in_float8_has_the_same_bits(pool: WorkerPool, mode: Any) -> None:
    """In bf16-true, gathered weights are not rounded before they are scaled."""
    base: Options = (("base", "bf16-true"),)
    expected = trained(pool, 2, "1x2", base)
    actual = trained(pool, 2, "1x2", (*base, ("float8_all_gather", True)), activation_checkpointing=mode)
    assert actual[1] == expected[1]
    assert all((actual[0][name] == expected[0][name]).all() for name in expected[0])


def saved_and_resumed(folder: Path) -> tuple[bool, bool, bool]:
    """Return whether a resumed run has the bits of one that was not stopped, and what loads without float8."""
    run = partial(fit, model=Resumable)
    options = {"float8_all_gather": True}
    whole, _ = run("1x2", options, num_steps=2)
    saved, _ = run("1x2", options, num_steps=1, save=folder / "float8")
    resumed, _ = run("1x2", options, num_steps=2, resume=folder / "float8")
    without, losses = run("2x1", None, num_steps=1, resume=folder / "float8")
    run("2x1", None, num_steps=1, save=folder / "bf16")
    _, new_losses = run("1x2", options, num_steps=2, resume=folder / "bf16")
    return (
        all((whole[name] == resumed[name]).all() for name in whole),
        all((saved[name] == without[name]).all() for name in saved) and not losses,
        len(new_losses) == 1 and bool(np.isfinite(new_losses[0])),
    )


def test_checkpoints_are_those_of_other_precisions(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(saved_and_resumed, 2, tmp_path) == [(True, True, True)] * 2


class Created(Wide):
    """Create the layers on the meta device, with a tie, a hook and a layer that is excluded."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = Transformer(dim=32)
            self.num_calls = 0
            self.model.blocks[0].qkv.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.num_calls += 1


def details() -> dict[str, Any]:
    """Return what a fit with a module on the meta device shows."""
    model = Created()
    trainer = make_trainer(
        "1x2", max_steps=2, plugins=[small({"exclude": ["model.blocks.1.mlp.*"], "float8_all_gather": True})]
    )
    trainer.fit(model)
    parallel = parallelized(model)
    assert parallel is not None
    shards = whole_parameters(model)
    with full_parameters(model):
        state = model.state_dict()
        is_tied = model.model.head.weight is model.model.embedding.weight
    return {
        "table": startup_table(trainer.strategy, parallel),
        "classes": {name: type(part).__name__ for name, part in model.named_modules() if hasattr(part, "in_features")},
        "num_calls": model.num_calls,
        "is_tied": is_tied,
        "rounded": max(
            float((state[name].float() - shard).abs().max() / shard.abs().max()) for name, shard in shards.items()
        ),
    }


def test_modules_on_the_meta_device_are_converted(pool: WorkerPool) -> None:
    for found in pool.run(details, 2):
        assert "7 of 9 linear layers compute in float8 (tensorwise, emulated, which is slow)" in found["table"]
        assert "gather      6 weights in float8" in found["table"]
        assert found["classes"]["model.blocks.0.qkv"] == "Float8Linear"
        assert found["classes"]["model.blocks.1.mlp.0"] == found["classes"]["model.blocks.1.mlp.2"] == "Linear"
        assert found["num_calls"] == 2
        assert found["is_tied"]
        assert found["rounded"] < 2**-8  # It is that of bfloat16; float8 has 2**-4.


def step(module: Wide, layout: str, options: dict[str, Any] | None) -> dict[str, Tensor] | str:
    """Train a module by a new Trainer for one step, and return its weights, or the error of the Trainer."""
    precise = {"precision": "bf16-mixed"} if options is None else {"plugins": [small(options)]}
    try:
        make_trainer(layout, max_steps=1, **precise).fit(module)
    except MisconfigurationException as error:
        return str(error)
    return {name: weight.clone() for name, weight in whole_parameters(module).items()}


def steps_again(
    layout: str, first: dict[str, Any] | None, second: dict[str, Any] | None, third: dict[str, Any] | None
) -> tuple[float, str]:
    """Train a module with three Trainers, each for a step, and compare the second step with that of a new module.

    Args:
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        first: Arguments of the first Trainer's Float8Precision; None: bf16-mixed.
        second: The same of the second Trainer.
        third: The same of the third Trainer, which is refused.

    Returns:
        How far the updates differ, as a fraction of the expected updates, and the error of the third Trainer.
    """
    module, new = Wide(), Wide()
    start, weights = step(module, layout, first), step(module, layout, second)
    error = step(module, layout, third)
    assert isinstance(start, dict)
    new.load_state_dict(start)
    expected = step(new, layout, second)
    assert isinstance(weights, dict)
    assert isinstance(expected, dict)
    assert isinstance(error, str)
    wrong = sum(float((weights[name] - expected[name]).square().sum()) for name in start)
    return (wrong / sum(float((expected[name] - start[name]).square().sum()) for name in start)) ** 0.5, error


def all_steps_again() -> tuple[tuple[float, str], tuple[float, str], Any]:
    gathered, later = {"float8_all_gather": True}, Wide()
    step(later, "2x1", None)
    return (
        steps_again("1x2", gathered, gathered, None),
        steps_again("tp2-1", {}, None, {"recipe": "rowwise"}),
        step(later, "2x1", {}),
    )


def test_a_second_trainer_computes_as_its_own_precision_says_or_is_refused(pool: WorkerPool) -> None:
    for again, without, later in pool.run(all_steps_again, 2):
        assert again[0] == 0.0
        assert without[0] < 0.005  # The plan of split layers is another one; float8 changes updates by 3%.
        assert "float8_all_gather=True, emulate=True), which cannot be changed to no Float8Precision" in again[1]
        assert "which cannot be changed to Float8Precision(recipe='rowwise'" in without[1]
        assert "with no Float8Precision, which cannot be changed to Float8Precision(" in later


def test_what_cannot_work_is_refused(pool: WorkerPool) -> None:
    for error in pool.run(refusals, 2):
        assert "float8_all_gather=True does not work with tp_size=2" in error["tp"]
        assert "needs matrix units for float8" in error["device"]
        assert "this run is on the device 'cpu'" in error["device"]
        assert "emulate=True" in error["device"]
        assert "float8_all_gather=True with reshard_after_forward=2" in error["parts"]
        assert "no weight can be gathered in float8" in error["units"]


def refusals() -> dict[str, str]:
    gathered = {"float8_all_gather": True}
    return {
        "tp": refused(Wide(), strategy=make_strategy("tp2-1"), plugins=[small(gathered)]),
        "device": refused(Wide(), strategy=make_strategy("1x2"), plugins=[small({"emulate": False})]),
        "parts": refused(Wide(), strategy=make_strategy("1x2", reshard_after_forward=2), plugins=[small(gathered)]),
        "units": refused(
            Wide(), strategy=make_strategy("1x2"), plugins=[small({**gathered, "exclude": ["model.blocks.*"]})]
        ),
    }
