"""Define the cases: two ways of training, the figure by which they are compared, and the bound that must be met."""

from __future__ import annotations

import ctypes
import logging
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.run.telemetry import peak_memory_mib
from tests.bench.harness import (
    LOSS_TOLERANCE,
    LOSS_TOLERANCE_BFLOAT16,
    Pace,
    Pairs,
    alternate,
    average_orders,
    compare_steps,
)
from tests.bench.saves import compare_stalls, compare_transfers
from tests.bench.sides import SIDES, missing_package, startup_seconds
from tests.bench.traffic import bytes_per_layer
from tests.bench.workload import Workload
from tests.pool import WorkerPool

__all__ = ["CASES", "Case", "NotMeasuredError", "Result", "Settings", "measure"]


Kind = Literal[
    "step", "large_step", "wide_step", "half_wide_step", "long_step",
    "startup", "memory", "heap", "stall", "write", "load", "traffic",
    "gpu_small_step", "gpu_step", "gpu_memory",
]  # fmt: skip
"""Kinds of comparisons, which :class:`Case` describes."""


@dataclass(frozen=True)
class Case:
    """Describe a comparison of two ways of training or saving by a figure of each.

    The kinds of comparisons are:

    - ``step``: ratio of the milliseconds of a training step.
    - ``large_step``: the same with a model 17 times as large, where the constant costs of a step weigh less.
    - ``wide_step`` and ``half_wide_step``: the same with a model of width 512, and 2,048 or 1,024 tokens in a step.
    - ``long_step``: the same with two sequences of 1,024 tokens in a step.
    - ``gpu_small_step``: the same with the model of ``wide_step`` on a GPU, which waits for the host most of the time.
    - ``gpu_step``: the same with a model of 400 million parameters and 16,384 tokens in a step on a GPU.
    - ``gpu_memory``: ratio of the peaks of the MiB that the caching allocator of a GPU has given out, in ``gpu_step``.
    - ``startup``: difference of the seconds until the first step.
    - ``memory``: ratio of the peaks of a rank's resident MiB. Freed memory goes back to the system, so that the peak is
      the memory that was in use at the same time.
    - ``heap``: the same, but glibc keeps some of the freed memory, as it does by default. The peak varies by about a
      tenth from run to run.
    - ``stall``: ratio of the milliseconds that training waits for a save, in the background and in the foreground.
    - ``write`` and ``load``: ratio of the milliseconds to write a checkpoint to the disk, and to read it.
    - ``traffic``: ratio of the KiB that a rank sends for a layer to those of a formula. They are counted, so one pair
      is enough.

    Args:
        kind: One of the kinds above.
        num_ranks: Number of processes of each side.
        ours: Name of the side that is measured: a key of ``SIDES``, or of ``TRANSFERS`` for ``write`` and ``load``.
        theirs: Name of the side that it is compared with. The same name as ``ours`` makes a control, which shows the
            error of the method.
        bound: Largest accepted value of ours / theirs (ours - theirs for ``startup``); None: the value is only shown.
        at_least: Smallest accepted value, if there is a bound; None: any value up to the bound is accepted.
    """

    kind: Kind
    num_ranks: int
    ours: str
    theirs: str
    bound: float | None = None
    at_least: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the case, by which ``--case`` selects it."""
        return f"{self.kind}-{self.num_ranks}-{self.ours}-{self.theirs}"

    @property
    def unit(self) -> str:
        """Return the unit of both sides' figures."""
        return {"memory": "MiB", "gpu_memory": "MiB", "heap": "MiB", "startup": "s", "traffic": "KiB"}.get(
            self.kind, "ms"
        )


M_MMAP_THRESHOLD = -3  # This is a constant of glibc's malloc.h.
# The following constants are bounds of cases. SAME_COMMUNICATION is for comparisons with the same communication written
# by hand, DDP for comparisons with the strategy of Lightning that does the same, and OF_RAW_BANDWIDTH is 80% of the
# bytes per second of plain files.
SAME_COMMUNICATION = 1.02
DDP = 1.00
FASTER_REDUCE_SCATTER = 0.95
MODEL_PARALLEL = 0.97
DEEPSPEED = 1.00
DEEPSPEED_3 = 0.90
STARTUP_S = 1.5
MEMORY = 1.02
STALL = 0.02
OF_RAW_BANDWIDTH = 1.25
FORMULA = (1.01, 0.99)
ON_GPU = (
    "bf16_compiled", "bf16_selective", "bf16_checkpointing", "bf16_tiled", "bf16_step_in_backward",
    "bf16_offload_optimizer", "bf16_offload_params", "tensorwise", "rowwise",
)  # fmt: skip

CASES = [
    Case("step", 2, "data_parallel", "by_hand_ddp", SAME_COMMUNICATION),
    Case("step", 2, "data_parallel", "ddp", DDP),
    Case("step", 4, "data_parallel", "by_hand_ddp", SAME_COMMUNICATION),
    Case("step", 4, "data_parallel", "ddp", DDP),
    Case("step", 2, "full_shard", "full_shard"),
    Case("step", 2, "full_shard", "by_hand_two_shot", SAME_COMMUNICATION),
    Case("step", 2, "full_shard", "by_hand", FASTER_REDUCE_SCATTER),
    Case("step", 2, "full_shard", "model_parallel", MODEL_PARALLEL),
    Case("step", 2, "full_shard_offload", "by_hand_two_shot_offload", SAME_COMMUNICATION),
    Case("step", 2, "full_shard", "ddp"),
    Case("step", 2, "full_shard_zero_1", "deepspeed_1", DEEPSPEED),
    Case("step", 2, "full_shard_zero_2", "deepspeed_2", DEEPSPEED),
    Case("step", 2, "full_shard_zero_3", "deepspeed_3", DEEPSPEED_3),
    Case("step", 2, "hybrid_2x1", "by_hand_ddp", SAME_COMMUNICATION),
    Case("step", 2, "hybrid_1x2", "by_hand_two_shot", SAME_COMMUNICATION),
    Case("step", 2, "hybrid_2x1", "ddp", DDP),
    Case("step", 4, "full_shard", "full_shard"),
    Case("step", 4, "full_shard", "by_hand_two_shot", SAME_COMMUNICATION),
    Case("step", 4, "full_shard", "by_hand", FASTER_REDUCE_SCATTER),
    Case("step", 4, "full_shard", "model_parallel", MODEL_PARALLEL),
    Case("step", 4, "full_shard", "ddp"),
    Case("step", 4, "full_shard_zero_1", "deepspeed_1", DEEPSPEED),
    Case("step", 4, "full_shard_zero_2", "deepspeed_2", DEEPSPEED),
    Case("step", 4, "full_shard_zero_3", "deepspeed_3", DEEPSPEED_3),
    Case("step", 4, "hybrid_2x2", "by_hand_2x2", SAME_COMMUNICATION),
    Case("step", 4, "hybrid_2x2", "ddp"),
    Case("step", 4, "hybrid_2x2", "deepspeed_3"),
    Case("step", 2, "tensor_parallel", "by_hand_tp", SAME_COMMUNICATION),
    Case("step", 4, "tensor_parallel", "by_hand_tp", SAME_COMMUNICATION),
    Case("long_step", 2, "context_parallel", "by_hand_cp", SAME_COMMUNICATION),
    Case("long_step", 2, "context_parallel_all_gather", "by_hand_cp"),
    Case("long_step", 2, "context_parallel", "full_shard"),
    Case("step", 2, "expert_parallel", "by_hand_ep", SAME_COMMUNICATION),
    Case("step", 2, "expert_parallel", "full_shard_mixture"),
    Case("step", 2, "pipeline_1f1b", "by_hand_1f1b", SAME_COMMUNICATION),
    Case("step", 2, "pipeline_gpipe", "by_hand_gpipe", SAME_COMMUNICATION),
    Case("large_step", 2, "pipeline_1f1b", "by_hand_1f1b", SAME_COMMUNICATION),
    Case("wide_step", 2, "full_shard_bf16", "by_hand_bf16", SAME_COMMUNICATION),
    Case("wide_step", 2, "full_shard_bf16", "full_shard"),
    Case("wide_step", 2, "by_hand_bf16", "by_hand_two_shot"),
    Case("half_wide_step", 2, "full_shard_bf16", "full_shard"),
    Case("half_wide_step", 2, "by_hand_bf16", "by_hand_two_shot"),
    Case("gpu_small_step", 1, "data_parallel", "by_hand_ddp", SAME_COMMUNICATION),
    Case("gpu_small_step", 1, "data_parallel", "ddp", DDP),
    Case("gpu_small_step", 1, "full_shard", "by_hand", SAME_COMMUNICATION),
    Case("gpu_step", 1, "full_shard_bf16", "by_hand_bf16_one_shot", SAME_COMMUNICATION),
    *(Case(kind, 1, f"full_shard_{name}", "full_shard_bf16") for kind in ("gpu_step", "gpu_memory") for name in ON_GPU),
    *(
        Case("gpu_step", 1, f"full_shard_{recipe}_compiled", "full_shard_bf16_compiled")
        for recipe in ("tensorwise", "rowwise")
    ),
    Case("gpu_memory", 1, "full_shard_bf16", "by_hand_bf16_one_shot", MEMORY),
    Case("startup", 2, "hybrid_1x2", "ddp", STARTUP_S),
    Case("startup", 4, "hybrid_2x2", "ddp", STARTUP_S),
    Case("memory", 2, "full_shard", "by_hand_two_shot", MEMORY),
    Case("memory", 2, "full_shard", "by_hand", MEMORY),
    Case("memory", 2, "hybrid_2x1", "by_hand_2x1", MEMORY),
    Case("memory", 4, "hybrid_2x2", "by_hand_2x2", MEMORY),
    Case("memory", 2, "tensor_parallel", "by_hand_tp"),
    Case("memory", 2, "full_shard", "model_parallel"),
    Case("memory", 2, "full_shard", "ddp"),
    Case("heap", 2, "full_shard", "by_hand"),
    Case("traffic", 2, "tensor_parallel", "formula", *FORMULA),
    Case("traffic", 4, "tensor_parallel_4", "formula", *FORMULA),
    Case("stall", 2, "asynchronous", "synchronous", STALL),
    *(
        Case(kind, 2, "full_shard", theirs, OF_RAW_BANDWIDTH if theirs == "raw" else None)
        for kind in ("write", "load")
        for theirs in ("raw", "dcp", "model_parallel")
    ),
]


@dataclass(frozen=True)
class Settings:
    """Configure which models are measured, and for how long.

    Args:
        model: Model for step time and start-up.
        large_model: Model for memory and large steps. It is so large that weights, gradients and optimizer state make
            up most of the memory, rather than the interpreter.
        wide_model: Model for wide steps, whose matrix products are large enough that a faster dtype pays.
        long_model: Model for long steps, with long sequences.
        saved_model: Model for checkpoints, which have 512 MiB of weights and optimizer state.
        gpu_model: Model for steps on a GPU, which it keeps busy.
        sent_model: Model for traffic; its number of heads is divisible by the number of ranks that a layer is split
            over.
        step: Pace of the comparisons of step time.
        startup: Pace of the comparisons of start-up; its ``max_width`` is in seconds.
        memory: Pace of the comparisons of memory.
        saves: Pace of the comparisons of checkpoints.
    """

    model: Workload
    large_model: Workload
    wide_model: Workload
    long_model: Workload
    saved_model: Workload
    gpu_model: Workload
    sent_model: Workload
    step: Pace
    startup: Pace
    memory: Pace
    saves: Pace

    @classmethod
    def full(cls, minutes: float) -> Settings:
        """Return the settings of ``make bench``, which measure each case for at most ``minutes``."""
        return cls(
            model=Workload(),
            large_model=Workload(dim=512, num_layers=10, num_heads=8, global_batch_size=4),
            wide_model=Workload(dim=512, num_heads=8),
            long_model=Workload(context=1024, global_batch_size=2),
            saved_model=Workload(dim=576, num_layers=11, num_heads=8, global_batch_size=4),
            gpu_model=Workload(dim=2048, num_layers=8, num_heads=16, context=2048, global_batch_size=8, device="cuda"),
            sent_model=Workload(num_heads=4),
            step=Pace(min_pairs=40, max_width=0.04, max_seconds=60 * minutes),
            startup=Pace(min_pairs=10, max_width=0.4, max_seconds=60 * minutes),
            memory=Pace(min_pairs=10, max_width=0.04, max_seconds=60 * minutes),
            saves=Pace(min_pairs=20, max_width=0.2, max_seconds=60 * minutes),
        )

    @classmethod
    def quick(cls) -> Settings:
        """Return settings that measure only as much as is needed to show that everything works."""
        tiny = Workload(dim=32, num_layers=2, num_heads=2, context=32, global_batch_size=8, text=__file__)
        few = Pace(min_pairs=6, max_width=1e9, max_seconds=60, steps=1, warmup_turns=1)
        one = replace(few, max_seconds=0)
        return cls(
            model=tiny,
            large_model=tiny,
            wide_model=tiny,
            long_model=replace(tiny, context=64, global_batch_size=2),
            saved_model=tiny,
            gpu_model=replace(tiny, device="cuda"),
            sent_model=replace(tiny, num_heads=4),
            step=few,
            startup=one,
            memory=one,
            saves=replace(one),
        )


@dataclass(frozen=True)
class Result:
    """Hold the result of a case.

    Args:
        case: Case that was measured.
        pairs: Figures of both sides.
        is_narrow: Whether the interval of the median is as narrow as the settings require.
        note: Further text for the printed row.
    """

    case: Case
    pairs: Pairs
    is_narrow: bool
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return whether the bound is met, as text: ``shown``, ``met``, ``NOT MET`` or ``TOO WIDE``.

        The bound is met if the median meets it, and the interval is narrow or below the bound altogether. Without a
        bound, the verdict is ``shown``.
        """
        if self.case.bound is None:
            return "shown"
        at_least = -math.inf if self.case.at_least is None else self.case.at_least
        if not at_least <= self.pairs.median <= self.case.bound:
            return "NOT MET"
        end = self.pairs.interval[1] if self.pairs.interval else math.inf
        return "met" if self.is_narrow or end <= self.case.bound else "TOO WIDE"


class NotMeasuredError(Exception):
    """Report that a case cannot be measured, because a package is not installed."""


def measure(case: Case, settings: Settings) -> Result:
    """Measure ``case`` in new processes.

    Raises:
        NotMeasuredError: If a package is missing.
        RankFailed: If a side failed, or the two sides did not do the same work.
    """
    if missing := missing_package(case.theirs):
        raise NotMeasuredError(f'{missing} is not installed: pip install "lightning-dist[bench]"')
    if case.kind.startswith("gpu") and not torch.cuda.is_available():
        raise NotMeasuredError("there is no GPU")
    by_kind = {
        "step": _measure_steps,
        "large_step": _measure_steps,
        "wide_step": _measure_steps,
        "half_wide_step": _measure_steps,
        "long_step": _measure_steps,
        "gpu_small_step": _measure_steps,
        "gpu_step": _measure_steps,
        "gpu_memory": _measure_memory,
        "startup": _measure_startup,
        "memory": _measure_memory,
        "heap": _measure_memory,
        "traffic": _measure_traffic,
    }
    return by_kind.get(case.kind, _measure_saves)(case, settings)


def _measure_steps(case: Case, settings: Settings) -> Result:
    pace, model = settings.step, settings.model
    if case.kind == "large_step":
        model = replace(settings.large_model, global_batch_size=settings.model.global_batch_size // 2)
    if case.kind in ("wide_step", "half_wide_step", "gpu_small_step"):
        model = settings.wide_model
    if case.kind == "gpu_small_step":
        model = replace(model, device="cuda")
    if case.kind == "gpu_step":
        model = settings.gpu_model
    if case.kind == "long_step":
        model = settings.long_model
    if case.kind == "half_wide_step":
        model = replace(model, global_batch_size=model.global_batch_size // 2)
    half = replace(pace, max_seconds=pace.max_seconds / 2)
    orders = [
        _on_new_workers(
            case.num_ranks, _steps, case.ours, case.theirs, model, half, is_ours_first, timeout_s=half.max_seconds + 300
        )[0]
        for is_ours_first in (True, False)
    ]
    pairs = average_orders(*orders)
    pairs.ours, pairs.theirs = ([1000 * seconds for seconds in side] for side in (pairs.ours, pairs.theirs))
    return Result(case, pairs, pace.is_narrow(pairs.interval))


def _steps(ours: str, theirs: str, workload: Workload, pace: Pace, is_ours_first: bool) -> Pairs:
    _init_process_group(workload)
    tolerance = LOSS_TOLERANCE_BFLOAT16 if "bf16" in ours + theirs else LOSS_TOLERANCE
    trains = partial(SIDES[ours], workload), partial(SIDES[theirs], workload)
    return compare_steps(*trains, pace, is_ours_first, tolerance)


def _measure_saves(case: Case, settings: Settings) -> Result:
    pace = settings.saves
    if case.kind == "stall":
        what: Callable[..., Pairs] = partial(compare_stalls, settings.saved_model, pace)
    else:
        what = partial(compare_transfers, case.kind, case.ours, case.theirs, settings.saved_model, pace)
    pairs = _on_new_workers(case.num_ranks, what, timeout_s=pace.max_seconds + 300)[0]
    pairs.ours, pairs.theirs = ([1000 * seconds for seconds in side] for side in (pairs.ours, pairs.theirs))
    return Result(case, pairs, pace.is_narrow(pairs.interval))


def _measure_startup(case: Case, settings: Settings) -> Result:
    def seconds(side: str) -> float:
        return max(_on_new_workers(case.num_ranks, startup_seconds, side, settings.model))

    pace, pairs = settings.startup, Pairs(by=operator.sub)
    alternate(partial(seconds, case.ours), partial(seconds, case.theirs), pairs, pace.stop_rule())
    return Result(case, pairs, pace.is_narrow(pairs.interval))


def _measure_memory(case: Case, settings: Settings) -> Result:
    before: dict[str, list[float]] = {case.ours: [], case.theirs: []}

    def peak_mib(side: str) -> float:
        model = settings.gpu_model if case.kind == "gpu_memory" else settings.large_model
        ranks = _on_new_workers(case.num_ranks, _memory_mib, side, model, case.kind == "memory")
        peak, at_start = max(ranks)
        before[side].append(at_start)
        return peak

    pace, pairs = settings.memory, Pairs()
    alternate(partial(peak_mib, case.ours), partial(peak_mib, case.theirs), pairs, pace.stop_rule())
    ours, theirs = (
        median(peak - at_start for peak, at_start in zip(peaks, before[side], strict=True))
        for side, peaks in ((case.ours, pairs.ours), (case.theirs, pairs.theirs))
    )
    note = f"over the imports: {ours:.0f} against {theirs:.0f} MiB, {ours / theirs:.3f}"
    return Result(case, pairs, pace.is_narrow(pairs.interval), note)


def _memory_mib(side: str, workload: Workload, give_back: bool, num_steps: int = 4) -> tuple[float, float]:
    """Train, and return the peak of this rank's memory and its size before the model was built, in MiB.

    The memory is the resident memory of the process, or what the caching allocator of a GPU has given out.

    Args:
        side: Key of ``SIDES``.
        workload: Model and data to train on.
        give_back: Whether freed memory goes back to the system.
        num_steps: Number of training steps.
    """
    if give_back and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)  # Setting the initial value again keeps glibc from raising it.
    on_gpu = workload.device == "cuda"
    at_start = 0.0 if on_gpu else psutil.Process().memory_info().rss / 2**20
    _init_process_group(workload)
    losses: list[Tensor] = []

    def end_step(loss: Tensor) -> bool:
        losses.append(loss)
        return len(losses) < num_steps

    SIDES[side](workload, end_step)
    return peak_memory_mib(torch.device(workload.device)), at_start


def _init_process_group(workload: Workload) -> None:
    """Initialize the default process group, by which tensors on the CPU can be sent as well."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if workload.device == "cuda" else "gloo")


def _measure_traffic(case: Case, settings: Settings) -> Result:
    ranks = _on_new_workers(case.num_ranks, bytes_per_layer, case.ours, settings.sent_model)
    ours, theirs = max(ranks)
    return Result(case, Pairs([ours / 1024], [theirs / 1024]), is_narrow=True)


def _on_new_workers(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Run a function on new workers, because memory and caches of earlier runs would influence the figures."""
    on_gpu = any(isinstance(arg, Workload) and arg.device == "cuda" for arg in args)
    pool = WorkerPool(forks=not on_gpu)
    try:
        return pool.run(_quietly, num_ranks, function, *args, timeout_s=timeout_s)
    finally:
        pool.close()


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return function(*args)
