"""Say how many floating-point operations per second a device can run at most."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import date
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

__all__ = ["Peak", "cache_folder", "known_peak", "measured_peak", "peak_of"]

_TERA = 1e12

_DENSE: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "H100 NVL": (835, 417, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989, 494, 67),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "A10": (125, 62.5, 31.2),
    "MI300X": (1307, 654, 163),
}
"""Peaks by part of the device's name: TFLOP/s in bfloat16 or float16, in TF32, and in float32, without sparsity.

They are from the vendors' data sheets (NVIDIA H100, H200, A100, L40S, L4 and A10 Tensor Core GPU; NVIDIA HGX B200 and
GB200 NVL72, per GPU; AMD Instinct MI300X); figures with sparsity are halved. The first entry that matches is used.
"""


class Peak(NamedTuple):
    """Hold the largest number of floating-point operations per second of a device, and where the number is from."""

    flops_per_s: float
    source: str


@cache
def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of ``device`` for matrix products in ``dtype``.

    The peak of a device that is in no data sheet known here, such as a CPU, is measured once on a machine, which takes
    less than a second, and kept in a file for later runs, so that their utilizations can be compared (see
    :func:`cache_folder`). Processes that need it at the same time wait for the first of them.

    Args:
        device: A device of this process.
        dtype: Floating-point dtype in which products are computed.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = known_peak(name, dtype, torch.get_float32_matmul_precision() != "highest")
    return _kept_peak(device, dtype, name) if known is None else known


def cache_folder() -> Path:
    """Return the folder of what is kept between runs of this user, which may be deleted at any time.

    It is that of the environment variable ``LIGHTNING_DIST_CACHE``, or ``lightning-dist`` in ``XDG_CACHE_HOME``, which
    by default is ``~/.cache``.
    """
    given = os.environ.get("LIGHTNING_DIST_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "lightning-dist"))


def _kept_peak(device: torch.device, dtype: torch.dtype, name: str) -> Peak:
    """Return the peak that an earlier process of this machine has measured, or measure and keep it."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    key = f"{name}{threads}, {dtype}, torch {torch.__version__}"
    path = cache_folder() / f"peaks-{socket.gethostname()}.json"  # Nodes that share the folder need not wait in turn.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = _read(path)
            if key not in kept:
                measured = measured_peak(device, dtype)
                kept[key] = [measured.flops_per_s, f"{measured.source} on {date.today()}, kept in {path}"]
                part = path.with_suffix(".part")
                part.write_text(json.dumps(kept, indent=1))
                part.replace(path)
            flops_per_s, source = kept[key]
            return Peak(float(flops_per_s), str(source))
    except (OSError, TypeError, ValueError):  # Without a place for it, or with a damaged file, it is not kept.
        return measured_peak(device, dtype)


def _read(path: Path) -> dict[str, list[float | str]]:
    try:
        kept = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return kept if isinstance(kept, dict) else {}


def known_peak(name: str, dtype: torch.dtype, allows_tf32: bool) -> Peak | None:
    """Return the peak from the data sheet of the device called ``name``; None: there is none.

    Args:
        name: The device's name, such as ``NVIDIA H100 80GB HBM3``.
        dtype: Floating-point dtype in which products are computed.
        allows_tf32: Whether products in float32 may be computed in TF32.
    """
    column = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1 if allows_tf32 else 2}.get(dtype)
    words = name.replace("-", " ")
    entry = next((entry for entry in _DENSE if f" {entry} " in f" {words} "), None)
    if column is None or entry is None:
        return None
    kind = ("bfloat16 and float16", "TF32", "float32")[column]
    return Peak(_DENSE[entry][column] * _TERA, f"data sheet of {entry}, dense {kind}")


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None) -> Peak:
    """Return the rate of the fastest of some products of square matrices.

    Args:
        device: A device of this process.
        dtype: Floating-point dtype in which products are computed.
        size: Number of rows and columns; None: 512 on CPUs, where the fastest of many short products is hardly
            slower beside other processes, and 8192 on accelerators.
    """
    size = size or (512 if device.type == "cpu" else 8192)
    with torch.no_grad():
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        product = left @ right
        best, begin = float("inf"), perf_counter()
        while perf_counter() - begin < _SECONDS:
            start = perf_counter()
            torch.mm(left, right, out=product)
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize(device)
            best = min(best, perf_counter() - start)
    return Peak(2 * size**3 / best, f"measured by products of {size} x {size} matrices")


_SECONDS = 0.2
"""Time for which products are measured."""
