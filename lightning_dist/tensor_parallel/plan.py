"""Which modules of a model are split over ``tp``, how, and who says so.

In this order: the user (names with wildcards, from the strategy's arguments or the module's
``tensor_parallel_plan()``), and a Hugging Face model (``_tp_plan``). What nobody names is replicated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["STYLES", "Entry", "PlanError", "Source", "resolve_plan"]

STYLES: dict[str, str] = {
    "colwise": "each rank has some of the output features, and they stay apart",
    "rowwise": "each rank has some of the input features; the ranks' outputs are summed",
    "colwise_gather_output": "each rank has some of the output features; all of them are gathered",
    "embedding_rowwise": "each rank has some of the vocabulary; the ranks' outputs are summed",
    "replicate": "every rank has all of it",
    "replicated_with_grad_allreduce": "every rank has all of it, uses it on its own features, and gradients are summed",
}
"""The styles of a plan, by the names that Hugging Face gives them, and what each means."""

_ALIASES = {"colwise_rep": "colwise_gather_output", "replicated": "replicate", "embedding": "embedding_rowwise"}
_NOT_YET = {"packed_colwise", "packed_rowwise", "rowwise_split_input", "moe_tp_experts"}
"""Styles of Hugging Face's plans that are answered by replicating."""

Source = Literal["user", "Hugging Face"]


class PlanError(ValueError):
    """A plan that does not fit the model."""


@dataclass(frozen=True)
class Entry:
    """What becomes of a module.

    Args:
        style: One of :data:`STYLES`.
        source: Who said so.
        why: What there is to add; empty: nothing.
    """

    style: str
    source: Source
    why: str = ""


def resolve_plan(root: nn.Module, user: Mapping[str, str] | None = None) -> dict[str, Entry]:
    """The plan for ``root``, by full name of the module, in the order of definition.

    Args:
        root: The model.
        user: Name to style. In a name ``*`` stands for one part between dots and ``**`` for any; it may leave out the
            beginning (``layers.*.mlp.up`` for ``model.layers.0.mlp.up``). None: ``root.tensor_parallel_plan()`` where
            it has that method.

    Raises:
        PlanError: If a name matches no module, or two match the same one, or a style is unknown. The text has the
            nearest that would do.
    """
    if user is None:
        method = getattr(root, "tensor_parallel_plan", None)
        user = method() if callable(method) else {}
    modules = {name: module for name, module in root.named_modules() if name}
    plan = dict(_hugging_face(root))
    said: dict[str, str] = {}
    for pattern, style in user.items():
        _check_style(pattern, style)
        matches = [name for name in modules if _matches(pattern, name)]
        if not matches:
            raise PlanError(f"plan: {pattern!r} matches no module.{_nearest(pattern, list(modules))}")
        for name in matches:
            if name in said:
                raise PlanError(f"plan: {said[name]!r} and {pattern!r} both match {name}; leave one out.")
            said[name] = pattern
            plan[name] = Entry(_ALIASES.get(style, style), "user")
    return {name: plan[name] for name in modules if name in plan}


def _hugging_face(root: nn.Module) -> Iterator[tuple[str, Entry]]:
    """What the outermost Hugging Face models in ``root`` say of their modules."""
    inside: set[nn.Module] = set()
    for prefix, model in root.named_modules():
        plan = getattr(model, "_tp_plan", None)
        if not isinstance(plan, Mapping) or model in inside:
            continue
        inside |= set(model.modules())
        for name, _ in model.named_modules():
            for pattern, style in ((str(pattern), str(style)) for pattern, style in plan.items()):
                if name and _as_regex(pattern).fullmatch(name):
                    full_name = f"{prefix}.{name}" if prefix else name
                    if style in _NOT_YET:
                        yield full_name, Entry("replicate", "Hugging Face", f"{style} is not supported")
                    elif _ALIASES.get(style, style) in STYLES:
                        yield full_name, Entry(_ALIASES.get(style, style), "Hugging Face")


def _check_style(pattern: str, style: str) -> None:
    known = [*STYLES, *_ALIASES]
    if style not in known:
        close = difflib.get_close_matches(style, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(STYLES)}."
        raise PlanError(f"plan: {pattern!r} has the unknown style {style!r}. {hint}")


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(rf"(.*\.)?{_as_regex(pattern).pattern}", name) is not None


def _as_regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".+", "*": r"[^.]+"}.get(part, re.escape(part)) for part in parts))


def _nearest(pattern: str, names: list[str]) -> str:
    with_stars = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    candidates = with_stars if "*" in pattern else [*names, *with_stars]
    close = difflib.get_close_matches(pattern, candidates, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else f" There are {', '.join(with_stars[:20])}."
