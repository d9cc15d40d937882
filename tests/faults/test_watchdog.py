"""Test that the watchdog finds, names and ends ranks that hang, and leaves other ranks alone."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.run.watchdog import EXIT_HANG, Watchdog
from lightning_dist.run.watchdog_process.explain import main
from tests.faults import hanging_rank
from tests.faults.hanging_rank import TIMEOUT_S

pytestmark = pytest.mark.alone

KILLED = -signal.SIGKILL
WAITS = "rank 0 waits in all_reduce #6 of group default_pg (ranks 0, 1)"
NOT_ENTERED = (
    "  rank 0: waits in all_reduce #6 of group default_pg (ranks 0, 1), which rank 1 has not entered; it is in "
)
EXPLAINED = {
    **dict.fromkeys(
        ("sleep", "busy"),
        "rank 1 has not entered all_reduce #6 of group default_pg (ranks 0, 1), in which rank 0 waits",
    ),
    **dict.fromkeys(
        ("stop", "gil"),
        f"{WAITS}, and no record shows a rank that has not entered it: the cause is a rank without a record, a device,"
        " or the network",
    ),
}
"""What the files of the ranks tell, where it is not the sentence of the watchdog."""


class Ranks:
    """Start one process per rank that runs :func:`hanging_rank.run`."""

    def __init__(self, fault: str, folder: Path, world_size: int = 2, ranks_per_node: int = 2) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        self.folder = folder
        self.processes = [
            context.Process(target=hanging_rank.run, args=(fault, rank, world_size, ranks_per_node, folder))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait_trained(self) -> None:
        _wait(lambda: all((self.folder / f"trained-{rank}").exists() for rank in range(len(self.processes))), 60)

    def exits(self, timeout_s: float = 30) -> list[Any]:
        """Wait for the processes to end, and return their exit codes.

        Raises:
            AssertionError: If a process is left after ``timeout_s`` seconds, or a watchdog a second later; they are
                killed then.
        """
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        try:
            assert all(process.exitcode is not None for process in self.processes), "processes were left"
            _wait(lambda: not self.watchers(), 1)
        finally:
            for process in self.processes:
                process.kill()
            for pid in self.watchers():
                os.kill(pid, signal.SIGKILL)
        return [process.exitcode for process in self.processes]

    def watchers(self) -> list[int]:
        """Return the ids of the watchdog processes; a zombie does not count, as it has no command line."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if b"watchdog_process" in command and os.fsencode(self.folder) in command:
                pids.append(int(path.parent.name))
        return pids

    def stderr(self, rank: int) -> str:
        return (self.folder / f"stderr-{rank}").read_text()


def _wait(is_true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def _place(fault: str) -> str:
    """Return the file, line and function in which a rank with this fault hangs."""
    lines = Path(hanging_rank.__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# hang: {fault}"))
    return f"{hanging_rank.__file__}:{number} in run"


@pytest.mark.parametrize(
    ("fault", "exits", "headline", "line", "grace_s"),
    [
        ("sleep", [EXIT_HANG, EXIT_HANG], f"rank 1 hangs: it is in {_place('sleep')}; {WAITS}", NOT_ENTERED, 3),
        pytest.param(
            "busy",
            [EXIT_HANG, EXIT_HANG],
            f"rank 1 hangs: it is in {_place('busy')}; {WAITS}",
            NOT_ENTERED,
            3,
            marks=pytest.mark.thorough,
        ),
        ("stop", [EXIT_HANG, KILLED], f"rank 1 hangs: it is stopped (SIGSTOP); {WAITS}", "", 3),
        pytest.param(
            "gil",
            [EXIT_HANG, KILLED],
            f"rank 1 hangs: it does not answer, because a call into C holds the GIL; it is in {_place('gil')}; {WAITS}",
            "",
            8,
            marks=pytest.mark.thorough,
        ),
        (
            "order",
            [EXIT_HANG, EXIT_HANG],
            "ranks 0, 1 hang: rank 0 is in all_reduce #1 of group 1 (ranks 0, 1), and rank 1 in all_reduce #1 of group"
            " 2 (ranks 0, 1): each waits for the other, as they call these collectives in different orders",
            "  rank 1: waits in all_reduce #1 of group 2 (ranks 0, 1), which rank 0 has not entered",
            3,
        ),
        (
            "mismatch",
            [EXIT_HANG, EXIT_HANG],
            "ranks 0, 1 hang: rank 0 is in all_reduce #6 [[4]] of group default_pg (ranks 0, 1), and rank 1 in"
            " broadcast #6 [[4]]: the ranks call different collectives",
            "",
            3,
        ),
    ],
)
def test_a_hang_is_explained_and_ended(
    fault: str,
    exits: list[int],
    headline: str,
    line: str,
    grace_s: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks(fault, tmp_path)
    ranks.wait_trained()
    start = time.monotonic()
    assert ranks.exits() == exits
    assert TIMEOUT_S * 0.5 < time.monotonic() - start < TIMEOUT_S + grace_s
    head, *lines = ranks.stderr(0).splitlines()
    reports = tmp_path / "reports"
    assert head.startswith(f"lightning-dist: {headline}"), head
    assert head.endswith(f". No training step for 2 s; see {reports / 'watchdog.txt'}")
    assert any(text.startswith(line) for text in lines), lines
    report = (reports / "watchdog.txt").read_text()
    assert report.startswith(head)
    main([str(reports)])
    assert capsys.readouterr().out == EXPLAINED.get(fault, headline) + ".\n"
    assert ", at step 4" in report
    for rank, code in enumerate(exits):
        assert (tmp_path / f"uploaded-{rank}").exists() == (code == EXIT_HANG)
        if code == EXIT_HANG:
            assert (tmp_path / f"uploaded-{rank}").read_text() == report
            assert "hanging_rank.py" in (reports / f"stacks-rank{rank}.txt").read_text()
            entries = json.loads((reports / f"flight_recorder-rank{rank}.json").read_text())["entries"]
            assert [entry["profiling_name"] for entry in entries[:5]] == ["gloo:all_reduce"] * 5


def test_a_rank_that_has_left_the_loop_is_named(tmp_path: Path) -> None:
    ranks = Ranks("left", tmp_path)
    assert ranks.exits() == [EXIT_HANG, EXIT_HANG]
    head, line, *_ = ranks.stderr(0).splitlines()
    assert head.startswith(f"lightning-dist: rank 1 hangs: it has left the loop; {WAITS}")
    assert line.startswith(NOT_ENTERED)


def test_a_single_process_is_watched(tmp_path: Path) -> None:
    ranks = Ranks("sleep", tmp_path, world_size=1, ranks_per_node=1)
    assert ranks.exits() == [EXIT_HANG]
    assert ranks.stderr(0).startswith(f"lightning-dist: rank 0 hangs: it is in {_place('sleep')}. No training step")


def test_each_node_reports_whether_one_of_its_ranks_is_the_cause(tmp_path: Path) -> None:
    ranks = Ranks("sleep", tmp_path, ranks_per_node=1)
    code, code_of_the_cause = ranks.exits()
    assert code_of_the_cause == EXIT_HANG
    if code == EXIT_HANG:
        assert ranks.stderr(0).startswith(
            "lightning-dist: the training hangs: no rank of this node is the cause, so it is a rank of another node, or"
            f" the network between them; {WAITS}. "
        )
    else:  # The other node ended its ranks first, so this one lost its connection to them.
        assert code == 1 and "Connection" in ranks.stderr(0)
    assert ranks.stderr(1).startswith(f"lightning-dist: rank 1 hangs: it is in {_place('sleep')}. ")
    assert (tmp_path / "reports" / "watchdog-rank1.txt").exists()


def test_the_ranks_are_watched_after_the_first_is_killed(tmp_path: Path) -> None:
    ranks = Ranks("first_killed", tmp_path)
    assert ranks.exits() == [KILLED, EXIT_HANG]
    assert ranks.stderr(0).startswith("lightning-dist: rank 0 hangs: it has died. ")
    assert ", at step 29" in (tmp_path / "reports" / "watchdog.txt").read_text()


@pytest.mark.parametrize("fault", ["none", "restart"])
def test_without_a_hang_nothing_is_printed_and_no_file_or_process_is_left(fault: str, tmp_path: Path) -> None:
    ranks = Ranks(fault, tmp_path)
    assert ranks.exits() == [0, 0]
    assert ranks.stderr(0) == ranks.stderr(1) == ""
    assert not (tmp_path / "reports").exists()


def test_a_suspended_job_does_not_count_as_hanging(tmp_path: Path) -> None:
    """Stop all ranks for a while, as Ctrl-Z or a scheduler may do, and check that none is taken to hang."""
    ranks = Ranks("beats", tmp_path)
    ranks.wait_trained()
    for number, pause_s in ((signal.SIGSTOP, 1.5 * TIMEOUT_S), (signal.SIGCONT, 0)):
        for process in ranks.processes:
            assert process.pid is not None
            os.kill(process.pid, number)
        time.sleep(pause_s)
    assert ranks.exits() == [0, 0]
    assert ranks.stderr(0) == ""


def test_the_watchdog_process_survives_signals_to_the_job_and_its_death_is_reported(tmp_path: Path) -> None:
    ranks = Ranks("beats", tmp_path)
    ranks.wait_trained()
    (watcher,) = ranks.watchers()
    assert os.getpgid(watcher) == watcher
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watcher, number)
    time.sleep(0.3)
    assert ranks.watchers() == [watcher]
    os.kill(watcher, signal.SIGKILL)
    assert ranks.exits() == [0, 0]
    assert ranks.stderr(1) == "lightning-dist: the watchdog of rank 1 has died: hangs are no longer detected\n"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout_s: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"timeout_s={timeout_s} must be positive"):
        Watchdog(tmp_path, timeout_s, 0, 0, 1, "name")


def test_a_rank_that_finds_no_watchdog_of_local_rank_0_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dist.run.watchdog_process.JOIN_S", 0.1)
    with pytest.raises(TimeoutError, match=r"local_rank=0 must start one with the same name='nobody'"):
        Watchdog(tmp_path, 1.0, 1, 1, 2, "nobody").start()


def test_a_beat_takes_less_than_10_microseconds(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 60.0, 0, 0, 1, str(tmp_path))
    start = time.monotonic()
    watchdog.start()
    started_s = time.monotonic() - start
    beat_s = min(timeit.repeat(lambda: watchdog.beat(1), number=1000, repeat=5)) / 1000
    watchdog.close()
    assert started_s < 2
    assert beat_s < 1e-5
