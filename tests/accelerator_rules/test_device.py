"""The simulated accelerator finds what nothing orders, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator_rules import NAME
from tests.pool import RankFailed, WorkerPool

SIZE = 1000


def _device() -> Any:
    return torch.get_device_module(NAME)


def _ones(**kwargs: Any) -> Tensor:
    return torch.ones(SIZE, device=NAME, **kwargs)


# Each function is run without and with what it needs in order not to be a race.


def read_after_write(is_ordered: bool) -> None:
    stream, tensor = _device().Stream(), _ones()
    if is_ordered:
        stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        kept = tensor * 2
    _device().current_stream().wait_stream(stream)
    del kept


def write_after_read(is_ordered: bool) -> None:
    stream, tensor = _device().Stream(), _ones()
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        kept = tensor * 2
    if is_ordered:
        _device().current_stream().wait_event(stream.record_event())
    tensor.add_(1)
    _device().current_stream().wait_stream(stream)
    del kept


def write_after_the_host_waited(is_ordered: bool) -> None:
    stream, tensor = _device().Stream(), _ones()
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        kept = tensor * 2
    event = stream.record_event()
    if is_ordered:
        event.synchronize()
    tensor.add_(1)
    del kept


def write_after_the_event_was_reached(is_ordered: bool) -> None:
    stream, tensor = _device().Stream(), _ones()
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        tensor.mul_(2)
    event = stream.record_event()
    while is_ordered and not event.query():
        pass
    tensor.add_(1)


def memory_that_another_stream_uses(is_ordered: bool) -> None:
    stream, tensor = _device().Stream(), _ones()
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        kept = tensor * 2
    if is_ordered:
        tensor.record_stream(stream)
    del tensor
    _ones().add_(1)
    _device().current_stream().wait_stream(stream)
    del kept


def backward_on_the_stream_of_the_forward(is_ordered: bool) -> None:
    stream = _device().Stream()
    weight = _ones(requires_grad=True)
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        loss = (weight * 2).sum()
    loss.backward()  # Autograd runs this on the stream of the forward, and then lets the current stream wait.
    if not is_ordered:
        with _device().stream(_device().Stream()):
            weight.grad.add_(1)
    weight.grad.add_(1)


def destination_of_a_copy(is_ordered: bool) -> None:
    copy = torch.zeros(SIZE, pin_memory=True)
    copy.copy_(_ones(), non_blocking=True)
    assert copy.isnan().all()
    if not is_ordered:
        copy.add_(1).fill_(3)
    _device().current_stream().synchronize()
    assert (copy == 1).all()


def source_of_a_copy(is_ordered: bool) -> None:
    source = torch.ones(SIZE, pin_memory=True)
    tensor = source.to(NAME, non_blocking=True)
    if is_ordered:
        _device().synchronize()
    source.fill_(2)
    _device().synchronize()
    assert tensor.sum().item() == SIZE


def pinned_memory_between_streams(is_ordered: bool) -> None:
    stream, pinned = _device().Stream(), torch.zeros(SIZE, pin_memory=True)
    pinned.copy_(_ones(), non_blocking=True)
    if is_ordered:
        stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        back = pinned.to(NAME, non_blocking=True)  # The stream sees the values before the host does.
        assert pinned.isnan().all()
        assert back.sum().item() == SIZE


CASES: list[Callable[[bool], None]] = [
    read_after_write,
    write_after_read,
    write_after_the_host_waited,
    write_after_the_event_was_reached,
    memory_that_another_stream_uses,
    backward_on_the_stream_of_the_forward,
    destination_of_a_copy,
    source_of_a_copy,
    pinned_memory_between_streams,
]


@pytest.mark.parametrize("case", CASES)
def test_what_nothing_orders_is_found(simulated: WorkerPool, case: Callable[[bool], None]) -> None:
    simulated.run(case, 1, True)
    with pytest.raises(RankFailed, match=r"RaceError: \d races?:") as error:
        simulated.run(case, 1, False)
    assert f"in {case.__name__}" in str(error.value)
    assert f"({4 * SIZE} bytes)" in str(error.value)


def use_parts() -> None:
    stream, tensor = _device().Stream(), _ones()
    stream.wait_stream(_device().current_stream())
    with _device().stream(stream):
        tensor[: SIZE // 2].add_(1)
    tensor[SIZE // 2 :].add_(1)
    _device().synchronize()


def test_parts_of_a_tensor_are_told_apart(simulated: WorkerPool) -> None:
    simulated.run(use_parts, 1)


def count_waits() -> dict[str, int]:
    from tests.accelerator_rules.host_waits import counted

    tensor, pinned = _ones(), torch.ones(SIZE, pin_memory=True)
    event = _device().current_stream().record_event()
    with counted() as counter:
        tensor.cpu(), tensor.sum().item(), tensor.tolist()
        torch.ones(SIZE).to(NAME)
        torch.ones(SIZE).to(NAME, non_blocking=True)
        tensor.copy_(pinned, non_blocking=True)
        tensor[tensor > 0], torch.nonzero(tensor), torch.bincount(tensor.long())
        tensor.repeat_interleave(torch.full((SIZE,), 2, device=NAME), output_size=2 * SIZE)
        tensor[tensor > 0] = 0.0
        event.synchronize()  # The host knows already that it was reached.
        tensor.add_(1)
        _device().current_stream().synchronize()
        _device().current_stream().synchronize()
    numbers: dict[str, int] = {}
    for wait, number in counter.waits.items():
        numbers[wait.kind] = numbers.get(wait.kind, 0) + number
    return numbers


def test_waits_of_the_host_are_counted(simulated: WorkerPool) -> None:
    assert simulated.run(count_waits, 1) == [
        {"device to host": 3, "host to device": 1, "pageable": 1, "operations": 3, "synchronize": 1}
    ]


def use_memory() -> tuple[int, int, bool, bool]:
    module = _device()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    tensor = _ones()
    tensor.untyped_storage().resize_(0)
    peak, after = module.max_memory_allocated() - before, module.memory_allocated() - before
    total = module.mem_get_info()[1]
    module.set_total_memory(module.memory_allocated() + 100)
    try:
        is_full = False
        _ones()
    except torch.OutOfMemoryError:
        is_full = True
    module.set_total_memory(total)
    try:
        is_refused = False
        _ones() + torch.ones(SIZE)
    except RuntimeError as error:
        is_refused = "same device" in str(error)
    return peak, after, is_full, is_refused


def test_memory_is_counted_and_limited(simulated: WorkerPool) -> None:
    assert simulated.run(use_memory, 1) == [(4 * SIZE, 0, True, True)]
