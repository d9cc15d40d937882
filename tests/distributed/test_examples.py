"""Test that the command runs the examples, with the same loss for each overlay, which only changes the strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from mlflow import MlflowClient

from lightning_dist.cli import main
from tests.pool import WorkerPool

ROOT = Path(__file__).parents[2]
SMALL_GPT = [
    "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=12", "--trainer.val_check_interval=4",
    "--trainer.limit_val_batches=4", "--trainer.log_every_n_steps=2", "--trainer.enable_progress_bar=false",
    "--data.init_args.max_bytes=200000", "--data.init_args.val_fraction=0.2", "--data.init_args.context=32",
    "--model.init_args.dim=32", "--model.init_args.num_layers=2", "--model.init_args.num_heads=2",
]  # fmt: skip
# This is an argument of the last callback. The sample is longer than the context, which has 32 tokens.
SHORT_SAMPLE = "--trainer.callbacks.num_tokens=40"


def fit(folder: Path, example: str, strategy: str, *flags: str) -> str:
    """Run an example in ``folder``, and return what it printed."""
    configs = [f"{ROOT}/examples/{example}/{name}.yaml" for name in ("base", strategy)]
    command = [sys.executable, "-m", "lightning_dist.cli", "fit", "-c", configs[0], "-c", configs[1], *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def fit_on_rank(folder: Path, overlays: list[str], flags: list[str]) -> int:
    """Run the command on this rank, as torchrun would, in a process that has already imported everything.

    Args:
        folder: Working directory.
        overlays: Names of configuration files in ``examples`` without suffix; the folder of the first is the example.
        flags: Further flags of the command.

    Returns:
        Exit code of the command.
    """
    sys.path.insert(0, str(ROOT))
    names = (f"{overlays[0].split('/')[0]}/base", *overlays)
    os.environ["COLUMNS"] = "80"
    with chdir(folder):
        return main(["fit", *(part for name in names for part in ("-c", f"{ROOT}/examples/{name}.yaml")), *flags])


def curves(folder: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Read from MLflow, for each name of a run and each metric, the values by step."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {
        run.info.run_name: {
            name: {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
            for name in run.data.metrics
        }
        for run in runs
    }


RANKS = {"single": 1, "ddp": 2, "full_shard": 2, "tensor_parallel": 2, "context_parallel": 2,
         "pipeline_parallel": 2, "nd_parallel": 4}  # fmt: skip


@pytest.mark.thorough
def test_the_gpt_example_has_the_same_losses_under_every_strategy(pool: WorkerPool, mlflow_folder: Path) -> None:
    sizes = ["--trainer.strategy.dp_replicate_size=2", "--trainer.strategy.dp_shard_size=1"]
    output = fit(mlflow_folder, "gpt", "hybrid_shard", *SMALL_GPT, *sizes)
    for expected in ("dp_replicate 2 x dp_shard 1 = 2 processes", "this model, held-out text", "uniform guess, ln 256",
                     "Checkpoint: ", "mlflow server --backend-store-uri", "/runs/"):  # fmt: skip
        assert expected in output
    for strategy, num_ranks in RANKS.items():
        flags = [*SMALL_GPT, f"--trainer.devices={num_ranks}", SHORT_SAMPLE]
        assert pool.run(fit_on_rank, num_ranks, mlflow_folder, [f"gpt/{strategy}"], flags) == [0] * num_ranks
    runs = curves(mlflow_folder)
    assert sorted(runs) == sorted([*RANKS, "hybrid_shard"])
    for metric, num_points in (("train/loss", 6), ("val/loss", 3)):
        reference = runs["single"][metric]
        assert len(reference) == num_points
        assert reference[max(reference)] < reference[min(reference)]
        for name, metrics in runs.items():
            assert metrics[metric] == pytest.approx(reference, abs=1e-4), name
    for metrics in runs.values():
        assert {"perf/step_ms", "perf/tokens_per_s", "memory/peak_mib"} <= metrics.keys()


SHORT_CONTEXT = [
    "--trainer.accelerator=cpu", "--trainer.max_steps=6", "--trainer.val_check_interval=3",
    "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=2", "--trainer.enable_progress_bar=false",
    "--data.init_args.max_bytes=400000", "--data.init_args.val_fraction=0.2", "--data.init_args.context=512",
    "--model.init_args.dim=32", "--model.init_args.num_layers=2", "--model.init_args.warmup_steps=2",
]  # fmt: skip
OVERLAYS = {"single": 1, "full_shard": 2, "context_parallel": 2, "tiled": 2}


@pytest.mark.thorough
def test_the_example_of_long_sequences_has_the_same_losses_under_every_strategy(
    pool: WorkerPool, mlflow_folder: Path
) -> None:
    sizes = {"tiled": ["--trainer.strategy.tiled_mlp=100", "--trainer.strategy.tiled_loss=100"]}
    for overlay, num_ranks in OVERLAYS.items():
        flags = [*SHORT_CONTEXT, f"--trainer.devices={num_ranks}", *sizes.get(overlay, [])]
        assert pool.run(fit_on_rank, num_ranks, mlflow_folder, [f"long_context/{overlay}"], flags) == [0] * num_ranks
    runs = curves(mlflow_folder)
    assert sorted(runs) == sorted(OVERLAYS)
    for metric, num_points in (("train/loss", 3), ("val/loss", 2)):
        reference = runs["single"][metric]
        assert len(reference) == num_points
        for name, metrics in runs.items():
            assert metrics[metric] == pytest.approx(reference, abs=1e-4), name


FEW_BYTES = [
    "--trainer.accelerator=cpu", "--trainer.max_steps=6", "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false",
    "--data.init_args.max_bytes=200000", "--data.init_args.val_fraction=0.2", "--data.init_args.context=32",
]  # fmt: skip


@pytest.mark.thorough
def test_the_example_of_experts_has_the_same_losses_under_every_strategy(pool: WorkerPool, mlflow_folder: Path) -> None:
    ranks = {"single": 1, "full_shard": 2, "expert_parallel": 2}
    for overlay, num_ranks in ranks.items():
        flags = [*FEW_BYTES, f"--trainer.devices={num_ranks}"]
        assert pool.run(fit_on_rank, num_ranks, mlflow_folder, [f"moe/{overlay}"], flags) == [0] * num_ranks
    runs = curves(mlflow_folder)
    assert sorted(runs) == sorted(ranks)
    reference = runs["single"]["val/loss"]
    assert len(reference) == 3
    assert reference[max(reference)] < reference[min(reference)]
    for name, metrics in runs.items():
        assert metrics["val/loss"] == pytest.approx(reference, abs=1e-4), name
    assert {"comm/ep_mib_per_step", "experts/max_over_mean"} <= runs["expert_parallel"].keys()


@pytest.mark.thorough
def test_the_vision_example_learns_to_recognize_digits(pool: WorkerPool, mlflow_folder: Path) -> None:
    flags = ["--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    sizes = ["--trainer.strategy.dp_replicate_size=1", "--trainer.strategy.dp_shard_size=2"]
    flags += [*sizes, "--trainer.max_epochs=5"]
    assert pool.run(fit_on_rank, 2, mlflow_folder, ["vision/hybrid_shard"], flags) == [0, 0]
    (run,) = curves(mlflow_folder).values()
    assert max(run["val/accuracy"].values()) > 0.95
