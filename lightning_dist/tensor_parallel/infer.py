"""A plan from what was seen of a step, for what nobody has given one.

Layers whose output is added to the hidden states are ``rowwise``, those that feed only them ``colwise``; a head with as
many outputs as an embedding has rows is split along the vocabulary, and so is the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor, nn

from lightning_dist.tensor_parallel.layers import LinearLayer, linear_layer, looks_at_tokens, num_heads, why_not_split
from lightning_dist.tensor_parallel.plan import Entry, SplitHeads
from lightning_dist.tensor_parallel.provenance import BATCH, Call, Provenance, sources
from lightning_dist.tracing import tensors_in

__all__ = ["Group", "Inferred", "inferred", "innermost_around"]

_HEADS = re.compile(r"(num|n)_.*heads?$|(num|n)_head$")


@dataclass(frozen=True)
class Group:
    """Layers that can be split together: a ``rowwise`` one, and those that feed it.

    Args:
        row: Full name of the ``rowwise`` layer.
        cols: Full names of the ``colwise`` layers.
        between: Full names of the norms of what the ``colwise`` layers return.
        num_packed: How many layers the only ``colwise`` one seems to be.
        parameters: Full names of other parameters that what feeds the ``rowwise`` layer is computed with, to the
            dimension that heads or features lie along.
        heads: Full name of the module around the group, to its tensors that have a dimension of heads.
    """

    row: str
    cols: tuple[str, ...]
    between: tuple[str, ...] = ()
    num_packed: int = 1
    parameters: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, SplitHeads] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of all its modules."""
        return (*self.cols, *self.between, self.row)

    def entries(self, num_packed: int | None = None) -> dict[str, Entry]:
        """Return what becomes of its modules.

        Args:
            num_packed: How many layers the only ``colwise`` one is; None: as many as it seems to be.
        """
        number = self.num_packed if num_packed is None else num_packed
        col = Entry("packed_colwise" if number > 1 else "colwise", "inferred", num_packed=number)
        between = Entry("replicated_with_grad_allreduce", "inferred")
        return {
            **dict.fromkeys(self.cols, col),
            **dict.fromkeys(self.between, between),
            self.row: Entry("rowwise", "inferred"),
        }


@dataclass(frozen=True)
class Inferred:
    """What was inferred of a model.

    Args:
        groups: Layers that can be split together.
        vocabulary: Full names of embeddings and heads to what becomes of them.
    """

    groups: Sequence[Group]
    vocabulary: Mapping[str, Entry]

    def entries(self) -> dict[str, Entry]:
        """Return what becomes of all modules."""
        return {name: entry for group in self.groups for name, entry in group.entries().items()} | dict(self.vocabulary)


def inferred(root: nn.Module, provenance: Provenance, num_ranks: int) -> Inferred:
    """Find what can be split of ``root``; what is not in it is replicated.

    Args:
        root: The model.
        provenance: What was seen of a step of it.
        num_ranks: Over how many ranks it is split.
    """
    return Inferred(list(_groups(root, provenance, num_ranks)), _vocabulary(root, provenance, num_ranks))


def innermost_around(names: Iterable[str], among: Mapping[str, object]) -> str:
    """Return the innermost of the modules ``among`` that all modules of ``names`` are in, or are; empty: none is."""
    parts = [name.split(".") for name in names]
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    while common and ".".join(common) not in among:
        common.pop()
    return ".".join(common)


def _groups(root: nn.Module, provenance: Provenance, num_ranks: int) -> Iterator[Group]:
    layers = {name: linear_layer(root.get_submodule(name)) for name in provenance.called}
    calls = {call.name: call for call in reversed(provenance.calls)}
    rows = {name for name in provenance.residual if layers.get(name) is not None}
    for row in sorted(rows):
        found = provenance.into[row] - BATCH
        cols = {name for name in found if layers.get(name) is not None}
        users = {name for name in layers for col in cols if col in provenance.into[name]}
        if not cols or not users <= rows or cols & provenance.residual:
            continue
        its_layer, of_cols = layers[row], [layers[col] for col in cols]
        assert its_layer is not None
        num_packed = 1
        if len(of_cols) == 1 and of_cols[0] is not None:
            num_packed = max(of_cols[0].out_features // its_layer.in_features, 1)
        around = innermost_around((row, *cols), calls)
        others = {name for name in found - cols if around and name.startswith(f"{around}.")}
        between = {
            name
            for name, its_sources in provenance.into.items()
            if name not in layers and its_sources & cols and its_sources <= cols | others | BATCH
        }
        heads = _num_heads(root, around, (row, *cols), its_layer, num_ranks)
        yield Group(
            row,
            tuple(sorted(cols)),
            tuple(sorted(between)),
            num_packed,
            dict(_parameters(root, others, provenance, its_layer, heads)),
            dict(_heads(calls[around], provenance, heads, found)) if around and heads else {},
        )


def _num_heads(root: nn.Module, around: str, names: Sequence[str], row: LinearLayer, num_ranks: int) -> int | None:
    """Return how many attention heads the features that enter a layer are, as the modules around it say."""
    owners = {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}
    modules = [root.get_submodule(owner) for owner in owners if owner == around or owner.startswith(f"{around}.")]
    counts = [
        value
        for module in modules
        for key, value in vars(module).items()
        if _HEADS.search(key) and isinstance(value, int) and not isinstance(value, bool)
    ]
    counts += [count for module in modules if (count := num_heads(module, row.in_features))]
    fitting = [count for count in counts if count > 1 and row.in_features % count == 0 and count % num_ranks == 0]
    return max(fitting, default=None)


def _parameters(
    root: nn.Module, names: Iterable[str], provenance: Provenance, row: LinearLayer, heads: int | None
) -> Iterator[tuple[str, int]]:
    """Find the dimension of heads or features of free parameters, and of those of tables of positions."""
    params = dict(root.named_parameters())
    for name in sorted(names):
        for full_name in [name] if name in params else [key for key in params if key.rpartition(".")[0] == name]:
            dims = [dim for dim, size in enumerate(params[full_name].shape) if size in (heads, row.in_features)]
            if dims and provenance.readers[full_name] == {full_name.rpartition(".")[0]}:
                yield full_name, dims[-1]


def _heads(call: Call, provenance: Provenance, heads: int, into_row: set[str]) -> Iterator[tuple[str, SplitHeads]]:
    """Find what a module is given, and returns, that is as attention scores are: (..., heads, queries, keys)."""

    def has_heads(value: object) -> bool:
        if not isinstance(value, Tensor) or value.ndim < 3 or not isinstance(value.size(-3), int):
            return False  # the size of what depends on values is not known
        return value.size(-3) == heads or (value.ndim == 3 and value.size(-3) % heads == 0)

    named: list[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    arguments = tuple(
        key
        for key, value in named
        if isinstance(value, Tensor) and has_heads(value) and sources(value) - BATCH <= into_row
    )
    later = provenance.used_later[call.name]
    outputs = tuple(
        index
        for index, value in enumerate(tensors_in(call.output))
        if index in later and has_heads(value) and value.size(-3) == heads and sources(value) - BATCH <= into_row
    )
    if arguments or outputs:
        yield call.name, SplitHeads(heads, arguments, outputs)


def _vocabulary(root: nn.Module, provenance: Provenance, num_ranks: int) -> dict[str, Entry]:
    """Find the head and the embedding of a language model."""
    modules = {name: root.get_submodule(name) for name in provenance.called}
    embeddings = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Embedding)
        and not why_not_split(module)
        and not looks_at_tokens(module)
        and not module.num_embeddings % num_ranks
    }
    used = {name for name in modules for other in modules if name in provenance.into[other]}
    entries: dict[str, Entry] = {}
    for name, module in modules.items():
        layer = linear_layer(module)
        if layer is None or name in used or name in provenance.residual:
            continue
        for embedding, rows in embeddings.items():
            if rows.num_embeddings == layer.out_features and embedding in provenance.called:
                entries[name] = Entry("colwise_gather_output", "inferred")
                entries[embedding] = Entry("embedding_rowwise", "inferred")
    return entries
