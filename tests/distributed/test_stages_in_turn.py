"""Test that steps of manual optimization train in a pipeline, whose stages work in turn, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_dist import PipelineParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import CONTEXT
from tests.pipeline_models import DeepGPT, DropoutBlock
from tests.pool import WorkerPool
from tests.thorough import one_in


class Manual(DeepGPT):
    """Add up two backwards, decide by values, and read the gradients of all stages between them.

    The embedding is tied to the head, and ``position`` and ``temperature`` are used between parts.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        if norm > 0.5:
            self.manual_backward(0.1 * self.loss(batch) + 0.01 * self.model.head.weight.square().mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.log_dict({"train/loss": loss, "norm": norm})


class Recomputed(Manual):
    """Recompute each block by itself in the backward."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        x = self.model.embedding(tokens) + self.model.position
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(self.model.head(self.model.norm(x)).flatten(0, 1), targets.flatten())


class Raising(Manual):
    """Fail on one rank only: in a block of the last stage, or in its backward."""

    in_backward = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.blocks[7].register_forward_hook(self._fail)
        super().training_step(batch, batch_idx)

    def _fail(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.in_backward:
            output.register_hook(_raise)
        elif not module.norm_1.weight.is_meta:
            _raise(output)


def _raise(tensor: Tensor) -> None:
    if tensor.shape[1] == CONTEXT:
        raise ValueError("a block fails")


class RaisingInBackward(Raising):
    in_backward = True


class ManualDropout(Manual):
    """Keep the masks that the blocks have drawn, and count the numbers that the step draws after them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks = nn.ModuleList(DropoutBlock(20) for _ in range(8))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            x = torch.ones(1, CONTEXT, 20, dtype=torch.float64)
            changed = [(block(x) - x).detach() for block in self.model.blocks]
        self.zeros = torch.stack([(one == 0).flatten() for one in changed])
        self.number = float(torch.rand(()))


def trained(cls: type[Manual], layout: str) -> tuple[Weights, dict[str, float]]:
    strategy = PipelineParallelStrategy(2) if layout == "pp" else layout
    trainer = make_trainer("auto", strategy=strategy, max_steps=3, precision="64-true", limit_val_batches=1)
    torch.manual_seed(0)
    model = cls()
    trainer.fit(model)
    return weights_of(model), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("cls", one_in(2, [Manual, Recomputed]))
def test_a_manual_step_trains_as_in_one_process(pool: WorkerPool, cls: type[Manual]) -> None:
    (expected, metrics), = pool.run(trained, 1, cls, "auto")  # fmt: skip
    for weights, logged in pool.run(trained, 2, cls, "pp"):
        assert_same(weights, expected)
        assert logged == pytest.approx(metrics, rel=1e-10)


def averaged(layout: str) -> Weights:
    """Train with an average of the weights, which replaces them at the end."""
    strategy = PipelineParallelStrategy(2) if layout == "pp" else layout
    callbacks = [EMAWeightAveraging(decay=0.5)]
    trainer = make_trainer("auto", strategy=strategy, max_steps=3, precision="32-true", callbacks=callbacks)
    torch.manual_seed(0)
    model = Manual()
    trainer.fit(model)
    return weights_of(model)


def test_weights_are_averaged_under_manual_optimization(pool: WorkerPool) -> None:
    (expected,) = pool.run(averaged, 1, "auto")
    for weights in pool.run(averaged, 2, "pp"):
        assert_same(weights, expected, 1e-5)


def failed(cls: type[Manual]) -> str:
    try:
        trained(cls, "pp")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("cls", one_in(2, [Raising, RaisingInBackward]))
def test_an_error_of_one_stage_is_raised_on_all(pool: WorkerPool, cls: type[Manual]) -> None:
    assert pool.run(failed, 2, cls, timeout_s=60) == ["ValueError: a block fails"] * 2


def masks() -> tuple[list[list[bool]], float]:
    model = ManualDropout()
    # The step calls no optimizer, so that no steps are counted.
    options = {"max_epochs": 1, "limit_train_batches": 1, "precision": "64-true"}
    make_trainer("auto", strategy=PipelineParallelStrategy(2), **options).fit(model)
    return model.zeros.tolist(), model.number


def test_blocks_draw_different_numbers_and_ranks_the_same(pool: WorkerPool) -> None:
    (zeros, number), other = pool.run(masks, 2)
    assert other == (zeros, number)
    assert all(any(block) for block in zeros)
    assert len({tuple(block) for block in zeros}) == len(zeros)
