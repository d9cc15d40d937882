"""Flatten, rebuild and map nested containers of tensors.

torch describes these functions in its guides and uses them in its public interfaces, but has them only in a private
module. Replaced by: a public ``torch.utils.pytree``.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to the leaves that are instances of ``kind``."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)
