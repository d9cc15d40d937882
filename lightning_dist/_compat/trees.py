"""Flatten, rebuild and map nested containers of tensors.

torch describes these functions in its guides and uses them in its public interfaces, but has them only in a private
module. Replaced by: a public ``torch.utils.pytree``.
"""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
