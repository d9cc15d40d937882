"""Warn if torch or Lightning is of a version that this package was not made for.

Private names of both are used, and may change in any minor version. pyproject.toml declares the same ranges, but pip
can be told to ignore them.
"""

from __future__ import annotations

import re
import warnings

import lightning
import torch

__all__ = ["SUPPORTED", "warn_of_other_versions"]

SUPPORTED = {"torch": ((2, 11), (2, 14)), "lightning": ((2, 6), (2, 7))}
"""The first version that this package is made for, and the first one that is not, of each package."""


def warn_of_other_versions() -> None:
    """Warn of each package whose version is outside of its range."""
    for name, version in (("torch", torch.__version__), ("lightning", lightning.__version__)):
        first, end = SUPPORTED[name]
        major, minor = map(int, re.findall(r"\d+", str(version))[:2])
        if not first <= (major, minor) < end:
            supported = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
            warnings.warn(
                f"{name} {version} is installed, but lightning-dist is made for {name}{supported}, of which it uses"
                f' private names: pip install "{name}{supported}".',
                stacklevel=2,
            )
