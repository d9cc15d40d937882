"""Test the loggers of Lightning and of this project, by reading what they have written."""

from __future__ import annotations

import csv
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from mlflow.tracking import MlflowClient

from lightning_dist.plugins.loggers import MLflowLogger as OwnMLflowLogger
from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier

Values = dict[str, list[tuple[int, float]]]
"""For each metric the steps and the values that were logged."""


def _from_csv(folder: Path) -> Values:
    found: Values = {}
    with open(folder / "lightning_logs" / "version_0" / "metrics.csv") as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"step"}:
                if row[name]:
                    found.setdefault(name, []).append((int(row["step"]), float(row[name])))
    return found


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: each has its length, a checksum, the data, and another checksum."""
    data, position = path.read_bytes(), 0
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        yield data[position + 12 : position + 12 + length]
        position += length + 16


def _from_tensorboard(folder: Path) -> Values:
    from tensorboardX.proto.event_pb2 import Event

    found: Values = {}
    for path in sorted(folder.rglob("events.out.tfevents*")):
        for record in _records(path):
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@cache
def _empty_database() -> Path:
    """Return an empty MLflow database, which takes seconds to create."""
    path = Path(tempfile.mkdtemp(prefix="empty-mlflow-")) / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def _provide_database(run: Run) -> None:
    """Put an empty MLflow database into the folder of ``run``, since ranks cannot create it at the same time."""
    path = run.folder / "mlflow.db"
    if run.rank == 0:
        shutil.copy(_empty_database(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.01)


def _from_mlflow(folder: Path) -> Values:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("cases")
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


# Each name maps to (title, function that makes the logger, function that reads what it has written).
_LOGGERS: dict[str, tuple[str, Callable[[Path], Logger], Callable[[Path], Values]]] = {
    "csv": ("CSVLogger", CSVLogger, _from_csv),
    "tensorboard": ("TensorBoardLogger", TensorBoardLogger, _from_tensorboard),
    "lightning_mlflow": (
        "Lightning's MLFlowLogger",
        lambda folder: MLFlowLogger("cases", tracking_uri=f"sqlite:///{folder}/mlflow.db"),
        _from_mlflow,
    ),
    "own_mlflow": (
        "this project's MLflowLogger",
        lambda folder: OwnMLflowLogger("cases", tracking_uri=f"sqlite:///{folder}/mlflow.db"),
        _from_mlflow,
    ),
}

_MEASURED = ("perf/", "memory/", "checkpoint/", "pipeline/", "comm/", "grad/", "epoch")

for _name, (_title, _make, _read) in _LOGGERS.items():

    @case(_title, name=_name)
    def _(
        run: Run,
        make: Callable[[Path], Logger] = _make,
        read: Callable[[Path], Values] = _read,
    ) -> None:
        if read is _from_mlflow:
            _provide_database(run)
        trainer = run.fit(Classifier(), val=True, logger=make(run.folder), max_epochs=2)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            logged = {name: values for name, values in read(run.folder).items() if not name.startswith(_MEASURED)}
            assert {"train/loss", "val/loss"} <= logged.keys()
            run.record("logged", {name: sorted(values) for name, values in logged.items()}, per_rank=True)
