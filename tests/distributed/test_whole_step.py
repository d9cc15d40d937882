"""Test that optimizers that need whole parameters compute what one process does, and keep their states at owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_dist.checkpoint import consolidate
from tests.behaviour.models import Block
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import TestModule
from tests.pool import WorkerPool
from tests.thorough import one_in
from tests.whole_optimizers import BySomeRows, Orthogonal, Shampoo, Sharpness, ToNormOfAll

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (BySomeRows, {}),
    "matrices": (Orthogonal, {}),
    "factors": (Shampoo, {}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "elementwise": (torch.optim.AdamW, {"lr": 0.01}),
    "norm of all": (ToNormOfAll, {}),
    "two evaluations": (Sharpness, {}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.3, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
}
NUM_STEPS = 4


class Net(TestModule):
    """Have matrices, a convolution, vectors and a scalar, of which some have fewer rows than there are ranks."""

    num_samples = 64

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        torch.manual_seed(0)
        self.kind = kind
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def data(self) -> tuple[Tensor, ...]:
        x = torch.randn(self.num_samples, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return x, x.sum((1, 2)).gt(0).long()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + self.mix(x.mT).mT
        loss = functional.cross_entropy(self.scale * self.head(self.blocks(x)).mean(1), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        cls, arguments = OPTIMIZERS[self.kind]
        wide = [param for param in self.parameters() if param.ndim > 1]
        narrow = [param for param in self.parameters() if param.ndim < 2]
        groups = [{"params": wide + narrow}] if self.kind == "lbfgs" else [{"params": wide}, {"params": narrow}]
        optimizer = cls(groups, **arguments)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(kind: str, layout: str, num_steps: int = NUM_STEPS, save: str = "", resume: str | None = None, **kwargs: Any):
    model = Net(kind)
    options = {"max_epochs": num_steps // 2, "limit_train_batches": 2, "precision": "64-true"}
    trainer = make_trainer(layout, kwargs, **options)
    trainer.fit(model, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
        getattr(trainer.strategy, "wait_for_checkpoints", lambda: None)()
    return model, trainer


def train_all(layout: str, kinds: tuple[str, ...], **kwargs: Any) -> dict[str, Weights]:
    return {kind: weights_of(fit(kind, layout, **kwargs)[0]) for kind in kinds}


@pytest.fixture(scope="module")
def of_one_process(pool: WorkerPool) -> dict[str, Weights]:
    return pool.run(train_all, 1, "auto", tuple(OPTIMIZERS))[0]


@pytest.mark.parametrize(
    ("layout", "num_ranks", "kwargs", "kinds"),
    one_in(
        5,
        [
            ("full_shard", 2, {}, tuple(OPTIMIZERS)),
            ("full_shard", 2, {"zero_stage": 1}, ("rows", "norm of all")),
            ("full_shard", 2, {"zero_stage": 2, "optimizer_step": "whole"}, ("matrices", "elementwise")),
            ("2x2", 4, {}, ("rows", "two evaluations")),
            ("tp2-1", 2, {}, ("factors", "adafactor", "norm of all", "lbfgs")),
            ("2x1", 2, {}, ("rows", "two evaluations", "lbfgs")),
            ("pp2-1", 2, {"num_microbatches": 2}, ("rows", "adafactor")),
        ],
    ),
    ids=["full", "zero1", "zero2-whole", "hybrid", "tp", "data", "pp"],
)
def test_any_optimizer_computes_what_one_process_does(
    pool: WorkerPool,
    of_one_process: dict[str, Weights],
    layout: str,
    num_ranks: int,
    kwargs: dict[str, Any],
    kinds: tuple[str, ...],
) -> None:
    for of_rank in pool.run(train_all, num_ranks, layout, kinds, **kwargs):
        for kind in kinds:
            assert_same(of_rank[kind], of_one_process[kind], 1e-9)


def save_all(folder: Path, layout: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        fit(kind, layout, 2, str(folder / f"{kind}.ckpt"))


def resume_all(folder: Path, layout: str, kinds: tuple[str, ...], **kwargs: Any) -> dict[str, Weights]:
    paths = {kind: str(folder / f"{kind}.ckpt") for kind in kinds}
    return {kind: weights_of(fit(kind, layout, resume=paths[kind], **kwargs)[0]) for kind in kinds}


@pytest.mark.thorough
@pytest.mark.parametrize("saved", one_in(3, ["full_shard", "2x1", "tp2-1"]))
def test_any_layout_resumes_the_states_of_owners(
    pool: WorkerPool, of_one_process: dict[str, Weights], tmp_path: Path, saved: str
) -> None:
    kinds = ("rows", "factors", "lbfgs")
    pool.run(save_all, 2, tmp_path, saved, kinds)
    others = {"full_shard": [("full_shard", 2), ("2x2", 4)], "2x1": [("full_shard", 2)], "tp2-1": [("full_shard", 4)]}
    for layout, ranks in others[saved]:
        for kind, weights in pool.run(resume_all, ranks, tmp_path, layout, kinds)[0].items():
            assert_same(weights, of_one_process[kind], 1e-9)
    if saved == "full_shard":
        files = tmp_path / "files"
        kinds = kinds[:-1]  # A line search amplifies rounding.
        for kind in kinds:
            consolidate(tmp_path / f"{kind}.ckpt", files / f"{kind}.ckpt")
        for kind, weights in pool.run(resume_all, 2, files, "full_shard", kinds)[0].items():
            assert_same(weights, of_one_process[kind], 1e-6)  # One process rounds states in such a file to float32.


class Watch(Callback):
    """Record which kinds of parameters hooks of an optimizer see."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self.seen.append(len(params) == len(list(module.parameters())) and isinstance(params[0], DTensor))

        optimizer.register_step_pre_hook(hook)
        optimizer.register_step_post_hook(hook)


def owned(kind: str) -> tuple[list[str], int, list[bool], str]:
    model, watch = Net(kind), Watch()
    trainer = make_trainer("full_shard", max_steps=2, precision="64-true", callbacks=[watch])
    rows: list[str] = []
    trainer.strategy.setup_optimizers, original = (
        lambda t: (original(t), rows.extend(text for _, text in trainer.strategy.optimizer_rows)),
        trainer.strategy.setup_optimizers,
    )
    trainer.fit(model)
    names = {param: name for name, param in model.named_parameters()}
    state = trainer.optimizers[0].state
    num_bytes = sum(v.nbytes for s in state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim)
    return sorted(names[param] for param in state if names[param] != "scale"), num_bytes, watch.seen, rows[0]


def test_states_are_spread_over_the_owners_and_hooks_see_shards(pool: WorkerPool) -> None:
    first, second = pool.run(owned, 2, "matrices")
    assert not set(first[0]) & set(second[0])
    assert len(first[0]) + len(second[0]) == len(list(Net("rows").parameters())) - 1
    assert 0.5 < first[1] / second[1] < 2.0
    assert first[2] == second[2] == [True] * 4
    assert first[3].startswith("Orthogonal: whole, each parameter on one of 2 ranks")
    assert "MiB per step" in first[3]
    first, second = pool.run(owned, 2, "norm of all")
    assert first[0] and not second[0]
    assert first[2] == second[2] == [True] * 4


class Fails(BySomeRows):
    """Fail on the rank that owns a certain parameter."""

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", 0) + 1
        if param.shape == (3, 6) and state["steps"] == 2 and torch.distributed.is_initialized():
            raise ZeroDivisionError("the optimizer failed")
        return super().direction(param, state)


def fail() -> str:
    OPTIMIZERS["fails"] = (Fails, {})
    try:
        fit("fails", "full_shard", optimizer_step="whole")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_of_an_owner_is_raised_on_all_ranks(pool: WorkerPool) -> None:
    texts = sorted(pool.run(fail, 2, timeout_s=60))
    assert texts[1] == "ZeroDivisionError: the optimizer failed"
    assert texts[0].startswith("OtherRankError: Fails.step failed on rank")


def refused(kind: str, layout: str, kwargs: dict[str, Any], **trainer: Any) -> str:
    try:
        make_trainer(layout, kwargs, max_steps=1, precision="64-true", **trainer).fit(Net(kind))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "layout", "kwargs", "text"),
    [
        ("rows", "full_shard", {"optimizer_step": "here"}, "ValueError: optimizer_step='here' must be 'auto'"),
        ("norm of all", "pp2-1", {"num_microbatches": 2}, "ToNormOfAll with pp_size=2: its result for a parameter"),
        ("lbfgs", "pp2-1", {"num_microbatches": 2}, "LBFGS with pp_size=2: it evaluates the loss several times"),
        ("rows", "full_shard", {"offload": "optimizer", "offload_folder": "/tmp"}, "BySomeRows with offload='optim"),
    ],
)
def test_what_prevents_whole_steps_is_refused_by_name(
    pool: WorkerPool, kind: str, layout: str, kwargs: dict[str, Any], text: str
) -> None:
    for error in pool.run(refused, 2, kind, layout, kwargs, timeout_s=60):
        assert text in error


class CountsInGroup(BySomeRows):
    """Count steps in the parameter group, as optimizers of several packages do, for a decreasing rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


class Thaws(Net):
    """Train more parameters from the third step on, which are in a group whose steps have been counted before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.requires_grad_(self.global_step >= 2)

    def configure_optimizers(self) -> Any:
        return CountsInGroup(
            [{"params": [*self.mix.parameters()]}, {"params": [*self.head.parameters(), *self.blocks.parameters()]}]
        )


def thaw(layout: str) -> tuple[Weights, list[int]]:
    model = Thaws("rows")
    trainer = make_trainer(layout, max_steps=4, precision="64-true")
    trainer.fit(model)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return weights_of(model), [group["steps"] for group in state["param_groups"]]


def test_steps_that_groups_count_are_the_same_for_all_owners(pool: WorkerPool) -> None:
    expected, _ = pool.run(thaw, 1, "auto")[0]
    for weights, counts in pool.run(thaw, 4, "1x4"):
        assert_same(weights, expected, 1e-9)
        assert counts == [4, 4]


class Rows(Net):
    """Look up a few rows of an embedding, some of which get a gradient of zero, and give a bias another dtype."""

    def __init__(self) -> None:
        super().__init__("elementwise")
        self.embedding = nn.Embedding(12, 6, padding_idx=3, sparse=True)
        self.head = nn.Linear(6, 3)
        self.head.bias = nn.Parameter(self.head.bias.detach().float())
        self.mix = self.blocks = nn.Identity()

    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(12, (self.num_samples, 4), generator=generator), torch.arange(self.num_samples) % 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        if batch_idx:  # The gradient of this row is zero then, and its momentum goes on to move it where it is used.
            x = x * (batch[0] != 5)[..., None]
        logits = functional.linear(x.mean(1), self.head.weight.to(x)) + self.head.bias.to(x)
        loss = functional.cross_entropy(self.scale * logits, batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        rest = [param for param in self.parameters() if param is not self.embedding.weight]
        return [torch.optim.SparseAdam([self.embedding.weight], lr=0.1), torch.optim.SGD(rest, lr=0.1)]


class ByHand(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()


def sparse(layout: str) -> Weights | str:
    model = ByHand()
    try:
        make_trainer(layout, max_steps=8).fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return weights_of(model)


def test_sparse_adam_and_layers_of_two_dtypes_work_where_nothing_is_sharded(pool: WorkerPool) -> None:
    expected = pool.run(sparse, 1, "auto")[0]
    for found in pool.run(sparse, 2, "2x1"):
        assert_same(found, expected, 1e-5)
    for error in pool.run(sparse, 2, "full_shard", timeout_s=60):
        assert "head has parameters of several dtypes" in error or "SparseAdam takes sparse gradients" in error
