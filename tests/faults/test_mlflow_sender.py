"""The process that sends to an MLflow server may be killed, outlives Ctrl-C, and ends with its training."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from mlflow import MlflowClient

from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers.outbox import Outbox
from lightning_dist.plugins.loggers.spool import find_spools
from tests.faults.test_mlflow_runs import Regression, Server, loader
from tests.launched import Forked, wait_for

pytestmark = pytest.mark.usefixtures("often")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    server = Server(folder)
    server.start()
    server.wait()
    yield server
    server.kill()


@pytest.fixture
def often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Outbox, "SEND_EVERY_S", 0.1)


def steps_of(server: Server, run_id: str) -> list[int]:
    return [metric.step for metric in MlflowClient(server.uri).get_metric_history(run_id, "train/loss")]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(pid: int) -> float:
    begin = time.monotonic()
    while not has_ended(pid):
        assert time.monotonic() < begin + 20
        time.sleep(0.01)
    return time.monotonic() - begin


def sender_of(logger: MLflowLogger) -> int:
    return logger._outbox._sender._process.pid  # type: ignore[union-attr]


def test_a_sender_that_is_killed_is_replaced_and_every_value_arrives_once(server: Server) -> None:
    logger = MLflowLogger(tracking_uri=server.uri, connect_timeout=60)
    run_id, senders = str(logger.run_id), [sender_of(logger)]
    logger.log_hyperparams({"lr": 0.1})
    with pytest.warns(UserWarning, match=r"was killed by signal 9 \(Killed\). It is started again"):
        for step in range(300):
            logger.log_metrics({"train/loss": step / 2}, step=step)
            if step == 100:
                time.sleep(0.3)  # Some values are sent, and some are not.
            if step == 150:
                os.kill(senders[0], signal.SIGKILL)
        logger.flush()
    senders.append(sender_of(logger))
    logger.log_hyperparams({"lr": 0.1, "depth": 2})
    logger.finalize("success")
    assert steps_of(server, run_id) == list(range(300))
    run = MlflowClient(server.uri).get_run(run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1", "depth": "2"})
    assert senders[0] != senders[1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in senders)  # They are no zombies either.
    assert find_spools(Path.cwd()) == []


def test_a_run_that_cannot_be_used_is_an_error_at_the_start(server: Server) -> None:
    run_id = MlflowClient(server.uri).create_run("0").info.run_id
    MlflowClient(server.uri).delete_run(run_id)
    with pytest.raises(ValueError, match=rf"run_id='{run_id}'\): this run was deleted. .* mlflow runs restore"):
        _ = MLflowLogger(tracking_uri=server.uri, run_id=run_id, connect_timeout=60).experiment


def log_until_killed(folder: Path, uri: str) -> None:
    """Log steps in a process that has forked a worker, as a data loader does."""
    os.chdir(folder)
    logger = MLflowLogger(tracking_uri=uri, connect_timeout=60)
    run_id = logger.run_id
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    for step in range(50):
        logger.log_metrics({"train/loss": step / 2}, step=step)
    entries = logger.entries_for_checkpoint()
    logger.flush()
    print("READY", run_id, entries["mlflow_training"], sender_of(logger), flush=True)
    for step in range(50, 100_000):
        logger.log_metrics({"train/loss": step / 2}, step=step)
        time.sleep(0.001)


def test_the_sender_of_a_training_that_is_killed_ends_and_a_resumed_one_goes_on(server: Server) -> None:
    process = Forked(log_until_killed, Path.cwd(), server.uri, environment=dict(os.environ))
    _, run_id, training, sender = wait_for(process, "READY", 1).splitlines()[-1].split()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    assert wait_until_ended(int(sender)) < 3
    process.kill()
    logger = MLflowLogger(tracking_uri=server.uri, connect_timeout=60)
    logger.continue_training(training, run_id, 50)
    assert logger.run_id == run_id
    num_before = max(steps_of(server, run_id)) + 1
    assert num_before > 50
    for step in range(50, num_before + 100):
        logger.log_metrics({"train/loss": -1.0}, step=step)
    logger.finalize("success")
    assert steps_of(server, run_id) == list(range(num_before + 100))
    assert MlflowClient(server.uri).get_run(run_id).info.status == "FINISHED"
    assert find_spools(Path.cwd()) == []


class Announced(Regression):
    """Print the process that sends once training has begun."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 20:
            assert isinstance(self.logger, MLflowLogger)
            print("READY", self.logger.run_id, sender_of(self.logger), flush=True)


def fit_until_interrupted(folder: Path, uri: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    trainer = Trainer(
        accelerator="cpu", logger=MLflowLogger(tracking_uri=uri, connect_timeout=60), max_steps=100_000,
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Announced(0.005), loader(8))


@pytest.mark.parametrize("to_sender_too", [False, True])
def test_ctrl_c_ends_a_run_with_everything_sent(server: Server, to_sender_too: bool) -> None:
    process = Forked(fit_until_interrupted, Path.cwd(), server.uri, environment=dict(os.environ))
    _, run_id, sender = wait_for(process, "READY", 1).splitlines()[-1].split()
    os.killpg(process.pid, signal.SIGINT)  # This is what a terminal does.
    if to_sender_too:  # This is what a scheduler does with a job.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(int(sender), number)
    output, _ = process.communicate(timeout=60)
    wait_until_ended(int(sender))
    run = MlflowClient(server.uri).get_run(run_id)
    steps = steps_of(server, run_id)
    assert run.info.status == "KILLED", output[-3000:]
    assert len(steps) >= 19  # When a step is announced, it is not logged yet.
    assert steps == list(range(len(steps)))
    assert find_spools(Path.cwd()) == []
    assert "was killed by" not in output
