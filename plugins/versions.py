"""Warn if torch or Lightning is of a version with which this package was not tested.

Private names of both are used, and may change in any minor version. pyproject.toml declares the same ranges, but pip
can be told to ignore them.
"""

from __future__ import annotations

import re
import warnings

import lightning
import torch

__all__ = ["TESTED", "warn_of_untested_versions"]

TESTED = {"torch": ((2, 11), (2, 14)), "lightning": ((2, 6), (2, 7))}
"""The first version that works, and the first one that is not tested, of each package."""


def warn_of_untested_versions() -> None:
    """Warn of each package whose version is outside of the tested range."""
    for name, version in (("torch", torch.__version__), ("lightning", lightning.__version__)):
        first, end = TESTED[name]
        major, minor = map(int, re.findall(r"\d+", str(version))[:2])
        if not first <= (major, minor) < end:
            tested = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
            warnings.warn(
                f"{name} {version} is installed, but lightning-dist is tested with {name}{tested}, of which it uses"
                f' private names: pip install "{name}{tested}".',
                stacklevel=2,
            )
