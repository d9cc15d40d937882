"""The backend finds what NCCL refuses, and what NCCL would hang on, mix up or race with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankFailed, WorkerPool


def bitwise_or() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.BOR)


def unsigned_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.uint16))


def transposed() -> None:
    dist.broadcast(torch.ones(2, 3).t(), 0)


def other_operation_on_one_rank() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


def other_size_on_one_rank() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def other_splits_on_one_rank() -> None:
    sends = [1, 2] if dist.get_rank() == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], sends)


def groups_in_other_order() -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = [first, second] if dist.get_rank() == 0 else [second, first]
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


def missing_operation_on_one_rank() -> None:
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def output_read_before_the_wait() -> None:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    total = float(tensor.sum())
    work.wait()
    assert total == 4.0, f"read {total} before the wait"


def output_written_before_the_wait() -> None:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.zero_()
    work.wait()


def input_written_before_the_wait() -> None:
    own = torch.ones(2)
    work = dist.all_gather_into_tensor(torch.empty(4), own, async_op=True)
    own.zero_()
    work.wait()


def send_without_a_partner() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)


def sends_that_wait_for_each_other() -> None:
    peer = 1 - dist.get_rank()
    dist.send(torch.ones(2), peer)
    dist.recv(torch.empty(2), peer)


def message_of_another_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.empty(3), 0)


def from_a_second_thread() -> None:
    dist.all_reduce(torch.ones(2))
    errors: list[Exception] = []

    def run() -> None:
        try:
            dist.all_reduce(torch.ones(2))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


DEFECTS: dict[Callable[[], None], str] = {
    bitwise_or: "Cannot use ReduceOp.BOR with NCCL",
    unsigned_dtype: "not supported for NCCL process group: torch.uint16",
    transposed: "Tensors must be contiguous",
    other_operation_on_one_rank: "have begun different operations",
    other_size_on_one_rank: "have begun different operations",
    other_splits_on_one_rank: "bytes, and is sent",
    groups_in_other_order: "begun the operations of their groups in different orders",
    missing_operation_on_one_rank: "does not end.* have left",
    output_read_before_the_wait: "read nan before the wait",
    output_written_before_the_wait: "an output was changed before the wait",
    input_written_before_the_wait: "an input was changed before the wait",
    send_without_a_partner: "does not end",
    sends_that_wait_for_each_other: "does not end",
    message_of_another_size: "receives 3xfloat32 from rank 0, which sends 2xfloat32",
    from_a_second_thread: "threads .* begin operations of one group",
}


def in_group(function: Callable[[], None]) -> None:
    dist.init_process_group("nccl_rules")
    function()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_defect_is_found(impatient_pool: WorkerPool, defect: Callable[[], None]) -> None:
    with pytest.raises(RankFailed, match=f"(?s){DEFECTS[defect]}"):
        impatient_pool.run(in_group, 2, defect, grace_s=8)


def in_order() -> list[float]:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensor, other = torch.ones(2), torch.full((2,), float(dist.get_rank()))
    works = [dist.all_reduce(tensor, group=first, async_op=True), dist.broadcast(other, 1, second, async_op=True)]
    for work in works:
        work.wait()
    received = torch.empty(1)
    peer = 1 - dist.get_rank()
    messages = [dist.P2POp(dist.isend, tensor[:1], peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [*tensor.tolist(), *other.tolist(), *received.tolist()]


def test_nothing_is_found_where_nothing_is_wrong(ruled_pool: WorkerPool) -> None:
    assert ruled_pool.run(run_in_group, 2) == [[2.0, 2.0, 1.0, 1.0, 2.0]] * 2


def run_in_group() -> list[float]:
    dist.init_process_group("nccl_rules")
    return in_order()
