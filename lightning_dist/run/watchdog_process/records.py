"""Compare what the flight recorders of several ranks have recorded of their collectives.

The entries have the format that torch 2.11 to 2.13 dumps for gloo and NCCL. ``state`` is "scheduled", "started" or
"completed". NCCL notes when a collective starts only with ``TORCH_NCCL_ENABLE_TIMING=1``; without it, a collective that
runs is "scheduled". NCCL records the operations of a coalesced group without a state, and then the group itself as
"nccl:coalesced", which has one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Entry", "Record", "Records", "list_ranks", "name_of"]

Entry: TypeAlias = dict[str, Any]
"""One collective, send or receive that a rank has recorded."""

_SAME_SIZES = ("all_reduce", "all_gather_base", "reduce_scatter_base", "broadcast", ":reduce")
"""Ends of the names of collectives whose inputs have the same number of elements on all ranks."""
_PEER = re.compile(r":(send|recv) \d+(?:->|<-)(\d+)$")
_COALESCED = "nccl:coalesced"


class Record:
    """Hold what one rank has recorded.

    Args:
        entries: Entries of the flight recorder, oldest first.
        members: Global ranks of each process group, by the group's name.
    """

    def __init__(self, entries: Sequence[Entry], members: Mapping[str, Sequence[int]]) -> None:
        self.entries = entries
        self.members = members
        coalesced = {_key(entry) for entry in entries if entry["profiling_name"] == _COALESCED}
        self._followed = [
            entry for entry in entries if entry["profiling_name"] == _COALESCED or _key(entry) not in coalesced
        ]
        self._highest: dict[tuple[Any, ...], int] = {}
        for entry in entries:
            *where, number = _key(entry)
            self._highest[*where] = max(number, self._highest.get((*where,), -1))
        # Each backend's recorder keeps a limited number of entries, and numbers them from 0.
        first: dict[str, int] = {}
        for entry in entries:
            first.setdefault(_backend(entry), entry.get("record_id", 0))
        self._overwritten = {backend for backend, number in first.items() if number > 0}

    @classmethod
    def from_dump(cls, dump: Mapping[str, Any]) -> Record:
        """Return the record in a dump of torch, or in a file that the watchdog has written.

        Args:
            dump: Dictionary with ``entries``, and with torch's ``pg_config`` or the watchdog's ``groups``.
        """
        members = {group["name"]: group["ranks"] for group in dump.get("groups", ())}
        for group in (dump.get("pg_config") or {}).values():
            ranks = group["ranks"]
            members[group["name"]] = json.loads(ranks) if isinstance(ranks, str) else ranks
        return cls(dump.get("entries") or [], members)

    @property
    def pending(self) -> list[Entry]:
        """Return the entries that are not completed: those that the device has started first, else the oldest first.

        Entries of groups whose description begins with "background" come last, as no step waits for them.
        """
        entries = [entry for entry in self._followed if not entry["retired"] and entry["state"] != "completed"]
        return sorted(
            entries,
            key=lambda entry: (entry["process_group"][1].startswith("background"), entry["state"] != "started"),
        )

    def find(self, like: Entry) -> Entry | None:
        """Return this rank's entry of the same collective as another rank's entry ``like``, if it has one."""
        return next((entry for entry in self._followed if _key(entry) == _key(like)), None)

    def has_entered(self, like: Entry) -> bool:
        """Return whether this rank has entered another rank's collective ``like``, even if its entry is overwritten."""
        *where, number = _key(like)
        return self._highest.get((*where,), -1) >= number

    def operations(self, entry: Entry) -> list[Entry]:
        """Return the operations of a coalesced group; of any other entry, the entry alone."""
        if entry["profiling_name"] == _COALESCED:
            return [each for each in self.entries if _key(each) == _key(entry) and each is not entry] or [entry]
        return [entry]

    def members_of(self, entry: Entry) -> Sequence[int]:
        """Return the global ranks of the group of ``entry``; empty if they are not known."""
        return self.members.get(entry["process_group"][0], ())

    def peer_of(self, entry: Entry) -> tuple[str, int] | None:
        """Return "send" or "recv" and the global rank at the other end; None if ``entry`` does not tell."""
        found = _PEER.search(entry["profiling_name"])
        members = self.members_of(entry)
        if found is None or int(found[2]) >= len(members):
            return None
        return found[1], members[int(found[2])]

    def exchanges(self, kind: str, peer: int, like: Entry, until: Entry | None = None) -> int | None:
        """Return how many sends to, or receives from, ``peer`` this rank has begun; None if some were overwritten.

        Args:
            kind: "send" or "recv".
            peer: Global rank at the other end.
            like: Entry of the same process group and backend.
            until: Entry after which none is counted; None: all are counted.
        """
        if _backend(like) in self._overwritten:
            return None
        end = len(self.entries) if until is None else self.entries.index(until) + 1
        found = [each for each in self.entries[:end] if _where(each) == _where(like)]
        return sum(self.peer_of(each) == (kind, peer) for each in found)

    def describe(self, entry: Entry) -> str:
        """Return the name, number and group of a collective, as "all_reduce #6 of group default_pg (ranks 0, 1)"."""
        return f"{self.name(entry)} of {self.group(entry)}"

    def name(self, entry: Entry) -> str:
        """Return the name and number of a collective; a coalesced group is named by its first operation."""
        peer = self.peer_of(entry)
        if peer is not None:
            kind, number = peer
            return f"{kind} #{entry['p2p_seq_id']} {'to' if kind == 'send' else 'from'} rank {number}"
        first, *others = self.operations(entry)
        return (
            f"{self.name(first)} (the first of {1 + len(others)} coalesced)" if first is not entry else name_of(entry)
        )

    def group(self, entry: Entry) -> str:
        """Return the name and the ranks of the group of ``entry``."""
        name, description = entry["process_group"]
        label = description if description and description != "undefined" else name
        members = self.members_of(entry)
        return f"group {label} ({list_ranks(members)})" if members else f"group {label}"


class Records:
    """Compare the records of several ranks.

    Args:
        records: Records by global rank. Ranks that have not answered are left out.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._records = records
        self.waits = {number: record.pending[0] for number, record in records.items() if record.pending}
        """The collective that each waiting rank waits in."""

    def missing(self, number: int) -> list[int]:
        """Return the ranks that are known not to have entered the collective that rank ``number`` waits in."""
        entry, record = self.waits[number], self._records[number]
        if not entry["is_p2p"]:
            return [
                other
                for other, found in self._records.items()
                if other in record.members_of(entry) and not found.has_entered(entry)
            ]
        return sorted({peer for each in record.operations(entry) for peer in self._missing_peer(number, each)})

    def _missing_peer(self, number: int, entry: Entry) -> list[int]:
        """Return the rank at the other end of a send or receive of rank ``number``, if it has not called its part."""
        record = self._records[number]
        peer = record.peer_of(entry)
        if peer is None or peer[1] not in self._records:
            return []
        kind, other = peer
        own = record.exchanges(kind, other, entry, entry)
        others = self._records[other].exchanges("recv" if kind == "send" else "send", number, entry)
        return [other] if own is not None and others is not None and others < own else []

    def find_conflict(self) -> tuple[list[int], str] | None:
        """Return the ranks that call different collectives, or wait for each other, and a clause that says so.

        Of ranks that call different collectives, the fewest that do the same are returned.
        """
        for number, entry in self.waits.items():
            for other, record in self._records.items():
                found = record.find(entry)
                if found is None or other == number or entry["is_p2p"] or _must_agree(found) == _must_agree(entry):
                    continue
                sizes = [entry["input_sizes"], found["input_sizes"]]
                dtypes = [" ".join(each.get("input_dtypes", ())) for each in (entry, found)]
                own, theirs = (
                    f"{size} {dtype}" if dtypes[0] != dtypes[1] else f"{size}"
                    for size, dtype in zip(sizes, dtypes, strict=True)
                )
                return self._minority(entry), (
                    f"rank {number} is in {name_of(entry)} {own} of {self._records[number].group(entry)}, and rank"
                    f" {other} in {name_of(found)} {theirs}: the ranks call different collectives"
                )
        if cycle := self._cycle():
            first, *others = [f"in {self._records[number].describe(self.waits[number])}" for number in cycle]
            texts = [f"rank {cycle[0]} is {first}"]
            texts += [f"rank {number} {other}" for number, other in zip(cycle[1:], others, strict=True)]
            waits = "each waits for the other" if len(cycle) == 2 else "each waits for the next"
            return sorted(cycle), (
                f"{', '.join(texts[:-1])}, and {texts[-1]}: {waits}, as they call these collectives in different orders"
            )
        return None

    def find_not_started(self) -> tuple[list[int], str] | None:
        """Return the ranks whose devices have not started a collective that other devices run, and a clause."""
        for number, entry in self.waits.items():
            if entry["state"] != "started":
                continue
            late = [
                other
                for other, record in self._records.items()
                if (found := record.find(entry)) is not None and found["state"] == "scheduled" and not found["retired"]
            ]
            if late:
                whose = "its device has" if len(late) == 1 else "their devices have"
                return late, (
                    f"{whose} not started {self._records[number].describe(entry)}, which the program has called:"
                    " an earlier kernel or copy does not end"
                )
        return None

    def explain(self) -> str:
        """Return one sentence, without its full stop, on the collective that was not entered by all its ranks."""
        conflict = self.find_conflict()
        if conflict is None:
            for number, entry in self.waits.items():
                record, missing = self._records[number], self.missing(number)
                if not missing:
                    continue
                missing = [other for other in missing if other not in self.waits] or missing  # Others wait themselves.
                waiting = [
                    other
                    for other, found in self.waits.items()
                    if other == number or (_key(found) == _key(entry) and not entry["is_p2p"])
                ]
                return (
                    f"{list_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not entered"
                    f" {record.describe(entry)}, in which {list_ranks(waiting)}"
                    f" {'waits' if len(waiting) == 1 else 'wait'}"
                )
            conflict = self.find_not_started()
        if conflict is not None:
            ranks, cause = conflict
            return f"{list_ranks(ranks)} {'hangs' if len(ranks) == 1 else 'hang'}: {cause}"
        if not self.waits:
            return "no rank waits in a collective"
        number, entry = next(iter(self.waits.items()))
        return (
            f"rank {number} waits in {self._records[number].describe(entry)}, and no record shows a rank that has not"
            " entered it: the cause is a rank without a record, a device, or the network"
        )

    def _minority(self, entry: Entry) -> list[int]:
        properties: dict[str, list[int]] = {}
        for number, record in self._records.items():
            if found := record.find(entry):
                properties.setdefault(str(_must_agree(found)), []).append(number)
        fewest = min(map(len, properties.values()))
        return [number for numbers in properties.values() if len(numbers) == fewest for number in numbers]

    def _cycle(self) -> list[int]:
        """Return ranks each of which waits for the next one, and the last for the first; empty if there are none."""
        for start in self.waits:
            path = [start]
            while True:
                following = [other for other in self.missing(path[-1]) if other in self.waits]
                if not following:
                    break
                if following[0] in path:
                    return path[path.index(following[0]) :]
                path.append(following[0])
        return []


def name_of(entry: Entry) -> str:
    """Return the name and number of a collective, as "all_reduce #6"."""
    return f"{entry['profiling_name'].partition(':')[2]} #{_key(entry)[-1]}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 1"."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, sorted(ranks)))}"


def _key(entry: Entry) -> tuple[str, str, bool, int]:
    """Return what identifies a collective on all ranks: group, backend, whether it is a send, and sequence number."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return *_where(entry), entry["is_p2p"], number


def _where(entry: Entry) -> tuple[str, str]:
    """Return the name of the process group and the backend."""
    return entry["process_group"][0], _backend(entry)


def _backend(entry: Entry) -> str:
    name: str = entry["profiling_name"]
    return name.partition(":")[0]


def _must_agree(entry: Entry) -> tuple[Any, ...]:
    """Return the properties of a collective that must be the same on all ranks that enter it."""
    name = entry["profiling_name"]
    if not name.endswith(_SAME_SIZES):
        return (name,)
    return name, sum(map(math.prod, entry["input_sizes"])), tuple(entry.get("input_dtypes", ()))
