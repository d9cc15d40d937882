"""Measure how long operations take on this machine's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import DispatchMode
from lightning_dist.plugins.planning.forked import in_forks
from lightning_dist.run.simulation import Operation, Shape

__all__ = ["host_seconds", "measured_seconds"]

_LONG_S = 0.01
"""Time after which an operation is not repeated once more."""

_VERY_LONG_S = 0.5
"""Time after which an operation is not repeated at all."""

_FEWEST, _MOST = 3, 20
"""Numbers of repetitions."""

_LARGEST_BYTES = 2**30
"""An operation whose tensors take more than this is not measured."""


def measured_seconds(
    operations: Iterable[Operation], device: torch.device, num_processes: int
) -> dict[Operation, float]:
    """Return the seconds of each operation, the median of some repetitions on tensors of the same shapes.

    Args:
        operations: The operations. Those that cannot be run alone, or need much memory, are left out of the result.
        device: Device on which they run.
        num_processes: Number of processes that run them at the same time, each with a core of its own, on the CPU. They
            share the memory's bandwidth as the ranks of a training do. Accelerators are measured by this process.
    """
    possible = [one for one in operations if one.arguments is not None and one.num_bytes <= _LARGEST_BYTES]
    measure = partial(_seconds_of_all, possible, device)
    if device.type != "cpu":
        found = [measure()]
        torch.get_device_module(device.type).empty_cache()
    else:
        outcomes = in_forks([measure] * num_processes, num_processes)
        found = [result for _, result, _ in outcomes if result is not None]
    times = zip(*found, strict=True) if found else ()
    return {
        operation: fmean(seconds) for operation, seconds in zip(possible, times, strict=False) if None not in seconds
    }


def _seconds_of_all(operations: Sequence[Operation], device: torch.device) -> list[float | None]:
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    with torch.no_grad():
        return [_seconds(operation, device) for operation in operations]


def _seconds(operation: Operation, device: torch.device) -> float | None:
    """Return the seconds of one operation; None: it cannot be run alone."""
    assert operation.arguments is not None
    given, named = operation.arguments
    function: Any = torch.ops
    for name in operation.name.split("."):
        function = getattr(function, name)
    try:
        # Lists of tensors were described as tuples, which operations accept as well.
        args = [_made(value, device) for value in given]
        kwargs = {name: _made(value, device) for name, value in named}
        return _median_of(lambda: function(*args, **kwargs), device)
    except Exception:  # Values that fit each other, such as indices, are not known here.
        return None


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, Shape):
        return _tensor(value, device)
    if isinstance(value, tuple):
        return [_made(one, device) for one in value]
    return device if isinstance(value, torch.device) else value


def _tensor(shape: Shape, device: torch.device) -> Tensor:
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
    if 0 in shape.size:
        num_elements = 0
    if shape.dtype.is_floating_point:
        flat = torch.rand(num_elements, device=device).to(shape.dtype)
    elif shape.dtype is torch.bool:
        flat = torch.ones(num_elements, dtype=torch.bool, device=device)
    else:  # These may be indices.
        flat = torch.zeros(num_elements, dtype=shape.dtype, device=device)
    return flat.as_strided(shape.size, shape.stride)


def _median_of(call: Callable[[], Any], device: torch.device, fewest: int = _FEWEST) -> float:
    _wait(device)
    start = perf_counter()
    call()
    _wait(device)
    if (first := perf_counter() - start) > _VERY_LONG_S:  # What the first call does besides is a small part of it.
        return first
    times: list[float] = []
    while len(times) < fewest or (sum(times) < _LONG_S and len(times) < _MOST):
        _wait(device)
        start = perf_counter()
        call()
        _wait(device)
        times.append(perf_counter() - start)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


class _Counter(DispatchMode):
    """Count operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def host_seconds() -> float:
    """Return the seconds that the host needs for an operation, besides the operation itself, in a training step.

    They are measured with a network of tiny layers, whose operations take no time: what is left is Python, autograd and
    the modules' calls. Between the layers are products of matrices, whose own time is subtracted: they take the caches
    from Python, as those of a model do.
    """
    (outcome,) = in_forks([_host_seconds], 1)
    return 0.0 if outcome[1] is None else outcome[1]


def _host_seconds() -> float:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    tiny = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(_NUM_TINY)]
    layers = nn.Sequential(*(module for layer in tiny for module in (layer, _Product())))
    data = torch.zeros(2, 4)

    def step() -> None:
        with torch.enable_grad():
            layers(data).sum().backward()

    counter = _Counter()
    with counter:
        step()
    product = _Product()

    def products() -> None:
        for _ in range(2 * _NUM_TINY):
            product(data)

    with torch.no_grad():
        alone = _median_of(lambda: torch.add(data, data), cpu)
        differences = [_median_of(step, cpu, 5) - _median_of(products, cpu, 5) for _ in range(5)]
    return max(median(differences) / counter.number - alone, 0.0)


_NUM_TINY = 16


class _Product(nn.Module):
    """Multiply two matrices in the forward and in the backward, and return the input."""

    matrix = torch.full((256, 256), 0.5)  # Importing this draws no random numbers.

    def forward(self, data: Tensor) -> Tensor:
        """Return ``data``."""
        self._multiply(data)
        if data.requires_grad:
            data.register_hook(self._multiply)
        return data

    def _multiply(self, gradient: Tensor) -> None:
        torch.mm(self.matrix, self.matrix)
