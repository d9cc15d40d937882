"""Test that a technique with an option is added by one file and one line, and then works with every strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    MeshStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    register_technique,
)
from lightning_dist.checkpoint import verify
from lightning_dist.parallel_module import parallelized
from lightning_dist.parallelize import OPTIONS
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.plugins.loggers.store import connect
from lightning_dist.plugins.strategies import TECHNIQUES
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.techniques.options import Build, TechniqueOptions
from lightning_dist.techniques.protocol import Parallel, Rows, SavedState, Technique
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import build
from tests.pool import WorkerPool
from tests.thorough import one_in

STRATEGIES: dict[str, tuple[int, Callable[..., Any]]] = {
    "data_parallel": (2, DataParallelStrategy),
    "full_shard": (2, FullShardStrategy),
    "hybrid_shard": (4, partial(HybridShardStrategy, 2, 2)),
    "tensor_parallel": (2, TensorParallelStrategy),
    "context_parallel": (2, ContextParallelStrategy),
    "pipeline_parallel": (2, partial(PipelineParallelStrategy, num_microbatches=2)),
    "nd_parallel": (4, partial(NDParallelStrategy, 2, tp_size=2, num_microbatches=2)),
}


@dataclass(frozen=True)
class DoublingOptions(TechniqueOptions):
    """Choose how reduced gradients are scaled.

    Args:
        doubling: Factor by which reduced gradients are multiplied. 1: they are not.

    Raises:
        ValueError: If the factor is not positive.
    """

    doubling: float = 1.0

    def __post_init__(self) -> None:
        if self.doubling <= 0:
            raise ValueError(f"doubling={self.doubling} must be positive, such as 2.")

    def techniques(self, build: Build) -> Iterator[Technique]:
        if self.doubling != 1:
            yield Doubling(self.doubling)


class Doubling(SavedState):
    """Count how often units are gathered, and scale the reduced gradients."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.num_gathers = 0
        self.num_doubled = 0

    def attach(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        assert group.is_gathered
        self.num_gathers += 1

    def after_backward(self, reduces: bool) -> None:
        if not reduces:
            return
        self.num_doubled += 1
        for group in self.parallel.groups:
            for param in group.params:
                if param.grad is not None:
                    param.grad *= self.factor

    after_microbatches = after_backward

    def state(self) -> dict[str, Any]:
        return {"num_doubled": self.num_doubled}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_doubled = state["num_doubled"]

    def table_rows(self) -> Rows:
        yield "doubling", f"all gradients, times {self.factor}"


@contextmanager
def registered() -> Iterator[None]:
    """Let strategies have the option in this context."""
    register_technique(DoublingOptions)
    try:
        yield
    finally:
        OPTIONS.remove(DoublingOptions)
        MeshStrategy.show_arguments()


def doubled(name: str, folder: Path, resumes: bool) -> tuple[Weights, int, int, str]:
    """Train two optimizer steps with the technique, and save, or resume and train two more.

    Args:
        name: Key of :data:`STRATEGIES`.
        folder: Folder of the checkpoint.
        resumes: Whether to resume from the checkpoint of an earlier call.

    Returns:
        The weights, the technique's two counters, and the start-up table.
    """
    with registered():
        model = build("gpt", optimizer="plain_sgd")
        trainer = make_trainer(
            "auto", strategy=STRATEGIES[name][1](doubling=2.0), max_steps=4 if resumes else 2,
            accumulate_grad_batches=2, precision="64-true",
        )  # fmt: skip
        path = folder / "two_steps.ckpt"
        parts = trainer.distributed_sampler_kwargs
        data = TensorDataset(*model.data())
        sampler = DistributedSampler(data, shuffle=False, **parts)
        loader = DataLoader(data, 8 // parts["num_replicas"], sampler=sampler)
        trainer.fit(model, loader, ckpt_path=path if resumes else None)
        if not resumes:
            trainer.save_checkpoint(path)
            trainer.strategy.wait_for_checkpoints()
    parallel = parallelized(model)
    assert parallel is not None
    technique = parallel.get(Doubling)
    assert technique is not None
    table = startup_table(trainer.strategy, parallel)
    return weights_of(model), technique.num_gathers, technique.num_doubled, table


def in_one_process() -> Weights:
    """Train in one process without the technique, but with twice the learning rate, which has the same effect."""

    class TwiceAsFast(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 2

    model = build("gpt", optimizer="plain_sgd")
    trainer = make_trainer(
        "auto", max_steps=4, accumulate_grad_batches=2, precision="64-true", callbacks=[TwiceAsFast()]
    )
    trainer.fit(model, DataLoader(TensorDataset(*model.data()), 8))
    return weights_of(model)


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> Weights:
    return pool.run(in_one_process, 1)[0]


@pytest.mark.parametrize("name", one_in(4, STRATEGIES))
def test_an_added_technique_changes_gradients_is_resumed_and_appears_in_the_table(
    pool: WorkerPool, name: str, expected: Weights, tmp_path: Path
) -> None:
    num_ranks = STRATEGIES[name][0]
    for _, num_gathers, num_doubled, table in pool.run(doubled, num_ranks, name, tmp_path, False):
        assert num_gathers > 0
        assert num_doubled == 2
        assert "  doubling    all gradients, times 2.0" in table.splitlines()
    weights: Weights = {}
    for own, _, num_doubled, _ in pool.run(doubled, num_ranks, name, tmp_path, True):
        assert num_doubled == 4
        weights |= own
    assert_same(weights, expected)


def test_a_wrong_value_and_an_argument_of_no_technique_are_refused() -> None:
    with registered(), pytest.raises(ValueError, match=r"doubling=-1 must be positive, such as 2\."):
        FullShardStrategy(doubling=-1)
    with pytest.raises(TypeError, match="FullShardStrategy has no argument 'doubling'"):
        FullShardStrategy(doubling=2)


def test_two_techniques_cannot_have_the_same_argument() -> None:
    @dataclass(frozen=True)
    class SameName(TechniqueOptions):
        compression: str | None = None

    with pytest.raises(ValueError, match="CompressionOptions and SameName both have an argument 'compression'"):
        register_technique(SameName)
    assert SameName not in OPTIONS


CONFIGURATION = """
seed_everything: 1
model: lightning.pytorch.demos.boring_classes.BoringModel
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  limit_val_batches: 0
  enable_progress_bar: false
  strategy: {class_path: lightning_dist.FullShardStrategy, init_args: {doubling: 3}}
"""


def test_an_installed_package_adds_a_technique_to_the_command(tmp_path: Path, mlflow_folder: Path) -> None:
    """An entry point is enough for YAML and the command line, and for what a run records."""
    package = tmp_path / "packages" / "doubling-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[{TECHNIQUES}]\ndoubling = {__name__}:DoublingOptions\n")
    (tmp_path / "run.yaml").write_text(CONFIGURATION)
    paths = [str(package.parent), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "lightning_dist.cli", "fit", "-c", "run.yaml"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    wrong = run("--trainer.strategy.doubling=-1")
    assert wrong.returncode == 2
    assert "doubling=-1.0 must be positive, such as 2." in wrong.stderr
    done = run("--trainer.strategy.doubling=4")
    assert done.returncode == 0, done.stderr
    assert "  doubling    all gradients, times 4.0" in (done.stdout + done.stderr).splitlines()
    (manifest,) = (verify(str(path)) for path in tmp_path.rglob("*.ckpt"))
    assert manifest.about["settings"]["doubling"] == 4.0
    store = connect(f"sqlite:///{mlflow_folder}/mlflow.db")
    (found,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    assert found.data.params["dist.doubling"] == "4.0"
