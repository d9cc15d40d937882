"""Measure the devices of the ranks, and find those that are slower than they should be or used by others."""

from __future__ import annotations

import os
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median_high
from time import perf_counter

import torch

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.format import bandwidth_text, flops_text
from lightning_dist.run.doctor.profile import DeviceFigures
from lightning_dist.run.doctor.ranks import Ranks
from lightning_dist.run.telemetry.peak import known_peak, measured_peak

__all__ = ["check_devices", "copy_bandwidth", "device_memory", "device_name", "judge_devices", "num_cores"]

SLOW_AGAINST_DATA_SHEET = 0.5
"""Large products of matrices reach more than 60% of the data sheet on a device that is whole and unused."""

SLOW_AGAINST_OTHERS = 0.7
"""GPUs of one model differ by 8% on average and by 22% at most, by manufacture and temperature (Sinha et al., Not All
GPUs Are Created Equal, SC 2022)."""

LEAST_FREE_OF_ACCELERATOR = 0.8
"""torch's context and NCCL need about a GiB, which is far less than the rest."""

LEAST_FREE_OF_HOST = 0.1

_TFLOAT32 = "tfloat32"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPES_OF_ACCELERATOR = {**_DTYPES, "float16": torch.float16, _TFLOAT32: torch.float32}

_SIZE_ON_CPU = 512
"""CPUs without instructions for bfloat16 would take seconds for larger matrices."""

_COPIED_BYTES, _COPIED_BYTES_OF_ACCELERATOR = 2**27, 2**30
_NUM_COPIES = 5


def check_devices(examination: Examination) -> list[Finding]:
    """Measure the devices of all ranks at the same time, as they are used in a training."""
    ranks = examination.ranks
    free, total = device_memory(ranks.device)
    ranks.gather(None)
    own = DeviceFigures(
        ranks.rank,
        ranks.hosts[ranks.rank],
        device_name(ranks.device),
        total,
        free,
        copy_bandwidth(ranks.device),
        _products(ranks.device),
    )
    examination.devices[:] = ranks.gather(own)
    return judge_devices(examination.devices, ranks)


def num_cores() -> int:
    """Return the number of cores that this process may use, which a scheduler of jobs may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, or of the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def _products(device: torch.device) -> dict[str, float]:
    precision = torch.get_float32_matmul_precision()
    rates = {}
    try:
        for name, dtype in (_DTYPES if device.type == "cpu" else _DTYPES_OF_ACCELERATOR).items():
            torch.set_float32_matmul_precision("high" if name == _TFLOAT32 else "highest")
            rates[name] = measured_peak(device, dtype, _SIZE_ON_CPU if device.type == "cpu" else None).flops_per_s
    finally:
        torch.set_float32_matmul_precision(precision)
    return rates


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Return the bytes that a copy in the device's memory reads and writes per second.

    Args:
        device: A device of this process.
        num_bytes: Bytes that are copied; None: so many that no cache holds them.
    """
    num_bytes = num_bytes or (_COPIED_BYTES if device.type == "cpu" else _COPIED_BYTES_OF_ACCELERATOR)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, fastest = torch.empty_like(source), float("inf")
    for _ in range(_NUM_COPIES):
        start = perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        fastest = min(fastest, perf_counter() - start)
    return 2 * num_bytes / fastest


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return the free bytes and all bytes of the device's memory, or of the host's, as far as a container limits it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    lines = Path("/proc/meminfo").read_text()
    free, total = (1024 * int(re.findall(rf"^{name}:\s*(\d+)", lines, re.MULTILINE)[0]) for name in _OF_MEMINFO)
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None and limit < total:
        free, total = min(free, limit - used), limit
    return free, total


_OF_MEMINFO = ("MemAvailable", "MemTotal")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def judge_devices(devices: Sequence[DeviceFigures], ranks: Ranks) -> list[Finding]:
    """Describe the devices, and compare them with their data sheets and with each other."""
    by_name: dict[str, list[DeviceFigures]] = defaultdict(list)
    for device in devices:
        by_name[device.name].append(device)
    findings = [Finding("devices", "pass", " ".join(_described(name, same) for name, same in by_name.items()))]
    if len(by_name) > 1:
        findings.append(
            Finding(
                "devices",
                "warn",
                f"The ranks have different devices: {', '.join(by_name)}. A step waits for the slowest of them.",
                "Use nodes with devices of one kind, or give those with slower ones a run of their own.",
            )
        )
    for same in by_name.values():
        findings += _slow(same, ranks)
    findings += _used_memory(devices, ranks)
    return findings


def _described(name: str, devices: Sequence[DeviceFigures]) -> str:
    products = ", ".join(
        f"{dtype} {_range([device.flops_per_s[dtype] for device in devices])}" for dtype in devices[0].flops_per_s
    )
    copies = bandwidth_text(min(device.memory_bytes_per_s for device in devices))
    free = min(device.free_bytes for device in devices) / 2**30
    return (
        f"{len(devices)} x {name}: products of matrices {products}; copies in memory {copies};"
        f" {free:,.1f} of {devices[0].memory_bytes / 2**30:,.1f} GiB free."
    )


def _range(numbers: Sequence[float]) -> str:
    low, high = flops_text(min(numbers)), flops_text(max(numbers))
    return low if low == high else f"{low} to {high}"


def _slow(same: Sequence[DeviceFigures], ranks: Ranks) -> list[Finding]:
    """Find devices that are slow beside others of the same name, or else beside their data sheet."""
    findings = []
    for dtype in same[0].flops_per_s:
        usual = median_high([device.flops_per_s[dtype] for device in same])
        slow = [device for device in same if device.flops_per_s[dtype] < SLOW_AGAINST_OTHERS * usual]
        if slow:
            worst = min(device.flops_per_s[dtype] for device in slow)
            findings.append(
                Finding(
                    "slow devices",
                    "warn",
                    f"Slower than the others: {ranks.named(device.rank for device in slow)}, with {flops_text(worst)}"
                    f" in {dtype}, where {flops_text(usual)} is usual for {same[0].name}. Every step waits for them.",
                    _WHY_SLOW,
                )
            )
            continue
        peak = known_peak(same[0].name, getattr(torch, dtype, torch.float32), dtype == _TFLOAT32)
        if peak is not None and usual < SLOW_AGAINST_DATA_SHEET * peak.flops_per_s:
            findings.append(
                Finding(
                    "slow devices",
                    "warn",
                    f"{same[0].name} reaches {flops_text(usual)} in {dtype}, less than half of the"
                    f" {flops_text(peak.flops_per_s)} of the {peak.source}.",
                    _WHY_SLOW,
                )
            )
    return findings


_WHY_SLOW = (
    "Look for other processes, a high temperature or a power limit (`nvidia-smi -q -d PERFORMANCE`), and on CPUs for"
    " too many threads (OMP_NUM_THREADS). Leave the node out if it stays slow."
)


def _used_memory(devices: Sequence[DeviceFigures], ranks: Ranks) -> list[Finding]:
    least = LEAST_FREE_OF_HOST if ranks.device.type == "cpu" else LEAST_FREE_OF_ACCELERATOR
    used = [device for device in devices if device.free_bytes < least * device.memory_bytes]
    if not used:
        return []
    worst = min(used, key=lambda device: device.free_bytes / device.memory_bytes)
    return [
        Finding(
            "free memory",
            "warn",
            f"Others use the memory of {ranks.named(device.rank for device in used)}: {worst.free_bytes / 2**30:,.1f}"
            f" of {worst.memory_bytes / 2**30:,.1f} GiB are free, before anything was computed. A run may need more.",
            "Find the processes (`nvidia-smi`, `top`) and end those that are left from earlier runs.",
        )
    ]
