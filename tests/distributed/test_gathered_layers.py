"""Layers in no pair are split with a gathered output, and ``nn.MultiheadAttention`` by heads: nobody sees a part."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import TensorParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.models import build
from tests.pool import WorkerPool
from tests.split_models import Images


class Plain(Images):
    """Train three linear layers that are attributes of the LightningModule, without a residual sum."""

    def make_model(self) -> nn.Module:
        self.first, self.second, self.last = nn.Linear(192, 40), nn.Linear(40, 64), nn.Linear(64, 4)
        return nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        hidden = functional.relu(self.first(images.flatten(1)))
        penalty = self.second.weight.square().sum()  # Outside of its forward, a weight is whole.
        return functional.cross_entropy(self.last(self.second(input=hidden).softmax(-1)), labels) + 1e-3 * penalty


class Recurrent(Images):
    def make_model(self) -> nn.Module:
        self.cell, self.head = nn.LSTM(24, 16, batch_first=True), nn.Linear(16, 5)
        return nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.head(self.cell(images.reshape(-1, 8, 24))[0][:, -1]), labels)


class Conv1D(nn.Conv1d):
    """Normalize over all channels in the forward of a layer, which has the name of another library's layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class Unusual(Images):
    """Use a mask that is trained, a layer with a forward of its own, and one that is called with other weights."""

    def make_model(self) -> nn.Module:
        self.attention, self.mask = nn.MultiheadAttention(24, 4, batch_first=True), nn.Parameter(torch.zeros(8, 8))
        self.own, self.head, self.changed = Conv1D(8, 8, 3, padding=1), nn.Linear(24, 4), nn.Linear(24, 24)
        return nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        x = images.reshape(-1, 8, 24)
        weights = {name: 2 * param for name, param in self.changed.named_parameters()}
        x = x + torch.func.functional_call(self.changed, weights, (x,))
        return functional.cross_entropy(
            self.head(self.own(self.attention(x, x, x, attn_mask=self.mask)[0])[:, 0]), labels
        )


class Watching(pl.Callback):
    """Record what hooks of all kinds see of a layer, from the first step on."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        layer = module.get_submodule(self.name)
        tensors: Any = lambda values: [value for value in values if isinstance(value, Tensor)]  # noqa: E731

        def note(*values: Any) -> None:
            for value in values:
                found = tensors(value if isinstance(value, tuple) else (value,))
                self.seen += [tensor.detach().clone() for tensor in found]

        layer.register_forward_pre_hook(lambda layer, args: note(args), prepend=True)
        layer.register_forward_hook(lambda layer, args, output: note(args, output, layer.get_parameter(self.weight)))
        layer.register_forward_hook(lambda layer, args, output: note(output), prepend=True)
        layer.register_full_backward_hook(lambda layer, before, after: note(before, after))

    @property
    def weight(self) -> str:
        return "out_proj.weight" if "attention" in self.name else "weight"


def with_batch_norm(**kwargs: Any) -> pl.LightningModule:
    module: Any = build("convolutions", **kwargs)
    module.model[1] = nn.BatchNorm2d(16)
    return module


LAYERS = {
    "unusual": (Unusual, "head"),
    "plain": (Plain, "second"),
    "convolutions": (with_batch_norm, "model.3"),
    "multihead": (lambda **kwargs: build("multihead", **kwargs), "model.blocks.weights_of_heads.attention.attention"),
}


def watched(key: str) -> tuple[Weights, list[Any], Weights, str]:
    """Train with hooks on a split layer, and with an average of the weights.

    Returns:
        The weights, what hooks have seen, the averaged weights, and the lines of the start-up table.
    """
    make, name = LAYERS[key]
    torch.manual_seed(0)
    # The gradient of a key's bias is a rounding error, which AdamW would divide by another one.
    model = make(optimizer="sgd" if key == "multihead" else "adamw").double()
    watching, average = Watching(name), WeightAveraging(avg_fn=lambda average, new, number: (average + new) / 2)
    strategy: Any = TensorParallelStrategy(2) if int(os.environ["WORLD_SIZE"]) > 1 else "auto"
    lines: list[str] = []
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        callbacks = [watching, average]
        make_trainer("2x2", strategy=strategy, max_steps=3, precision="64-true", callbacks=callbacks).fit(model)
    averaged = weights_of(average._average_model.module)
    return weights_of(model), [tensor.numpy() for tensor in watching.seen], averaged, "\n".join(lines)


@pytest.mark.parametrize("key", LAYERS)
def test_hooks_and_averages_see_what_they_see_in_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, key: str
) -> None:
    ((weights, seen, averaged, _),) = reference_pool.run(watched, 1, key)
    assert seen
    for found in pool.run(watched, 2, key):
        assert_same(found[0], weights)
        assert_same(dict(enumerate(found[1])), dict(enumerate(seen)))
        assert_same(found[2], averaged)
        style = "attention_heads" if key in ("multihead", "unusual") else "colwise_gather_output"
        assert f"{style} (inferred)" in found[3]


def share_of(key: str) -> str:
    """Return the first row of the start-up table about what is split."""
    lines: list[str] = []
    model = Plain() if key == "plain" else build(key)
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        make_trainer("2x2", strategy=TensorParallelStrategy(4), max_steps=1).fit(model)
    return next(line.split("split", 1)[1].strip() for text in lines for line in text.split("\n") if "  split " in line)


@pytest.mark.parametrize(
    ("key", "share"), [("plain", "98%"), ("convolutions", "88%"), ("encoder", "91%"), ("multihead", "96%")]
)
def test_most_of_a_model_without_pairs_is_split(pool: WorkerPool, key: str, share: str) -> None:
    assert pool.run(share_of, 4, key)[0] == f"{share} of the parameters"


def what_little_can_be_split() -> tuple[str, list[str], str]:
    """Train models of which nothing or little can be split, and the last again with ``strict_plan=False``.

    Returns:
        The error of the first one, and the warnings of the two others.
    """
    error = refused(Recurrent(), strategy=TensorParallelStrategy(2))
    warned = []
    for strict_plan in (None, False):
        model = Recurrent()
        model.head = nn.Linear(16, 6)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            refused(model, strategy=TensorParallelStrategy(2, strict_plan=strict_plan))
        warned.append("".join(str(one.message) for one in found if "parameters are split" in str(one.message)))
    return error, *warned


def test_ranks_that_would_do_the_same_work_are_refused_or_warned_of(pool: WorkerPool) -> None:
    for rank, (error, warned, tolerated) in enumerate(pool.run(what_little_can_be_split, 4)):
        assert "tp_size=2: no layer of this model is split (" in error
        assert "so that 2 ranks would do the same work. Use these ranks otherwise" in error
        assert ("tp_size=2: 4% of the parameters are split. All ranks of tp hold the others" in warned) == (not rank)
        assert not tolerated


PAIR = {"model.0": "colwise", "model.1": "replicate", "model.2": "rowwise", "model.4": "colwise_gather_output"}
"""A plan of the user for a pair of convolutions."""


def trained_with_a_pair_of_convolutions() -> Weights:
    torch.manual_seed(0)
    model = build("convolutions").double()
    model.model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 4)
    ).double()
    strategy: Any = TensorParallelStrategy(2, plan=PAIR) if int(os.environ["WORLD_SIZE"]) > 1 else "auto"
    make_trainer("2x2", strategy=strategy, max_steps=3, precision="64-true").fit(model)
    return weights_of(model)


def test_a_plan_may_split_a_pair_of_convolutions(pool: WorkerPool) -> None:
    (expected,) = pool.run(trained_with_a_pair_of_convolutions, 1)
    for weights in pool.run(trained_with_a_pair_of_convolutions, 2):
        assert_same(weights, expected)


def refused_plans() -> list[str]:
    """Return the errors of plans that give layers styles which do not fit them."""
    plans = (
        ("convolutions", {"model.3": "attention_heads"}),
        ("convolutions", {"model.6": "colwise_gather_output"}),
        ("convolutions", {"model.0": "colwise"}),
        ("multihead", {"blocks.hinted.attention.attention": "rowwise"}),
    )
    return [refused(build(model), strategy=TensorParallelStrategy(2, plan=plan)) for model, plan in plans]


def test_styles_that_do_not_fit_are_refused(pool: WorkerPool) -> None:
    for heads, groups, alone, style in pool.run(refused_plans, 4):
        assert "plan: model.3 is a Conv2d, and attention_heads splits nn.MultiheadAttention only" in heads
        assert "model.6 is a Conv2d, and colwise_gather_output splits linear layers and convolutions without" in groups
        assert "plan: split as given, model (Sequential) does not compute the same as the whole: it raises" in alone
        assert "is a MultiheadAttention, and rowwise splits linear layers and convolutions" in style
