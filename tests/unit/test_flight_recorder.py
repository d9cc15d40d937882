"""Test the sentences on hangs, with records in the format of NCCL's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.run.watchdog import record_collectives
from lightning_dist.run.watchdog_process.diagnosis import Diagnosis
from lightning_dist.run.watchdog_process.explain import explain, main
from lightning_dist.run.watchdog_process.rank import Rank
from lightning_dist.run.watchdog_process.records import Record

WORLD = ("0", "default_pg")
TP = ("7", "mesh_tp")
MEMBERS = {"0": [0, 1, 2, 3], "7": [2, 3]}


def entry(number: int, name: str = "all_reduce", state: str = "completed", **changes: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 dumps it for NCCL."""
    is_p2p = name.startswith(("send", "recv"))
    return {
        "record_id": 0,
        "pg_id": 0,
        "process_group": WORLD,
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1000 + number,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        **changes,
    }


def dump(*entries: dict[str, Any], members: dict[str, list[int]] = MEMBERS, first: int = 0) -> dict[str, Any]:
    """Return what ``_dump_nccl_trace`` returns when unpickled; ``first`` entries were overwritten."""
    return {
        "version": "2.10",
        "pg_config": {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in members.items()},
        "pg_status": {},
        "entries": [{**each, "record_id": first + index} for index, each in enumerate(entries)],
    }


def merged(of_nccl: dict[str, Any], members: dict[str, list[int]]) -> dict[str, Any]:
    """Return a dump of NCCL with that of gloo before it, as the watchdog writes them."""
    of_gloo = dump(entry(1, profiling_name="gloo:barrier"), members=members)
    return {**of_nccl, "entries": of_gloo["entries"] + of_nccl["entries"]}


DONE = entry(1)
WAITS = entry(2, "_reduce_scatter_base", "scheduled")
PAIR = {"0": [4, 6]}
SEND, RECV = entry(1, "send 0->1", "scheduled"), entry(1, "recv 1<-0", "scheduled")

CASES: list[tuple[str, dict[int, dict[str, Any]], str]] = [
    (
        "two ranks have not entered",
        {0: dump(DONE, WAITS), 1: dump(DONE), 2: dump(DONE, WAITS), 3: dump(DONE)},
        "ranks 1, 3 have not entered _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), in which ranks 0,"
        " 2 wait.",
    ),
    (
        "the ranks that wait elsewhere are not the cause",
        {
            0: dump(DONE, WAITS),
            1: dump(DONE, WAITS),
            2: dump(DONE, entry(1, state="scheduled", process_group=TP)),
            3: dump(DONE),
        },
        "rank 3 has not entered _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), in which ranks 0, 1"
        " wait.",
    ),
    (
        "another collective",
        {0: dump(DONE, WAITS), 1: dump(DONE, WAITS), 2: dump(DONE, entry(2, "broadcast", "scheduled"))},
        "rank 2 hangs: rank 0 is in _reduce_scatter_base #2 [[4, 2]] of group default_pg (ranks 0, 1, 2, 3), and rank 2"
        " in broadcast #2 [[4, 2]]: the ranks call different collectives.",
    ),
    (
        "another dtype",
        {
            0: dump(entry(1, state="scheduled")),
            1: dump(entry(1, state="scheduled", input_dtypes=["Half"])),
            2: dump(entry(1, state="scheduled")),
        },
        "rank 1 hangs: rank 0 is in all_reduce #1 [[4, 2]] Float of group default_pg (ranks 0, 1, 2, 3), and rank 1 in"
        " all_reduce #1 [[4, 2]] Half: the ranks call different collectives.",
    ),
    (
        "the same number of elements in another shape is no error",
        {
            number: dump(entry(1, state="scheduled", input_sizes=sizes))
            for number, sizes in {0: [[4, 2]], 1: [[8]], 2: [[2, 4]], 3: [[8, 1]]}.items()
        },
        "rank 0 waits in all_reduce #1 of group default_pg (ranks 0, 1, 2, 3), and no record shows a rank that has"
        " not entered it: the cause is a rank without a record, a device, or the network.",
    ),
    (
        "all_gather of uneven parts is no error",
        {0: dump(entry(1, "all_gather")), 1: dump(entry(1, "all_gather", input_sizes=[[1]]))},
        "no rank waits in a collective.",
    ),
    (
        "another order",
        {
            2: dump(WAITS),
            3: dump(entry(1, state="scheduled", process_group=TP)),
        },
        "ranks 2, 3 hang: rank 2 is in _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), and rank 3 in"
        " all_reduce #1 of group mesh_tp (ranks 2, 3): each waits for the other, as they call these collectives in"
        " different orders.",
    ),
    (
        "a ring of three groups",
        {
            number: dump(
                entry(1, state="scheduled", process_group=(name, name)),
                members={"a": [0, 1], "b": [1, 2], "c": [2, 0]},
            )
            for number, name in enumerate("abc")
        },
        "ranks 0, 1, 2 hang: rank 0 is in all_reduce #1 of group a (ranks 0, 1), rank 1 in all_reduce #1 of group b"
        " (ranks 1, 2), and rank 2 in all_reduce #1 of group c (ranks 0, 2): each waits for the next, as they call"
        " these collectives in different orders.",
    ),
    (
        "a device that does not start",
        {
            0: dump(entry(1, state="started")),
            1: dump(entry(1, state="started")),
            2: dump(entry(1, state="scheduled")),
        },
        "rank 2 hangs: its device has not started all_reduce #1 of group default_pg (ranks 0, 1, 2, 3), which the"
        " program has called: an earlier kernel or copy does not end.",
    ),
    (
        "an overwritten entry was entered",
        {0: dump(DONE, WAITS), 1: dump(entry(2001), first=2000)},
        "rank 0 waits in _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), and no record shows a rank"
        " that has not entered it: the cause is a rank without a record, a device, or the network.",
    ),
    (
        "a background group is not what a step waits for",
        {
            0: dump(entry(1, state="scheduled", process_group=("9", "background: stop requests")), WAITS),
            1: dump(DONE),
        },
        "rank 1 has not entered _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), in which rank 0 waits.",
    ),
    (
        "a send without its receive",
        {4: dump(SEND, members=PAIR), 6: dump(members=PAIR)},
        "rank 6 has not entered send #1 to rank 6 of group default_pg (ranks 4, 6), in which rank 4 waits.",
    ),
    (
        "receives that were overwritten may have been begun",
        {4: dump(SEND, members=PAIR), 6: merged(dump(entry(2), members=PAIR, first=2000), members=PAIR)},
        "rank 4 waits in send #1 to rank 6 of group default_pg (ranks 4, 6), and no record shows a rank that has"
        " not entered it: the cause is a rank without a record, a device, or the network.",
    ),
    (
        "a receive whose send is begun",
        {4: dump(SEND, members=PAIR), 6: dump(RECV, members=PAIR)},
        "rank 4 waits in send #1 to rank 6 of group default_pg (ranks 4, 6), and no record shows a rank that has"
        " not entered it: the cause is a rank without a record, a device, or the network.",
    ),
    (
        "coalesced sends, which have no state of their own",
        {
            4: dump(SEND, entry(1, "coalesced", p2p_seq_id=1, is_p2p=True), members=PAIR),
            6: dump(
                RECV,
                entry(1, "coalesced", p2p_seq_id=1, is_p2p=True),
                entry(2, "recv 1<-0", "scheduled"),
                entry(2, "send 1->0", "scheduled"),
                entry(2, "coalesced", "scheduled", p2p_seq_id=2, is_p2p=True),
                members=PAIR,
            ),
        },
        "rank 4 has not entered recv #2 from rank 4 (the first of 2 coalesced) of group default_pg (ranks 4, 6), in"
        " which rank 6 waits.",
    ),
]


@pytest.mark.parametrize(("dumps", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_dumps_of_nccl_are_explained_in_one_sentence(dumps: dict[int, dict[str, Any]], sentence: str) -> None:
    assert explain(dumps) == sentence


class FakeRank(Rank):
    """Stand for a rank that has answered, and whose main thread is in ``place``."""

    def __init__(self, number: int, dumped: dict[str, Any], place: str) -> None:
        self.number, self.pid = number, 1000 + number
        self.is_closed = self.has_ended = self.said_goodbye = False
        self.waited_s = 5.0
        self.groups = {
            name: {"name": name, "description": "", "ranks": ranks, "entered": 2, "is_p2p": False}
            for name, ranks in MEMBERS.items()
        }
        self.entries = dumped["entries"]
        self._place = place

    state = "S"
    exchange = ""

    @property
    def place(self) -> str:
        return self._place


def test_the_watchdog_names_the_rank_that_has_not_entered_a_collective_of_nccl() -> None:
    """Let a rank read a file while the others wait on the device, which their stacks do not show."""
    in_step = "train.py:7 in training_step"
    dumps = [dump(DONE, WAITS), dump(DONE, WAITS), dump(DONE), dump(DONE, WAITS)]
    diagnosis = Diagnosis(
        [FakeRank(number, each, "data.py:3 in read" if number == 2 else in_step) for number, each in enumerate(dumps)],
        timeout_s=1.0,
    )
    group = "_reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3)"
    assert diagnosis.headline() == f"rank 2 hangs: it is in data.py:3 in read; ranks 0, 1, 3 wait in {group}"
    assert diagnosis.lines() == [
        f"ranks 0, 1, 3: waits in {group}, which rank 2 has not entered; it is in {in_step}",
        "rank 2: is in data.py:3 in read",
    ]


def test_the_watchdog_names_the_rank_whose_device_does_not_start() -> None:
    dumps = [dump(entry(1, state=state)) for state in ("started", "scheduled", "started", "started")]
    diagnosis = Diagnosis([FakeRank(number, each, "a.py:1 in f") for number, each in enumerate(dumps)], timeout_s=1.0)
    assert diagnosis.headline() == (
        "rank 1 hangs: its device has not started all_reduce #1 of group default_pg (ranks 0, 1, 2, 3), which the"
        " program has called: an earlier kernel or copy does not end; ranks 0, 2, 3 wait in all_reduce #1 of group"
        " default_pg (ranks 0, 1, 2, 3)"
    )


def test_a_timed_out_collective_is_not_pending() -> None:
    """NCCL retires a collective that has timed out without completing it."""
    assert Record.from_dump(dump(entry(1, state="scheduled", retired=True))).pending == []


def test_the_files_of_the_watchdog_and_of_torch_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting, late = dump(DONE, WAITS), dump(DONE)
    groups = [{"name": name, "ranks": ranks} for name, ranks in MEMBERS.items()]
    (tmp_path / "flight_recorder-rank0.json").write_text(json.dumps({"groups": groups, "entries": waiting["entries"]}))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(late))
    main([str(tmp_path), str(tmp_path / "nccl_trace_rank_1")])
    assert capsys.readouterr().out == (
        "rank 1 has not entered _reduce_scatter_base #2 of group default_pg (ranks 0, 1, 2, 3), in which rank 0"
        " waits.\n"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace", b"{}", "the name does not end with a rank"),
        ("trace_0", pickle.dumps(print), "it holds an object of class builtins.print"),
        ("trace_0", b"no dump", "is no file of a flight recorder"),
        ("trace_0", pickle.dumps([1]), "it holds no dictionary"),
    ],
)
def test_other_files_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        main([str(tmp_path / name)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "0"}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}),
    ],
)
def test_recording_does_not_override_a_setting_of_the_user(
    given: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    record_collectives()
    assert {name: os.environ[name] for name in names if name in os.environ} == found
    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
