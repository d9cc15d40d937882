"""Measure the peak memory of this process."""

import resource
import sys

import torch

_BYTES_PER_MIB = 1024 * 1024


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB.

    For a CUDA device, this is the peak of the caching allocator (``max_memory_allocated``) since the start or the last
    ``torch.cuda.reset_peak_memory_stats``. For any other device, it is the peak resident set size of the process, which
    includes code and libraries and which the operating system never resets.

    Args:
        device: The device that holds the model.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _BYTES_PER_MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss counts bytes on macOS, KiB on every other Unix.
    return peak / _BYTES_PER_MIB if sys.platform == "darwin" else peak / 1024
