"""Test that training code of the kinds that users write gives the same weights as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import GPT, ResNet, TestModule, Transformer
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in


class ClippedByValue(GPT):
    trainer_kwargs = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


class PlainSGDClipped(GPT):
    trainer_kwargs = {"gradient_clip_val": 0.1}

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


class FunctionalHead(GPT):
    """Read parameters of modules that are never called."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer(tied=False)
        self.projection = nn.Linear(20, 20)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = functional.linear(functional.embedding(tokens, self.model.embedding.weight), self.projection.weight)
        for block in self.model.blocks:
            x = block(x)
        return functional.cross_entropy(self.model.head(x).flatten(0, 1), targets.flatten())


class ChannelsLast(ResNet):
    """Use another memory format, and a buffer that was expanded, so that its elements share memory."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.to(memory_format=torch.channels_last)
        self.register_buffer("scale", torch.ones(1).expand(6))
        self.eval()  # BatchNorm uses its running statistics, which are the same on any number of ranks.

    def train(self, mode: bool = True) -> Any:
        return super().train(False)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images, labels) * self.scale.mean()


class NoModuleCalled(TestModule):
    """Use all parameters through functions, so that no module is called and no hook runs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(3))

    data = GPT.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].to(self.bias.dtype)
        hidden = torch.tanh(functional.linear(x, self.net[0].weight, self.net[0].bias))
        return (functional.linear(hidden, self.net[2].weight) + self.bias).square().mean()


class SeveralForms(GPT):
    """Return lists from configure_optimizers, with a scheduler that monitors a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": scheduler, "monitor": "train/loss", "interval": "step", "frequency": 2}
        return [optimizer], [config]


class ManualWithRootParameter(GPT):
    """Train by manual optimization with two backwards per step, each of which uses a parameter of the root module."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.offset = nn.Parameter(torch.zeros(20))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch) + (self.offset * (part + 1) - 1).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class AccumulatesByHand(ManualWithRootParameter):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            self.loss(batch)  # No backward follows this forward.
        self.manual_backward((self.loss(batch) + (self.offset - 1).square().mean()) / 2)
        with torch.no_grad():
            self.loss(batch)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
            assert self.loss(batch) > 0  # This forward uses the weights after the step.


class OverridesHooks(GPT):
    """Change gradients in a hook, override backward, and clip gradients by torch's function."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class Recomputes(GPT):
    """Recompute the blocks in the backward by torch's checkpointing."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        tokens, targets = batch
        x = self.model.embedding(tokens)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(self.model.head(self.model.norm(x)).flatten(0, 1), targets.flatten())


class Unfreezes(BaseFinetuning):
    """Freeze the blocks for two epochs."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer)


class Unfreezing(GPT):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for param in self.parameters():
            param.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([param for param in self.parameters() if param.requires_grad])

    def configure_callbacks(self) -> Any:
        return [Unfreezes()]

    trainer_kwargs = {"limit_train_batches": 2}


WAYS = [
    ClippedByValue,
    PlainSGDClipped,
    ChannelsLast,
    FunctionalHead,
    NoModuleCalled,
    SeveralForms,
    ManualWithRootParameter,
    AccumulatesByHand,
    OverridesHooks,
    Recomputes,
    Unfreezing,
]


def train(way: type[TestModule], layout: str) -> Weights:
    torch.manual_seed(0)
    model = way()
    kwargs = getattr(way, "trainer_kwargs", {})
    make_trainer(layout, max_steps=6, precision="64-true", **kwargs).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("way", one_in(3, WAYS))
def test_trains_as_in_one_process(pool: WorkerPool, reference_pool: WorkerPool, way: type[TestModule]) -> None:
    before = {name: param.detach().numpy() for name, param in way().named_parameters()}
    (hybrid, *_), (expected,) = in_parallel(
        lambda: pool.run(train, 4, way, "2x2"), lambda: reference_pool.run(train, 1, way, "auto")
    )
    assert any(not np.array_equal(before[name], expected[name]) for name in expected)
    assert_same(hybrid, expected)
    assert_same(pool.run(train, 2, way, "full_shard")[0], expected)


class Weighted(GPT):
    """Train on sequences of unequal length, and return the number of tokens as the weight of the mean loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        position = torch.arange(8)
        targets = torch.where(position < 1 + tokens[:, :1] % 8, targets, -100)
        logits = self.model(tokens) * self.temperature
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (targets != -100).sum()}


def train_weighted(layout: str, accumulate: int, num_steps: int) -> Weights:
    torch.manual_seed(0)
    # One process has the data of all ranks and accumulated batches in one batch, whose plain mean is the weighted mean.
    model = Weighted(global_batch_size=8 if layout != "auto" else 8 * accumulate)
    kwargs = {"accumulate_grad_batches": accumulate} if layout != "auto" else {}
    make_trainer(layout, max_steps=num_steps, precision="64-true", gradient_clip_val=1.0, **kwargs).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weighted_losses_give_the_mean_over_all_tokens(pool: WorkerPool, accumulate: int) -> None:
    expected = pool.run(train_weighted, 1, "auto", accumulate, 5)[0]
    assert_same(pool.run(train_weighted, 4, "2x2", accumulate, 5)[0], expected)


class SeesGradients(GPT):
    """Record at the start of every ``training_step`` whether there are gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.__dict__.setdefault("seen", []).append(any(param.grad is not None for param in self.parameters()))
        return super().training_step(batch, batch_idx)


class LooksBeforeZeroGrad(Callback):
    """Record before every ``zero_grad`` whether there are gradients."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        seen = any(param.grad is not None for param in pl_module.parameters())
        self.__dict__.setdefault("seen", []).append(seen)


def gradients_seen(with_hook: bool) -> tuple[list[bool], list[bool]]:
    module, hook = SeesGradients(), LooksBeforeZeroGrad()
    callbacks = [hook] if with_hook else []
    trainer = make_trainer("full_shard", max_steps=3, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(module)
    return module.__dict__["seen"], hook.__dict__.get("seen", [])


def test_old_gradients_are_freed_before_the_forward_unless_a_hook_may_read_them(pool: WorkerPool) -> None:
    assert pool.run(gradients_seen, 2, False)[0] == ([False, True] * 3, [])
    assert pool.run(gradients_seen, 2, True)[0] == ([False, True, True, True, True, True], [False, True, True])


class Addresses(GPT):
    """Record the memory address of the embedding's weight in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.address = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.address = self.model.embedding.weight.data_ptr()
        return super().training_step(batch, batch_idx)


def uses_parameters_of_the_optimizer(layout: str) -> bool:
    model = Addresses()
    make_trainer(layout, max_steps=2).fit(model)
    weight = model.model.embedding.weight
    return model.address == (weight.to_local() if isinstance(weight, DTensor) else weight).data_ptr()


@pytest.mark.parametrize(("layout", "in_place"), [("1x1", True), ("2x1", True), ("1x2", False)])
def test_a_parameter_is_not_copied_in_steps_if_it_is_not_sharded(pool: WorkerPool, layout: str, in_place: bool) -> None:
    num_ranks = 1 if layout == "1x1" else 2
    assert pool.run(uses_parameters_of_the_optimizer, num_ranks, layout) == [in_place] * num_ranks
