"""Parameters that have no gradient on some ranks, or on none: what a mixture of experts or a skipped head leaves.

Ranks that reduce gradients together must send the same tensors. A rank without a gradient sends zeros, and after each
backward the ranks agree on which parameters any of them used: one that no rank used has no gradient afterwards, as in
one process, so that optimizers leave it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.sharding._compat import ShardedGroup

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Agrees, after backwards, on which parameters have gradients.

    Args:
        groups: The groups of the model's parameters, in the same order on all ranks.
        mesh: The ranks that reduce gradients together.
    """

    def __init__(self, groups: Sequence[ShardedGroup], mesh: DeviceMesh) -> None:
        self._all_groups = groups
        self._groups = [group for group in groups if group.mesh.size() > 1]
        self._mesh = mesh
        # Reading the answer from an accelerator waits for the whole backward: it is asked again only where it matters.
        self._is_cheap = mesh.device_type == "cpu"
        self._is_needed = True

    def ask_again(self) -> None:
        """Agree after the next backward also where no parameter was unused before."""
        self._is_needed = True

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Agree when the backward inside is done. A collective over the mesh, where gradients are reduced now."""
        for group in self._all_groups:
            group.forget_used()
        if not self._groups or not self._groups[0].syncs_gradients:
            yield
            return
        had_gradient = [group.begin_agreement() for group in self._groups]
        try:
            yield
        except BaseException:
            for group in self._groups:
                group.abandon_agreement()
            raise
        used = [group.used() for group in self._groups]
        if self._is_cheap or self._is_needed:
            flat = [flag for flags in used for flag in flags]
            agreed = self._on_any_rank(flat)
            self._is_needed = not all(agreed)
            flags = iter(agreed)
            used = [[next(flags) for _ in group] for group in used]
        with torch.no_grad():
            for group, of_any, had in zip(self._groups, used, had_gradient, strict=True):
                group.end_agreement(of_any, had)

    def _on_any_rank(self, used: Sequence[bool]) -> list[bool]:
        flags = torch.tensor(used, dtype=torch.uint8, device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            if self._mesh.size(axis) > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX, self._mesh.get_group(axis))
        return [bool(flag) for flag in flags.tolist()]
