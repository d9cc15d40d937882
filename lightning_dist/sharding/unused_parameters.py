"""Handle parameters without a gradient on some or all ranks, as in a mixture of experts or with a skipped head.

Ranks that reduce gradients together must send the same tensors, so a rank without a gradient sends zeros. After each
backward, the ranks agree on which parameters any of them used. A parameter that no rank used has no gradient
afterwards, as in a single process, so that optimizers skip it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.collectives import any_of_flags
from lightning_dist.sharding._compat import ShardedGroup

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Agree between ranks, after a backward, on which parameters have gradients.

    Args:
        groups: Groups of the model's parameters, in the same order on all ranks.
        mesh: Device mesh of the ranks that reduce gradients together.
        end: Function that checks that the ranks of the mesh's last axis have ended the backward; it is given flags, and
            returns the largest of each rank's. None: nothing is checked.
        finish_reductions: Function that waits for the reductions of gradients that are under way.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        mesh: DeviceMesh,
        end: Callable[[Tensor], Tensor] | None,
        finish_reductions: Callable[[], None],
    ) -> None:
        self.has_reduced = False
        """Whether the last agreement has reduced gradients, after FSDP2 has ended the backward."""
        self._all_groups = groups
        self._groups = groups if mesh.size() > 1 else ()
        self._end = end
        self._finish_reductions = finish_reductions
        num_axes = mesh.ndim if end is None else mesh.ndim - 1
        axes = [mesh.get_group(axis) for axis in range(num_axes) if mesh.size(axis) > 1]
        if mesh.device_type != "cpu" and axes:  # A read from the device would wait for the whole backward.
            ranks = mesh.mesh.flatten().tolist()
            axes = [dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="used parameters")]
        # These are weak references, because strong ones would keep connections open after an error on this rank.
        self._agreeing = [weakref.ref(group) for group in axes]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Agree on parameters with gradients at the end of the context, in which a backward runs.

        This is a collective over the mesh if this backward reduces gradients, and else one over its last axis if the
        end is checked.
        """
        self.has_reduced = False
        for group in self._all_groups:
            group.forget_used()
        if not self._groups or not self._groups[0].syncs_gradients:
            yield
            if self._end is not None:
                self._end(torch.empty(0, dtype=torch.uint8))
            return
        had_gradient = [group.begin_agreement() for group in self._groups]
        try:
            yield
            used = [group.used() for group in self._groups]
            agreed = iter(self._on_any_rank([flag for flags in used for flag in flags]))
        except BaseException:
            for group in self._groups:
                group.abandon_agreement()
            raise
        used = [[next(agreed) for _ in group] for group in used]
        with torch.no_grad():
            for group, of_any, had in zip(self._groups, used, had_gradient, strict=True):
                self.has_reduced |= group.end_agreement(of_any, had)
            self._finish_reductions()

    def _on_any_rank(self, used: Sequence[bool]) -> list[bool]:
        flags = list(used)
        if self._end is not None:
            flags = self._end(torch.tensor(flags, dtype=torch.uint8)).bool().tolist()
        for group in self._agreeing:
            alive = group()
            assert alive is not None
            flags = any_of_flags(flags, alive)
        return flags
