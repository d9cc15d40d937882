"""Test checkpoints, evaluations, unequal loads and errors where experts are distributed over ranks.

That it computes the same as one process is tested in ``tests/parity/test_expert_parallel.py`` as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_dist import FullShardStrategy, HybridShardStrategy, NDParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.distributed.test_tensor_parallel import AtStart
from tests.expert_models import Mixture, PlainMixture
from tests.models import build
from tests.pool import WorkerPool, in_parallel

RESUMED = {
    "ep2": lambda: FullShardStrategy(ep_size=2),
    "none": lambda: FullShardStrategy(),
    "ep4": lambda: FullShardStrategy(ep_size=4),
    "2xep2": lambda: HybridShardStrategy(2, 2, ep_size=2),
    "tp2": lambda: NDParallelStrategy(tp_size=2, ep_size=2),
    "pp2": lambda: NDParallelStrategy(pp_size=2, ep_size=2),
}


def resume(folder: Path, first: str, others: list[str]) -> tuple[Weights, list[Weights], list[Weights]]:
    """Save with one layout, and resume for one step with the others, by AdamW.

    Returns:
        The saved weights, and in the order of the layouts the loaded weights and the weights after the step.
    """
    kwargs: dict[str, Any] = {"precision": "64-true", "gradient_clip_val": 0.5}
    model = build("gpt_oss", optimizer="adamw")
    trainer = make_trainer("full_shard", strategy=RESUMED[first](), max_steps=2, **kwargs)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    read: list[Weights] = []
    stepped = []
    for layout in others:
        again = build("gpt_oss", seed=1, optimizer="adamw")
        trainer = make_trainer(
            "full_shard", strategy=RESUMED[layout](), max_steps=3, callbacks=[AtStart(read)], **kwargs
        )
        trainer.fit(again, ckpt_path=folder / "run.ckpt")
        stepped.append(weights_of(again))
    return weights_of(model), read, stepped


@pytest.mark.parametrize(("first", "others"), [("ep2", list(RESUMED)), ("none", ["none", "ep4"]), ("ep4", ["none"])])
def test_any_layout_resumes_the_checkpoint_of_distributed_experts(
    pool: WorkerPool, tmp_path: Path, first: str, others: list[str]
) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path, first, others):
        assert len(read) == len(stepped) == len(others)
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0], 1e-6)
            assert any((weights[name] != saved[name]).any() for name in saved)


class Penalized(PlainMixture):
    """Use the weights of all experts outside of the module that holds them, before and after it runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = self.blocks[0].experts.up.pow(2).sum()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * (before + sum(block.experts.down.abs().sum() for block in self.blocks))


class OnTwoExperts(PlainMixture):
    """Send all tokens to two experts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        router = self.blocks[0].router
        with torch.no_grad():
            router.bias.copy_(torch.tensor([0.0, 50.0, 51.0, 0.0]))
        router.requires_grad_(False)
        self.embedding.requires_grad_(False)  # The first layer's tokens need no gradient.


class Manual(PlainMixture):
    """Accumulate and clip gradients by hand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class OwnAdam(torch.optim.Adam):
    """Be none of torch's own classes, so that its updates are computed on DTensors."""


class WithOwnOptimizer(PlainMixture):
    def configure_optimizers(self) -> Any:
        return OwnAdam(self.parameters(), lr=1e-3, foreach=True)


class Skipping(PlainMixture):
    """Leave out the second block in every second step, and have a block that is never used."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unused = Mixture(24, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks[: 1 + batch_idx % 2]:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())


FITTED: dict[str, tuple[type[pl.LightningModule], dict[str, Any], dict[str, Any]]] = {
    "penalized": (Penalized, {}, {}),
    "penalized, gathered": (Penalized, {"reshard_after_forward": False}, {}),
    "two experts": (OnTwoExperts, {}, {"adamw": True}),
    "two experts on four": (OnTwoExperts, {"ep_size": 4}, {"adamw": True}),
    "manual": (Manual, {}, {}),
    "own optimizer": (WithOwnOptimizer, {}, {"gradient_clip_val": 0.1}),
    "skipping": (Skipping, {}, {"adamw": True}),
    "zero 1": (PlainMixture, {"zero_stage": 1}, {"accumulate_grad_batches": 2}),
    "zero 2": (PlainMixture, {"zero_stage": 2}, {"accumulate_grad_batches": 2}),
    "sharded over 2": (PlainMixture, {"reshard_after_forward": 2}, {}),
    "checkpointing": (PlainMixture, {"activation_checkpointing": "full"}, {"accumulate_grad_batches": 2}),
    "selective": (PlainMixture, {"activation_checkpointing": "selective"}, {}),
    "compiled": (PlainMixture, {"compile": "eager"}, {}),
    "in backward": (PlainMixture, {"step_in_backward": True}, {}),
    "offload": (PlainMixture, {"offload": "params"}, {"gradient_clip_val": 0.1}),
    "gloo": (PlainMixture, {"direct_collectives": False}, {}),
    "anomaly": (PlainMixture, {}, {"detect_anomaly": True}),
    "clip value": (PlainMixture, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "replicas": (PlainMixture, {"dp_replicate_size": 2, "check_replicas_every_n_steps": 1}, {}),
}


def fit(name: str, is_alone: bool) -> Weights:
    make, strategy, kwargs = FITTED[name]
    torch.manual_seed(0)
    optimizer = "adamw" if kwargs.get("adamw") else "sgd"
    model = make(optimizer=optimizer)
    kwargs = {"max_steps": 4, "precision": "64-true", **{k: v for k, v in kwargs.items() if k != "adamw"}}
    strategy = {"ep_size": 2, **strategy}
    kind = HybridShardStrategy if "dp_replicate_size" in strategy else FullShardStrategy
    chosen = {"strategy": "auto", "devices": 1} if is_alone else {"strategy": kind(**strategy)}
    make_trainer("auto", **kwargs, **chosen).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("name", FITTED)
def test_any_way_of_training_computes_what_one_process_does(
    pool: WorkerPool, reference_pool: WorkerPool, name: str
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(fit, 4, name, False), lambda: reference_pool.run(fit, 1, name, True)[0]
    )
    for weights in outcomes:
        assert_same(weights, expected)
