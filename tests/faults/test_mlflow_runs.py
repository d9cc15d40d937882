"""A training is one run in MLflow, whatever happens to its processes and to the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow import MlflowClient
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers.outbox import Outbox
from lightning_dist.plugins.loggers.spool import find_spools
from lightning_dist.plugins.strategies import FullShardStrategy
from tests.launched import Forked

pytestmark = pytest.mark.alone

GLOBAL_BATCH, SAVE_EVERY, NUM_STEPS = 8, 5, 40


class Regression(LightningModule):
    """Fit a linear layer slowly enough to be killed in between."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.step_s = step_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train/loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(batch_size: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=batch_size)


def train(folder: Path, send_every_s: float) -> None:
    """Train as one rank of a run that resumes its newest checkpoint."""
    Outbox.SEND_EVERY_S = send_every_s
    os.chdir(folder)
    world_size = int(os.environ["WORLD_SIZE"])
    saves = ModelCheckpoint(dirpath=folder / "saves", every_n_train_steps=SAVE_EVERY, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=FullShardStrategy(), max_steps=NUM_STEPS, callbacks=[saves],
        logger=MLflowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db"), log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(0.03), loader(GLOBAL_BATCH // world_size), ckpt_path="auto")


def start(folder: Path, world_size: int, send_every_s: float) -> list[Forked]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "runs"}
    return [
        Forked(
            train, folder, send_every_s,
            environment={**os.environ, **sizes, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]  # fmt: skip


def test_a_training_that_is_killed_three_times_is_one_run_without_doubled_steps(mlflow_folder: Path) -> None:
    saves = mlflow_folder / "saves"
    # Metrics are sent at once, so that the run has later steps than the checkpoint, or stay in the spool when killed.
    for life, (world_size, send_every_s) in enumerate([(2, 0.05), (2, 60.0), (1, 0.05)]):
        ranks = start(mlflow_folder, world_size, send_every_s)
        _wait_for(saves / f"step={SAVE_EVERY * 2 * (life + 1)}.ckpt", ranks)
        time.sleep(0.1)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate(timeout=20)
    [first, second] = start(mlflow_folder, 2, 5.0)
    output, _ = first.communicate(timeout=100)
    second.communicate(timeout=20)
    assert first.returncode == 0, output[-3000:]

    client = MlflowClient(f"sqlite:///{mlflow_folder}/mlflow.db")
    experiment = client.get_experiment_by_name("lightning_logs")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "full_shard 2")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(NUM_STEPS))
    resumed_at = [int(step) for step in run.data.tags["resumed_at_steps"].split(", ")]
    assert [step >= 10 * life for life, step in enumerate(resumed_at, start=1)] == [True] * 3
    assert run.data.params["dist.world_size"] == "2"
    drift = run.data.tags["param_drift.dist.world_size"]
    assert drift == f"2 -> 1 at step {resumed_at[1]}; 1 -> 2 at step {resumed_at[2]}"
    assert run.data.params["dist.global_batch"] == str(GLOBAL_BATCH)
    assert "param_drift.dist.global_batch" not in run.data.tags
    assert find_spools(mlflow_folder) == []


def _wait_for(path: Path, ranks: list[Forked]) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        if time.monotonic() > deadline or ranks[0].returncode is not None:
            ranks[0].kill()
            raise AssertionError(ranks[0].stdout.read()[-3000:])
        time.sleep(0.01)


class Server:
    """Run ``mlflow server`` in processes of its own, which can be killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", "sqlite:///mlflow.db",
                   "--artifacts-destination", "artifacts", "--host", "127.0.0.1", "--port", str(self.port),
                   "--workers", "1"]  # fmt: skip
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, start_new_session=True)

    @property
    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while not self.is_up:
            assert time.monotonic() < deadline, (self._folder / "server.log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(mlflow_folder: Path) -> Iterator[Server]:
    server = Server(mlflow_folder)
    server.start()
    yield server
    server.kill()


class TimedLogger(MLflowLogger):
    """Measure for how long the training thread is in each call that logs metrics."""

    seconds: list[float]

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        super().log_metrics(*args, **kwargs)
        self.seconds.append(time.perf_counter() - begin)


class Outage(Regression):
    """Kill the server within training and start it again, and train on until it has been back for a while."""

    def __init__(self, server: Server) -> None:
        super().__init__(0.01)
        self.server = server
        self.back_at = 0
        self.num_steps = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 50:
            self.server.kill()
        elif self.num_steps == 150:
            self.server.start()
        elif self.num_steps > 150 and self.num_steps % 20 == 0 and not self.back_at and self.server.is_up:
            self.back_at = self.num_steps
        if self.back_at and self.num_steps == self.back_at + 100:
            self.trainer.should_stop = True


@pytest.mark.thorough
def test_training_does_not_notice_that_the_server_is_killed_and_misses_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outbox, "SEND_EVERY_S", 0.5)
    server.wait()
    logger = TimedLogger(tracking_uri=server.uri, save_dir=tmp_path / "mlruns", connect_timeout=60)
    logger.seconds = []
    module = Outage(server)
    trainer = Trainer(
        accelerator="cpu", logger=logger, max_steps=20_000, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(UserWarning) as caught:
        trainer.fit(module, loader(8))
    about_mlflow = [str(warning.message) for warning in caught if "MLflow" in str(warning.message)]
    assert len(about_mlflow) == 1
    assert f"MLflow at {server.uri} cannot be reached" in about_mlflow[0]
    client = MlflowClient(server.uri)
    run = client.get_run(str(logger.version))
    assert run.info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == list(range(module.num_steps))
    assert find_spools(tmp_path) == []
    seconds = sorted(logger.seconds)
    assert seconds[len(seconds) // 2] < 1e-4
    assert seconds[len(seconds) * 99 // 100] < 1e-3
