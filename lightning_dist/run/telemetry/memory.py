"""Measure the memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["bytes_in_use", "peak_bytes_since", "peak_memory_mib", "reset_peak"]

_BYTES_PER_MIB = 1024 * 1024

_highest_before_reset = 0.0
"""The peak of the resident memory, in MiB, at the last :func:`reset_peak`."""


def _has_allocator(device: torch.device) -> bool:
    """Return whether torch allocates the memory of ``device`` by an allocator that counts bytes, as that of CUDA."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device.type), "max_memory_allocated")


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB.

    For an accelerator, this is the peak of the caching allocator (``max_memory_allocated``) since the start or the last
    ``reset_peak_memory_stats``. For the CPU, it is the peak resident set size of the process, which includes code and
    libraries.

    Args:
        device: The device that holds the model.
    """
    if _has_allocator(device):
        return int(torch.get_device_module(device.type).max_memory_allocated(device)) / _BYTES_PER_MIB
    return max(_highest_before_reset, _peak_resident_mib())


def bytes_in_use(device: torch.device) -> int | None:
    """Return the bytes that the caching allocator has allocated, or else the resident set size; None: unknown."""
    if _has_allocator(device):
        return int(torch.get_device_module(device.type).memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def reset_peak(device: torch.device) -> None:
    """Begin a new peak for :func:`peak_bytes_since`, where the system can; :func:`peak_memory_mib` keeps the old one.

    The peak of an accelerator is left as it is, because the user may have reset it.
    """
    global _highest_before_reset
    if _has_allocator(device):
        return
    before = _peak_resident_mib()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
    _highest_before_reset = max(_highest_before_reset, before)


def peak_bytes_since(device: torch.device) -> int:
    """Return the peak since the last :func:`reset_peak`."""
    if _has_allocator(device):
        return int(torch.get_device_module(device.type).max_memory_allocated(device))
    return int(_peak_resident_mib() * _BYTES_PER_MIB)


def _peak_resident_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss counts bytes on macOS, KiB on every other Unix.
    return peak / _BYTES_PER_MIB if sys.platform == "darwin" else peak / 1024
