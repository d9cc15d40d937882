"""Send what a run has logged to MLflow, such that sending it again changes nothing."""

from __future__ import annotations

import re
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dist.plugins.loggers.run_identity import OpenRun
from lightning_dist.plugins.loggers.spool import Entry
from lightning_dist.plugins.loggers.store import is_refused

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

__all__ = ["Delivery"]

_MAX_METRICS, _MAX_PARAMS = 1000, 100  # MLflow takes no more in one call.
_DRIFT_TAG = "param_drift."
_MAX_TAG_NAME = 250
_MAX_UPLOADS = 3


class Delivery:
    """Send entries to a run.

    An entry is a dictionary with one of these keys:

    ============ ==============================================================================================
    ``metrics``  a list of ``[name, value, time in ms, step]``; the step is None for a metric without one
    ``params``   values by name; one that the run has with another value becomes a tag ``param_drift.<name>``
    ``tags``     values by name
    ``name``     the run's name
    ``text``     ``[name of an artifact, its content]``
    ``file``     ``[path of a local file or folder, folder among the artifacts, whether the local one is removed]``
    ``model``    ``[name, path of a local file, whether it is removed]``: the file becomes a model of MLflow
    ``end``      ``[status, time in ms]``
    ============ ==============================================================================================

    Entries may be sent again after an error, because MLflow's databases keep one of several equal values of a metric
    that have the same time and step. A metric that an earlier process has logged already at a step is not logged again
    there.

    Args:
        client: A client of the store.
        run: The run that the entries are sent to.
        step: Optimizer step from which this process resumed the training, or 0.
        compares_histories: Whether the run may have later steps than those of the entries although it does not have
            the entries, as when they come from an earlier process. The histories of metrics are then read to find out.
            Otherwise, steps up to the last one of a metric are taken to be there.
    """

    def __init__(self, client: MlflowClient, run: OpenRun, step: int = 0, compares_histories: bool = False) -> None:
        self.num_metrics = 0
        self.refused: list[str] = []
        self.num_refused_metrics = 0
        self._client = client
        self._run = run
        self._step = step
        self._compares_histories = compares_histories
        self._histories: dict[str, set[int]] = {}
        self._failed_uploads: Counter[str] = Counter()

    def send(self, entries: Sequence[Entry]) -> None:
        """Send entries in order.

        What the store refuses for its content, such as a name that is too long, is left out and listed in
        :attr:`refused`.

        Raises:
            Exception: If the store cannot be reached, or the run was deleted.
        """
        for kind, group in groupby(entries, lambda entry: next(iter(entry))):
            values = [entry[kind] for entry in group]
            if kind == "metrics":
                self._send_metrics([point for points in values for point in points])
            else:
                for value in values:
                    self._attempt(kind, value)

    def _attempt(self, kind: str, value: Any) -> None:
        try:
            getattr(self, f"_send_{kind}")(value)
        except Exception as error:
            if kind in ("text", "file", "model"):
                self._check_uploads(value[0], error)
            else:
                self._check_refusal(error)
            self._refuse(f"{kind} {value!r:.200}", error)

    def _check_refusal(self, error: Exception) -> None:
        """Raise the error unless the store has refused the content of a call."""
        if not is_refused(error):
            raise error
        if self._client.get_run(self._run.run_id).info.lifecycle_stage == "deleted":
            raise error

    def _check_uploads(self, name: str, error: Exception) -> None:
        """Raise the error of an upload, unless only the store of artifacts fails, repeatedly."""
        self._client.get_run(self._run.run_id)
        self._failed_uploads[name] += 1
        if self._failed_uploads[name] < _MAX_UPLOADS:
            raise error

    def _refuse(self, what: str, error: Exception) -> None:
        self.refused.append(what)
        warnings.warn(f"MLflow has refused {what}: {getattr(error, 'message', error)}", stacklevel=1)

    def _send_metrics(self, points: list[Any]) -> None:
        from mlflow.entities import Metric

        self._step = max([self._step, *(step for _, _, _, step in points if step is not None)])
        metrics = [
            Metric(name, value, time_ms, step or 0)
            for name, value, time_ms, step in points
            if step is None or not self._has(name, step)
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._send_batch(metrics[start : start + _MAX_METRICS])

    def _send_batch(self, metrics: list[Metric]) -> None:
        try:
            self._client.log_batch(self._run.run_id, metrics=metrics)
        except Exception as error:
            self._check_refusal(error)
            if len(metrics) == 1:
                self.num_refused_metrics += 1
                self._refuse(f"the metric {metrics[0].key}={metrics[0].value}", error)
                return
            half = len(metrics) // 2
            self._send_batch(metrics[:half])
            self._send_batch(metrics[half:])
        else:
            self.num_metrics += len(metrics)

    def _has(self, name: str, step: int) -> bool:
        """Return whether an earlier process has logged a metric at a step."""
        if step > self._run.last_steps.get(name, -1):
            return False
        if not self._compares_histories:
            return True
        if name not in self._histories:
            history = self._client.get_metric_history(self._run.run_id, name)
            self._histories[name] = {metric.step for metric in history}
        return step in self._histories[name]

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        had = self._run.params
        new = [Param(name, value) for name, value in params.items() if name not in had]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run.run_id, params=new[start : start + _MAX_PARAMS])
        drifts = {name: (self._now(name), value) for name, value in params.items() if name in had}
        drifts = {name: (before, now) for name, (before, now) in drifts.items() if before != now}
        if drifts:
            tags = {}
            for name, (before, now) in drifts.items():
                tag = (_DRIFT_TAG + name)[:_MAX_TAG_NAME]
                earlier = self._run.tags.get(tag)
                drift = f"{before} -> {now} at step {self._step}"
                tags[tag] = f"{earlier}; {drift}" if earlier else drift
            self._send_tags(tags)
            warnings.warn(
                "MLflow cannot change the parameters of a run; kept as they were: "
                + ", ".join(f"{name} (was {before}, now {now})" for name, (before, now) in drifts.items())
                + f". Tags {_DRIFT_TAG}<name> record the changes.",
                stacklevel=1,
            )
        had |= {param.key: param.value for param in new}

    def _now(self, name: str) -> str:
        """Return the value that a parameter has now, after the changes that tags record."""
        drift = self._run.tags.get((_DRIFT_TAG + name)[:_MAX_TAG_NAME], "")
        changed = re.search(r".* -> (.*) at step \d+$", drift, re.DOTALL)
        return changed.group(1) if changed else self._run.params[name]

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._run.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        self._run.tags |= tags

    def _send_name(self, name: str) -> None:
        self._client.update_run(self._run.run_id, name=name)

    def _send_text(self, text: Sequence[str]) -> None:
        name, content = text
        self._client.log_text(self._run.run_id, content, name)

    def _send_file(self, file: Sequence[Any]) -> None:
        path, folder, is_removed = Path(file[0]), file[1] or None, file[2]
        if path.is_dir():
            folder = f"{folder}/{path.name}" if folder else path.name
            self._client.log_artifacts(self._run.run_id, str(path), folder)
        elif path.exists():
            self._client.log_artifact(self._run.run_id, str(path), folder)
        else:
            self.refused.append(str(path))
            warnings.warn(f"{path} was removed before it was uploaded to MLflow.", stacklevel=1)
            return
        if is_removed:
            shutil.rmtree(path.parent)  # It was made for this file or folder alone.

    def _send_model(self, model: Sequence[Any]) -> None:
        from mlflow.entities import LoggedModelOutput

        name, path, is_removed = model[0], Path(model[1]), model[2]
        experiment, run_id = self._run.experiment_id, self._run.run_id
        found = self._client.search_logged_models([experiment], f"name = '{name}' AND source_run_id = '{run_id}'")
        logged = found[0] if found else self._client.create_logged_model(experiment, name, run_id)
        if logged.status != "READY":
            self._client.log_model_artifact(logged.model_id, str(path))
            self._client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, self._step)])
            self._client.finalize_logged_model(logged.model_id, "READY")
        if is_removed:
            shutil.rmtree(path.parent)

    def _send_end(self, end: Sequence[Any]) -> None:
        status, time_ms = end
        self._client.set_terminated(self._run.run_id, status, time_ms)
