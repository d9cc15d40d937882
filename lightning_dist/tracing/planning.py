"""Find how modules are distributed: candidates are tried until one computes what the whole module computes.

The planners of all techniques that try modules share this loop. They differ in their candidates, and in the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["OncePerKind", "first_that_fits"]

_Candidate = TypeVar("_Candidate")
_Found = TypeVar("_Found")


def first_that_fits(
    candidates: Iterable[_Candidate], attempt: Callable[[_Candidate], tuple[_Found, str]]
) -> tuple[_Found | None, str]:
    """Try candidates in their order, and return the first one that computes the same.

    Args:
        candidates: The ways to distribute a module, with the most likely one first.
        attempt: Function that tries a candidate. It returns what was found, such as the candidate with what the trial
            has shown about it, and why it does not compute the same; empty: it does.

    Returns:
        What was found, and an empty text; or None, and the reason against the first candidate, which is empty if there
        are no candidates.
    """
    first = ""
    for candidate in candidates:
        found, why_not = attempt(candidate)
        if not why_not:
            return found, ""
        first = first or why_not
    return None, first


class OncePerKind(Generic[_Found]):
    """Find something once for all modules of the same kind.

    A trial is a collective. Ranks must therefore agree on which modules are of the same kind.
    """

    def __init__(self) -> None:
        self._found: dict[object, _Found] = {}

    def of(self, kind: object, find: Callable[[], _Found]) -> _Found:
        """Return what ``find`` returns, or has returned for an earlier module of the same kind.

        Args:
            kind: What modules must have in common, such as
                :func:`~lightning_dist.tracing.block_trial.kind_of_block` returns.
            find: Function that is called for the first module of this kind.
        """
        if kind not in self._found:
            self._found[kind] = find()
        return self._found[kind]
