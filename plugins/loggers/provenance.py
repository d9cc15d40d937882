"""Describe a run for reproduction: the code's commit, the versions of packages, and its strategy and layout."""

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dist.plugins._compat import training_loaders
from lightning_dist.plugins.global_batch import global_batch
from lightning_dist.plugins.loggers.dataset_digest import describe_dataset

_DISTRIBUTIONS = ("lightning-dist", "torch", "lightning", "mlflow")
_GIT_TIMEOUT_S = 5
_MAX_VARIATIONS = 4
"""The largest number of arguments in the name of a run."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages on which a run's results depend."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, str]:
    """Return the ``commit`` of the working directory's repository, and whether tracked files differ (``dirty``).

    Returns:
        A dictionary with both as text. It is empty outside of a repository, or if git is missing or too slow, and has
        no ``dirty`` if only that is unknown.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} if changes is None else {"commit": commit, "dirty": str(bool(changes)).lower()}


def provenance_tags() -> dict[str, str]:
    """Return the versions and the commit as the tags of a run; MLflow's page shows one of them as the source."""
    commit = git_state()
    tags = {f"version.{name}": version for name, version in versions().items()}
    tags |= {f"git.{name}": value for name, value in commit.items()}
    return tags | ({"mlflow.source.git.commit": commit["commit"]} if commit else {})


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_distribution(trainer: Trainer) -> dict[str, Any]:
    """Return how the run is distributed over devices: strategy, layout, precision and counts.

    Args:
        trainer: A Trainer whose strategy is set up. If the strategy has a ``layout`` with a method ``describe()``, the
            size of each of its axes is included; so are the ``settings`` of this project's strategies, such as the
            schedule of a pipeline.
    """
    strategy = trainer.strategy
    layout = getattr(strategy, "layout", None)
    return {
        "strategy": _strategy_name(trainer),
        "precision": trainer.precision,
        "accelerator": type(trainer.accelerator).__name__.removesuffix("Accelerator").lower(),
        "num_devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "device": _device_name(strategy.root_device),
        "layout": {} if layout is None else layout.describe(),
        **getattr(strategy, "settings", {}),
    }


def _strategy_name(trainer: Trainer) -> str:
    """Return the name under which a Trainer finds the strategy, or that of its class."""
    kind = type(trainer.strategy)
    registered = (name for name, entry in StrategyRegistry.items() if entry["strategy"] is kind)
    return getattr(trainer.strategy, "strategy_name", None) or next(registered, kind.__name__)


def _device_name(device: torch.device) -> str:
    """Return the model of a GPU, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def evaluation(trainer: Trainer) -> str | None:
    """Return ``validate``, ``test`` or ``predict`` if the Trainer was asked for that, and None if it trains."""
    function = trainer.state.fn
    return None if function in (None, TrainerFn.FITTING) else str(function.value)


def run_name(trainer: Trainer) -> str:
    """Return the strategy, its sizes and what differs from its defaults, and what is not a training.

    Examples are ``hybrid_shard 2x4`` and ``full_shard 4 bf16-mixed zero_stage=1``.
    """
    return " ".join(filter(None, (_spread_name(trainer), *_variations(trainer), evaluation(trainer))))


def _spread_name(trainer: Trainer) -> str:
    name = _strategy_name(trainer)
    layout = getattr(trainer.strategy, "layout", None)
    if layout is None:
        return name if trainer.world_size == 1 else f"{name} {trainer.world_size}"
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1}
    experts = f" ep{layout.ep}" if layout.ep > 1 else ""
    if name in ("nd_parallel", "auto_parallel"):
        return " ".join([name, *(f"{axis}{size}" for axis, size in sizes.items())]) + experts
    return f"{name} {'x'.join(map(str, sizes.values())) or 1}{experts}"


def _variations(trainer: Trainer) -> Iterator[str]:
    """Yield what tells runs of one strategy and layout apart: the precision, and the arguments of techniques."""
    precision = getattr(trainer, "precision", None)
    if precision not in (None, "32-true"):
        yield str(precision)
    config = getattr(trainer.strategy, "config", None)
    given = {} if config is None else {k: v for one in config.arguments.options for k, v in one.given().items()}
    for name, value in list(given.items())[:_MAX_VARIATIONS]:
        if value is True:
            yield name
        elif isinstance(value, int | str):
            yield f"{name}={value}"
        else:  # Compressors and methods of synchronization have short names of their own.
            has_name = any("__str__" in vars(kind) for kind in type(value).__mro__[:-1])
            yield str(value) if has_name else name


def data_of(trainer: Trainer) -> dict[str, Any]:
    """Return the sizes of a training's batches, and a digest of its dataset; empty if they are not known.

    Args:
        trainer: A Trainer that trains, whose data loaders exist.
    """
    found: dict[str, Any] = {}
    if batch := global_batch(trainer):
        found["dist"] = {
            "batch_per_rank": batch.per_rank,
            "accumulate_grad_batches": batch.accumulate,
            "global_batch": batch.total,
        }
    loader = next((loader for loader in training_loaders(trainer) if hasattr(loader, "dataset")), None)
    if loader is not None:
        found["data"] = describe_dataset(loader.dataset, getattr(trainer, "datamodule", None))
    return found
