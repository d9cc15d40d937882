"""Compare the versions of the software of all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding

__all__ = ["check_versions", "installed_versions"]

_MUST_BE_EQUAL = ("python", "torch", "lightning", "lightning-dist", "CUDA of torch", "NCCL")
"""Ranks with different ones may order their collectives or pickle objects in different ways, and then hang or fail."""

_OTHERS = ("numpy", "torchmetrics", "torchao", "transformers", "safetensors", "mlflow", "fsspec")
_MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Return the versions of this process by the names of packages and other software."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "lightning", "lightning-dist", *_OTHERS):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = _MISSING
    versions["torch"] = torch.__version__  # It names the build, such as +cu130.
    if torch.version.cuda is not None:
        versions["CUDA of torch"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver = Path("/sys/module/nvidia/version")
    if driver.exists():
        versions["NVIDIA driver"] = driver.read_text().strip()
    return versions


def check_versions(
    examination: Examination, of_this_rank: Callable[[], dict[str, str]] = installed_versions
) -> list[Finding]:
    """Find versions that differ between ranks.

    Args:
        examination: The ranks. It is given the versions of rank 0.
        of_this_rank: Function that returns the versions of this process by name.
    """
    ranks = examination.ranks
    of_ranks = ranks.gather(of_this_rank())
    examination.versions.update({name: text for name, text in of_ranks[0].items() if text != _MISSING})
    different = {}
    for name in dict.fromkeys(name for versions in of_ranks for name in versions):
        holders: dict[str, list[int]] = {}
        for rank, versions in enumerate(of_ranks):
            holders.setdefault(versions.get(name, _MISSING), []).append(rank)
        if len(holders) > 1:
            parts = [f"{text} on {ranks.named(holding)}" for text, holding in holders.items()]
            different[name] = f"{name} is {', and '.join(parts)}"
    if not different:
        shown = ", ".join(f"{name} {text}" for name, text in examination.versions.items())
        return [Finding("versions", "pass", f"All ranks have {shown}.")]
    findings = []
    if serious := [text for name, text in different.items() if name in _MUST_BE_EQUAL]:
        seen = f"{'; '.join(serious)}. Ranks with different ones may hang or fail in a collective."
        findings.append(Finding("versions", "fail", seen, _ADVICE))
    if others := [text for name, text in different.items() if name not in _MUST_BE_EQUAL]:
        seen = f"{'; '.join(others)}. What ranks compute, or read from files, may differ."
        findings.append(Finding("versions", "warn", seen, _ADVICE))
    return findings


_ADVICE = "Install the same on all nodes, from one lock file or container image."
