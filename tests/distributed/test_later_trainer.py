"""Test that a module which an earlier Trainer has made parallel is used as a later one asks, or refused."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from lightning_dist import DataParallelStrategy, FullShardStrategy, NDParallelStrategy
from lightning_dist.compression import DiLoCo, PowerSGD
from lightning_dist.parallel_module import parallelized
from tests.distributed.fit import make_trainer, refused
from tests.models import build
from tests.pool import WorkerPool
from tests.thorough import one_in

SHARDED = {"dp_shard_size": 2}
CONTEXT = {"cp_size": 2, "attention": "all_gather"}
STAGES = {"pp_size": 2, "num_microbatches": 2}
REPLICAS = {"dp_replicate_size": 2}


def fit_and_fit_again(before: dict[str, Any], *later: dict[str, Any]) -> list[str]:
    """Fit a model by one strategy and then by each of others, and return the errors of the latter."""
    model = build("gpt")

    def strategy(arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(arguments)
        precision = arguments.pop("precision", "32-true")
        return {"strategy": NDParallelStrategy(**arguments), "precision": precision}

    make_trainer("auto", **strategy(before), max_steps=1).fit(model)
    return [refused(model, **strategy(arguments), max_steps=2 + k) for k, arguments in enumerate(later)]


@pytest.mark.parametrize(
    ("before", "later"),
    one_in(
        3,
        [
            (SHARDED, {"offload": "optimizer"}),
            (SHARDED, {"activation_checkpointing": "full"}),
            (SHARDED, {"compile": "eager"}),
            (SHARDED, {"check_replicas_every_n_steps": 2}),
            (SHARDED, {"min_num_params": 7}),
            (SHARDED, {"reshard_after_forward": False}),
            (SHARDED, {"tiled_mlp": 2}),
            (SHARDED, {"step_in_backward": True}),
            (SHARDED, {"units": ["Block"]}),
            (REPLICAS, {"compression": "bf16"}),
            (REPLICAS, {"sync": DiLoCo(inner_steps=2)}),
            ({**REPLICAS, "sync": DiLoCo(inner_steps=2)}, {"sync": DiLoCo(inner_steps=3)}),
            (
                {**REPLICAS, "sync": DiLoCo(compression=PowerSGD(rank=4))},
                {"sync": DiLoCo(compression=PowerSGD(rank=8))},
            ),
            (CONTEXT, {"attention": "ulysses"}),
            (CONTEXT, {"split_evaluations": True}),
            (STAGES, {"num_microbatches": 4}),
            (STAGES, {"schedule": "gpipe"}),
            ({"tp_size": 2}, {"plan": {"blocks.0.mlp.0": "replicate"}}),
            ({"tp_size": 2}, {"sequence_parallel": False}),
        ],
    ),
)
def test_each_argument_must_be_that_of_the_earlier_trainer(
    pool: WorkerPool, before: dict[str, Any], later: dict[str, Any]
) -> None:
    (name,) = later
    for same, other in pool.run(fit_and_fit_again, 2, before, before, {**before, **later}):
        assert same == "no error"
        assert "An earlier Trainer has made this GPT" in other
        assert f" parallel with {name}=" in other
        assert "which cannot be changed to" in other


@pytest.mark.parametrize(
    ("before", "later", "error"),
    [
        (SHARDED, {"tp_size": 2}, "layout=dp_replicate 1 x dp_shard 2, which cannot be changed to dp_replicate 1 x"),
        (SHARDED, {**SHARDED, "precision": "bf16-mixed"}, "param_dtype=None, which cannot be changed to torch.bfloat"),
        ({**SHARDED, "offload": "params"}, SHARDED, "offload=params, which cannot be changed to None"),
    ],
)
def test_layouts_precisions_and_what_is_left_out_are_compared_as_well(
    pool: WorkerPool, before: dict[str, Any], later: dict[str, Any], error: str
) -> None:
    for (found,) in pool.run(fit_and_fit_again, 2, before, later):
        assert error in found


def test_what_an_earlier_trainer_has_chosen_may_be_left_open_or_named(pool: WorkerPool) -> None:
    for errors in pool.run(
        fit_and_fit_again, 2, {"cp_size": 2}, {"cp_size": 2, "attention": "ulysses"}, {"cp_size": 2}
    ):
        assert errors == ["no error"] * 2
    named = {**STAGES, "virtual_stages": 1}
    for errors in pool.run(fit_and_fit_again, 2, {"pp_size": 2, "num_microbatches": 2}, named, {"pp_size": 2}):
        assert errors == ["no error"] * 2


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ({**SHARDED, "activation_checkpointing": True}, {**SHARDED, "activation_checkpointing": "full"}),
        (SHARDED, {**SHARDED, "activation_checkpointing": "none"}),
        ({**SHARDED, "compile": "eager"}, {**SHARDED, "compile": {"backend": "eager"}}),
        (SHARDED, {**SHARDED, "compile": None}),
        ({**SHARDED, "units": ["Block"]}, {**SHARDED, "units": ("Block",)}),
        (REPLICAS, {**REPLICAS, "reshard_after_forward": False}),
        (SHARDED, {**SHARDED, "schedule": "gpipe"}),
        (SHARDED, {**SHARDED, "split_evaluations": True}),
        (SHARDED, {**SHARDED, "strict_plan": True}),
    ],
)
def test_other_spellings_and_arguments_without_effect_are_accepted(
    pool: WorkerPool, before: dict[str, Any], later: dict[str, Any]
) -> None:
    for errors in pool.run(fit_and_fit_again, 2, before, later):
        assert errors == ["no error"]


def evaluate_after_fit() -> tuple[str, str]:
    """Train a model, evaluate it by a strategy without what concerns training alone, and train it by that strategy."""
    model = build("gpt")
    training = FullShardStrategy(step_in_backward=True, activation_checkpointing="full")
    make_trainer("auto", strategy=training, max_steps=1).fit(model)
    trainer = make_trainer("auto", strategy=FullShardStrategy(), max_steps=2, limit_val_batches=1)
    trainer.validate(model)
    stored = refused(model, strategy=FullShardStrategy(step_in_backward=True), precision="64-true", max_steps=2)
    return stored, refused(model, strategy=FullShardStrategy(), max_steps=2)


def test_what_concerns_training_alone_may_differ_in_an_evaluation(pool: WorkerPool) -> None:
    for stored, trained in pool.run(evaluate_after_fit, 2):
        assert "precision='32-true', which stores other weights than '64-true'" in stored
        assert "step_in_backward=True, which cannot be changed to False" in trained


def fit_again_after_a_collection() -> tuple[bool, str, str, bool]:
    """Fit a model by Trainers that nobody holds any more when the next one begins."""
    model = build("gpt")
    make_trainer("auto", strategy=DataParallelStrategy(), max_steps=1).fit(model)
    model.trainer = None
    gc.collect()
    is_parallel = parallelized(model) is not None
    same = refused(model, strategy=DataParallelStrategy(), max_steps=2)
    other = refused(model, strategy=DataParallelStrategy(compression="bf16"), max_steps=3)
    model.trainer = None
    return is_parallel, same, other, parallelized(pickle.loads(pickle.dumps(model))) is None


def test_a_module_stays_parallel_when_its_trainer_is_gone(pool: WorkerPool) -> None:
    for is_parallel, same, other, is_copy_ordinary in pool.run(fit_again_after_a_collection, 2):
        assert is_parallel
        assert is_copy_ordinary
        assert same == "no error"
        assert "parallel with compression=None, which cannot be changed to" in other
