"""Ranks agree on flags, and wait for each other only while the flags change."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_dist.mesh.flag_agreement import FlagAgreement, FlagsChangedError
from tests.pool import WorkerPool

USED, UNUSED = [True, True, False], [True, False, False]


def agreements(calls: list[list[list[bool]]]) -> list[list[bool] | str]:
    """Return what each call returns; ``calls`` holds the flags of each rank. The first two flags are expected."""
    dist.init_process_group("gloo")
    agreement = FlagAgreement([0, 1], "test", lambda index: f"flag {index} was set")
    results: list[list[bool] | str] = []
    for flags in calls:
        try:
            results.append(agreement.agree(flags[dist.get_rank()], USED))
        except FlagsChangedError as error:
            results.append(str(error))
            break
    return results


def test_flags_that_any_rank_has_set_are_returned(pool: WorkerPool) -> None:
    calls = [[USED, UNUSED], [[False] * 3, [False, False, True]], [UNUSED, UNUSED]]
    expected = [USED, [False, False, True], UNUSED]
    assert pool.run(agreements, 2, calls) == [expected, expected]


def test_a_rank_that_lacks_flags_gets_those_of_ranks_that_have_gone_on(pool: WorkerPool) -> None:
    calls = [[USED, USED]] * 3 + [[USED, UNUSED], [UNUSED, USED], [UNUSED, UNUSED]]
    expected = [USED] * 5 + [UNUSED]
    assert pool.run(agreements, 2, calls) == [expected, expected]


@pytest.mark.parametrize("early", [False, True])
def test_an_unexpected_flag_is_an_error_only_after_ranks_have_gone_on(pool: WorkerPool, early: bool) -> None:
    late = [True, True, True]
    calls = [[USED, USED]] * (1 if early else 3) + [[late, USED], [USED, USED]]
    first, second = pool.run(agreements, 2, calls)
    if early:
        assert first == second == [USED, late, USED]
    else:
        assert first[:3] == [USED] * 3
        assert second[:4] == [USED] * 4
        assert "flag 2 was set on some ranks" in str(first[3])  # This rank has waited.
        assert "flag 2 was set on some ranks" in str(second[4])  # This one had gone on.


def time_of_each_call(num_calls: int, slow_call: int, sleep_s: float) -> list[float]:
    dist.init_process_group("gloo")
    agreement = FlagAgreement([0, 1], "test", str)
    times = []
    for call in range(num_calls):
        if call == slow_call and dist.get_rank() == 1:
            time.sleep(sleep_s)
        begin = time.perf_counter()
        agreement.agree(USED, USED)
        times.append(time.perf_counter() - begin)
    dist.barrier()
    return times


def test_a_rank_waits_only_for_the_exchange_before(pool: WorkerPool) -> None:
    early = pool.run(time_of_each_call, 2, 3, 1, 1.0)[0]
    assert early[1] > 0.7  # The ranks do not know yet what is usual.
    settled = pool.run(time_of_each_call, 2, 5, 3, 1.0)[0]
    assert settled[3] < 0.5
    assert settled[4] > 0.5  # This call waits for the exchange of the one before.
