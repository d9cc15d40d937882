"""Write times and bandwidths with units that suit their size."""

from __future__ import annotations

__all__ = ["bandwidth_text", "flops_text", "seconds_text"]


def bandwidth_text(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s or MB/s, in which a MB is a million bytes."""
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def flops_text(flops_per_s: float) -> str:
    """Return floating-point operations per second in TFLOP/s or GFLOP/s."""
    return f"{flops_per_s / 1e12:.3g} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.3g} GFLOP/s"


def seconds_text(seconds: float) -> str:
    """Return a time in s, ms or µs."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
