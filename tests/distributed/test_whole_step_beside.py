"""Test optimizers whose parameters have owners together with what else changes gradients, weights and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_dist import FullShardStrategy
from lightning_dist.techniques.compression import DiLoCo, LocalSGD
from tests.distributed.fit import Weights, assert_same, make_strategy, make_trainer, weights_of
from tests.distributed.test_whole_step import OPTIMIZERS, Net
from tests.expert_models import PlainMixture
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

ALL, TWO = ("rows", "factors", "norm of all"), ("rows", "norm of all")


class InOtherOrder(Net):
    """Give two replicas of one rank the samples that two replicas of two ranks have."""

    def data(self) -> tuple[Tensor, ...]:
        order = torch.arange(self.num_samples).view(-1, 2, 2).mT.flatten()
        return tuple(tensor[order] for tensor in super().data())


class Experts(PlainMixture):
    """Distribute experts over ranks, each with an optimizer that needs whole weights."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        cls, arguments = OPTIMIZERS[self.kind]
        return cls(self.parameters(), **arguments)


class Saves(pl.Callback):
    """Save a checkpoint after two of four optimizer steps, at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


Side = tuple[str, dict[str, Any]]
"""A layout, and further arguments of its strategy."""


def train_all(
    side: Side, make: Any, kinds: tuple[str, ...], saves: Path | None = None, loads: Path | None = None, **kwargs: Any
) -> dict[str, Weights]:
    """Train with each optimizer, and save in the middle or resume there."""
    found = {}
    for kind in kinds:
        model = make(kind)
        layout, options = side
        strategy: Any = FullShardStrategy(**options) if "ep_size" in options else make_strategy(layout, **options)
        callbacks = [] if saves is None else [Saves(saves / f"{kind}.ckpt")]
        num_batches = 2 * kwargs.get("accumulate_grad_batches", 1)
        defaults = {"max_epochs": 2, "limit_train_batches": num_batches, "precision": "64-true"}
        trainer = make_trainer("auto", strategy=strategy, callbacks=callbacks, **{**defaults, **kwargs})
        trainer.fit(model, ckpt_path=None if loads is None else loads / f"{kind}.ckpt")
        found[kind] = weights_of(model)
    return found


ONE: Side = ("auto", {})
BESIDE: dict[str, tuple[Side, int, Any, tuple[str, ...], dict[str, Any], Side, Any, list[Side]]] = {
    "local": (
        ("2x2", {"sync": LocalSGD(3)}), 4, Net, ALL, {}, ("2x1", {"sync": LocalSGD(3)}), InOtherOrder,
        [("2x2", {"sync": LocalSGD(3)})],
    ),
    "diloco": (
        ("2x2", {"sync": DiLoCo(2)}), 4, Net, TWO, {}, ("2x1", {"sync": DiLoCo(2)}), InOtherOrder,
        [("tp2-2", {"sync": DiLoCo(2)})],
    ),
    "experts": (("", {"ep_size": 2}), 4, Experts, TWO, {}, ONE, Experts, [("", {"ep_size": 2}), ("2x2", {})]),
    "compression": (
        ("2x2", {"compression": "bf16"}), 4, Net, TWO, {}, ("2x1", {"compression": "bf16"}), InOtherOrder,
        [("2x2", {"compression": "bf16"})],
    ),
    "offload": (("full_shard", {"offload": "params"}), 2, Net, TWO, {}, ONE, Net,
                [("full_shard", {"offload": "params"}), ("2x1", {})]),
    "zero 1": (("full_shard", {"zero_stage": 1}), 2, Net, TWO, {"accumulate_grad_batches": 2}, ONE, Net,
               [("full_shard", {"zero_stage": 1}), ("tp2-1", {})]),
    "zero 2": (("full_shard", {"zero_stage": 2}), 2, Net, TWO, {"accumulate_grad_batches": 2}, ONE, Net,
               [("full_shard", {"zero_stage": 2}), ("full_shard", {"zero_stage": 1})]),
}  # fmt: skip
"""For each setting: its layout, ranks, module, optimizers, and arguments of the Trainer; the layout and module that
it is compared with; and the layouts that resume a checkpoint of it."""


@pytest.mark.parametrize("name", one_in(6, BESIDE))
def test_owners_beside_other_settings_compute_and_resume_what_nothing_sharded_does(
    pool: WorkerPool, reference_pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    side, num_ranks, make, kinds, kwargs, other_side, other, resumed = BESIDE[name]
    num_others = 1 if other_side is ONE else 2
    found, expected = in_parallel(
        lambda: pool.run(train_all, num_ranks, side, make, kinds, tmp_path, **kwargs),
        lambda: reference_pool.run(train_all, num_others, other_side, other, kinds, **kwargs)[0],
    )
    local = "sync" in side[1]  # A save gives all replicas the mean of their states, which the reference does not do.
    for kind in kinds:
        for of_rank in found:
            if not local:
                assert_same(of_rank[kind], expected[kind], 1e-9)
    for again in resumed:
        resuming = InOtherOrder if again[0] == "tp2-2" else make
        for of_rank in pool.run(train_all, num_ranks, again, resuming, kinds, None, tmp_path, **kwargs):
            for kind in kinds:
                assert_same(of_rank[kind], found[0][kind], 1e-9)
    if local:
        for of_rank in pool.run(train_all, num_ranks, side, make, kinds, **kwargs):
            for kind in kinds:
                assert_same(of_rank[kind], expected[kind], 1e-9)


def refused(kind: str, layout: str, options: dict[str, Any]) -> str:
    try:
        train_all((layout, options), Net, (kind,), max_steps=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "layout", "options", "text"),
    [
        ("rows", "full_shard", {"offload": "both", "offload_folder": "/tmp"}, "BySomeRows with offload='both'"),
        ("rows", "full_shard", {"step_in_backward": True}, "step_in_backward=True with BySomeRows, whose update"),
        ("elementwise", "full_shard", {"step_in_backward": True, "optimizer_step": "whole"}, "AdamW with step_in_b"),
        (
            "rows",
            "full_shard",
            {"zero_stage": 2, "step_in_backward": True},
            "step_in_backward=True with BySomeRows, whose update",
        ),
        ("lbfgs", "2x1", {"sync": LocalSGD(2)}, "LBFGS with sync=LocalSGD"),
        ("lbfgs", "2x1", {"sync": DiLoCo(2)}, "LBFGS with sync=DiLoCo"),
    ],
)
def test_settings_without_owners_are_refused_by_name(
    pool: WorkerPool, kind: str, layout: str, options: dict[str, Any], text: str
) -> None:
    for error in pool.run(refused, 2, kind, layout, options, timeout_s=60):
        assert text in error
