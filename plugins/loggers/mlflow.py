"""Log a run to MLflow with its configuration, layout, versions, commit, metrics and checkpoints."""

import importlib.util
import json
import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.plugins._compat import INSTANTIATOR
from lightning_dist.plugins.loggers.background import BackgroundWriter
from lightning_dist.plugins.loggers.params import allowed_name, as_dict, flatten, param_text
from lightning_dist.plugins.loggers.provenance import git_state, spread, versions
from lightning_dist.plugins.loggers.store import connect, default_save_dir, own_randomness
from lightning_dist.plugins.tracking_uri import SQLITE, chosen_tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

_MAX_PARAMS_PER_BATCH = 100


class MLflowLogger(MLFlowLogger):
    """Log to MLflow; ``MLflowLogger()`` works without arguments, in any working directory.

    It differs from Lightning's ``MLFlowLogger`` as follows: the store is an SQLite database by default; only rank 0
    connects to it, when something is first logged; parameters keep up to 6,000 characters, and nested ones get dotted
    names; strategy, layout, precision, versions and the git commit are logged at the start of every run; sharded
    (directory) checkpoints are uploaded like files; a run that fails is marked FAILED, one that is interrupted KILLED.

    A run's folder is ``save_dir/experiment_name/run_id``, with its ``checkpoints`` and, by default, its ``artifacts``.

    Args:
        experiment_name: Name of the experiment, which is created if it does not exist.
        run_name: Name of a new run; None: MLflow invents one.
        tracking_uri: URI of the store: by default the environment variable ``MLFLOW_TRACKING_URI``, else
            ``sqlite:///mlflow.db`` in the working directory.
        tags: Tags to set on the run, in addition to those for versions and the git commit, which a new run gets.
        save_dir: Folder for the run's local files, such as checkpoints. By default ``mlruns``: beside the database
            if that is an SQLite file, else in the working directory.
        log_model: Whether and when the checkpoints of every ModelCheckpoint are uploaded. ``"all"``: during training.
            True: at its end, or during training if ``save_top_k`` is -1. False: never.
        prefix: Text that is put before the name of every metric, followed by a dash.
        artifact_location: URI of a new experiment's artifacts: by default the experiment's folder under ``save_dir``
            with an SQLite store, else what the tracking server chooses.
        run_id: ID of a run to continue, instead of starting a new one.
        synchronous: Whether to wait until the store has accepted a metric. By default metrics are sent in the
            background, and an error there is raised by a later call.

    Raises:
        ModuleNotFoundError: If mlflow is not installed.
        ValueError: If ``log_model`` is none of its three values; on first use, if ``run_id`` is unknown or the
            experiment was deleted.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ModuleNotFoundError('MLflowLogger needs mlflow: pip install "lightning-dist[cli]"')
        if log_model not in (True, False, "all"):
            raise ValueError(f"MLflowLogger(log_model={log_model!r}): expected True, False or 'all'.")
        # MLFlowLogger's own __init__ is skipped, because it connects to the store on every rank.
        super(MLFlowLogger, self).__init__()
        self.tags: dict[str, Any] | None = tags
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = chosen_tracking_uri(tracking_uri)
        self._save_dir = os.fspath(save_dir) if save_dir is not None else default_save_dir(self._tracking_uri)
        self._log_model = log_model
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._run_id = run_id
        self._experiment_id: str | None = None
        self._synchronous = bool(synchronous)
        self._writer = BackgroundWriter(is_unreachable=_is_unreachable)
        self._client: MlflowClient | None = None
        self._params: dict[str, str] = {}
        self._checkpoint_callbacks: dict[str, ModelCheckpoint] = {}
        self._uploaded: dict[str, float] = {}

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> "MlflowClient":
        """Return the connected MLflow client, with the run started; on other ranks than 0, a dummy that does nothing.

        Raises:
            ValueError: If the given run or experiment cannot be used.
        """
        if self._client is None:
            client = connect(self._tracking_uri)
            if self._run_id is None:
                self._create_run(client)
            else:
                self._reopen_run(client, self._run_id)
            self._client = client
        return self._client

    @property
    def tracking_uri(self) -> str:
        """Return the URI of the store."""
        return self._tracking_uri

    @property
    @override
    def run_id(self) -> str | None:
        """Return the run's ID, and start the run if necessary; on other ranks than 0, None unless it was given."""
        _ = self.experiment
        return self._run_id

    @property
    @override
    def experiment_id(self) -> str | None:
        """Return the experiment's ID, and create the experiment if necessary; None on other ranks than 0."""
        _ = self.experiment
        return self._experiment_id

    @property
    @override
    def save_dir(self) -> str:
        """Return the folder for the runs' local files; the same on every rank."""
        return self._save_dir

    @property
    @override
    def name(self) -> str:
        """Return the experiment's name as a valid folder name; the same on every rank, without use of the store."""
        return re.sub(r"[^\w.-]+", "_", self._experiment_name).strip(".") or "_"

    @property
    @override
    def version(self) -> str | None:
        """Return the run's ID."""
        return self.run_id

    @property
    @override
    def log_dir(self) -> str | None:
        """Return the run's folder; on other ranks than 0, None unless the run's ID was given."""
        return None if self.version is None else os.path.join(self.save_dir, self.name, self.version)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None, *args: Any, **kwargs: Any) -> None:
        """Log parameters; nested names are joined with dots, and a value that the run already has is not sent again.

        Args:
            params: Parameters, nested to any depth. Lists of scalars stay one value.
            *args: Ignored.
            **kwargs: Ignored.
        """
        from mlflow.entities import Param

        client = self.experiment
        named = as_dict(params)
        named = {key: value for key, value in named.items() if key != INSTANTIATOR}
        flat = {allowed_name(key): param_text(key, value) for key, value in flatten(named)}
        changed = [key for key, value in flat.items() if self._params.get(key, value) != value]
        if changed:
            rank_zero_warn(
                "MLflow cannot change the parameters of a run; kept as they were: "
                + ", ".join(f"{key} (was {self._params[key]}, now {flat[key]})" for key in changed)
            )
        new = [Param(key, value) for key, value in flat.items() if key not in self._params]
        for start in range(0, len(new), _MAX_PARAMS_PER_BATCH):
            batch = new[start : start + _MAX_PARAMS_PER_BATCH]
            self._writer.run(partial(client.log_batch, self._run_id, params=batch))
        self._params = flat | self._params

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Log metrics.

        Args:
            metrics: Values by name. Text is left out with a warning, as in Lightning.
            step: The step to which the values belong; None: 0.

        Raises:
            Exception: The error of an earlier call to the store in the background.
        """
        from mlflow.entities import Metric

        client = self.experiment
        now_ms = int(time() * 1000)
        batch = []
        for name, value in metrics.items():
            if isinstance(value, str):
                rank_zero_warn(f"Discarding the metric {name}={value!r}: it is text.")
                continue
            key = f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name
            batch.append(Metric(allowed_name(key), float(value), now_ms, step or 0))
        self._writer.put(partial(client.log_batch, self._run_id, metrics=batch))
        if self._synchronous:
            self._writer.flush()

    @rank_zero_only
    def log_config(self, config: Mapping[str, Any], text: str) -> None:
        """Log a run's resolved configuration as parameters and as the artifact ``config.yaml``.

        Args:
            config: The configuration; parameters are named like the command's flags, such as ``trainer.max_steps``.
            text: The same configuration as a YAML document.
        """
        self.log_hyperparams(dict(config))
        self._writer.run(partial(self.experiment.log_text, self._run_id, text, "config.yaml"))

    @rank_zero_only
    def log_folder(self, folder: Path, name: str) -> None:
        """Upload a local folder as artifacts under ``name``, and return when it is done."""
        self.experiment.log_artifacts(str(self._run_id), str(folder), name)

    @rank_zero_only
    def log_file(self, write: Callable[[Path], None], name: str) -> None:
        """Log a file as the artifact ``name``, in the background.

        Args:
            write: Function that writes the file to the path that it is given.
            name: Path under which the file is stored among the run's artifacts, such as ``pipeline/schedule.png``.
        """
        self._writer.put(partial(self._upload_file, self.experiment, write, name))
        if self._synchronous:
            self._writer.flush()

    @override
    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Log the strategy, layout, precision and device counts as parameters under ``dist.``, in place of a graph.

        Lightning calls this at the start of every run, after the strategy is set up. It is the only call that gives a
        logger access to the Trainer.

        Args:
            model: The LightningModule, whose Trainer has set up the strategy.
            input_array: Ignored.
        """
        trainer = getattr(model, "_trainer", None)
        if trainer is not None:
            self.log_hyperparams({"dist": spread(trainer)})

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Upload a ModelCheckpoint's new checkpoints, now or at the end, as ``log_model`` says."""
        if self._log_model == "all" or (self._log_model is True and checkpoint_callback.save_top_k == -1):
            self._writer.run(partial(self._upload_checkpoints, self.experiment, checkpoint_callback))
        elif self._log_model is True:
            self._checkpoint_callbacks[checkpoint_callback.state_key] = checkpoint_callback

    def flush(self) -> None:
        """Wait until the store has everything that was logged.

        Raises:
            Exception: The error of the first call to the store that failed.
        """
        self._writer.flush()

    @override
    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Upload the checkpoints and values that are still pending, and end the run if one was started.

        Args:
            status: ``"failed"``, ``"success"`` or ``"finished"``. A run that failed because of Ctrl-C or a signal is
                marked KILLED.
        """
        client = self._client
        if client is None:
            return
        ended = _terminal_status(status)
        try:
            for callback in self._checkpoint_callbacks.values():
                self._writer.run(partial(self._upload_checkpoints, client, callback))
            self._writer.flush()
        except Exception as error:
            if ended == "FINISHED":
                raise
            # The error that ended the run is being raised, and this one must not replace it.
            rank_zero_warn(f"MLflow did not take all of run {self._run_id}: {error}")
        finally:
            self._end_run(client, ended)

    def _end_run(self, client: "MlflowClient", status: str) -> None:
        try:
            self._writer.run(partial(client.set_terminated, str(self._run_id), status))
        except Exception as error:
            if status == "FINISHED":
                raise
            rank_zero_warn(f"Run {self._run_id} could not be marked as {status} in MLflow: {error}")
        finally:
            self._writer.try_again()

    def _create_run(self, client: "MlflowClient") -> None:
        from mlflow.tracking.context.registry import resolve_tags

        self._experiment_id = self._find_or_create_experiment(client)
        commit = git_state()
        tags = {f"version.{name}": version for name, version in versions().items()}
        tags |= {f"git.{name}": value for name, value in commit.items()}
        if commit:
            tags["mlflow.source.git.commit"] = commit["commit"]
        tags |= {key: str(value) for key, value in (self.tags or {}).items()}
        with own_randomness():
            run = client.create_run(self._experiment_id, run_name=self._run_name, tags=resolve_tags(tags))
        self._run_id = run.info.run_id

    def _reopen_run(self, client: "MlflowClient", run_id: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            raise ValueError(
                f"MLflowLogger(run_id={run_id!r}): {self._tracking_uri} has no such run ({error.message}). Leave "
                "run_id out to start a new one."
            ) from error
        self._experiment_id = run.info.experiment_id
        self._params = dict(run.data.params)
        client.update_run(run_id, status="RUNNING")
        for key, value in (self.tags or {}).items():
            client.set_tag(run_id, key, value)

    def _find_or_create_experiment(self, client: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._experiment_name)
        if found is None:
            try:
                return str(client.create_experiment(self._experiment_name, self._artifact_root()))
            except MlflowException:
                # Another run may have created the experiment in the meantime.
                found = client.get_experiment_by_name(self._experiment_name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise ValueError(
                f"MLflowLogger(experiment_name={self._experiment_name!r}): this experiment was deleted. Choose another "
                f"name, or restore it: MLFLOW_TRACKING_URI={self._tracking_uri} mlflow experiments restore -x "
                f"{found.experiment_id}"
            )
        return str(found.experiment_id)

    def _artifact_root(self) -> str | None:
        if self._artifact_location is None and self._tracking_uri.startswith(SQLITE):
            return Path(self.save_dir, self.name).resolve().as_uri()
        return self._artifact_location

    def _upload_file(self, client: "MlflowClient", write: Callable[[Path], None], name: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, Path(name).name)
            write(path)
            client.log_artifact(str(self._run_id), str(path), str(Path(name).parent))

    def _upload_checkpoints(self, client: "MlflowClient", callback: ModelCheckpoint) -> None:
        run_id = str(self._run_id)
        for path, score in _checkpoints(callback).items():
            modified = path.stat().st_mtime
            if self._uploaded.get(str(path), -1.0) >= modified:
                continue
            folder = path.stem
            if path.is_dir():
                client.log_artifacts(run_id, str(path), f"{folder}/{path.name}")
            else:
                client.log_artifact(run_id, str(path), folder)
            is_best = str(path) == callback.best_model_path
            about = {
                "score": score,
                "monitor": callback.monitor,
                "original_filename": path.name,
                "aliases": ["latest", "best"] if is_best else ["latest"],
            }
            with tempfile.TemporaryDirectory() as scratch:
                Path(scratch, "metadata.json").write_text(json.dumps(about, indent=2))
                client.log_artifacts(run_id, scratch, folder)
            self._uploaded[str(path)] = modified


def _checkpoints(callback: ModelCheckpoint) -> dict[Path, float | None]:
    """Return the existing checkpoints of a callback, files and directories, oldest first, with their scores."""
    scores: dict[str, Tensor | None] = {
        callback.last_model_path: callback.current_score,
        callback.best_model_path: callback.best_model_score,
        **callback.best_k_models,
    }
    existing = [(Path(path), score) for path, score in scores.items() if path and Path(path).exists()]
    existing.sort(key=lambda item: item[0].stat().st_mtime)
    return {path: None if score is None else float(score) for path, score in existing}


def _is_unreachable(error: Exception) -> bool:
    """Return whether MLflow's client has given up reaching the server. It retries each call for minutes."""
    from mlflow.exceptions import MlflowException

    return type(error) is MlflowException and error.message.startswith("API request to ")


def _terminal_status(status: str) -> str:
    if status != "failed":
        return "FINISHED"
    # Lightning finalizes loggers while it handles the exception, and passes "failed" for every exception.
    return "KILLED" if isinstance(sys.exc_info()[1], (KeyboardInterrupt, SIGTERMException, SystemExit)) else "FAILED"
