"""Test that a model that no rank could hold is built, and starts from the weights that one process would draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from examples.gpt.model import GPTModule
from lightning_dist import full_parameters
from lightning_dist.model.deferred_init import is_deferred
from tests.distributed.fit import make_trainer, refused
from tests.distributed.test_memory_report import Deep, fit_within, limited_memory, params_mib
from tests.models import CONTEXT, GPT, VOCAB, Llama, ResNet, TestModule, Transformer
from tests.pool import RankFailed, WorkerPool
from tests.thorough import one_in

SEED = 7


class Measured(GPT):
    """Count right predictions by a metric that is created together with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, targets = self.model(batch[0]).flatten(0, 1), batch[1].flatten()
        self.accuracy.update(logits.detach(), targets)
        return functional.cross_entropy(logits * self.temperature, targets)


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "example": partial(GPTModule, dim=32, num_layers=2, num_heads=2, max_len=CONTEXT),
    "measured": Measured,
    "resnet": ResNet,
    "llama": Llama,
}


class Late(TestModule):
    """Build one of ``MODELS`` in configure_model, and keep its tensors as they are when the training begins."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.is_deferred = False
        self.start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if not list(self.children()):
            self.inner: Any = MODELS[self.name]()
            self.is_deferred = all(map(is_deferred, self.parameters()))

    def data(self) -> tuple[Tensor, ...]:
        return ResNet.data(self) if self.name == "resnet" else GPT.data(self)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.name == "llama":
            return self.inner.model(input_ids=batch[0], labels=batch[0]).loss
        if self.name == "example":
            return functional.cross_entropy(self.inner(batch[0]).flatten(0, 1), batch[1].flatten())
        return self.inner.loss(*batch) if self.name == "resnet" else self.inner.loss(batch)

    def on_train_start(self) -> None:
        with full_parameters(self):
            self.start = tensors(self.inner)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter and buffer by name."""
    return {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}


def built(name: str) -> dict[str, Tensor]:
    """Build a model as one process does."""
    seed_everything(SEED, verbose=False)
    return tensors(MODELS[name]())


def starts(layout: str, names: list[str]) -> tuple[list[dict[str, Tensor]], int]:
    """Train each model for a step, and return the tensors with which it began, and how many tokens a metric counted."""
    found, num_counted = [], 0
    for name in names:
        trainer = make_trainer(layout, max_steps=1)
        # The numbers of rank 0 must be used, although a user has given ranks different seeds.
        seed_everything(SEED + trainer.global_rank, verbose=False)
        model = Late(name)
        trainer.fit(model)
        assert model.is_deferred
        found.append(model.start)
        if name == "measured":
            num_counted = int(model.inner.accuracy.tp + model.inner.accuracy.fn)
    return found, num_counted


@pytest.mark.parametrize(
    ("layout", "num_ranks", "names"),
    one_in(
        3,
        [
            ("full_shard", 2, list(MODELS)),
            ("2x2", 4, ["example"]),
            ("2x1", 2, list(MODELS)),
            ("tp2-1", 2, list(MODELS)),
            ("pp2-1", 2, list(MODELS)),
        ],
    ),
)
def test_training_begins_with_the_bits_that_one_process_draws(
    pool: WorkerPool, layout: str, num_ranks: int, names: list[str]
) -> None:
    ranks = pool.run(starts, num_ranks, layout, names)
    if "measured" in names:
        assert max(num_counted for _, num_counted in ranks) == 8 * CONTEXT // (1 if "-" in layout else num_ranks)
    for starts_of_rank, _ in ranks:
        for name, found in zip(names, starts_of_rank, strict=True):
            expected = built(name)
            assert found.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name


class Without(GPT):
    """Build a model in configure_model, part of which has no values that all ranks could know.

    Args:
        what: What is wrong.
    """

    def __init__(self, what: str) -> None:
        TestModule.__init__(self)
        self.what = what

    def configure_model(self) -> None:
        if not list(self.children()):
            self.model = Transformer()
            self.temperature = nn.Parameter(torch.ones(()))
            if self.what == "parameter":
                self.model.position = nn.Parameter(torch.empty(CONTEXT, 20))
            elif self.what == "attribute":
                self.table = torch.empty(3)
            else:
                nn.init.constant_(self.model.position, float(self.trainer.global_rank))


def refusals() -> dict[str, str]:
    return {what: refused(Without(what)) for what in ("parameter", "attribute", "rank")}


def test_models_without_known_values_are_refused(pool: WorkerPool) -> None:
    first, *others = pool.run(refusals, 4)
    for errors in (first, *others):
        assert (
            "Transformer (model) has tensors on the meta device that its constructor gives no values"
            in errors["parameter"]
        )
        assert "Without (the root module) has the attribute 'table' on the meta device" in errors["attribute"]
    assert "comparing how ranks initialise the model failed on 3 of 4 ranks" in first["rank"]
    assert (
        "Rank 0: aten.fill_.Scalar(('torch.float32 (8, 20) (20, 1) 0', '0.0'), {}); this rank: aten.fill_.Scalar"
        in others[0]["rank"]
    )


DIM, NUM_LAYERS = 512, 56
LIMIT_MIB = 370


class Steep(Deep):
    """Train with an optimizer that has no state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_within(limit_mib: int) -> None:
    with limited_memory(limit_mib):
        Steep(DIM, num_layers=NUM_LAYERS).configure_model()


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_model_larger_than_the_limit_of_memory_is_built_and_trained(own_pool: WorkerPool) -> None:
    assert params_mib(DIM, NUM_LAYERS) > 1.2 * LIMIT_MIB
    model = partial(Steep, DIM, num_layers=NUM_LAYERS)
    own_pool.run(fit_within, 2, LIMIT_MIB, model, num_steps=1, step_in_backward=True)
    with pytest.raises(RankFailed, match="can't allocate memory"):
        own_pool.run(build_within, 1, LIMIT_MIB)
