"""Describe a run for reproduction: the code's commit, the versions of packages, and its strategy and layout."""

import platform
import subprocess
from importlib import metadata
from typing import Any

from lightning.pytorch import Trainer

_DISTRIBUTIONS = ("lightning-dist", "torch", "lightning", "mlflow")
_GIT_TIMEOUT_S = 5


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


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def spread(trainer: Trainer) -> dict[str, Any]:
    """Return how the run is distributed over devices: strategy, layout, precision and counts.

    Args:
        trainer: A Trainer whose strategy is set up. If the strategy has a ``layout`` with a method ``describe()``, the
            size of each of its axes is included.
    """
    strategy = trainer.strategy
    layout = getattr(strategy, "layout", None)
    return {
        "strategy": getattr(strategy, "strategy_name", None) or type(strategy).__name__,
        "precision": trainer.precision,
        "accelerator": type(trainer.accelerator).__name__.removesuffix("Accelerator").lower(),
        "num_devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "layout": {} if layout is None else layout.describe(),
    }
