"""Keep DTensor's cache of how operators are sharded from test to test, although each test has its own process groups.

DTensor decides for each operator, once per mesh and shape, how its result is sharded. This takes a third of the time of
a short training, so a worker keeps the decisions. The tensors that an operator returns have the mesh of the decision,
which may be that of an earlier test. Such a mesh must find the process groups of the current test, which it does by
their names: it is used only for meshes whose groups have the same names.
"""

from __future__ import annotations

import gc
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug

__all__ = ["compare_meshes_by_process_groups", "forget_process_groups"]

CLEARED_EVERY = 50
"""Number of destroyed default process groups after which the cache is cleared, so that it does not grow for ever."""

_num_forgotten = 0


def compare_meshes_by_process_groups() -> None:
    """Let a mesh of an earlier test equal another one in this process only if their process groups have the same names.

    Meshes of the same test are compared as torch does it.
    """
    has_same_ranks = DeviceMesh.__eq__

    def is_equal(self: Any, other: object) -> bool:
        if self is other or not has_same_ranks(self, other):
            return self is other
        is_earlier = hasattr(self, "is_of_earlier_test") or hasattr(other, "is_of_earlier_test")
        return not is_earlier or _group_names(self) == _group_names(other)

    DeviceMesh.__eq__ = is_equal  # type: ignore[method-assign]


def _group_names(mesh: Any) -> list[Any]:
    flattened = sorted(mesh._get_root_mesh()._flatten_mapping.items())
    return [getattr(mesh, "_dim_group_names", None), [(name, part._dim_group_names) for name, part in flattened]]


def forget_process_groups() -> None:
    """Remove the destroyed process groups from all meshes, which then look up groups by name among the current ones."""
    global _num_forgotten
    _num_forgotten += 1
    if _num_forgotten % CLEARED_EVERY == 0:
        debug._clear_sharding_prop_cache()
    for candidate in gc.get_objects():
        if type(candidate) is DeviceMesh:
            candidate._pg_registry.clear()
            candidate.is_of_earlier_test = True  # type: ignore[attr-defined]
