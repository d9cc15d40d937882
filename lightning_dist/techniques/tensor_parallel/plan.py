"""Represent a tensor-parallel plan: which modules of a model are split over ``tp``, in which style, and who chose it.

The user's plan (names with wildcards, from the strategy's arguments or the module's ``tensor_parallel_plan()``) takes
precedence over that of a Hugging Face model (``_tp_plan``). A module that neither plan names is split if
:mod:`~lightning_dist.techniques.tensor_parallel.infer` finds a way to split it, and replicated otherwise.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from lightning_dist.model.layers import linear_layer
from lightning_dist.techniques.tensor_parallel.layers import unsupported_options

__all__ = [
    "STYLES",
    "Entry",
    "Plan",
    "PlanError",
    "Source",
    "SplitHeads",
    "SplitSequence",
    "is_inside",
    "resolve_plan",
]

STYLES: dict[str, str] = {
    "colwise": "each rank has some of the output features, and they are not gathered",
    "packed_colwise": "several colwise layers in one weight: packed_colwise:3 for query, key and value",
    "rowwise": "each rank has some of the input features; the ranks' outputs are summed",
    "colwise_gather_output": "each rank has some of the output features; all of them are gathered",
    "attention_heads": "each rank has some of the heads of an nn.MultiheadAttention; the ranks' outputs are summed",
    "embedding_rowwise": "each rank has some rows of the vocabulary; the ranks' outputs are summed",
    "experts": "each rank has some of the experts of a mixture, whose parameters are stacked",
    "replicate": "every rank has the whole module",
    "replicated_with_grad_allreduce": "every rank has the whole module and applies it to its own features; gradients"
    " are summed",
}
"""The styles of a plan and their meaning, under the names that Hugging Face gives them."""

_ALIASES = {"colwise_rep": "colwise_gather_output", "replicated": "replicate", "embedding": "embedding_rowwise"}
_NOT_YET = {"packed_rowwise", "rowwise_split_input"}
"""Styles of Hugging Face's plans that are not supported: modules with such a style are replicated."""

Source = Literal["user", "Hugging Face", "inferred"]


class PlanError(ValueError):
    """Report a plan that does not fit the model."""


@dataclass(frozen=True)
class Entry:
    """Represent how a plan treats one module.

    Args:
        style: One of the keys of :data:`STYLES`.
        source: Origin of the style: the user, Hugging Face's plan of the model, or the inference from a traced step.
        why: The reason for the style, or another remark for the start-up table; empty: none.
        num_packed: Number of layers that are packed in a ``packed_colwise`` layer; 1 for other styles.
    """

    style: str
    source: Source
    why: str = ""
    num_packed: int = 1

    @property
    def is_split(self) -> bool:
        """Return whether each rank holds a part of the module's parameters."""
        return not self.style.startswith("replicate")

    @property
    def is_of_submodules(self) -> bool:
        """Return whether the entry also treats the parameters of the module's submodules."""
        return self.style in ("experts", "attention_heads")

    def replicated(self, why: str) -> Entry:
        """Return an entry from the same source that replicates the module.

        Args:
            why: The reason, for the start-up table.
        """
        return replace(self, style="replicate", why=why, num_packed=1)


@dataclass(frozen=True)
class SplitSequence:
    """Represent where hidden states are split along the sequence, so that each rank has some of the tokens.

    Modules are given by their full names, and arguments of a module by position or keyword.

    Args:
        chains: Sequences of blocks, each of which is given the output of the one before. Tokens are split before the
            first block of a chain and gathered after the last.
        streams: For each block, the argument that holds its hidden states.
        regions: For each module inside a block that needs all tokens, the arguments that must be gathered for it.
        layers: ``colwise`` layers outside of all regions; each gathers its own input.
    """

    chains: tuple[tuple[str, ...], ...]
    streams: Mapping[str, int | str]
    regions: Mapping[str, tuple[int | str, ...]]
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitHeads:
    """Represent the tensors with a dimension of attention heads that a split module takes and returns.

    These are tensors of shape ``(..., heads, queries, keys)``, such as attention scores and position biases. They have
    all heads outside of the module. Inside, where its layers are split, each rank has its own heads.

    Args:
        num_heads: The number of heads over all ranks. If the size of the dimension is a multiple of this number, the
            dimension holds the heads of each sample in turn.
        arguments: Positions or keywords of the module's arguments that are such tensors.
        outputs: Indices of the returned tensors that code after the module uses, and that must therefore be gathered.
    """

    num_heads: int
    arguments: tuple[int | str, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Represent the tensor-parallel plan of a model.

    Args:
        entries: The entry of each module that says how it is treated, by full module name.
        sizes: The values on each rank of the attributes that count heads or features, by full module name and then by
            the attribute's name.
        sequence: Description of the split of hidden states along the sequence; None: they are not split.
        draws_random: Whether the model may draw random numbers. Ranks must then draw the same numbers where activations
            are replicated, and different numbers where they are split.
        split_logits: Full names of the ``colwise_gather_output`` layers whose output stays split until a function needs
            the whole of it.
        notes: Further lines of the start-up table.
        parameters: For each split parameter that belongs to no split layer, by full name, the dimension along which it
            is split.
        heads: The tensors with a dimension of attention heads that a module takes or returns, by full module name.
        with_parts: Full names of the modules that are given or return only a rank's part of the ``"features"`` or of
            the ``"tokens"``, which the values name.
        widths: Names of the arguments whose last size a module reads as that of a rank's part (see
            :mod:`~lightning_dist.techniques.tensor_parallel.own_width`), by full module name.
    """

    entries: Mapping[str, Entry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sequence: SplitSequence | None = None
    draws_random: bool = True
    split_logits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, SplitHeads] = field(default_factory=dict)
    with_parts: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def gathers_output_of(self, name: str) -> bool:
        """Return whether the ranks gather the output of the layer ``name`` in its forward."""
        entry = self.entries.get(name)
        return entry is not None and entry.style == "colwise_gather_output" and name not in self.split_logits

    def outline(self) -> str:
        """Return as text everything that ranks must agree on, without reasons, which may name a rank's own device."""
        styles = {name: (entry.style, entry.num_packed) for name, entry in self.entries.items()}
        others = (self.sizes, self.sequence, self.draws_random, self.split_logits, self.parameters, self.heads)
        return repr((styles, *others, self.widths))

    def copied_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the outermost modules that every rank of ``tp`` runs on the same input, because nothing is split.

        Args:
            root: The model of the plan.
        """
        split = [name for name, entry in self.entries.items() if entry.style != "replicate"]
        split += [name.rpartition(".")[0] for name in self.parameters]
        if self.sequence is not None:  # A rank runs the modules of these blocks on its own tokens.
            blocks = [block for chain in self.sequence.chains for block in chain]
            split += [name for name, _ in root.named_modules() if _is_in(name, blocks)]
        around = {"", *(name[:end] for name in split for end in range(1, len(name) + 1) if name[end:][:1] in ("", "."))}
        return [
            module
            for name, module in root.named_modules()
            if name not in around and name.rpartition(".")[0] in around and not _is_in(name, split)
        ]


def is_inside(name: str, module: str) -> bool:
    """Return whether ``name`` is the module ``module`` or one of its submodules."""
    return name == module or name.startswith(f"{module}.")


def _is_in(name: str, others: Collection[str]) -> bool:
    """Return whether the module ``name`` is one of ``others`` or inside one of them."""
    return any(is_inside(name, other) for other in others)


def resolve_plan(root: nn.Module, user: Mapping[str, str] | None = None) -> dict[str, Entry]:
    """Merge the plans of the user and of Hugging Face for ``root``; the user's entries override the others.

    Args:
        root: The model, in which the names of modules are looked up.
        user: The style of each module, by name. In a name, ``*`` stands for one part between dots and ``**`` for one or
            more parts, and the beginning may be left out (``layers.*.mlp.up`` for ``model.layers.0.mlp.up``). None:
            the result of ``root.tensor_parallel_plan()`` if the model has that method.

    Returns:
        The entries by full module name, in the order in which the model defines its modules.

    Raises:
        PlanError: If a name matches no module, if two names match the same module, or if a style is unknown. The text
            suggests the nearest valid names.
    """
    if user is None:
        method = getattr(root, "tensor_parallel_plan", None)
        user = method() if callable(method) else {}
    modules = {name: module for name, module in root.named_modules() if name}
    plan = dict(_hugging_face(root))
    patterns: dict[str, str] = {}
    for pattern, text in user.items():
        style, num_packed = _parse(pattern, text)
        matches = [name for name in modules if _matches(pattern, name)]
        if not matches:
            raise PlanError(f"plan: {pattern!r} matches no module.{_nearest(pattern, list(modules))}")
        for name in matches:
            if name in patterns:
                raise PlanError(f"plan: {patterns[name]!r} and {pattern!r} both match {name}; leave one out.")
            patterns[name] = pattern
            plan[name] = Entry(style, "user", num_packed=num_packed)
    return {name: plan[name] for name in modules if name in plan}


def _hugging_face(root: nn.Module) -> Iterator[tuple[str, Entry]]:
    """Yield module names and entries from the ``_tp_plan`` of the outermost Hugging Face models in ``root``."""
    inside: set[nn.Module] = set()
    for prefix, model in root.named_modules():
        plan = getattr(model, "_tp_plan", None)
        if not isinstance(plan, Mapping) or model in inside:
            continue
        inside |= set(model.modules())
        for name, module in model.named_modules():
            for pattern, style in ((str(pattern), str(style)) for pattern, style in plan.items()):
                if name and _as_regex(pattern).fullmatch(name):
                    full_name = f"{prefix}.{name}" if prefix else name
                    style = _ALIASES.get(style, style)
                    can_be = linear_layer(module) is not None or not style.startswith("packed")
                    if (
                        style == "embedding_rowwise"
                        and isinstance(module, nn.Embedding)
                        and unsupported_options(module)
                    ):
                        yield full_name, Entry("replicate", "Hugging Face", f"it has {unsupported_options(module)}")
                    elif style in _NOT_YET or not can_be:
                        yield full_name, Entry("replicate", "Hugging Face", f"{style} is not supported")
                    elif style in STYLES:
                        yield full_name, Entry(style, "Hugging Face", num_packed=2 if style == "packed_colwise" else 1)


def _parse(pattern: str, text: str) -> tuple[str, int]:
    """Split the text of a style, such as ``packed_colwise:3``, into the style and the number of packed layers."""
    style, _, number = text.partition(":")
    known = [*STYLES, *_ALIASES]
    if style not in known:
        close = difflib.get_close_matches(style, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(STYLES)}."
        raise PlanError(f"plan: {pattern!r} has the unknown style {text!r}. {hint}")
    if style != "packed_colwise" and number:
        raise PlanError(f"plan: {pattern!r} has {text!r}, but only packed_colwise takes a number.")
    if style == "packed_colwise" and (not number.isdigit() or int(number) < 2):
        raise PlanError(
            f"plan: {pattern!r} has {text!r}; say how many layers are packed in it, as packed_colwise:3 for query, key"
            " and value or packed_colwise:2 for gate and up."
        )
    return _ALIASES.get(style, style), int(number or 1)


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
