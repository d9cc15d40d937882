"""Test checkpoints, evaluations, unequal loads and errors where experts are distributed over ranks.

``tests/parity/test_expert_parallel.py`` compares gradients and weights with those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import FullShardStrategy, HybridShardStrategy, NDParallelStrategy, full_parameters
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.techniques.compression import LocalSGD, TopK
from lightning_dist.techniques.expert_parallel import ExpertParallel
from lightning_dist.techniques.expert_parallel.planner import find_expert_plan
from lightning_dist.techniques.tensor_parallel import TensorParallel
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.distributed.test_tensor_parallel import AtStart
from tests.expert_models import Llama4, Mixture, PlainExperts, PlainMixture
from tests.models import build
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

RESUMED = {
    "ep2": lambda: FullShardStrategy(ep_size=2),
    "none": lambda: FullShardStrategy(),
    "ep4": lambda: FullShardStrategy(ep_size=4),
    "2xep2": lambda: HybridShardStrategy(2, 2, ep_size=2),
    "tp2": lambda: NDParallelStrategy(tp_size=2, ep_size=2),
    "pp2": lambda: NDParallelStrategy(pp_size=2, ep_size=2),
    "tp2 alone": lambda: NDParallelStrategy(tp_size=2),
    "tp4": lambda: NDParallelStrategy(tp_size=4),
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


LATER = [
    ("ep2", list(RESUMED)),
    ("none", ["none", "ep4"]),
    ("ep4", ["none"]),
    ("tp4", ["tp2 alone", "tp2"]),
]
"""The layout that saves a checkpoint, and those that resume it."""


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "others"), one_in(4, LATER))
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


class PenalizedByBatch(PlainMixture):
    """Use the weights of all experts in a term that is another one on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = batch[0].double().pow(2).mean() * 1e-3
        loss = super().training_step(batch, batch_idx)
        return loss + scale * sum(block.experts.down.pow(2).sum() for block in self.blocks)


class OnTwoExperts(PlainMixture):
    """Send all tokens to two experts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        router = self.blocks[0].router
        with torch.no_grad():
            router.bias.copy_(torch.tensor([0.0, 50.0, 51.0, 0.0]))
        router.requires_grad_(False)
        self.embedding.requires_grad_(False)  # The first layer's tokens need no gradient.


class WideExperts(PlainExperts):
    """Compute with tokens of a narrower dtype than that of the outputs."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.to(self.up.dtype), index, weights)


class WideMixture(Mixture):
    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.experts = WideExperts(num_experts, dim, 16)
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([0.0, 0.0, 50.0, 51.0]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        # Gradients of float32 tokens would be rounded in another way than in one process.
        return x + self.experts(tokens.detach().float(), index, weights).view_as(x)


class OfTwoDtypes(PlainMixture):
    """Have experts that return another dtype than that of their tokens, of which some ranks get none."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(WideMixture(24, 4) for _ in range(2))


class Grouped(PlainExperts):
    """Take tokens in several dimensions, as ``(samples, tokens, features)``."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = functional.one_hot(index, self.num_experts).to(x.dtype) * weights[..., None]
        results = torch.einsum("...eh,ehd->...ed", torch.einsum("...d,edh->...eh", x, self.up).relu(), self.down)
        return ((results + self.bias) * chosen.sum(-2)[..., None]).sum(-2)


class GroupedMixture(Mixture):
    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.experts = Grouped(num_experts, dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weights)


class InSeveralDimensions(PlainMixture):
    """Give tokens to experts without flattening them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(GroupedMixture(24, 4) for _ in range(2))


class WithOptionalInputs(PlainExperts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor, bias: Tensor | None = None, **others: Any) -> Tensor:
        outputs = super().forward(x, index, weights)
        return outputs if bias is None else outputs + bias


class MixtureWithOptionalInputs(PlainMixture):
    def __init__(self, gives_bias: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.experts = WithOptionalInputs(4, 24, 16)
            if gives_bias:
                block.experts.register_forward_pre_hook(lambda module, args: (*args, torch.ones(24)))


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


class Layer(Mixture):
    """Have layers before the experts that are split over ``tp``, so that hidden states can be split as well."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.up, self.down = nn.Linear(dim, 40), nn.Linear(40, dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.down(self.up(x).relu()))


class WithSplitTokens(PlainMixture):
    """Run the experts on each rank's own tokens while hidden states are split along the sequence."""

    def __init__(self, num_experts: int = 4, **kwargs: Any) -> None:
        super().__init__(num_experts, **kwargs)
        self.blocks = nn.ModuleList(Layer(24, num_experts) for _ in range(2))

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            plan = self.trainer.strategy.parallel.get(TensorParallel).plan
            assert plan.sequence is not None, plan.notes


class WithSixExperts(WithSplitTokens):
    """Have experts whose number does not divide by ``ep_size x tp_size``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(6, **kwargs)


class OnTwoOfSplitTokens(WithSplitTokens):
    """Send all tokens to two experts, so that some ranks are given no tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with torch.no_grad():
            self.blocks[0].router.bias.copy_(torch.tensor([0.0, 0.0, 50.0, 51.0]))


def losses_of_unequal_lengths(module: pl.LightningModule, step: Any, batch: Any, batch_idx: int) -> Tensor:
    """Return the mean loss of two batches, of which the second one has seven tokens instead of eight from step 1 on.

    With two data-parallel ranks, each has one of the two batches, and the second one's do not divide by two ranks.
    """
    is_alone = module.trainer.world_size == 1
    losses = []
    for index in range(2) if is_alone else [module.trainer.global_rank // 2]:
        length = 7 if batch_idx and index else 8
        losses.append(step([value[index::2] if is_alone else value for value in batch], length))
    return torch.stack(losses).mean()


class OfUnequalLengths(WithSplitTokens):
    """Give ranks of ``ep`` sequences of which only some divide by the number of ranks of ``tp``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def step(batch: Any, length: int) -> Tensor:
            return super(OfUnequalLengths, self).training_step([value[:, :length] for value in batch], batch_idx)

        return losses_of_unequal_lengths(self, step, batch, batch_idx)


class SixExpertsOfUnequalLengths(OfUnequalLengths):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(6, **kwargs)


class DenseOfUnequalLengths(Llama4):
    """Have experts that compute on all tokens, and sequences of unequal lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def step(batch: Any, length: int) -> Tensor:
            return super(DenseOfUnequalLengths, self).training_step([value[:, :length] for value in batch], batch_idx)

        return losses_of_unequal_lengths(self, step, batch, batch_idx)


OVER_TP: dict[str, Any] = {"ep_size": 1, "tp_size": 2}
FITTED: dict[str, tuple[type[pl.LightningModule], dict[str, Any], dict[str, Any]]] = {
    "penalized": (Penalized, {}, {}),
    "penalized, gathered": (Penalized, {"reshard_after_forward": False}, {}),
    "two experts": (OnTwoExperts, {}, {"adamw": True}),
    "two experts on four": (OnTwoExperts, {"ep_size": 4}, {"adamw": True}),
    "two dtypes": (OfTwoDtypes, {}, {}),
    "manual": (Manual, {}, {}),
    "optional inputs": (MixtureWithOptionalInputs, {}, {}),
    "own optimizer": (WithOwnOptimizer, {}, {"gradient_clip_val": 0.1}),
    "skipping": (Skipping, {}, {"adamw": True}),
    "several dimensions": (InSeveralDimensions, {}, {}),
    "several dimensions over tp": (InSeveralDimensions, {"ep_size": 1, "tp_size": 4}, {}),
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
    "penalized on four": (Penalized, {"ep_size": 4}, {"gradient_clip_val": 0.1}),
    "penalized by the batch": (PenalizedByBatch, {}, {}),
    "penalized by the batch on four": (PenalizedByBatch, {"ep_size": 4}, {"gradient_clip_val": 0.1}),
    "manual on four": (Manual, {"ep_size": 4}, {}),
    "own optimizer on four": (WithOwnOptimizer, {"ep_size": 4}, {"gradient_clip_val": 0.1}),
    "skipping on four": (Skipping, {"ep_size": 4}, {"adamw": True}),
    "zero 1 on four": (PlainMixture, {"ep_size": 4, "zero_stage": 1}, {"accumulate_grad_batches": 2}),
    "checkpointing on four": (PlainMixture, {"ep_size": 4, "activation_checkpointing": "full"}, {}),
    "in backward on four": (PlainMixture, {"ep_size": 4, "step_in_backward": True}, {}),
    "offload on four": (PlainMixture, {"ep_size": 4, "offload": "params"}, {"gradient_clip_val": 0.1}),
    "over tp": (PlainMixture, {"ep_size": 1, "tp_size": 4}, {"gradient_clip_val": 0.1}),
    "over tp, penalized": (Penalized, OVER_TP, {}),
    "over tp, penalized, whole": (Penalized, {**OVER_TP, "dp_replicate_size": 2}, {}),
    "over tp, penalized by the batch": (PenalizedByBatch, {**OVER_TP, "dp_replicate_size": 2}, {}),
    "over ep and tp, penalized by the batch": (PenalizedByBatch, {"tp_size": 2}, {}),
    "over tp, two experts": (OnTwoExperts, {"ep_size": 1, "tp_size": 4}, {"adamw": True}),
    "over tp, two dtypes": (OfTwoDtypes, OVER_TP, {}),
    "over ep and tp, two dtypes": (OfTwoDtypes, {"tp_size": 2}, {}),
    "over tp, skipping": (Skipping, {**OVER_TP, "dp_replicate_size": 2}, {"adamw": True}),
    "over tp, manual": (Manual, OVER_TP, {}),
    "over tp, checkpointing": (PlainMixture, {**OVER_TP, "activation_checkpointing": "full"}, {}),
    "over tp, compiled": (PlainMixture, {**OVER_TP, "compile": "eager"}, {}),
    "over tp, compressed": (
        PlainMixture,
        {**OVER_TP, "dp_replicate_size": 2, "compression": TopK(ratio=1.0, min_numel=64)},
        {"gradient_clip_val": 0.1},
    ),
    "over tp, local updates": (PlainMixture, {**OVER_TP, "dp_replicate_size": 2, "sync": LocalSGD(1)}, {}),
    "over ep and tp, penalized": (Penalized, {"tp_size": 2}, {"accumulate_grad_batches": 2}),
    "split tokens over tp": (WithSplitTokens, {"ep_size": 1, "tp_size": 4}, {"gradient_clip_val": 0.1}),
    "split tokens over tp, checkpointing": (WithSplitTokens, {**OVER_TP, "activation_checkpointing": "full"}, {}),
    "split tokens over ep and tp": (WithSplitTokens, {"tp_size": 2}, {"accumulate_grad_batches": 2}),
    "split tokens over ep alone": (WithSixExperts, {"tp_size": 2}, {"gradient_clip_val": 0.1}),
    "unequal lengths": (OfUnequalLengths, {"tp_size": 2}, {"gradient_clip_val": 0.1}),
    "unequal lengths, checkpointing": (OfUnequalLengths, {"tp_size": 2, "activation_checkpointing": "full"}, {}),
    "unequal lengths over ep alone": (SixExpertsOfUnequalLengths, {"tp_size": 2}, {}),
    "unequal lengths of a dense form": (DenseOfUnequalLengths, {"tp_size": 2}, {}),
    "split tokens of two experts": (OnTwoOfSplitTokens, {"tp_size": 2}, {"adamw": True}),
    "replicas": (PlainMixture, {"dp_replicate_size": 2, "check_replicas_every_n_steps": 1}, {}),
}


def fit(name: str, is_alone: bool) -> Weights:
    make, strategy, kwargs = FITTED[name]
    torch.manual_seed(0)
    optimizer = "adamw" if kwargs.get("adamw") else "sgd"
    model = make(optimizer=optimizer)
    kwargs = {"max_steps": 4, "precision": "64-true", **{k: v for k, v in kwargs.items() if k != "adamw"}}
    strategy = {"ep_size": 2, **strategy}
    kind: Any = HybridShardStrategy if "dp_replicate_size" in strategy else FullShardStrategy
    if "tp_size" in strategy:
        kind = NDParallelStrategy
    chosen = {"strategy": "auto", "devices": 1} if is_alone else {"strategy": kind(**strategy)}
    make_trainer("auto", **kwargs, **chosen).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("name", one_in(6, FITTED))
def test_any_way_of_training_computes_what_one_process_does(
    pool: WorkerPool, reference_pool: WorkerPool, name: str
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(fit, 4, name, False), lambda: reference_pool.run(fit, 1, name, True)[0]
    )
    for weights in outcomes:
        assert_same(weights, expected)


class Evaluated(PlainMixture):
    """Log a validation loss, and return predictions."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sum((1, 2))


def evaluate(is_alone: bool) -> tuple[float, list[float], list[float], list[int]]:
    """Train and validate, predict unequal numbers of batches, and call the model on each rank alone.

    Returns:
        The validation loss, what this rank predicts, what it computes alone from the same batches, and the numbers of
        experts that the modules and their state dict have outside of steps.
    """
    torch.manual_seed(0)
    model = Evaluated()
    strategy = {"strategy": "auto", "devices": 1} if is_alone else {"strategy": HybridShardStrategy(2, 2, ep_size=2)}
    trainer = make_trainer("auto", max_steps=2, precision="64-true", limit_val_batches=2, **strategy)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    loss = float(trainer.callback_metrics["val/loss"])
    tokens = model.data()[0][: 8 * (trainer.global_rank + 1)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=8)
    predicted = [float(value) for batch in trainer.predict(model, loader) or () for value in batch]
    with full_parameters(model):
        state = model.state_dict()
        alone = [float(value) for value in model(tokens).sum((1, 2))]
    experts = model.blocks[0].experts
    sizes = [experts.num_experts, len(experts.up), len(state["blocks.0.experts.up"])]
    return loss, predicted, alone, sizes


def test_evaluations_and_calls_outside_of_steps_see_all_experts(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(evaluate, 4, False), lambda: reference_pool.run(evaluate, 1, True)[0]
    )
    for rank, (loss, predicted, alone, sizes) in enumerate(outcomes):
        assert loss == pytest.approx(expected[0], rel=1e-10)
        assert len(predicted) == 8 * (rank + 1)
        assert predicted == pytest.approx(alone, rel=1e-10)
        assert predicted[:8] == pytest.approx(expected[1], rel=1e-10)
        assert sizes == [4, 4, 4]


class Sent(pl.Callback):
    """Record the figures of the technique, and count the tokens that this rank sends to others."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.technique = trainer.strategy.parallel.get(ExpertParallel)
        self.num_sent = self.largest = 0
        rank = self.technique._group.rank()

        def count(router: nn.Module, args: Any, scores: Tensor) -> None:
            index = scores.topk(2).indices
            self.num_sent += int((index // 2 != rank).sum())
            self.largest += int(index.flatten().bincount().max()) * 4 / index.numel()

        for block in module.blocks[:1]:  # The router is the same module in all layers.
            block.router.register_forward_hook(count)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.metrics = self.technique.metrics(1)


def sent() -> tuple[dict[str, float], int, float, int, str]:
    callback = Sent()
    model = PlainMixture()
    trainer = make_trainer("auto", strategy=FullShardStrategy(ep_size=2), max_steps=1, callbacks=[callback])
    trainer.fit(model)
    table = startup_table(trainer.strategy, trainer.strategy.parallel)
    held = sum(param.to_local().numel() for param in model.blocks[0].experts.parameters())
    return callback.metrics, callback.num_sent, callback.largest / 2, held, table


def test_a_rank_sends_as_many_bytes_as_the_formula_says(pool: WorkerPool) -> None:
    outcomes = pool.run(sent, 4)
    for rank, (metrics, num_tokens, largest, held, table) in enumerate(outcomes):
        num_of_other = outcomes[rank ^ 1][1]  # Its partner of ep sends this rank so many tokens.
        routed = 2 * (num_tokens + num_of_other) * 24 * 4  # Tokens and results, in the forward and in the backward.
        counts = 2 * 2 * 8  # In each of 2 layers, how many tokens each of the 2 experts of the other rank gets.
        assert metrics["comm/ep_mib_per_step"] * 2**20 == pytest.approx(routed + counts)
        assert num_tokens > 0
        assert metrics["experts/max_over_mean"] == pytest.approx(largest)
        assert held == 4 * (24 * 16 + 16 * 24 + 24) / 4
        assert "2 of 4 on each of 2 ranks (ep), in 2 layers, each sharded over 2 ranks" in table


def split_over_tp() -> tuple[dict[str, float], int, str]:
    """Train a step with experts over ``tp``.

    Returns:
        The technique's figures, the number of elements of experts that this rank has, and the start-up table.
    """
    model = PlainMixture()
    callback = Figures()
    plan = {"embedding": "replicate", "head": "replicate", "router": "replicate"}  # Nothing else sends anything.
    strategy = NDParallelStrategy(tp_size=4, plan=plan)
    trainer = make_trainer("auto", strategy=strategy, max_steps=1, callbacks=[callback])
    trainer.fit(model)
    held = sum(param.to_local().numel() for param in model.blocks[0].experts.parameters())
    return callback.metrics, held, startup_table(trainer.strategy, trainer.strategy.parallel)


class Figures(pl.Callback):
    """Record what the techniques measure in a step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        of_experts = trainer.strategy.parallel.get(ExpertParallel).metrics(1)
        self.metrics = {**of_experts, **trainer.strategy.parallel.get(TensorParallel).metrics(1)}


def test_experts_over_tp_take_two_all_reduces_of_the_tokens_in_a_layer(pool: WorkerPool) -> None:
    for metrics, held, table in pool.run(split_over_tp, 4):
        assert held == 4 * (24 * 16 + 16 * 24 + 24) / 4
        assert "1 of 4 on each of 4 ranks (tp), in 2 layers" in table
        assert "experts (inferred): 2 x blocks.*.experts" in table
        assert metrics["experts/max_over_mean"] >= 1
        # In each of 2 layers, the 64 tokens of 24 features, and in the backward the 2 weights of each as well.
        assert metrics["comm/tp_mib_per_step"] * 2**20 == pytest.approx(2 * 2 * 3 / 4 * 64 * (24 + 24 + 2) * 4)


class Scaled(PlainExperts):
    """Divide the results by the number of experts that have tokens, so that no expert can compute alone."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) / index.unique().numel()


class Counting(PlainExperts):
    """Count calls in a buffer and in a list, and draw numbers."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("num_calls", torch.zeros(()))
        self.calls: list[int] = []

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.num_calls += 1
        self.calls.append(len(x))
        torch.rand(1)
        return super().forward(x, index, weights)


class HalfFitting(PlainMixture):
    """Have one layer whose experts cannot be distributed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks[1].experts = Scaled(4, 24, 16)


class NotFitting(HalfFitting):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks[0].experts = Scaled(4, 24, 16)


REFUSED: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "experts": (
        lambda: PlainMixture(6),
        lambda: FullShardStrategy(ep_size=4),
        ("ep_size=4", "6 experts", "1, 2, 3, 6"),
    ),
    "no experts": (
        lambda: build("gpt"),
        lambda: FullShardStrategy(ep_size=2),
        ("ep_size=2", "no experts", "ep_size=1"),
    ),
    "ranks": (PlainMixture, lambda: FullShardStrategy(ep_size=3), ("ep_size=3", "dp_shard_size=4", "1, 2, 4")),
    "replicas": (PlainMixture, lambda: HybridShardStrategy(2, 2, ep_size=4), ("ep_size=4", "dp_shard_size=2", "1, 2")),
    "remaining": (PlainMixture, lambda: FullShardStrategy(ep_size=-1), ("ep_size=-1 must be a positive",)),
    "not fitting": (NotFitting, lambda: FullShardStrategy(ep_size=2), ("blocks.0.experts", "alone", "ep_size=1")),
    "strict": (
        HalfFitting,
        lambda: NDParallelStrategy(ep_size=2, strict_plan=True),
        ("blocks.1.experts", "strict_plan"),
    ),
    "strict over tp": (
        lambda: PlainMixture(6),
        lambda: NDParallelStrategy(tp_size=4, strict_plan=True),
        ("tp_size=4", "blocks.0.experts: its 6 experts do not divide", "strict_plan"),
    ),
    "plan names another module": (
        PlainMixture,
        lambda: NDParallelStrategy(tp_size=2, plan={"blocks.*.router": "experts"}),
        ("blocks.0.router (Linear) is not experts", "num_experts"),
    ),
    "plan names experts that do not fit": (
        NotFitting,
        lambda: NDParallelStrategy(tp_size=2, plan={"blocks.*.experts": "experts"}),
        ("blocks.0.experts has the style experts", "alone", "replicate"),
    ),
    "optional inputs": (
        lambda: MixtureWithOptionalInputs(gives_bias=True),
        lambda: FullShardStrategy(ep_size=2),
        ("blocks.0.experts is called with more than x, index, weights", "ep_size=1"),
    ),
    "compression": (
        PlainMixture,
        lambda: HybridShardStrategy(2, 2, ep_size=2, compression="bf16"),
        ("compression='bf16", "ep_size=2"),
    ),
}


def refuse(names: list[str]) -> list[str]:
    return [refused(REFUSED[name][0](), strategy=REFUSED[name][1]()) for name in names]


def test_what_cannot_be_distributed_is_refused_with_the_fix(pool: WorkerPool) -> None:
    for errors in pool.run(refuse, 4, list(REFUSED)):
        for name, error in zip(REFUSED, errors, strict=True):
            assert error.startswith("TypeError" if name == "optional inputs" else "ValueError"), (name, error)
            for text in REFUSED[name][2]:
                assert text in error, (name, error)


def tried() -> tuple[int, int, float, list[int], bool]:
    """Plan for two modules, and return what the trials have left."""
    dist.init_process_group("gloo")
    model = nn.ModuleList([Counting(4, 24, 16), Scaled(4, 24, 16)])
    before = torch.get_rng_state()
    plan = find_expert_plan(model, 2, 1, torch.device("cpu"))
    left = before.equal(torch.get_rng_state())
    return len(plan.forms), len(plan.left), float(model[0].num_calls), model[0].calls, left


def test_a_trial_leaves_the_experts_as_they_were(pool: WorkerPool) -> None:
    assert pool.run(tried, 2) == [(1, 1, 0.0, [], True)] * 2


def half(is_alone: bool) -> tuple[Weights, str]:
    torch.manual_seed(0)
    model = HalfFitting()
    strategy = {"strategy": "auto", "devices": 1} if is_alone else {"strategy": FullShardStrategy(ep_size=2)}
    trainer = make_trainer("auto", max_steps=2, precision="64-true", **strategy)
    trainer.fit(model)
    table = "" if is_alone else startup_table(trainer.strategy, trainer.strategy.parallel)
    return weights_of(model), table


def test_experts_that_do_not_fit_stay_on_all_ranks_with_the_reason(pool: WorkerPool) -> None:
    for _, table in pool.run(half, 4, False):
        assert "blocks.1.experts has all experts on each rank: one expert alone does not compute" in table


def planned() -> tuple[str, list[int]]:
    model = PlainMixture()
    plan = {"blocks.0.experts": "replicate", "blocks.1.experts": "experts"}
    trainer = make_trainer("auto", strategy=NDParallelStrategy(tp_size=4, plan=plan), max_steps=1)
    trainer.fit(model)
    return startup_table(trainer.strategy, trainer.strategy.parallel), [
        block.experts.up.to_local().numel() for block in model.blocks
    ]


def test_a_plan_says_which_experts_are_split_over_tp(pool: WorkerPool) -> None:
    for table, sizes in pool.run(planned, 4):
        assert sizes == [4 * 24 * 16, 24 * 16]
        assert "experts (user): blocks.*.experts" in table
        assert "replicate (user; as the plan says): blocks.*.experts" in table
