"""Say how many floating-point operations per second a device can run at most."""

from __future__ import annotations

from functools import cache
from time import perf_counter
from typing import NamedTuple

import torch

__all__ = ["Peak", "known_peak", "measured_peak", "peak_of"]

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

    The peak of a device that is in no data sheet known here, such as a CPU, is measured once, which takes less than a
    second. If other processes use the same cores at that time, it is what is left to this process.

    Args:
        device: A device of this process.
        dtype: Floating-point dtype in which products are computed.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = known_peak(name, dtype, torch.get_float32_matmul_precision() != "highest")
    return measured_peak(device, dtype) if known is None else known


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
        size: Number of rows and columns; None: 1024 on CPUs, and 8192 on accelerators.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
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
