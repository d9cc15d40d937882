"""Infer a tensor-parallel plan from the recorded data flow of a step.

Layers whose output is added to the hidden states become ``rowwise``, and the layers that feed only those become
``colwise``. A head with as many outputs as an embedding has rows is split along the vocabulary, and so is the
embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor, nn

from lightning_dist.model.layers import LinearLayer, linear_layer
from lightning_dist.techniques.tensor_parallel.layers import num_heads, overrides_forward, unsupported_options
from lightning_dist.techniques.tensor_parallel.plan import Entry, SplitHeads
from lightning_dist.tracing.step_graph import Dataflow, tensors_in
from lightning_dist.tracing.step_graph.dataflow import BATCH, Call, sources

__all__ = ["Inferred", "LayerGroup", "inferred", "innermost_around"]

_HEADS = re.compile(r"(num|n)_.*heads?$|(num|n)_head$")


@dataclass(frozen=True)
class LayerGroup:
    """Represent layers that must be split together: a ``rowwise`` layer and the ``colwise`` layers that feed it.

    Args:
        row: Full name of the ``rowwise`` layer.
        cols: Full names of the ``colwise`` layers.
        between: Full names of the modules, such as norms, that the output of the ``colwise`` layers passes through.
        num_packed: Number of layers that seem to be packed in the group's only ``colwise`` layer; 1 if there are more.
        parameters: Other parameters from which the input of the ``rowwise`` layer is computed, as a mapping from the
            full name to the dimension of the heads or features.
        heads: The arguments and outputs with a dimension of heads of the module around the group, by its full name.
    """

    row: str
    cols: tuple[str, ...]
    between: tuple[str, ...] = ()
    num_packed: int = 1
    parameters: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, SplitHeads] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the full names of the group's modules."""
        return (*self.cols, *self.between, self.row)

    @property
    def mixes_tokens(self) -> bool:
        """Return whether the group seems to be an attention: queries, keys and values, or tensors with heads."""
        return bool(self.heads) or max(len(self.cols), self.num_packed) >= 3

    def entries(self, num_packed: int | None = None) -> dict[str, Entry]:
        """Return the plan's entries for the group's modules, by full name.

        Args:
            num_packed: Number of layers that are packed in the group's only ``colwise`` layer; None: the group's own
                ``num_packed``.
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
    """Represent the plan that was inferred for a model.

    Args:
        groups: The groups of layers that can be split; the layers of a group are split together or not at all.
        vocabulary: The entries of embeddings and output heads, by full name.
    """

    groups: Sequence[LayerGroup]
    vocabulary: Mapping[str, Entry]

    def entries(self) -> dict[str, Entry]:
        """Return the entries of all modules, by full name."""
        return {name: entry for group in self.groups for name, entry in group.entries().items()} | dict(self.vocabulary)


def inferred(root: nn.Module, dataflow: Dataflow, num_ranks: int) -> Inferred:
    """Find the modules of ``root`` that can be split; modules that the result does not name are replicated.

    Args:
        root: The model with whole parameters.
        dataflow: The record of a step of the model on fake tensors.
        num_ranks: Number of ranks that layers are split over.
    """
    return Inferred(list(_groups(root, dataflow, num_ranks)), _vocabulary(root, dataflow, num_ranks))


def innermost_around(names: Iterable[str], among: Mapping[str, object]) -> str:
    """Return the innermost module that contains every module of ``names``; a module contains itself.

    Args:
        names: Full names of modules.
        among: Full names of the modules to choose from, as keys.

    Returns:
        The full name of the module; empty if there is none.
    """
    parts = [name.split(".") for name in names]
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    while common and ".".join(common) not in among:
        common.pop()
    return ".".join(common)


def _groups(root: nn.Module, dataflow: Dataflow, num_ranks: int) -> Iterator[LayerGroup]:
    layers = {name: linear_layer(root.get_submodule(name)) for name in dataflow.called}
    calls = dataflow.first_calls()
    rows = {name for name in dataflow.residual if layers.get(name) is not None}
    for row in sorted(rows):
        found = dataflow.input_sources[row] - BATCH
        cols = {name for name in found if layers.get(name) is not None}
        users = {name for name in layers for col in cols if col in dataflow.input_sources[name]}
        if not cols or not users <= rows or cols & dataflow.residual:
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
            for name, its_sources in dataflow.input_sources.items()
            if name not in layers and its_sources & cols and its_sources <= cols | others | BATCH
        }
        heads = _num_heads(root, around, (row, *cols), its_layer, num_ranks)
        yield LayerGroup(
            row,
            tuple(sorted(cols)),
            tuple(sorted(between)),
            num_packed,
            dict(_parameters(root, others, dataflow, its_layer, heads)),
            dict(_heads(calls[around], dataflow, heads, found)) if around and heads else {},
        )


def _num_heads(root: nn.Module, around: str, names: Sequence[str], row: LinearLayer, num_ranks: int) -> int | None:
    """Return the number of attention heads that the input features of a ``rowwise`` layer consist of.

    Candidates are attributes such as ``num_heads``, and numbers derived from ``head_dim``, of the modules in ``around``
    that contain the layers. The largest one that fits is returned.

    Args:
        root: The model, in which the modules are looked up.
        around: Full name of the innermost called module that contains the group; empty: there is none.
        names: Full names of the group's layers.
        row: Dimensions and numbers of features of the group's ``rowwise`` layer.
        num_ranks: Number of ranks that layers are split over; the number of heads must divide by it.

    Returns:
        The number of heads; None if none fits.
    """
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
    root: nn.Module, names: Iterable[str], dataflow: Dataflow, row: LinearLayer, heads: int | None
) -> Iterator[tuple[str, int]]:
    """Yield the full names of free parameters and position tables with a dimension of heads or features.

    Args:
        root: The model, in which the parameters are looked up.
        names: Full names of free parameters, or of modules that hold parameters.
        dataflow: The record of a step of the model on fake tensors.
        row: Dimensions and numbers of features of the group's ``rowwise`` layer.
        heads: Number of heads; None: it is not known.

    Yields:
        The full name of each parameter, and the dimension of the heads or features.
    """
    params = dict(root.named_parameters())
    for name in sorted(names):
        for full_name in [name] if name in params else [key for key in params if key.rpartition(".")[0] == name]:
            dims = [dim for dim, size in enumerate(params[full_name].shape) if size in (heads, row.in_features)]
            if dims and dataflow.readers[full_name] == {full_name.rpartition(".")[0]}:
                yield full_name, dims[-1]


def _heads(call: Call, dataflow: Dataflow, heads: int, into_row: set[str]) -> Iterator[tuple[str, SplitHeads]]:
    """Find the arguments and outputs of a module that have the shape ``(..., heads, queries, keys)``.

    Args:
        call: A call of the innermost called module that contains the group.
        dataflow: The record of a step of the model on fake tensors.
        heads: Number of attention heads over all ranks.
        into_row: Sources of the input of the ``rowwise`` layer. Tensors that come from other layers are left out.

    Yields:
        The full name of the module and these arguments and outputs, if there are any.
    """

    def has_heads(value: object) -> bool:
        if not isinstance(value, Tensor) or value.ndim < 3 or not isinstance(value.size(-3), int):
            return False  # A symbolic size depends on values, which fake tensors do not have.
        return value.size(-3) == heads or (value.ndim == 3 and value.size(-3) % heads == 0)

    named: list[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    arguments = tuple(
        key
        for key, value in named
        if isinstance(value, Tensor) and has_heads(value) and sources(value) - BATCH <= into_row
    )
    later = dataflow.used_later[call.name]
    outputs = tuple(
        index
        for index, value in enumerate(tensors_in(call.output))
        if index in later and has_heads(value) and value.size(-3) == heads and sources(value) - BATCH <= into_row
    )
    if arguments or outputs:
        yield call.name, SplitHeads(heads, arguments, outputs)


def _vocabulary(root: nn.Module, dataflow: Dataflow, num_ranks: int) -> dict[str, Entry]:
    """Return entries for the output head of a language model and the embedding with the same vocabulary."""
    modules = {name: root.get_submodule(name) for name in dataflow.called}
    embeddings = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Embedding)
        and not unsupported_options(module)
        and not overrides_forward(module)
        and not module.num_embeddings % num_ranks
    }
    used = {name for name in modules for other in modules if name in dataflow.input_sources[other]}
    entries: dict[str, Entry] = {}
    for name, module in modules.items():
        layer = linear_layer(module)
        if layer is None or name in used or name in dataflow.residual:
            continue
        for embedding, rows in embeddings.items():
            if rows.num_embeddings == layer.out_features and embedding in dataflow.called:
                entries[name] = Entry("colwise_gather_output", "inferred")
                entries[embedding] = Entry("embedding_rowwise", "inferred")
    return entries
