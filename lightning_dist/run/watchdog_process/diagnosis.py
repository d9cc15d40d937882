"""Find the cause of a hang."""

from __future__ import annotations

from .rank import STOPPED, Rank
from .records import Records, list_ranks

__all__ = ["Diagnosis"]


class Diagnosis:
    """Find the ranks that cause a hang, and describe what each rank does.

    The causes that are looked for, in this order:

    - ranks that are stopped, have died or do not answer;
    - ranks that wait in no collective and have not entered one that others wait in, or else whose last beat is too old;
    - ranks that call different collectives as a group's next one, or call the same ones in another order;
    - ranks whose device has not started a collective that it was given.

    Args:
        ranks: Ranks of this node, after they had time to answer.
        timeout_s: Seconds without a beat after which a rank counts as hanging.
    """

    def __init__(self, ranks: list[Rank], timeout_s: float) -> None:
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._states = {rank: rank.state for rank in ranks}
        self._known = {rank: record for rank in ranks if (record := rank.record) is not None}
        self._records = Records({rank.number: record for rank, record in self._known.items()})
        self._waits = {rank: self._records.waits[rank.number] for rank in ranks if rank.number in self._records.waits}
        self.culprits, self.cause = self._find()

    def _find(self) -> tuple[list[Rank], str]:
        broken = [rank for rank in self.ranks if self._breakdown(rank)]
        silent = [rank for rank in self.ranks if rank.groups is None and not rank.is_closed and rank not in broken]
        if not broken and len(silent) < len(self.ranks):
            broken = silent
        if broken:
            return broken, self._whats(broken)
        free = [rank for rank in self.ranks if rank not in self._waits and not rank.exchange]
        late = [rank for rank in free if self._is_behind(rank)] or [
            rank for rank in free if rank.waited_s > self._timeout_s
        ]
        if late:
            return late, self._whats(late)
        conflict = self._records.find_conflict() or self._records.find_not_started()
        if conflict is not None:
            numbers, cause = conflict
            return [rank for rank in self.ranks if rank.number in numbers], cause
        return [], "no rank of this node is the cause, so it is a rank of another node, or the network between them"

    def _whats(self, ranks: list[Rank]) -> str:
        whats = list(dict.fromkeys(self.what(rank) for rank in ranks))
        subject = "it" if len(ranks) == 1 else "each" if len(whats) == 1 else "one"
        return "; ".join(f"{subject} {what}" for what in whats)

    def _breakdown(self, rank: Rank) -> str:
        if rank.has_ended:
            return "" if rank.said_goodbye else "has died"
        return STOPPED.get(self._states[rank], "")

    def _is_behind(self, rank: Rank) -> bool:
        if any(rank.number in self._missing(other) for other in self._waits):
            return True
        counts = {name: group["entered"] for name, group in (rank.groups or {}).items() if not group["is_p2p"]}
        return not self._waits and any(
            name in counts and counts[name] < group["entered"]
            for other in self.ranks
            for name, group in (other.groups or {}).items()
        )

    def _missing(self, rank: Rank) -> list[int]:
        """Return the ranks of this node that are known not to have entered the collective that ``rank`` waits in."""
        return self._records.missing(rank.number)

    def _described(self, rank: Rank) -> str:
        return self._known[rank].describe(self._waits[rank])

    def what(self, rank: Rank) -> str:
        """Return what ``rank`` does, as a clause to follow its name."""
        place = rank.place or "a place that could not be found out"
        if self._breakdown(rank):
            return self._breakdown(rank)
        if rank.is_closed:
            return "has left the loop"
        if rank in self._waits:
            missing = self._missing(rank)
            has_not = f", which {list_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not entered"
            return f"waits in {self._described(rank)}{has_not * bool(missing)}; it is in {place}"
        if rank.exchange:
            return f"waits in {rank.exchange}; it is in {place}"
        if rank.groups is None:
            return f"does not answer, because a call into C holds the GIL; it is in {place}"
        disk = " (its main thread waits for a disk or a network file system)" if self._states[rank] == "D" else ""
        return f"is in {place}{disk}"

    def headline(self) -> str:
        """Return one sentence that names the hanging ranks, the cause, and what the other ranks wait in."""
        numbers = [rank.number for rank in self.culprits]
        who = f"{list_ranks(numbers)} {'hangs' if len(numbers) == 1 else 'hang'}" if numbers else "the training hangs"
        text = f"{who}: {self.cause}"
        waits: dict[str, list[int]] = {}
        for rank in self._waits:
            if rank not in self.culprits:
                waits.setdefault(self._described(rank), []).append(rank.number)
        for rank in self.ranks:
            if rank not in self.culprits and rank not in self._waits and rank.exchange:
                waits.setdefault(rank.exchange, []).append(rank.number)
        for entry_text, waiting in waits.items():
            text += f"; {list_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {entry_text}"
        return text

    def lines(self) -> list[str]:
        """Return a line on what each rank does; ranks that do the same share a line."""
        shown: dict[str, list[int]] = {}
        for rank in self.ranks:
            shown.setdefault(self.what(rank), []).append(rank.number)
        return [f"{list_ranks(numbers)}: {what}" for what, numbers in shown.items()]

    def details(self) -> list[str]:
        """Return the lines on each rank's last beat, process groups and pending collectives."""
        lines = []
        for rank in self.ranks:
            lines.append(f"rank {rank.number} (process {rank.pid}): {rank.last_beat}")
            for group in (rank.groups or {}).values():
                entered = f"{group['entered']} {'operations' if group['is_p2p'] else 'collectives'} entered"
                lines.append(f"  group {group['name']} {group['description']}, {list_ranks(group['ranks'])}: {entered}")
            if record := self._known.get(rank):
                lines += [f"  not completed: {record.describe(entry)}" for entry in record.pending]
            if rank.entries == [] and any(group["entered"] for group in (rank.groups or {}).values()):
                lines.append("  the flight recorder is off: unset TORCH_FR_BUFFER_SIZE to see the collectives")
        return lines
