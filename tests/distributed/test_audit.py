"""Test that the audit of the first step finds defects that are planted into the engine, and names the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import TensorParallelStrategy
from lightning_dist.model import units
from lightning_dist.techniques.sharding._compat import ShardedGroup
from lightning_dist.techniques.sharding._compat import group as sharded_groups
from tests.behaviour.cases.sharing_and_weights import _LateHooks, _Prototypes, _SharedWeight, _TensorHooks
from tests.behaviour.models import Classifier, samples
from tests.distributed.fit import make_trainer
from tests.pool import WorkerPool


class EarlyHead(Classifier):
    """Use the head's bias before the blocks, and call the head after them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.head.bias.sum())


@contextmanager
def gradients_of_outer_layers_are_left() -> Iterator[None]:
    """Plant the defect that gradients which arrive while their unit is not gathered are not reduced."""

    def seen_only_while_gathered(self: ShardedGroup) -> bool:
        return self.is_gathered and bool(self._unreduced())

    with (
        patch.object(ShardedGroup, "wait_for_end_of_backward", lambda self: None),
        patch.object(ShardedGroup, "has_unreduced_gradients", seen_only_while_gathered),
        patch.object(ShardedGroup, "end_agreement", lambda self, used, had: False),
    ):
        yield


PLANTED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "gradients of outer layers are left": (gradients_of_outer_layers_are_left, EarlyHead, r"'head\.bias'"),
    "weights that blocks share are in no group": (
        lambda: patch.object(units, "_move_to_shared_unit", lambda root, found, owners: found),
        _SharedWeight,
        r"'net\.1\.up\.weight' is in no parameter group",
    ),
    "hooks from before sharding are dropped": (
        lambda: patch.object(sharded_groups, "move_hooks", lambda source, target: None),
        _TensorHooks,
        r"put on the parameter 'net\.1\.up\.weight' before it was sharded is lost",
    ),
    "hooks are not put on gathered parameters": (
        lambda: patch.object(sharded_groups, "share_hooks", lambda source, target: None),
        Classifier,
        r"A hook was put on the parameter 'net\.0\.weight' and would not be called",
    ),
    "changes in place are not written back": (
        lambda: patch.object(ShardedGroup, "write_back", lambda self, compares=False: None),
        lambda: _Prototypes(through_data=False),
        r"changed the parameter 'head\.weight' in place",
    ),
}


def train(defect: str | None, name: str) -> str:
    plant, build, _ = PLANTED[name]
    model = build()
    trainer = make_trainer("full_shard", max_steps=2, callbacks=[_LateHooks()] if build is Classifier else [],
                           precision="64-true")  # fmt: skip
    loader = torch.utils.data.DataLoader(samples(), 4)
    try:
        if defect is None:
            trainer.fit(model, loader)
        else:
            with plant():
                trainer.fit(model, loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_named(pool: WorkerPool, name: str) -> None:
    assert pool.run(train, 2, None, name) == ["", ""]
    for text in pool.run(train, 2, name, name):
        assert text.startswith("AuditError")
        assert re.search(PLANTED[name][2], text), text


class AddsLayer(pl.Callback):
    """Give the module a new parameter after it was sharded."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.late = nn.Linear(2, 2).double()


class Drifts(pl.Callback):
    """Change the weights of one replica before each optimizer step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.head.bias.add_(0.01)


class EmbeddingWithMaxNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x) + self.table((x[:, :8]).argmax(1)))


def train_wrong(layout: str, callback: str, model: str) -> str:
    strategy = {"strategy": TensorParallelStrategy(tp_size=2)} if layout == "tp" else {}
    callbacks = [globals()[callback]()] if callback else []
    trainer = make_trainer("2x1", max_steps=3, callbacks=callbacks, precision="64-true", **strategy)
    if layout == "full_shard":
        trainer = make_trainer("full_shard", max_steps=3, callbacks=callbacks, precision="64-true")
    generator = torch.Generator().manual_seed(trainer.global_rank)
    x = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    try:
        trainer.fit(globals()[model](), torch.utils.data.DataLoader(data, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("layout", "callback", "model", "expected"),
    [
        ("full_shard", "AddsLayer", "Classifier", "'late.weight' is in no parameter group"),
        ("2x1", "Drifts", "Classifier", "'head.bias' differs between ranks of dp_replicate"),
        ("full_shard", "", "EmbeddingWithMaxNorm", "changed the parameter 'table.weight' in place, and not alike"),
    ],
)
def test_a_parameter_that_would_be_trained_wrongly_is_named(
    pool: WorkerPool, layout: str, callback: str, model: str, expected: str
) -> None:
    for text in pool.run(train_wrong, 2, layout, callback, model):
        assert expected in text
