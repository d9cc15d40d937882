"""Choose the sizes of models whose speed and memory are measured, by the kind of machine."""

from __future__ import annotations

import math
from dataclasses import replace

from examples.gpt.model import VOCAB_SIZE
from tests.bench.workload import Workload
from tests.gpu.machine import Machine

__all__ = ["flops_per_token", "num_parameters", "workload"]

SIZES = {
    "124M": Workload(dim=768, num_layers=17, num_heads=12, context=1024, global_batch_size=16, device="cuda"),
    "1B": Workload(dim=2048, num_layers=20, num_heads=16, context=2048, global_batch_size=4, device="cuda"),
}
"""The examples' GPT, whose vocabulary is so small that it has more blocks than GPT-2 of the same size.

Two models of 1B with their optimizer states need 32 GiB where two ways of training take turns, besides the activations.
"""

TINY = Workload(dim=64, num_layers=4, num_heads=2, context=32, global_batch_size=8, text=__file__)


def workload(machine: Machine, size: str, batch_divisor: int = 1) -> Workload:
    """Return the workload of a size on a GPU, and a tiny one elsewhere.

    Args:
        machine: The machine.
        size: Key of ``SIZES``.
        batch_divisor: Number by which the batch is smaller.
    """
    if machine.kind != "cuda":
        return TINY
    return replace(SIZES[size], global_batch_size=SIZES[size].global_batch_size // batch_divisor)


def _in_blocks(size: Workload) -> int:
    hidden = math.ceil(8 * size.dim / 3 / 32) * 32
    return size.num_layers * (4 * size.dim**2 + 3 * size.dim * hidden)


def num_parameters(size: Workload) -> int:
    """Return the number of parameters of the GPT, without those of norms."""
    return _in_blocks(size) + 2 * VOCAB_SIZE * size.dim


def flops_per_token(size: Workload) -> float:
    """Return the floating-point operations that a training step needs for a token (Chowdhery et al., 2022, PaLM, B)."""
    products = _in_blocks(size) + VOCAB_SIZE * size.dim
    return 6.0 * products + 12.0 * size.num_layers * size.dim * size.context
