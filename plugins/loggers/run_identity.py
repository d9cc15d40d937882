"""Find or create the MLflow run of a training, which continues over restarts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lightning_dist.plugins.loggers.store import UnusableStoreError, is_refused, own_randomness
from lightning_dist.run import runs_table
from lightning_dist.run.tracking_uri import absolute_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

__all__ = ["OpenRun", "RunIdentity", "is_newest_start", "last_steps", "open_run", "reopened"]

TRAINING_TAG = "lightning_dist.training"
STARTED_TAG = "lightning_dist.started_at"
RESUMED_FROM_TAG = "resumed_from"
RESUMED_AT_TAG = "resumed_at_steps"
_PARENT_TAG = "mlflow.parentRunId"
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development", runs_table.TAG: runs_table.state()}
"""Tags that say that an experiment trains models, and is not about applications of language models, and which columns
its table of runs has."""


@dataclass(frozen=True)
class RunIdentity:
    """Say to which run a training logs. It is plain data, and is the header of a spool.

    Args:
        tracking_uri: URI of the store, as the user gave it.
        experiment: Name of the experiment, which is created if it does not exist.
        training: ID of the training, which all of its processes share, and which is in its checkpoints.
        started_at: Time at which this process began, in ms since 1970.
        artifact_location: URI of a new experiment's artifacts; None: the store's choice.
        run_name: Name of a new run; None: MLflow's choice, until the strategy names it.
        tags: Tags of a new run.
        run_tags: Tags of the run, also if it continues.
        step: Optimizer step from which this process resumes the training; None: it begins it.
        run_id: ID of the run to which the training has logged, or that the user has given; None: unknown.
        is_given: Whether the user has given ``run_id``.
        parent: ID of the run that a new run goes on from, because the user wants a new one for a resumed training.
    """

    tracking_uri: str
    experiment: str
    training: str
    started_at: int
    artifact_location: str | None = None
    run_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    run_tags: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    run_id: str | None = None
    is_given: bool = False
    parent: str | None = None

    def header(self) -> dict[str, Any]:
        """Return the identity as plain JSON, from which ``RunIdentity(**header)`` makes an equal one anywhere."""
        return {**asdict(self), "tracking_uri": absolute_uri(self.tracking_uri)}


@dataclass
class OpenRun:
    """Describe a run that is ready to be logged to.

    Args:
        run_id: The ID of the run in MLflow.
        experiment_id: The ID of its experiment.
        params: The parameters that it has.
        tags: The tags that it has.
        last_steps: The last step that it has of each metric.
    """

    run_id: str
    experiment_id: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)


def open_run(client: MlflowClient, identity: RunIdentity, is_first_try: bool) -> OpenRun:
    """Return the run of a training, which is continued if it exists and created otherwise.

    Args:
        client: A client of the store.
        identity: The run that is wanted.
        is_first_try: Whether no earlier call, of which only the answer may have been lost, can have created the run.

    Raises:
        UnusableStoreError: If the user has given a run that does not exist or was deleted, or an experiment that was
            deleted.
        MlflowException: If the store cannot be reached.
    """
    if identity.is_given:
        given = _given_run(client, identity)
        _tag(client, client.get_experiment(given.info.experiment_id))
        return _continued(client, given, identity)
    experiment_id = _find_or_create_experiment(client, identity)
    before = _run_before(client, identity, experiment_id)
    if before is not None and identity.parent is None and before.info.experiment_id == experiment_id:
        return _continued(client, before, identity)
    if not is_first_try and (created := _find_by_tag(client, experiment_id, identity.training)) is not None:
        return _continued(client, created, identity)
    tags = {**identity.tags, **identity.run_tags, **_own_tags(identity)}
    if before is not None:
        tags[RESUMED_FROM_TAG] = f"{before.info.run_id} at step {identity.step}"
        if before.info.experiment_id == experiment_id:  # MLflow shows a run below one of the same experiment only.
            tags[_PARENT_TAG] = before.info.run_id
    return _created(client, experiment_id, identity, tags)


def _created(client: MlflowClient, experiment_id: str, identity: RunIdentity, tags: dict[str, str]) -> OpenRun:
    from mlflow.tracking.context.registry import resolve_tags

    with own_randomness():
        run = client.create_run(
            experiment_id, start_time=identity.started_at, tags=resolve_tags(tags), run_name=identity.run_name
        )
    return OpenRun(run.info.run_id, experiment_id, tags=tags)


def _own_tags(identity: RunIdentity) -> dict[str, str]:
    return {TRAINING_TAG: identity.training, STARTED_TAG: str(identity.started_at)}


def _continued(client: MlflowClient, run: Run, identity: RunIdentity) -> OpenRun:
    """Return an existing run, and record that this process goes on with it, unless it or a later one has done so."""
    from mlflow.entities import RunTag

    run_id, tags = run.info.run_id, dict(run.data.tags)
    if int(tags.get(STARTED_TAG, 0)) < identity.started_at:
        new_tags = {**identity.run_tags, **_own_tags(identity)}
        if identity.step is not None:
            earlier = tags.get(RESUMED_AT_TAG)
            new_tags[RESUMED_AT_TAG] = f"{earlier}, {identity.step}" if earlier else str(identity.step)
        client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in new_tags.items()])
        tags |= new_tags
    return OpenRun(run_id, run.info.experiment_id, dict(run.data.params), tags, last_steps(run))


def reopened(client: MlflowClient, run: OpenRun) -> OpenRun:
    """Return a run that this process has opened before, with the parameters and tags that it has now.

    Its last steps stay those that it had before this process.

    Raises:
        MlflowException: If the store cannot be reached.
    """
    data = client.get_run(run.run_id).data
    return replace(run, params=dict(data.params), tags=dict(data.tags))


def last_steps(run: Run) -> dict[str, int]:
    """Return the last step of each metric of a run."""
    # The values that Run.data shows have no step; its message has it.
    return {metric.key: metric.step for metric in run.data.to_proto().metrics}


def _given_run(client: MlflowClient, identity: RunIdentity) -> Run:
    run_id = str(identity.run_id)
    run, reason = _existing(client, run_id)
    if run is None:
        raise UnusableStoreError(
            f"MLflowLogger(run_id={run_id!r}): {identity.tracking_uri} has no such run ({reason}). Leave run_id out to"
            " start a new one."
        )
    if run.info.lifecycle_stage == "deleted":
        raise UnusableStoreError(
            f"MLflowLogger(run_id={run_id!r}): this run was deleted. Leave run_id out to start a new one, or restore"
            f" it: MLFLOW_TRACKING_URI={identity.tracking_uri} mlflow runs restore --run-id {run_id}"
        )
    return run


def _run_before(client: MlflowClient, identity: RunIdentity, experiment_id: str) -> Run | None:
    """Return the run to which the training has logged before its checkpoint, unless it is gone; None for a new one."""
    if identity.step is None:
        return None
    run_id = identity.parent or identity.run_id
    if run_id is None:  # MLflow could not be reached when the checkpoint was saved.
        return _find_by_tag(client, experiment_id, identity.training)
    run, _ = _existing(client, run_id)
    if run is not None and run.info.lifecycle_stage != "deleted":
        return run
    # The checkpoint may be of another store, in which this training had another run.
    found = _find_by_tag(client, experiment_id, identity.training)
    if found is None and identity.parent is None:
        gone = "does not have" if run is None else "has deleted"
        warnings.warn(
            f"{identity.tracking_uri} {gone} the run {run_id}, to which the training logged before the checkpoint that"
            " is resumed. A new run is started, which has only the metrics from there.",
            stacklevel=1,
        )
    return found


def _existing(client: MlflowClient, run_id: str) -> tuple[Run | None, str]:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id), ""
    except MlflowException as error:
        if not is_refused(error):
            raise
        return None, str(error.message)


def _find_by_tag(client: MlflowClient, experiment_id: str, training: str) -> Run | None:
    found = client.search_runs(
        [experiment_id], f"tags.`{TRAINING_TAG}` = '{training}'", max_results=1, order_by=["attributes.start_time"]
    )
    return found[0] if found else None


def _find_or_create_experiment(client: MlflowClient, identity: RunIdentity) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(identity.experiment)
    if found is None:
        try:
            return str(client.create_experiment(identity.experiment, identity.artifact_location, tags=_EXPERIMENT_TAGS))
        except MlflowException:
            # Another run may have created the experiment in the meantime.
            found = client.get_experiment_by_name(identity.experiment)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise UnusableStoreError(
            f"MLflowLogger(experiment_name={identity.experiment!r}): this experiment was deleted. Choose another name,"
            f" or restore it: MLFLOW_TRACKING_URI={identity.tracking_uri} mlflow experiments restore -x"
            f" {found.experiment_id}"
        )
    _tag(client, found)
    return str(found.experiment_id)


def _tag(client: MlflowClient, experiment: Experiment) -> None:
    for key in _EXPERIMENT_TAGS.keys() - experiment.tags.keys():
        client.set_experiment_tag(experiment.experiment_id, key, _EXPERIMENT_TAGS[key])


def is_newest_start(run: OpenRun, identity: RunIdentity) -> bool:
    """Return whether no later process of the training has gone on with the run."""
    return int(run.tags.get(STARTED_TAG, 0)) <= identity.started_at
