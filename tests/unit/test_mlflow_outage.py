"""Training goes on while MLflow is away, and MLflow has everything exactly once when it is back."""

import json
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from lightning_dist.cli import main
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers import outbox as outbox_module
from lightning_dist.plugins.loggers import sender as sender_module
from lightning_dist.plugins.loggers.leftovers import sync
from lightning_dist.plugins.loggers.outbox import Outbox
from lightning_dist.plugins.loggers.run_identity import RunIdentity
from lightning_dist.plugins.loggers.spool import Spool, SpoolInUseError, find_spools
from lightning_dist.plugins.loggers.store import connect
from tests.pool import WorkerPool
from tests.unit.test_mlflow_logger import Module, client, fit

pytestmark = pytest.mark.usefixtures("workplace")


class Store:
    """Pass calls on to MLflow's client, unless it is away; ``loses_answers`` fails calls after they have worked."""

    def __init__(self) -> None:
        self.is_away = False
        self.loses_answers = 0
        self.delay_s = 0.0
        self.calls: Counter[str] = Counter()

    def connect(self, uri: str) -> Any:
        self.client = connect(uri)
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.delay_s)
            self.calls[name] += 1
            if self.is_away:
                raise MlflowException(f"API request to http://gone/{name} failed with exception refused")
            result = getattr(self.client, name)(*args, **kwargs)
            if self.loses_answers:
                self.loses_answers -= 1
                raise MlflowException(f"API request to http://slow/{name} failed with timeout exception")
            return result

        return call


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(sender_module, "connect", store.connect)
    monkeypatch.setattr(Outbox, "SEND_EVERY_S", 0.05)
    monkeypatch.setattr(Outbox, "FIRST_RETRY_S", 0.05)
    return store


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Return the texts of the warnings of all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(warning.message) for warning in caught]


def only_run() -> Any:
    [experiment] = [found for found in client().search_experiments() if found.name == "lightning_logs"]
    [run] = client().search_runs([experiment.experiment_id])
    return run


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client().get_metric_history(run_id, key)]


def spools() -> list[Path]:
    return find_spools(Path("mlruns"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_fit_that_starts_without_mlflow_warns_once_and_its_run_is_made_when_it_is_back(store: Store) -> None:
    store.is_away = True
    logger = MLflowLogger()

    class Returns(Module):
        def on_train_end(self) -> None:
            store.is_away = False

    with pytest.warns(UserWarning, match="Training goes on") as caught:
        fit(logger, Returns(), max_steps=6)
    about_mlflow = [str(warning.message) for warning in caught if "MLflow" in str(warning.message)]
    assert len(about_mlflow) == 1
    assert "sqlite:///mlflow.db cannot be reached (API request to http://gone/" in about_mlflow[0]
    assert "lightning-dist sync" in about_mlflow[0]
    run = only_run()
    assert (run.info.status, run.info.run_name, run.data.params["dist.world_size"]) == (
        "FINISHED",
        "single_device",
        "1",
    )
    assert [step for step, _ in history(run.info.run_id, "train/loss")] == [1, 3, 5]
    assert spools() == []
    assert logger.version is not None
    assert logger.version.startswith("offline-")


@pytest.mark.parametrize("loses_answers", [0, 1, 3])
def test_an_outage_in_the_middle_loses_and_doubles_nothing(store: Store, loses_answers: int) -> None:
    logger = MLflowLogger()
    for step in range(30):
        if step == 10:
            logger.flush()
            store.is_away = True
        if step == 20:
            wait_until(lambda: logger._outbox.is_away)  # type: ignore[union-attr]
            store.is_away, store.loses_answers = False, loses_answers
        logger.log_metrics({"a": step / 2, "nan": float("nan")}, step=step)
    logger.finalize("success")
    logger.finalize("success")
    run = only_run()
    if loses_answers < 3:
        wait_until(lambda: len(history(run.info.run_id, "a")) == 30)
    for path in spools():
        assert sync(path).status == "sent"
    assert history(run.info.run_id, "a") == [(step, step / 2) for step in range(30)]
    assert len(history(run.info.run_id, "nan")) == 30
    assert client().get_run(run.info.run_id).info.status == "FINISHED"


def test_a_run_whose_creation_was_not_answered_is_not_created_twice(store: Store) -> None:
    create, logger = "create_run", MLflowLogger()
    original = store.__getattr__

    def lose_once(name: str) -> Callable[..., Any]:
        if name == create and not store.calls[create]:
            store.loses_answers = 1
        return original(name)

    store.__class__ = type("Losing", (Store,), {"__getattr__": lambda self, name: lose_once(name)})
    logger.log_metrics({"a": 1.0}, step=0)
    wait_until(lambda: logger.run_id is not None)
    logger.finalize("success")
    assert store.calls[create] == 1
    assert history(only_run().info.run_id, "a") == [(0, 1.0)]


def test_the_start_waits_no_longer_than_connect_timeout(store: Store) -> None:
    store.delay_s = 2.0
    logger = MLflowLogger(tracking_uri="sqlite:///mlflow.db", connect_timeout=0.2)
    outbox_local = outbox_module.is_local
    try:
        outbox_module.is_local = lambda uri: False  # type: ignore[assignment]
        begin = time.monotonic()
        with pytest.warns(UserWarning, match=r"has not answered within connect_timeout=0.2 s"):
            assert logger.run_id is None
        assert time.monotonic() - begin < 1.5
    finally:
        outbox_module.is_local = outbox_local
    store.delay_s = 0.0
    logger.log_metrics({"a": 1.0}, step=3)
    logger.finalize("success")
    assert history(only_run().info.run_id, "a") == [(3, 1.0)]


def test_logging_takes_microseconds_while_mlflow_is_slow(store: Store) -> None:
    logger = MLflowLogger()
    assert logger.run_id
    store.delay_s = 0.05
    seconds = []
    for step in range(500):
        begin = time.perf_counter()
        logger.log_metrics({"train/loss": 0.1, "lr-SGD": 0.2, "epoch": 1, "a": 0.0, "b": 1.0}, step=step)
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.0005)
    store.delay_s = 0.0
    calls = store.calls["log_batch"]
    logger.finalize("success")
    seconds.sort()
    assert seconds[250] < 1e-4
    assert seconds[495] < 1e-3
    assert calls < 30  # They are sent in batches.
    assert len(history(only_run().info.run_id, "a")) == 500


def test_a_full_disk_is_warned_of_once_and_nothing_is_lost_while_mlflow_can_be_reached(
    store: Store, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_disk(monkeypatch)
    logger = MLflowLogger()
    for step in range(5):
        logger.log_metrics({"a": step}, step=step)
    logger.finalize("success")
    assert history(only_run().info.run_id, "a") == [(step, float(step)) for step in range(5)]


def test_the_number_of_metrics_that_a_full_disk_has_lost_is_said_at_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_disk(monkeypatch)
    monkeypatch.setattr(outbox_module, "_MAX_IN_MEMORY", 4)
    logger = MLflowLogger()
    assert logger.run_id
    store.is_away = True
    with pytest.warns(UserWarning) as caught:
        for step in range(10):
            logger.log_metrics({"a": step, "b": step}, step=step)
        logger.flush()
        store.is_away = False
        logger.finalize("success")
    texts = [str(warning.message) for warning in caught]
    assert sum("cannot be kept" in text and "No space left on device" in text for text in texts) == 1
    [lost] = [text for text in texts if "are lost" in text]
    # Of 10 calls, the newest 4 are kept; then the end of the run pushes out one more, unless they were sent before.
    assert lost.startswith(("12 values of metrics are lost", "14 values of metrics are lost"))
    assert [step for step, _ in history(only_run().info.run_id, "a")][-1] == 9


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel refuse every write to a spool, as a full disk does."""
    opened = os.open

    def open_full(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if str(path).endswith(".spool.jsonl"):
            return opened("/dev/full", os.O_RDWR)
        return opened(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", open_full)


def test_what_mlflow_refuses_is_named_and_does_not_hold_up_the_rest(store: Store) -> None:
    logger = MLflowLogger()
    with pytest.warns(UserWarning) as caught:
        logger.log_metrics({"a": 1.0, "x" * 251: 2.0, "b": 3.0}, step=0)
        logger.finalize("success")
    texts = [str(warning.message) for warning in caught]
    assert any(text.startswith("MLflow has refused the metric xxx") for text in texts)
    assert any(text.startswith("1 values of metrics are lost") for text in texts)
    assert set(client().get_run(only_run().info.run_id).data.metrics) == {"a", "b"}


def test_a_run_that_is_deleted_while_it_trains_does_not_end_training(store: Store) -> None:
    logger = MLflowLogger()
    run_id = str(logger.run_id)
    client().delete_run(run_id)
    with pytest.warns(UserWarning, match="must be in the 'active' state"):
        logger.log_metrics({"a": 1.0}, step=0)
        logger.finalize("success")
    client().restore_run(run_id)
    [path] = spools()
    assert sync(path).num_metrics == 1


def run_without_mlflow(store: Store) -> str:
    """Log a run that MLflow does not get from its third step on, and return its ID."""
    logger = MLflowLogger()
    for step in range(6):
        if step == 3:
            logger.flush()
            store.is_away = True
        logger.log_metrics({"a": step}, step=step)
    with pytest.warns(UserWarning, match=r"has not got everything: .* keeps 3 values of metrics. To send it .* sync "):
        logger.finalize("success")
    return only_run().info.run_id  # type: ignore[no-any-return]


def test_sync_sends_what_an_ended_run_has_left(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = run_without_mlflow(store)
    assert client().get_run(run_id).info.status == "RUNNING"
    assert main(["sync", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["spools"]
    assert (result["status"], result["num_metrics"], result["run_id"]) == ("sent", 3, run_id)
    assert history(run_id, "a") == [(step, float(step)) for step in range(6)]
    assert client().get_run(run_id).info.status == "FINISHED"
    assert main(["sync", "mlruns"]) == 0
    assert capsys.readouterr().out == "There is nothing to send.\n"


def test_sync_does_not_double_steps_that_a_later_process_has_logged(store: Store) -> None:
    run_id = run_without_mlflow(store)
    client().log_metric(run_id, "a", 40.0, step=4)
    client().log_metric(run_id, "a", 70.0, step=7)
    [path] = spools()
    assert sync(path).num_metrics == 2
    assert sorted(history(run_id, "a")) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (5, 5), (7, 70)]


def test_sync_keeps_what_it_cannot_send(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run_without_mlflow(store)
    assert main(["sync", "--tracking-uri", "http://127.0.0.1:9"]) == 1
    assert "not sent: http://127.0.0.1:9 does not answer. Start this server" in capsys.readouterr().out
    [path] = spools()
    assert sync(path).status == "sent"
    assert main(["sync", "nowhere"]) == 2
    assert "DIR='nowhere' is not a folder" in capsys.readouterr().err


def test_two_processes_do_not_send_the_same_spool(pool: WorkerPool, tmp_path: Path) -> None:
    header = RunIdentity("sqlite:///mlflow.db", "e", "t" * 32, 1).header()
    spool = Spool(tmp_path / "1-t.spool.jsonl", header)
    spool.append([{"metrics": [["a", 1.0, 2, 3]]}])
    assert pool.run(try_to_open, 1, str(spool.path)) == ["in use"]
    spool.close()
    assert pool.run(try_to_open, 1, str(spool.path)) == [[{"metrics": [["a", 1.0, 2, 3]]}]]


def try_to_open(path: str) -> Any:
    try:
        spool = Spool(Path(path))
    except SpoolInUseError:
        return "in use"
    entries, _ = spool.pending()
    spool.close()
    return entries


def test_a_spool_whose_last_line_is_incomplete_is_sent_without_it(tmp_path: Path) -> None:
    path = tmp_path / "1-t.spool.jsonl"
    spool = Spool(path, RunIdentity("sqlite:///mlflow.db", "e", "t" * 32, 1).header())
    spool.append([{"tags": {"a": "1"}}, {"tags": {"b": "2"}}])
    spool.close()
    path.write_bytes(path.read_bytes()[:-5])
    spool = Spool(path)
    assert spool.pending()[0] == [{"tags": {"a": "1"}}]
    spool.sent(spool.pending()[1])
    assert spool.is_empty
    spool.append([{"tags": {"c": "3"}}])
    assert spool.pending()[0] == [{"tags": {"c": "3"}}]
    spool.close()


def create_store(folder: str) -> str:
    os.chdir(folder)
    logger = MLflowLogger()
    run_id = str(logger.run_id)
    logger.finalize("success")
    return run_id


def test_two_runs_may_create_the_same_database(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    run_ids = pool.run(as_own_run, 2, str(folder))
    assert len(set(run_ids)) == 2
    found = MlflowClient(f"sqlite:///{folder}/mlflow.db").search_runs(["1"])
    assert {run.info.run_id for run in found} == set(run_ids)


def as_own_run(folder: str) -> str:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = 0
    return create_store(folder)


def test_threads_end_with_the_run(store: Store) -> None:
    before = set(threading.enumerate())
    logger = MLflowLogger()
    logger.log_metrics({"a": 1.0})
    logger.finalize("success")
    assert set(threading.enumerate()) <= before


def test_sync_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sync", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "lightning-dist sync /scratch/mlruns --json" in text
    assert "1  something could not be sent" in text
