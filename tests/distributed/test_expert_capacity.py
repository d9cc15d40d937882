"""Test experts that compute a limited number of each rank's tokens, so that no size depends on values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_dist import DataParallelStrategy, FullShardStrategy, HybridShardStrategy, NDParallelStrategy
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.techniques.expert_parallel import ExpertParallel
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.distributed.test_expert_parallel import Evaluated, OfTwoDtypes, OfUnequalLengths, WithSplitTokens
from tests.expert_models import Mixture, PlainMixture
from tests.models import CONTEXT, build
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

ALL = 1000
"""A capacity by which no token is left out."""


class LimitedMixture(Mixture):
    """Leave out in one process what ranks leave out, each of its own part of the batch."""

    ranks = 1
    capacity = ALL

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        if self.training:
            weights = weights * self._is_kept(index.view(len(x), -1, 2)).view_as(weights)
        return x + self.experts(tokens, index, weights).view_as(x)

    def _is_kept(self, index: Tensor) -> Tensor:
        """Return which of the experts of each token compute it; ``index`` is of shape ``(sequences, tokens, k)``."""
        is_kept = torch.zeros_like(index)
        for rank in range(self.ranks):  # Sequence i is on rank i modulo the number of ranks.
            chosen = functional.one_hot(index[rank :: self.ranks].flatten(), self.experts.num_experts)
            position = (chosen.cumsum(0) * chosen).sum(-1)
            is_kept[rank :: self.ranks] = (position <= self.capacity).view_as(is_kept[rank :: self.ranks]).long()
        return is_kept


class Limited(PlainMixture):
    """Limit the tokens of experts in one process; on several, the strategy does so."""

    def limit(self, ranks: int, capacity: int) -> None:
        for block in self.blocks:
            block.__class__ = LimitedMixture
            block.ranks, block.capacity = ranks, capacity


def _strategy(**kwargs: Any) -> Any:
    if "tp_size" in kwargs or "pp_size" in kwargs or "cp_size" in kwargs:
        return NDParallelStrategy(**kwargs)
    return (HybridShardStrategy if "dp_replicate_size" in kwargs else FullShardStrategy)(**kwargs)


FULL: dict[str, Any] = {"activation_checkpointing": "full"}
FITTED: dict[str, tuple[type[PlainMixture], dict[str, Any], dict[str, Any], int]] = {
    "all tokens": (PlainMixture, {"ep_size": 2, "expert_capacity": ALL}, {}, 4),
    "all tokens, over tp": (PlainMixture, {"tp_size": 4, "expert_capacity": ALL}, {}, 1),
    "all tokens, split over tp": (WithSplitTokens, {"ep_size": 2, "tp_size": 2, "expert_capacity": ALL}, {}, 2),
    "all tokens, two dtypes": (OfTwoDtypes, {"ep_size": 2, "expert_capacity": ALL}, {}, 4),
    "all tokens, unequal lengths": (OfUnequalLengths, {"ep_size": 2, "tp_size": 2, "expert_capacity": ALL}, {}, 2),
    "all tokens, stages": (PlainMixture, {"ep_size": 2, "pp_size": 2, "expert_capacity": ALL}, {}, 2),
    "ep 2": (Limited, {"ep_size": 2, "expert_capacity": 5}, {"gradient_clip_val": 0.1}, 4),
    "ep 2, accumulation": (Limited, {"ep_size": 2, "expert_capacity": 6}, {"accumulate_grad_batches": 2}, 4),
    "ep 4, checkpointing": (Limited, {"ep_size": 4, "expert_capacity": 5, **FULL}, {}, 4),
    "replicas": (Limited, {"ep_size": 2, "expert_capacity": 4, "dp_replicate_size": 2}, {}, 4),
    "tp 2": (Limited, {"tp_size": 2, "expert_capacity": 7}, {"gradient_clip_val": 0.1}, 2),
    "tp 4, checkpointing": (Limited, {"tp_size": 4, "expert_capacity": 20, **FULL}, {}, 1),
    "ep 2, tp 2": (Limited, {"ep_size": 2, "tp_size": 2, "expert_capacity": 9}, {"accumulate_grad_batches": 2}, 2),
    "none of them": (Limited, {"ep_size": 4, "expert_capacity": 1}, {}, 4),
    "ep 2, offload": (Limited, {"ep_size": 2, "expert_capacity": 5, "offload": "params"}, {}, 4),
    "ep 2, in backward": (Limited, {"ep_size": 2, "expert_capacity": 5, "step_in_backward": True}, {}, 4),
}
"""The model, arguments of the strategy and of the Trainer, and the number of ranks with own parts of the batch."""


def fit(name: str, is_alone: bool) -> Weights:
    make, kwargs, of_trainer, ranks = FITTED[name]
    torch.manual_seed(0)
    model = make(optimizer="adamw" if make is Limited else "sgd")
    if is_alone and isinstance(model, Limited):
        model.limit(ranks, kwargs["expert_capacity"])
    chosen = {"strategy": "auto", "devices": 1} if is_alone else {"strategy": _strategy(**kwargs)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "expert_capacity=")
        make_trainer("auto", max_steps=4, precision="64-true", **of_trainer, **chosen).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("name", one_in(6, FITTED))
def test_tokens_beyond_the_capacity_are_left_out_as_in_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, name: str
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(fit, 4, name, False), lambda: reference_pool.run(fit, 1, name, True)[0]
    )
    for weights in outcomes:
        assert_same(weights, expected)


def fit_another_capacity(name: str) -> Weights:
    make, kwargs, of_trainer, _ = FITTED[name]
    torch.manual_seed(0)
    model = make(optimizer="adamw")
    strategy = _strategy(**{**kwargs, "expert_capacity": ALL})
    make_trainer("auto", max_steps=4, precision="64-true", strategy=strategy, **of_trainer).fit(model)
    return weights_of(model)


def test_the_cases_leave_tokens_out(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    limited, every = pool.run(fit, 4, "ep 2", False)[0], pool.run(fit_another_capacity, 4, "ep 2")[0]
    assert any(abs(limited[name] - every[name]).max() > 1e-3 for name in limited)


def evaluate(capacity: int | None) -> tuple[float, dict[str, float], list[str], str]:
    """Train a step, and validate.

    Returns:
        The validation loss, the metrics of experts, the warnings about the capacity, and the start-up table.
    """
    torch.manual_seed(0)
    model = Evaluated()
    kwargs = {"precision": "64-true", "max_steps": 6, "limit_val_batches": 2}
    trainer = make_trainer("auto", strategy=FullShardStrategy(ep_size=2, expert_capacity=capacity), **kwargs)
    trainer.validate(model, verbose=False)
    loss = float(trainer.callback_metrics["val/loss"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer("auto", strategy=FullShardStrategy(ep_size=2, expert_capacity=capacity), **kwargs)
        trainer.fit(model)
    told = [text for each in caught if (text := str(each.message)).startswith("expert_capacity=")]
    parallel = trainer.strategy.parallel
    return loss, parallel.get(ExpertParallel).metrics(6), told, startup_table(trainer.strategy, parallel)


def test_evaluations_leave_no_token_out_and_training_says_how_many(pool: WorkerPool) -> None:
    limited, free = pool.run(evaluate, 4, 3), pool.run(evaluate, 4, None)
    for (loss, metrics, told, table), (expected, others, silent, _) in zip(limited, free, strict=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        # Two sequences with two choices for each token, of which four experts have three places each.
        assert metrics["experts/left_out"] == pytest.approx(1 - 4 * 3 / (2 * CONTEXT * 2), abs=0.2)
        assert "experts/left_out" not in others
        assert not silent
        assert len(told) == 1, told
        assert "tokens of rank" in told[0]
        assert "use a larger expert_capacity" in told[0]
        assert "an expert computes at most 3 tokens of a rank" in table


def refuse() -> list[str]:
    twice = PlainMixture()
    errors = [refused(twice, strategy=FullShardStrategy(ep_size=2, expert_capacity=8))]
    return [
        *errors,
        refused(twice, strategy=FullShardStrategy(ep_size=2, expert_capacity=9), max_steps=2),
        refused(build("llama4"), strategy=FullShardStrategy(ep_size=2, expert_capacity=8)),
    ]


def test_what_has_no_capacity_is_refused_with_the_fix(pool: WorkerPool) -> None:
    for first, other, dense in pool.run(refuse, 4):
        assert first == "no error"
        assert "expert_capacity=8, which cannot be changed to 9" in other
        assert dense.startswith(
            "ValueError: expert_capacity=8: each expert of model.model.layers.0.feed_forward.experts"
        )
        assert "Use expert_capacity=None" in dense


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_capacity_is_a_number_of_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match=f"expert_capacity={value} must be a number of tokens"):
        FullShardStrategy(ep_size=2, expert_capacity=value)


def test_a_strategy_without_experts_takes_no_capacity() -> None:
    with pytest.raises(TypeError, match="expert_capacity"):
        DataParallelStrategy(expert_capacity=4)


def alone() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("auto", max_steps=1, strategy=FullShardStrategy(expert_capacity=4)).fit(PlainMixture())
    return [text for each in caught if "expert_capacity" in (text := str(each.message))]


def test_a_capacity_without_distributed_experts_is_said_to_have_no_effect(pool: WorkerPool) -> None:
    told = pool.run(alone, 2)[0]
    assert told == ["expert_capacity=4 has no effect: ep_size and tp_size are 1, so that no experts are distributed."]
