"""Test to which MLflow run a training logs, and which tags and parameters make runs comparable."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_dist.compression import LocalSGD
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers.dataset_digest import describe_dataset
from lightning_dist.plugins.loggers.provenance import run_name
from lightning_dist.plugins.loggers.spool import find_spools
from lightning_dist.plugins.strategies import FullShardStrategy, HybridShardStrategy
from tests.pool import WorkerPool
from tests.unit.test_mlflow_logger import client, files, fit, run_of

pytestmark = pytest.mark.usefixtures("workplace")


def first_life(**kwargs: Any) -> dict[str, Any]:
    """Log five steps, and return what a checkpoint of step 3 says about the run."""
    logger = MLflowLogger(**kwargs)
    logger.log_hyperparams({"dist": {"world_size": 4}, "lr": 0.1})
    for step in range(5):
        logger.log_metrics({"a": step}, step=step)
    entries = logger.entries_for_checkpoint()
    logger.finalize("failed")
    return {"training": entries["mlflow_training"], "run_id": entries["mlflow_run"], "step": 3}


def second_life(resumed: dict[str, Any], **kwargs: Any) -> MLflowLogger:
    """Log the steps from 3 on again, as a process that resumes the checkpoint."""
    logger = MLflowLogger(**kwargs)
    logger.continue_training(**resumed)
    logger.log_hyperparams({"dist": {"world_size": 2}, "lr": 0.1})
    for step in range(3, 7):
        logger.log_metrics({"a": 10.0 * step}, step=step)
    logger.finalize("success")
    return logger


def history(run_id: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client().get_metric_history(run_id, "a")]


@pytest.mark.parametrize("knows_run", [True, False])
def test_a_resumed_training_continues_its_run(knows_run: bool) -> None:
    resumed = first_life()
    logger = second_life(resumed if knows_run else resumed | {"run_id": None})
    assert logger.run_id == resumed["run_id"]
    run = run_of(logger)
    assert run.info.status == "FINISHED"
    assert history(run.info.run_id) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0)]
    assert run.data.tags["resumed_at_steps"] == "3"
    assert run.data.params == {"dist.world_size": "4", "lr": "0.1"}
    assert run.data.tags["param_drift.dist.world_size"] == "4 -> 2 at step 3"
    assert "param_drift.lr" not in run.data.tags
    third = second_life(resumed)
    assert run_of(third).data.tags["resumed_at_steps"] == "3, 3"
    assert run_of(third).data.tags["param_drift.dist.world_size"] == "4 -> 2 at step 3"


def test_a_metric_without_a_step_is_logged_again_by_a_resumed_training() -> None:
    logger = MLflowLogger()
    logger.log_metrics({"a": 1.0})
    entries = logger.entries_for_checkpoint()
    logger.finalize("success")
    logger = MLflowLogger()
    logger.continue_training(entries["mlflow_training"], entries["mlflow_run"], 3)
    logger.log_metrics({"a": 2.0})
    logger.finalize("success")
    assert history(str(logger.run_id)) == [(0, 1.0), (0, 2.0)]


@pytest.mark.parametrize(
    ("arguments", "is_child"), [({"continue_run": False}, True), ({"experiment_name": "other"}, False)]
)
def test_a_user_can_have_a_new_run_which_is_linked_to_the_one_before(arguments: dict[str, Any], is_child: bool) -> None:
    resumed = first_life()
    run = run_of(second_life(resumed, **arguments))
    assert run.info.run_id != resumed["run_id"]
    assert run.data.tags["resumed_from"] == f"{resumed['run_id']} at step 3"
    assert run.data.tags.get("mlflow.parentRunId") == (resumed["run_id"] if is_child else None)
    assert history(run.info.run_id) == [(3, 30.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert run.data.params["dist.world_size"] == "2"


def test_a_run_that_the_user_gives_is_used_instead_of_the_checkpoints() -> None:
    resumed, given = first_life(), first_life()
    assert second_life(resumed, run_id=given["run_id"]).run_id == given["run_id"]


@pytest.mark.parametrize("gone", ["deleted", "unknown"])
def test_a_checkpoint_whose_run_is_gone_starts_a_new_one_with_a_warning(gone: str) -> None:
    resumed = first_life()
    if gone == "deleted":
        client().delete_run(resumed["run_id"])
    else:
        resumed |= {"training": "0" * 32, "run_id": "1" * 32}
    verb = {"deleted": "has deleted", "unknown": "does not have"}[gone]
    with pytest.warns(UserWarning, match=f"{verb} the run {resumed['run_id']}, to which the training logged"):
        logger = second_life(resumed)
    assert logger.run_id != resumed["run_id"]
    assert [step for step, _ in history(str(logger.run_id))] == [3, 4, 5, 6]


def test_a_given_run_that_was_deleted_is_refused() -> None:
    run_id = first_life()["run_id"]
    client().delete_run(run_id)
    with pytest.raises(ValueError, match=rf"run_id='{run_id}'\): this run was deleted. .* mlflow runs restore"):
        _ = MLflowLogger(run_id=run_id).experiment


def test_an_experiment_has_the_kind_of_model_training_and_columns_for_strategies() -> None:
    client().create_experiment("old")
    for name in ("new", "old"):
        _ = MLflowLogger(name).run_id
        tags = client().get_experiment_by_name(name).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"
        columns = json.loads(tags["mlflow.sharedViewState.strategies"])["selectedColumns"]
        assert {"tags.`run.strategy`", "metrics.`val/loss`", "metrics.`perf/tokens_per_s`"} <= set(columns)


def test_lightnings_strategies_have_the_names_under_which_a_trainer_finds_them() -> None:
    trainer = SimpleNamespace(strategy=DDPStrategy(), world_size=4, state=SimpleNamespace(fn=None))
    assert run_name(trainer) == "ddp 4"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "layout", "expected"),
    [
        ("hybrid_shard", {"dp_replicate": 2, "dp_shard": 2}, "hybrid_shard 2x2"),
        ("full_shard", {"dp_shard": 4}, "full_shard 4"),
        ("full_shard", {}, "full_shard 1"),
        ("nd_parallel", {"pp": 2, "tp": 4}, "nd_parallel pp2 tp4"),
        ("ddp", None, "ddp 8"),
    ],
)
def test_runs_are_named_by_strategy_and_layout(strategy: str, layout: dict[str, int] | None, expected: str) -> None:
    layout_of = {} if layout is None else {"layout": ParallelLayout(**layout)}
    strategy_with_layout = SimpleNamespace(strategy_name=strategy, **layout_of)
    trainer = SimpleNamespace(strategy=strategy_with_layout, state=SimpleNamespace(fn=None), world_size=8)
    assert run_name(trainer) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "arguments", "expected"),
    [
        ("32-true", {}, "hybrid_shard 2x2"),
        ("bf16-mixed", {"compression": "powersgd"}, "hybrid_shard 2x2 bf16-mixed powersgd"),
        ("32-true", {"reshard_after_forward": False}, "hybrid_shard 2x2 reshard_after_forward=False"),
        ("32-true", {"sync": LocalSGD(4)}, "hybrid_shard 2x2 LocalSGD every 4 steps"),
        ("32-true", {"tiled_mlp": 2}, "hybrid_shard 2x2 tiled_mlp=2"),
    ],
)
def test_names_of_runs_say_what_differs_from_the_defaults(
    precision: str, arguments: dict[str, Any], expected: str
) -> None:
    strategy = HybridShardStrategy(**arguments)
    strategy._layout = ParallelLayout(dp_replicate=2, dp_shard=2)
    trainer = SimpleNamespace(strategy=strategy, state=SimpleNamespace(fn=None), world_size=4, precision=precision)
    assert run_name(trainer).startswith(expected)  # type: ignore[arg-type]


class Fingerprinted(Dataset[int]):
    _fingerprint = "abc"

    def __len__(self) -> int:
        return 3


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("No sample is fetched.")

    def __len__(self) -> int:
        raise TypeError("unknown")


def test_the_digest_of_a_dataset_changes_with_its_data() -> None:
    data = torch.arange(100.0)
    other = data.clone()
    other[3] = -1
    digests = [
        describe_dataset(dataset)["digest"]
        for dataset in (
            TensorDataset(data), TensorDataset(data.clone()), Subset(TensorDataset(data), range(100)),
            TensorDataset(other), TensorDataset(data[:99]), TensorDataset(data.double()),
        )
    ]  # fmt: skip
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 4
    assert describe_dataset(TensorDataset(data)) == {
        "dataset": "TensorDataset", "num_samples": 100, "digest": digests[0],
    }  # fmt: skip
    assert describe_dataset(Fingerprinted()) == {"dataset": "Fingerprinted", "num_samples": 3, "digest": "abc"}
    assert describe_dataset(Stream()) == {"dataset": "Stream", "num_samples": None, "digest": None}
    assert describe_dataset(Stream(), SimpleNamespace(digest="v2"))["digest"] == "v2"


def test_the_best_checkpoint_becomes_a_model_up_to_the_limit() -> None:
    small, large = MLflowLogger(logged_model_max_mib=1), MLflowLogger(logged_model_max_mib=0.0001)
    fit(small, callbacks=[ModelCheckpoint()])
    with pytest.warns(UserWarning, match=r"step=4.ckpt is not logged as a model: .*logged_model_max_mib=0.0001\)"):
        fit(large, callbacks=[ModelCheckpoint()])
    [model] = client().search_logged_models([str(small.experiment_id)])
    assert (model.name, model.status, model.source_run_id) == ("epoch=0-step=4", "READY", small.run_id)
    assert files(Path(model.artifact_location.removeprefix("file://"))) >= {"epoch=0-step=4.ckpt"}
    assert [output.model_id for output in run_of(small).outputs.model_outputs] == [model.model_id]


def test_system_metrics_are_logged_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    logger = MLflowLogger(system_metrics=True)
    fit(logger)
    metrics = run_of(logger).data.metrics
    assert 0 < metrics["system/node0/system_memory_usage_percentage"] <= 100
    assert "system/node0/cpu_utilization_percentage" in metrics


def fit_on_two_nodes(folder: str) -> str | None:
    os.environ["MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"] = "0.05"
    logger = MLflowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db", system_metrics=True)
    fit(logger, strategy=FullShardStrategy(), devices=1, num_nodes=2, enable_checkpointing=False)
    return logger.run_id


def test_every_node_logs_its_system_metrics_to_the_same_run(pool: WorkerPool, mlflow_folder: Path) -> None:
    run_id, _ = pool.run(fit_on_two_nodes, 2, str(mlflow_folder), num_nodes=2)
    run = client().get_run(str(run_id))
    nodes = {name.split("/")[1] for name in run.data.metrics if name.startswith("system/")}
    assert nodes == {"node0", "node1"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "full_shard 2")
    assert find_spools(mlflow_folder) == []
