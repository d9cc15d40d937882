"""Agree between ranks on flags, and wait for the other ranks only while the flags change."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_dist._compat import new_group_of
from lightning_dist.mesh.collectives import begin_any_of_flags

__all__ = ["FlagAgreement", "FlagsChangedError"]

_NUM_USUAL = 2
"""Number of exchanges in a row, in which every rank had the flags that it expected, after which no rank waits."""


_DIGEST_BITS = 32
"""Number of bits of the digest by which the ranks find out whether their flags are the same."""


class FlagsChangedError(RuntimeError):
    """Report that a rank had set a flag which no rank had expected, when others had gone on without waiting for it."""


@dataclass
class _Exchange:
    """Hold an exchange of flags that has begun.

    Args:
        finish: Function that waits for the exchange, and returns all exchanged bits.
        expected: The flags that this rank has expected.
    """

    finish: Callable[[], list[bool]]
    expected: list[bool]


class FlagAgreement:
    """Find out at the end of every backward which flags are set on any rank.

    The ranks exchange their flags every time. If every rank had the flags that it expected in the last two exchanges,
    a rank that has them again goes on with its own flags, and looks at the result of the exchange when it calls
    :meth:`agree` the next time. A rank with other flags waits for the result. It may lack flags that the others have
    set. If it has set flags that the ranks which have gone on could not expect, all ranks raise an error, and those
    that have gone on do so one call later.

    The ranks exchange bits over gloo on the host. On the device, the host would have to wait for the whole backward.

    Creating an instance is a collective over the ranks, which get a process group for this purpose alone.

    Args:
        ranks: Global ranks that agree, in increasing order.
        description: Description of what the flags say, for logs and reports of hangs.
        describe: Function that returns what a flag says, given its index, for the error text.
    """

    def __init__(self, ranks: Sequence[int], description: str, describe: Callable[[int], str]) -> None:
        group = new_group_of(ranks, "gloo", description)
        # torch.distributed keeps the group. A second reference would keep its connections open after an error here.
        self._group = weakref.ref(group)
        self._describe = describe
        self._last: _Exchange | None = None
        self._num_usual = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks."""
        group: dist.ProcessGroup | None = self._group()
        assert group is not None
        return group

    def agree(self, flags: Sequence[bool], expected: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. This is a collective over the group.

        Args:
            flags: The flags of this rank, of which all ranks have the same number.
            expected: The flags that a rank has in a usual step.

        Raises:
            FlagsChangedError: If a rank has set a flag that was not expected, when others did not wait for it.
        """
        self._finish()
        flags, expected = list(flags), list(expected)
        goes_on = flags == expected and self._num_usual >= _NUM_USUAL
        self._last = self._begin(flags, expected, goes_on)
        return flags if goes_on else self._finish()

    def _begin(self, flags: list[bool], expected: list[bool], goes_on: bool) -> _Exchange:
        digest = [bool(zlib.crc32(bytes(flags)) >> bit & 1) for bit in range(_DIGEST_BITS)]
        # A bit of the digest that differs between ranks is set on some rank both itself and in the complement.
        complement = [not bit for bit in digest]
        finish = begin_any_of_flags([flags != expected, goes_on, *digest, *complement, *flags], self.group)
        return _Exchange(finish, expected)

    def _finish(self) -> list[bool]:
        """Wait for the last exchange, and return for each flag whether it is set on any rank; empty: there is none."""
        last, self._last = self._last, None
        if last is None:
            return []
        is_unusual, has_gone_on, *rest = last.finish()
        digest, complement, flags = rest[:_DIGEST_BITS], rest[_DIGEST_BITS : 2 * _DIGEST_BITS], rest[2 * _DIGEST_BITS :]
        differs = any(one and other for one, other in zip(digest, complement, strict=True))
        self._num_usual = 0 if is_unusual or differs else self._num_usual + 1
        unexpected = [index for index, is_set in enumerate(flags) if is_set and not last.expected[index]]
        if not has_gone_on or not unexpected:
            return flags
        what = self._describe(unexpected[0])
        raise FlagsChangedError(
            f"In this step or in the one before, {what} on some ranks but not on all, which had not happened in the"
            " steps before. The other ranks had gone on by then. Let this happen on all ranks in the same step, or, if"
            " it cannot, also in the first two steps of the run, so that ranks wait for each other."
        )
