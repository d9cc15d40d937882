"""Read sizes of memory, and find that of a device."""

from __future__ import annotations

import re

import torch

from lightning_dist.run.doctor.devices import device_memory

__all__ = ["memory_of", "parse_memory"]

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def parse_memory(text: str, argument: str) -> int:
    """Return the number of bytes that a size such as ``"80GiB"`` stands for.

    Args:
        text: The size, with its unit.
        argument: Name of the argument that has it, for the error.

    Raises:
        ValueError: If the text is no number with one of the units GiB, MiB, GB and MB.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)\s*", str(text))
    if found is None:
        raise ValueError(f"{argument}={text} is no size: give a number and a unit, such as 80GiB, 80GB or 500MiB.")
    return int(float(found[1]) * _UNITS[found[2]])


def memory_of(device: torch.device, num_ranks: int) -> int:
    """Return the bytes of memory of a rank's device.

    Args:
        device: The device of a rank of this node.
        num_ranks: Number of ranks of this node, which share its memory on the CPU.
    """
    _, total = device_memory(device)
    return total // num_ranks if device.type == "cpu" else total
