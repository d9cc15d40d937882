"""A plan from what was seen of a step, where nobody has given one.

Layers whose output is added to the hidden states are ``rowwise``, those that feed only them ``colwise``; a head with as
many outputs as an embedding has rows is split along the vocabulary, and so is the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_dist.tensor_parallel.layers import linear_layer, why_not_split
from lightning_dist.tensor_parallel.plan import Entry
from lightning_dist.tensor_parallel.provenance import Provenance

__all__ = ["inferred"]


def inferred(root: nn.Module, provenance: Provenance, num_ranks: int) -> dict[str, Entry]:
    """What becomes of the modules of ``root``, by full name; what is not in it is replicated.

    Args:
        root: The model.
        provenance: What was seen of a step of it.
        num_ranks: Over how many ranks it is split.
    """
    entries = {name: entry for group in _groups(root, provenance) for name, entry in group.entries().items()}
    return entries | _vocabulary(root, provenance, num_ranks)


@dataclass(frozen=True)
class _Group:
    """Layers that are split together: a ``rowwise`` one, and those that feed it."""

    row: str
    cols: tuple[str, ...]
    between: tuple[str, ...]  # norms of what the cols return
    num_packed: int

    def entries(self) -> dict[str, Entry]:
        col = Entry("packed_colwise" if self.num_packed > 1 else "colwise", "inferred", num_packed=self.num_packed)
        between = Entry("replicated_with_grad_allreduce", "inferred")
        return {
            **dict.fromkeys(self.cols, col),
            **dict.fromkeys(self.between, between),
            self.row: Entry("rowwise", "inferred"),
        }


def _groups(root: nn.Module, provenance: Provenance) -> Iterator[_Group]:
    layers = {name: linear_layer(root.get_submodule(name)) for name in provenance.called}
    rows = {name for name in provenance.residual if layers.get(name) is not None}
    for row in sorted(rows):
        cols = provenance.into[row]
        users = {name for name in layers for col in cols if col in provenance.into[name]}
        if not cols or not users <= rows or cols & provenance.residual:
            continue
        its_layer, of_cols = layers[row], [layers.get(col) for col in cols]
        assert its_layer is not None
        num_packed = 1
        if len(of_cols) == 1 and of_cols[0] is not None:
            num_packed = max(of_cols[0].out_features // its_layer.in_features, 1)
        if any(layer is None for layer in of_cols):
            continue
        between = {
            name for name, sources in provenance.into.items() if name not in layers and sources and sources <= cols
        }
        yield _Group(row, tuple(sorted(cols)), tuple(sorted(between)), num_packed)


def _vocabulary(root: nn.Module, provenance: Provenance, num_ranks: int) -> dict[str, Entry]:
    """The head and the embedding of a language model."""
    modules = {name: root.get_submodule(name) for name in provenance.called}
    embeddings = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and not why_not_split(module) and not module.num_embeddings % num_ranks
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
