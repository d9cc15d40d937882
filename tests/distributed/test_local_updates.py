"""Test replicas that train on their own and are synchronized now and then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dist import HybridShardStrategy
from lightning_dist._compat import local_of
from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.techniques.compression import DiLoCo, Int8, LocalSGD, SyncMethod, local_updates
from lightning_dist.techniques.compression.wire import Wire
from tests.behaviour.models import Classifier, samples
from tests.distributed.fit import Weights, assert_same, make_strategy, make_trainer, weights_of
from tests.models import GPT
from tests.pool import WorkerPool
from tests.thorough import one_in

GLOBAL_BATCH_SIZE, NUM_RANKS = 8, 4


class SeededGPT(GPT):
    """Begin from the same weights on every rank, and train with a given optimizer."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        super().__init__(optimizer=optimizer)


def train(layout: str, sync: SyncMethod | None, optimizer: str, num_steps: int, **kwargs: Any) -> Weights:
    """Return the weights after some steps in float64."""
    kwargs = {"max_steps": num_steps, "precision": "64-true", **kwargs}
    strategy_kwargs = {"sync": sync, "check_replicas_every_n_steps": sync.inner_steps if sync else 1}
    trainer = make_trainer("auto", strategy=make_strategy(layout, **strategy_kwargs), **kwargs)
    model = SeededGPT(optimizer)
    trainer.fit(model)
    for param in model.parameters():
        if not param.is_meta:
            first = local_of(param.detach()).clone()
            group = trainer.strategy.mesh["dp_replicate"].get_group()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, local_of(param))
    return weights_of(model)


@pytest.mark.parametrize(
    ("layout", "sync"),
    one_in(
        2,
        [
            ("2x2", LocalSGD(1)),
            ("2x2", LocalSGD(5, start_step=5)),
            ("2x2", DiLoCo(1, outer_lr=1.0, outer_momentum=0.0)),
            ("4x1", DiLoCo(1, outer_lr=1.0, outer_momentum=0.0)),
        ],
    ),
)
def test_one_inner_step_equals_averaging_gradients(pool: WorkerPool, layout: str, sync: SyncMethod) -> None:
    expected = pool.run(train, NUM_RANKS, layout, None, "plain_sgd", 5)[0]
    assert_same(pool.run(train, NUM_RANKS, layout, sync, "plain_sgd", 5)[0], expected)


def simulated(num_replicas: int, num_parts: int, sync: DiLoCo, num_steps: int, optimizer_name: str) -> Weights:
    """Run algorithm 1 of the paper in one process, with an outer step that is written out by hand.

    Args:
        num_replicas: Number of replicas.
        num_parts: Number of parts that a replica's batch is divided into, which are samples of the global batch.
        sync: Arguments of the algorithm.
        num_steps: Number of inner steps in all; the last one is followed by an outer step.
        optimizer_name: Name of the inner optimizer.
    """
    replicas = [SeededGPT(optimizer_name).double() for _ in range(num_replicas)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    tokens, targets = replicas[0].data()
    outer = {name: param.detach().clone() for name, param in replicas[0].named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    trains = {name for name, param in replicas[0].named_parameters() if param.requires_grad}
    for step in range(num_steps):
        for index, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            samples = range(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
            part = [sample for sample in samples if sample // num_parts % num_replicas == index]
            optimizer.zero_grad()
            replica.loss((tokens[part], targets[part])).backward()
            optimizer.step()
        if step < sync.start_step:
            for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(param.detach() for param in params) / num_replicas
                for param in params:
                    param.data.copy_(mean)
            outer = {name: param.detach().clone() for name, param in replicas[0].named_parameters()}
        elif (step + 1) % sync.inner_steps == 0 or step + 1 == num_steps:
            ends = [dict(replica.named_parameters()) for replica in replicas]
            for name in trains:
                delta = outer[name] - sum(end[name].detach() for end in ends) / num_replicas
                momentum[name] = sync.outer_momentum * momentum[name] + delta
                outer[name] -= sync.outer_lr * (delta + sync.outer_momentum * momentum[name])
            for end in ends:
                for name, value in outer.items():
                    end[name].data.copy_(value)
    return {name: value.numpy() for name, value in outer.items()}


@pytest.mark.parametrize(
    ("layout", "num_replicas", "num_parts", "num_steps", "start_step"),
    one_in(
        2,
        [
            ("2x2", 2, 2, 9, 0),
            ("2x2", 2, 2, 8, 2),
            ("4x1", 4, 1, 8, 0),
            ("tp2-2", 2, 1, 8, 0),
            ("pp2-2", 2, 1, 8, 4),
        ],
    ),
)
def test_diloco_equals_the_algorithm_of_its_paper(
    pool: WorkerPool, layout: str, num_replicas: int, num_parts: int, num_steps: int, start_step: int
) -> None:
    sync = DiLoCo(3, start_step=start_step)
    expected = pool.run(simulated, 1, num_replicas, num_parts, sync, num_steps, "adamw")[0]
    weights: Weights = {}
    for own in pool.run(train, NUM_RANKS, layout, sync, "adamw", num_steps):
        weights |= own
    assert_same(weights, expected)


def means_with_and_without_others() -> list[bool]:
    """Return whether the mean of a tensor has the same bits alone and after another one, by both methods."""
    dist.init_process_group("gloo")
    wire, generator = Wire(dist.group.WORLD), torch.Generator().manual_seed(dist.get_rank())
    other, tensor = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    same = []
    for average in (wire.average, wire.average_each):
        alone, together = tensor.clone(), tensor.clone()
        average([alone])
        average([other.clone(), together])
        same.append(torch.equal(alone, together))
    return same


def test_a_mean_does_not_depend_on_what_else_is_averaged(pool: WorkerPool) -> None:
    """Stages that share a parameter average it together with different others."""
    for same in pool.run(means_with_and_without_others, 3):
        assert same == [False, True]


class Resumable(SeededGPT):
    """Use a loader to which Lightning gives a sampler, so that its position in the data is saved."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2)


class Saving(pl.Callback):
    """Save a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("layout", "sync", "step"),
    one_in(
        6,
        [
            ("2x2", LocalSGD(3), 5),
            ("2x2", DiLoCo(3, compression=Int8(min_numel=64)), 3),
            ("4x1", DiLoCo(3), 5),
            ("tp2-2", DiLoCo(3, compression=Int8(min_numel=64)), 5),
            ("pp2-2", DiLoCo(3), 3),
            ("pp2-2", LocalSGD(3), 5),
        ],
    ),
)
def test_a_resumed_run_goes_on_bit_by_bit(
    pool: WorkerPool, tmp_path: Path, layout: str, sync: SyncMethod, step: int
) -> None:
    path = tmp_path / "saved"
    whole = pool.run(train_on, NUM_RANKS, layout, sync, 9, path, step)
    resumed = pool.run(train_on, NUM_RANKS, layout, sync, 9, path)
    for expected, actual in zip(whole, resumed, strict=True):
        assert expected.keys() == actual.keys()
        assert all((expected[key] == actual[key]).all() for key in expected)


def train_on(layout: str, sync: SyncMethod, num_steps: int, path: Path, save_at: int | None = None) -> Weights:
    """Train and save a checkpoint after a step, or resume from it."""
    trainer = make_trainer(
        "auto",
        strategy=make_strategy(layout, sync=sync),
        max_steps=num_steps,
        precision="64-true",
        use_distributed_sampler=True,
        callbacks=[] if save_at is None else [Saving(path, save_at)],
    )
    model = Resumable("adamw")
    trainer.fit(model, ckpt_path=path if save_at is None else None)
    return weights_of(model)


def validated() -> list[tuple[int, bool]]:
    """Return, for each validation, the step and whether all replicas have the same weights."""
    seen = []

    class Record(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            group, is_same = trainer.strategy.mesh["dp_replicate"].get_group(), True
            for param in pl_module.parameters():
                first = local_of(param.detach()).clone()
                dist.broadcast(first, group=group, group_src=0)
                is_same &= torch.equal(first, local_of(param))
            seen.append((trainer.global_step, is_same))

    trainer = make_trainer(
        "2x2", {"sync": LocalSGD(100)}, max_steps=6, val_check_interval=2, limit_val_batches=1, callbacks=[Record()]
    )
    trainer.fit(SeededGPT("adamw"))
    return seen


def test_validation_sees_synchronized_weights(pool: WorkerPool) -> None:
    for seen in pool.run(validated, NUM_RANKS):
        assert seen == [(0, True), (2, True), (4, True), (6, True)]


def count_bytes(sync: SyncMethod) -> list[int]:
    """Return the bytes that this rank has sent to the other replica until the end of each step."""
    from lightning_dist.parallel_module import parallelized
    from lightning_dist.techniques.compression import LocalUpdates

    sent = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            sent.append(parallelized(pl_module).get(LocalUpdates).wire.num_bytes)

    make_trainer("2x2", {"sync": sync}, max_steps=4, callbacks=[Record()]).fit(SeededGPT("adamw"))
    return sent


def test_replicas_send_each_other_weights_only_when_they_are_synchronized(pool: WorkerPool) -> None:
    exact = pool.run(count_bytes, NUM_RANKS, LocalSGD(2))[0]
    assert exact[0] == 0
    assert exact[1] == exact[2] > 0
    assert exact[3] == 2 * exact[1]
    compressed = pool.run(count_bytes, NUM_RANKS, DiLoCo(2, compression=Int8(min_numel=64)))[0]
    assert compressed[1] < 0.5 * exact[1]


class Manual(SeededGPT):
    def __init__(self) -> None:
        super().__init__("adamw")
        self.automatic_optimization = False


def refusal(kwargs: dict[str, Any], manual: bool = False) -> str:
    try:
        trainer = make_trainer("auto", strategy=HybridShardStrategy(**kwargs), max_steps=1)
        trainer.fit(Manual() if manual else SeededGPT("adamw"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kwargs", "manual", "text"),
    [
        ({"dp_shard_size": 2, "sync": LocalSGD(2)}, False, "it synchronizes replicas, and there is one"),
        ({"dp_shard_size": 1, "sync": LocalSGD(2), "compression": "bf16"}, False, "Leave one of the two out"),
        ({"dp_shard_size": 1, "sync": LocalSGD(2), "check_replicas_every_n_steps": 3}, False, "Use a multiple of 2"),
        ({"dp_shard_size": 1, "sync": DiLoCo(2)}, True, "with automatic_optimization = False in Manual"),
    ],
)
def test_what_cannot_be_synchronized_is_refused(
    pool: WorkerPool, kwargs: dict[str, Any], manual: bool, text: str
) -> None:
    for error in pool.run(refusal, 2, kwargs, manual):
        assert text in error


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (LocalSGD, {"inner_steps": 0}, "inner_steps=0 must be"),
        (LocalSGD, {"start_step": -1}, "start_step=-1 must be"),
        (DiLoCo, {"outer_lr": 0.0}, "outer_lr=0.0 must be above 0"),
        (DiLoCo, {"outer_momentum": 1.0}, "outer_momentum=1.0 must be"),
        (DiLoCo, {"compression": "zip"}, "compression='zip': there is no such compressor"),
        (DiLoCo, {"compression": Int8(start_step=5)}, "start_step=5 and fallback=None"),
    ],
)
def test_arguments_that_are_not_valid_are_refused(kind: type[SyncMethod], arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**arguments)


class Skips(Classifier):
    """Skip the second step on the second rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.world_size == 1:  # One process takes half of the first rank's step.
            return 0.5 * self.loss([tensor[::2] for tensor in batch])
        return None if batch_idx == 1 and self.global_rank == 1 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_with_a_skipped_step(layout: str, sync: SyncMethod | None) -> Weights:
    model = Skips()
    parts = 1 if sync is None else 2
    part = Subset(samples(32), range(int(os.environ["RANK"]), 32, parts))
    loader = DataLoader(part, 8 // parts)
    make_trainer(layout, {} if sync is None else {"sync": sync}, max_steps=4, precision="64-true").fit(model, loader)
    return weights_of(model)


@pytest.mark.parametrize("sync", [LocalSGD(1), DiLoCo(1, 1.0, 0.0, nesterov=False)])
def test_a_rank_may_skip_a_step(pool: WorkerPool, sync: SyncMethod) -> None:
    expected = pool.run(train_with_a_skipped_step, 1, "auto", None)[0]
    for actual in pool.run(train_with_a_skipped_step, 2, "2x1", sync):
        assert_same(actual, expected)


class StepsOnSomeRanks(Classifier):
    """Step the optimizer by hand, on the second rank less often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx == 0 or self.global_rank == 0:
            optimizer.step()


def step_on_some_ranks() -> str:
    local_updates._SECONDS_TO_ARRIVE = 1.0
    trainer = make_trainer("2x1", {"sync": LocalSGD(2)}, max_epochs=1, precision="64-true")
    try:
        trainer.fit(StepsOnSomeRanks(), DataLoader(samples(16), 8))
    except OtherRankError as error:
        return str(error)
    except RuntimeError:  # The other rank has ended.
        assert trainer.global_rank == 1
    return ""


def test_ranks_that_step_unequally_often_raise_an_error(pool: WorkerPool) -> None:
    first, _ = pool.run(step_on_some_ranks, 2)
    assert "the synchronization after 2 optimizer steps of this rank" in first and "rank 1" in first
