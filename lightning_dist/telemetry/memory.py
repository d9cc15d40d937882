"""Peak memory of this process."""

import resource
import sys

import torch

_BYTES_PER_MIB = 1024 * 1024


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory this process has held, in MiB.

    On a CUDA device that is what the caching allocator handed out (``max_memory_allocated``), since the start or the
    last ``torch.cuda.reset_peak_memory_stats``. On any other device it is the process's peak resident set, code and
    libraries included, which the operating system never lowers again.

    Args:
        device: The device that holds the model.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _BYTES_PER_MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss counts bytes on macOS, KiB on every other Unix.
    return peak / _BYTES_PER_MIB if sys.platform == "darwin" else peak / 1024
