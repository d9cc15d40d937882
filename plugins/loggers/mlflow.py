"""Log a run to MLflow with its configuration, layout, versions, commit, metrics and checkpoints."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.plugins.loggers.checkpoints import CheckpointUploads
from lightning_dist.plugins.loggers.outbox import Outbox
from lightning_dist.plugins.loggers.params import allowed_name, flat_params
from lightning_dist.plugins.loggers.provenance import (
    data_of,
    describe_distribution,
    evaluation,
    git_state,
    provenance_tags,
    run_name,
    versions,
)
from lightning_dist.plugins.loggers.run_identity import OpenRun, RunIdentity
from lightning_dist.plugins.loggers.spool import Entry
from lightning_dist.plugins.loggers.store import Client, default_save_dir, default_spool_dir
from lightning_dist.plugins.loggers.system_metrics import NodeMetrics
from lightning_dist.run.runs_table import STRATEGY
from lightning_dist.run.tracking_uri import SQLITE, chosen_tracking_uri

__all__ = ["MLflowLogger"]


class MLflowLogger(MLFlowLogger):
    """Log to MLflow; ``MLflowLogger()`` works without arguments, in any working directory.

    It differs from Lightning's ``MLFlowLogger`` as follows: the store is an SQLite database by default; only rank 0
    connects to it, when something is first logged; what is logged is kept in a local file while MLflow cannot be
    reached, and no failure of MLflow ends a fit; a training that is resumed continues its run; parameters keep up to
    6,000 characters, and nested ones get dotted names; strategy, layout, precision, versions and the git commit are
    logged at the start of every run; sharded (directory) checkpoints are uploaded like files; a run that fails is
    marked FAILED, one that is interrupted KILLED.

    A run's folder is ``save_dir/experiment_name/run_id``, with its ``checkpoints`` and, by default, its ``artifacts``.
    If MLflow cannot be reached when the run starts, a name with ``offline`` replaces the ``run_id``.

    Args:
        experiment_name: Name of the experiment, which is created if it does not exist.
        run_name: Name of a new run; None: its strategy, layout and what differs from their defaults, such as
            ``hybrid_shard 2x4 bf16-mixed``, or that it failed before they were known.
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
        synchronous: Whether to wait until the store has accepted a metric, or cannot be reached. By default metrics
            are sent in the background.
        continue_run: Whether a fit that resumes a checkpoint continues the run of the training that saved it. If
            False, it starts a new run, which is linked to that one.
        connect_timeout: Time in seconds for which the start waits for the store. Training then begins without it.
        system_metrics: Whether the use of each node's processors, memory, disks, network and GPUs is logged every 10 s.
        logged_model_max_mib: Size in MiB up to which the best checkpoint of every ModelCheckpoint is logged as one file
            that is a model of MLflow, at the end of a fit; None: none is. Rank 0 holds it in memory meanwhile.
        spool_dir: Local folder of the files that keep what the store has not got. By default ``mlflow-spool`` under
            ``save_dir``.

    Raises:
        ModuleNotFoundError: If mlflow is not installed, or psutil for ``system_metrics``.
        ValueError: If ``log_model`` is none of its three values or ``connect_timeout`` is not positive; on first use,
            if ``run_id`` is unknown, or the run or experiment was deleted.
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
        continue_run: bool = True,
        connect_timeout: float = 5.0,
        system_metrics: bool = False,
        logged_model_max_mib: float | None = None,
        spool_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ModuleNotFoundError('MLflowLogger needs mlflow: pip install "lightning-dist[cli]"')
        if system_metrics and importlib.util.find_spec("psutil") is None:
            raise ModuleNotFoundError("MLflowLogger(system_metrics=True) needs psutil: pip install psutil")
        if log_model not in (True, False, "all"):
            raise ValueError(f"MLflowLogger(log_model={log_model!r}): expected True, False or 'all'.")
        if not connect_timeout > 0:
            raise ValueError(f"MLflowLogger(connect_timeout={connect_timeout}): expected more than 0 seconds.")
        # MLFlowLogger's own __init__ is skipped, because it connects to the store on every rank.
        super(MLFlowLogger, self).__init__()
        self.tags: dict[str, Any] | None = tags
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = chosen_tracking_uri(tracking_uri)
        self._save_dir = os.fspath(save_dir) if save_dir is not None else default_save_dir(self._tracking_uri)
        self._spool_dir = Path(spool_dir or default_spool_dir(self._save_dir)).resolve()
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._run_id = run_id
        self._synchronous = bool(synchronous)
        self._continues_run = continue_run
        self._connect_timeout = connect_timeout
        self._logs_system_metrics = system_metrics
        self._uploads = CheckpointUploads(log_model, logged_model_max_mib, self._spool_dir)
        self._node_metrics: NodeMetrics | None = None
        self._training = uuid.uuid4().hex
        self._resumed: tuple[str, str | None, int] | None = None
        self._run: OpenRun | None = None
        self._outbox: Outbox | None = None
        self._has_started = False
        self._folder_name: str | None = run_id
        self._names: dict[str, str] = {}
        self._trainer: Trainer | None = None
        self._is_described = False

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Client:
        """Return the MLflow client, with the run started; on other ranks than 0, a dummy that does nothing.

        If MLflow cannot be reached, calls of the client fail; those of the logger do not.

        Raises:
            ValueError: If the given run or experiment cannot be used.
        """
        return cast(Client, self._started().client or DummyLogger().experiment)

    @property
    def tracking_uri(self) -> str:
        """Return the URI of the store."""
        return self._tracking_uri

    @property
    @override
    def run_id(self) -> str | None:
        """Return the run's ID, and start the run if necessary; None while MLflow cannot be reached.

        On other ranks than 0, it is None unless it was given.
        """
        run = self._open_run()
        return self._run_id if run is None else run.run_id

    @property
    @override
    def experiment_id(self) -> str | None:
        """Return the experiment's ID, and create the experiment if necessary; None where :attr:`run_id` is."""
        run = self._open_run()
        return None if run is None else run.experiment_id

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
        """Return the run's ID, or a name for its folder if MLflow could not be reached when it started."""
        self._open_run()
        return self._folder_name

    @property
    @override
    def log_dir(self) -> str | None:
        """Return the run's folder; on other ranks than 0, None unless the run's ID was given."""
        return None if self.version is None else os.path.join(self.save_dir, self.name, self.version)

    def continue_training(self, training: str, run_id: str | None, step: int) -> None:
        """Log to the run of the training that a checkpoint is from; this project's strategies call it before a fit.

        It has no effect if the user has given a run, or the run has started already.

        Args:
            training: ID of the training, which :meth:`entries_for_checkpoint` has put into the checkpoint.
            run_id: ID of its run; None if MLflow could not be reached when the checkpoint was saved.
            step: Number of optimizer steps at the checkpoint.
        """
        if self._run is None and self._outbox is None and self._run_id is None:
            self._resumed = (training, run_id, step)
            if self._continues_run:
                self._training = training

    @rank_zero_only
    def entries_for_checkpoint(self) -> dict[str, str]:
        """Return what a checkpoint that is being saved needs, so that a process that resumes it continues the run."""
        run = self._open_run()
        if self._outbox is not None:
            self._outbox.write_soon()
        return {"mlflow_training": self._training} | ({} if run is None else {"mlflow_run": run.run_id})

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None, *args: Any, **kwargs: Any) -> None:
        """Log parameters; nested names are joined with dots, and parameters that are None are left out.

        A parameter that the run has with another value keeps it; a tag ``param_drift.<name>`` records the change.

        Args:
            params: Parameters, nested to any depth. Lists of scalars stay one value.
            *args: Ignored.
            **kwargs: Ignored.
        """
        flat = flat_params(params)
        if flat:
            self._put({"params": flat})

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Log metrics.

        Args:
            metrics: Values by name. Text is left out with a warning, as in Lightning.
            step: The step to which the values belong; None: 0.
        """
        now_ms = int(time.time() * 1000)
        points = []
        for name, value in metrics.items():
            if isinstance(value, str):
                rank_zero_warn(f"Discarding the metric {name}={value!r}: it is text.")
                continue
            points.append([self._metric_name(name), float(value), now_ms, None if step is None else int(step)])
        self._put({"metrics": points})
        if self._trainer is not None and self._trainer.training:
            trainer, self._trainer = self._trainer, None
            self.log_hyperparams(data_of(trainer))

    def _metric_name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = allowed_name(f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name)
        return self._names[name]

    @rank_zero_only
    def log_config(self, config: Mapping[str, Any], text: str) -> None:
        """Log a run's resolved configuration as parameters and as the artifact ``config.yaml``.

        Args:
            config: The configuration; parameters are named like the command's flags, such as ``trainer.max_steps``.
            text: The same configuration as a YAML document.
        """
        self.log_hyperparams(dict(config))
        self._put({"text": ["config.yaml", text]})

    @rank_zero_only
    def log_folder(self, folder: Path, name: str) -> None:
        """Upload the files of a local folder as artifacts under ``name``, and return when it is done.

        If MLflow cannot be reached, they stay in the folder until it can.
        """
        for path in sorted(folder.iterdir()):
            self._put({"file": [str(path.resolve()), name, False]})
        self.flush()

    @rank_zero_only
    def log_file(self, write: Callable[[Path], None], name: str) -> None:
        """Log a file as the artifact ``name``, in the background.

        Args:
            write: Function that writes the file to the path that it is given.
            name: Path under which the file is stored among the run's artifacts, such as ``pipeline/schedule.png``.
        """
        path = self._spool_dir / f"file-{time.time_ns()}" / Path(name).name

        def written() -> Entry:
            path.parent.mkdir(parents=True)
            write(path)
            return {"file": [str(path), str(Path(name).parent), True]}

        self._put(written)

    @override
    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Log how the run is distributed as parameters under ``dist.``, in place of a graph, and name the run.

        Lightning calls this on all ranks at the start of every run, after the strategy is set up. It is the only call
        that gives a logger access to the Trainer.

        Args:
            model: The LightningModule, whose Trainer has set up the strategy.
            input_array: Lightning's example of an input, which is not used.
        """
        trainer = getattr(model, "_trainer", None)
        if trainer is None:
            return
        if self._logs_system_metrics and self._node_metrics is None:
            self._start_node_metrics(trainer)
        if trainer.is_global_zero:
            self._describe(trainer)

    def _describe(self, trainer: Trainer) -> None:
        self.log_hyperparams({"dist": describe_distribution(trainer)})
        self.log_hyperparams({"version": versions(), "git": git_state()})
        if not self._is_described:  # What the Trainer does next with this logger belongs to the same run.
            self._is_described = True
            self.log_hyperparams({"dist": {"task": evaluation(trainer)}})
            name = run_name(trainer)
            self._put({"tags": {STRATEGY: name}})
            if self._run_name is None and self._is_new_run:
                self._put({"name": name})
        self._trainer = trainer  # The data loaders do not exist yet.

    def _start_node_metrics(self, trainer: Trainer) -> None:
        """Sample the node's metrics on its first rank. This is a collective over all processes."""
        self._start_on_rank_0()
        own = None if self._outbox is None or self._outbox.run is None else (self._outbox.identity, self._outbox.run)
        shared: tuple[RunIdentity, OpenRun] | None = trainer.strategy.broadcast(own)
        if shared is None:
            rank_zero_warn("system_metrics=True has no effect: MLflow could not be reached when the run started.")
        elif trainer.local_rank == 0:
            if not trainer.is_global_zero:
                identity = replace(shared[0], training=self._training, run_id=shared[1].run_id, is_given=True)
                self._outbox = Outbox(identity, self._spool_dir, self._connect_timeout, shared[1])
                self._outbox.start()
            self._node_metrics = NodeMetrics(
                trainer.node_rank, self._tracking_uri, self._put, lambda: trainer.global_step
            )

    @property
    def _is_new_run(self) -> bool:
        return self._run_id is None and (self._resumed is None or not self._continues_run)

    @override
    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Upload a ModelCheckpoint's new checkpoints, now or at the end, as ``log_model`` says."""
        for entry in self._uploads.saved(checkpoint_callback):
            self._put(entry)

    @rank_zero_only
    def flush(self) -> None:
        """Wait until the store has everything that was logged, or cannot be reached."""
        if self._outbox is not None:
            self._outbox.flush()

    @override
    def finalize(self, status: str = "success") -> None:
        """Send what is left, and end the run if one was started.

        What MLflow has not got, because it cannot be reached, stays in the spool, which a warning names.

        Args:
            status: ``"failed"``, ``"success"`` or ``"finished"``. A run that failed because of Ctrl-C or a signal is
                marked KILLED.
        """
        if self._node_metrics is not None:
            self._node_metrics.close()
            self._node_metrics = None
        if self._outbox is None:
            return
        self._put_end(_terminal_status(status))
        outbox, self._outbox = self._outbox, None
        outbox.close()
        self._run = outbox.run

    @rank_zero_only
    def _put_end(self, status: str) -> None:
        for entry in self._uploads.at_end(has_failed=status != "FINISHED"):
            self._put(entry)
        has_begun = self._is_described or bool(self._names)
        if status != "FINISHED" and not has_begun and self._run_name is None and self._is_new_run:
            self._put({"name": "failed before its first step"})
        self._put({"end": [status, int(time.time() * 1000)]})

    def _put(self, entry: Entry | Callable[[], Entry]) -> None:
        outbox = self._started()
        outbox.put(entry)
        if self._synchronous:
            outbox.flush()

    def _started(self) -> Outbox:
        """Return the outbox, with the run started, unless MLflow cannot be reached."""
        if self._outbox is None:
            outbox = Outbox(self._identity(), self._spool_dir, self._connect_timeout, self._run)
            outbox.start()
            self._outbox, self._run, self._has_started = outbox, outbox.run, True
            if self._folder_name is None:
                self._folder_name = outbox.run.run_id if outbox.run is not None else f"offline-{self._training[:12]}"
        return self._outbox

    @rank_zero_only
    def _start_on_rank_0(self) -> None:
        self._started()

    def _open_run(self) -> OpenRun | None:
        if not self._has_started:
            self._start_on_rank_0()
        if self._run is None and self._outbox is not None:  # MLflow may be back in the meantime.
            self._run = self._outbox.run
        return self._run

    def _identity(self) -> RunIdentity:
        _, run_before, step = self._resumed or ("", None, None)
        return RunIdentity(
            self._tracking_uri,
            self._experiment_name,
            self._training,
            time.time_ns() // 1_000_000,
            self._artifact_root(),
            self._run_name,
            provenance_tags(),
            {key: str(value) for key, value in (self.tags or {}).items()},
            step,
            run_id=self._run_id or (run_before if self._continues_run else None),
            is_given=self._run_id is not None,
            parent=None if self._continues_run else run_before,
        )

    def _artifact_root(self) -> str | None:
        if self._artifact_location is None and self._tracking_uri.startswith(SQLITE):
            return Path(self.save_dir, self.name).resolve().as_uri()
        return self._artifact_location


def _terminal_status(status: str) -> str:
    """Return MLflow's status of a run that Lightning ends with ``status``, which may be due to an exception."""
    if status != "failed":
        return "FINISHED"
    # Lightning finalizes loggers while it handles the exception, and passes "failed" for every exception.
    return "KILLED" if isinstance(sys.exc_info()[1], (KeyboardInterrupt, SIGTERMException, SystemExit)) else "FAILED"
