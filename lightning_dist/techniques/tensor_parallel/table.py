"""Describe a tensor-parallel plan in the table that is printed at the start of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from lightning_dist.techniques.tensor_parallel.plan import Entry, Plan

__all__ = ["rows_of"]


def rows_of(plan: Plan, fraction: float, num_overlapped: int) -> Iterator[tuple[str, str]]:
    """Yield the rows that describe ``plan``, each as a label and a text. Only the first row has a label.

    Args:
        plan: The plan by which the model was split.
        fraction: Fraction of the model's parameters that are split, between 0 and 1.
        num_overlapped: Number of layers that exchange tokens while they multiply.
    """
    texts = [
        f"{fraction:.0%} of the parameters",
        *_modules(plan.entries),
        *_parameters(plan.parameters),
        *plan.notes,
    ]
    if num_overlapped:
        texts.append(f"{num_overlapped} layers exchange tokens while they multiply")
    for index, text in enumerate(texts):
        yield "" if index else "split", text


def _modules(entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a text for each style, source and reason that occurs, with the modules that have it."""
    lines: dict[tuple[str, str, str], Counter[str]] = {}
    for name, entry in entries.items():
        lines.setdefault((entry.style, entry.source, entry.why), Counter())[_short(name)] += 1
    for (style, source, why), names in lines.items():
        yield f"{style} ({source}{'; ' if why else ''}{why}): {_counted(names)}"


def _parameters(parameters: Mapping[str, int]) -> Iterator[str]:
    """Yield a text for the parameters that belong to no split layer and are split with the attention heads."""
    if parameters:
        yield f"with the heads (inferred): {_counted(Counter(map(_short, parameters)))}"


def _short(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
