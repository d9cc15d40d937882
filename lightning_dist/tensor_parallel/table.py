"""What the table at the start of a run says of a plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from lightning_dist.tensor_parallel.plan import Entry, Plan

__all__ = ["rows_of"]


def rows_of(plan: Plan, fraction: float) -> Iterator[tuple[str, str]]:
    """Yield the rows of ``plan``, a label and a text each.

    Args:
        plan: The plan of a model.
        fraction: The fraction of the model's parameters of which each rank has a part.
    """
    texts = [
        f"{fraction:.0%} of the parameters",
        *_modules(plan.entries),
        *_parameters(plan.parameters),
        *plan.notes,
    ]
    for index, text in enumerate(texts):
        yield "" if index else "split", text


def _modules(entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a text for each way of splitting: which modules are split so, and where the plan comes from."""
    lines: dict[tuple[str, str, str], Counter[str]] = {}
    for name, entry in entries.items():
        lines.setdefault((entry.style, entry.source, entry.why), Counter())[_short(name)] += 1
    for (style, source, why), names in lines.items():
        yield f"{style} ({source}{'; ' if why else ''}{why}): {_counted(names)}"


def _parameters(parameters: Mapping[str, int]) -> Iterator[str]:
    """Yield a text for the parameters that are split with the heads of the attention around them."""
    if parameters:
        yield f"with the heads (inferred): {_counted(Counter(map(_short, parameters)))}"


def _short(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
