"""Compare tokens per second and peak memory with a training loop that is written by hand on torch."""

from __future__ import annotations

import os
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.run.telemetry import peak_memory_mib
from lightning_dist.run.telemetry.peak import peak_of
from tests.bench import handwritten
from tests.bench.harness import LOSS_TOLERANCE_BFLOAT16, EndStep, Pace, Pairs, average_orders, compare_steps
from tests.bench.sides import SIDES, with_trainer
from tests.bench.workload import Workload
from tests.gpu.check import Found
from tests.gpu.checks.sizes import flops_per_token, num_parameters, workload
from tests.gpu.ranks import Ranks

__all__ = ["COMPARISONS", "step_time"]

BOUND = 0.98
"""The smallest accepted number of tokens per second, relative to the loop by hand."""

COMPARISONS = {
    "full_shard": ("full_shard", "fully_shard"),
    "data_parallel": ("data_parallel", "plain"),
    "data_parallel-ddp": ("data_parallel", "ddp"),
}
"""The compared ways of training, by the names of checks."""

WAYS: dict[str, Any] = {
    "full_shard": SIDES["full_shard_bf16"],
    "fully_shard": SIDES["by_hand_bf16_one_shot"],
    "data_parallel": partial(with_trainer, "data_parallel", precision="bf16-mixed"),
    "plain": partial(handwritten.train_alone, in_bfloat16=True),
    "ddp": partial(handwritten.train_ddp, in_bfloat16=True),
}
"""Ways of training in bfloat16 under autocast; the last three are written by hand."""


def compare(name: str, size: Workload, pace: Pace, is_ours_first: bool) -> Pairs:
    """Return pairs of seconds per step."""
    _connect(size)
    ours, theirs = (partial(_train, way, size) for way in COMPARISONS[name])
    return compare_steps(ours, theirs, pace, is_ours_first, LOSS_TOLERANCE_BFLOAT16)


def peak_mib(way: str, size: Workload, num_steps: int = 4) -> float:
    """Return the peak of the memory of some steps, in MiB."""
    _connect(size)
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []

    def end_step(loss: Tensor) -> bool:
        losses.append(loss)
        return len(losses) < num_steps

    WAYS[way](size, end_step)
    return peak_memory_mib(torch.device(size.device))


def _train(way: str, size: Workload, end_step: EndStep) -> None:
    """Train in a thread, which has a current device of its own."""
    _choose_device(size)
    WAYS[way](size, end_step)


def _choose_device(size: Workload) -> None:
    if size.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _connect(size: Workload) -> None:
    """Initialize the default process group, by which tensors on the CPU can be sent as well."""
    _choose_device(size)
    dist.init_process_group("cpu:gloo,cuda:nccl" if size.device == "cuda" else "gloo")


def peak_flops(device: str) -> float:
    """Return the peak of a device in bfloat16, in operations per second."""
    return peak_of(torch.device(device), torch.bfloat16).flops_per_s


def step_time(ranks: Ranks, num_ranks: int, name: str, size_name: str, seconds: float) -> Found:
    """Let a way of :data:`COMPARISONS` and the loop by hand take turns, and measure the memory of each.

    Args:
        ranks: The ranks of the check.
        num_ranks: Number of ranks.
        name: Key of ``COMPARISONS``.
        size_name: Key of ``SIZES``.
        seconds: Longest time of measurements.
    """
    size = workload(ranks.machine, size_name)
    pace = Pace(min_pairs=8, max_width=0.02, max_seconds=seconds / 2, steps=3, warmup_turns=3)
    if not ranks.is_cuda:
        pace = Pace(min_pairs=1, max_width=1e9, max_seconds=1, warmup_turns=1)
    peaks = [max(ranks.run(peak_mib, num_ranks, way, size)) for way in COMPARISONS[name]]
    orders = [ranks.run(compare, num_ranks, name, size, pace, first)[0] for first in (True, False)]
    pairs = average_orders(*orders)
    tokens = size.global_batch_size * size.context
    limit = ranks.run(peak_flops, 1, size.device)[0] * num_ranks
    rates = [tokens / median(side) for side in (pairs.ours, pairs.theirs)]
    mfus = [rate * flops_per_token(size) / limit for rate in rates]
    ratio, interval = 1 / pairs.median, pairs.interval
    spread = f" ({1 / interval[1]:.3f} to {1 / interval[0]:.3f})" if interval else ""
    details = [f"GPT with {num_parameters(size):,} parameters, {tokens:,} tokens in a step, {len(pairs)} pairs"]
    for way, rate, mfu, peak in zip(COMPARISONS[name], rates, mfus, peaks, strict=True):
        details.append(f"{way:<16}{rate:>14,.0f} tokens/s   MFU {mfu:6.1%}   peak {peak:>10,.0f} MiB")
    figure = (
        f"{rates[0]:,.0f} tokens/s, {ratio:.3f}{spread} of {COMPARISONS[name][1]};"
        f" MFU {mfus[0]:.1%}; memory {peaks[0] / peaks[1]:.3f}"
    )
    return Found(figure, ratio >= BOUND or not ranks.is_cuda, tuple(details))
