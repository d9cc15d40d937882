"""Test that fused optimizers, and those that update lists of tensors, step shards as one process steps the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist import DataParallelStrategy, FullShardStrategy, MeshPrecision, NDParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.distributed.test_float16 import MARKED, NUM_STEPS, Overflowing, Watch
from tests.models import GPT
from tests.pool import WorkerPool
from tests.thorough import one_in

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "Adam fused amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "AdamW one by one": (torch.optim.AdamW, {"foreach": False}),
}
STRATEGIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "replicas": (DataParallelStrategy, {}),
    "zero 1": (FullShardStrategy, {"zero_stage": 1}),
    "zero 2": (FullShardStrategy, {"zero_stage": 2}),
    "zero 3": (FullShardStrategy, {"zero_stage": 3}),
    "step in backward": (FullShardStrategy, {"step_in_backward": True}),
    "split layers": (NDParallelStrategy, {"tp_size": 2}),
    "stages": (NDParallelStrategy, {"pp_size": 2}),
    "offloaded states": (FullShardStrategy, {"offload": "optimizer"}),
    "offloaded shards": (FullShardStrategy, {"offload": "params"}),
}


class Optimized(GPT):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        cls, kwargs = OPTIMIZERS[self.name]
        return cls(self.parameters(), lr=0.01, **kwargs)


def fit_all(strategy: str | None) -> dict[str, Weights]:
    """Train with each optimizer, and return the weights that each has left."""
    result = {}
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        model = Optimized(name)
        cls, kwargs = (None, {}) if strategy is None else STRATEGIES[strategy]
        how: dict[str, Any] = {"strategy": cls(**kwargs)} if cls is not None else {"devices": 1}
        make_trainer("auto", max_steps=3, precision="64-true", **how).fit(model)
        result[name] = weights_of(model)
    return result


@pytest.fixture(scope="module")
def expected(reference_pool: WorkerPool) -> dict[str, Weights]:
    return reference_pool.run(fit_all, 1, None)[0]


@pytest.mark.parametrize("strategy", one_in(6, STRATEGIES))
def test_weights_are_those_of_one_process(strategy: str, expected: dict[str, Weights], pool: WorkerPool) -> None:
    actual = pool.run(fit_all, 2, strategy)[0]
    for name, weights in expected.items():
        assert_same(actual[name], weights, 1e-6 if name.startswith("Ada") else 1e-10)  # Keys have zero gradients.


class ScaledLosses(Overflowing):
    """Overflow in some steps, in which a fused step that is given the scale of the loss changes nothing."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=self.is_fused)


def fit_scaled(is_fused: bool) -> tuple[Weights, list[float], list[bool]]:
    torch.manual_seed(0)
    model, watch, precision = ScaledLosses(is_fused), Watch(), MeshPrecision(param_dtype="float16")
    strategy = FullShardStrategy()
    trainer = make_trainer("auto", strategy=strategy, plugins=[precision], callbacks=[watch], max_steps=NUM_STEPS)
    assert precision.scaler is not None
    precision.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2).state_dict())
    trainer.fit(model)
    return weights_of(model), watch.scales, watch.has_moved


def test_a_fused_step_is_skipped_on_all_ranks_if_a_gradient_overflows_on_one(pool: WorkerPool) -> None:
    expected, scales, _ = pool.run(fit_scaled, 2, False)[0]
    for weights, found, has_moved in pool.run(fit_scaled, 2, True):
        assert found == scales
        assert [step for step, moved in enumerate(has_moved) if not moved] == list(MARKED)
        assert_same(weights, expected, 1e-4)


class Capturable(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), capturable=True)


def capture() -> str:
    return refused(Capturable())


def test_a_step_for_cuda_graphs_is_refused_on_the_cpu(pool: WorkerPool) -> None:
    for error in pool.run(capture, 4):
        assert error.startswith("MisconfigurationException: Optimizer 0 is AdamW(capturable=True) on the CPU")
        assert error.endswith("Leave capturable out.")


def clip() -> str:
    precision = MeshPrecision(param_dtype="float16")
    return refused(ScaledLosses(is_fused=True), strategy=FullShardStrategy(), plugins=[precision], gradient_clip_val=1)


def test_clipping_with_a_fused_optimizer_is_refused_where_losses_are_scaled(pool: WorkerPool) -> None:
    for error in pool.run(clip, 2):
        assert "does not allow for gradient clipping because it performs unscaling of gradients" in error
