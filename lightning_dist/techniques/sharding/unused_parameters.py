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

from lightning_dist.mesh.collectives import any_of_flags
from lightning_dist.mesh.flag_agreement import FlagAgreement
from lightning_dist.techniques.sharding._compat import ShardedGroup

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Agree between ranks, after a backward, on which parameters have gradients.

    Args:
        groups: Groups of the model's parameters, in the same order on all ranks.
        mesh: Device mesh of the ranks that reduce gradients together.
        begin_end: Function that begins to check that the ranks of the mesh's last axis have ended the backward. It is
            given flags, and returns a function that waits and returns the largest of each rank's. None: nothing is
            checked.
        finish_reductions: Function that waits for the reductions of gradients that are under way.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        mesh: DeviceMesh,
        begin_end: Callable[[Tensor], Callable[[], Tensor]] | None,
        finish_reductions: Callable[[], None],
    ) -> None:
        self.has_reduced = False
        """Whether the last agreement has reduced gradients, after FSDP2 has ended the backward."""
        self._all_groups = groups
        self._groups = groups if mesh.size() > 1 else ()
        self._begin_end = begin_end
        self._finish_reductions = finish_reductions
        self._replicas: list[weakref.ref[dist.ProcessGroup]] = []
        """The groups over which flags are exchanged that ``begin_end`` has exchanged over the last axis before."""
        self._agreement: FlagAgreement | None = None
        if begin_end is not None:
            axes = [mesh.get_group(axis) for axis in range(mesh.ndim - 1) if mesh.size(axis) > 1]
            # These are weak references, because strong ones would keep connections open after an error on this rank.
            self._replicas = [weakref.ref(group) for group in axes]
        elif mesh.size() > 1:
            self._agreement = FlagAgreement(mesh.mesh.flatten().tolist(), "used parameters", self._describe_flag)

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
            if self._begin_end is not None:
                self._begin_end(torch.empty(0, dtype=torch.uint8))()
            return
        had_gradient = [group.begin_agreement() for group in self._groups]
        try:
            yield
            with torch.no_grad():
                used = self._agree([group.used() for group in self._groups])
        except BaseException:
            for group in self._groups:
                group.abandon_agreement()
            raise
        with torch.no_grad():
            for group, of_any, had in zip(self._groups, used, had_gradient, strict=True):
                self.has_reduced |= group.end_agreement(of_any, had)
            self._finish_reductions()

    def _agree(self, used: Sequence[Sequence[bool]]) -> list[list[bool]]:
        """Return, for each parameter of each group, whether any rank has a gradient.

        Args:
            used: For each parameter of each group, whether this rank has a gradient.
        """
        flags = [flag for of_group in used for flag in of_group]
        if self._begin_end is not None:
            finish = self._begin_end(torch.tensor(flags, dtype=torch.uint8))
            if not self._replicas:  # Otherwise ranks would reduce gradients and exchange flags in different orders.
                self._reduce_where_all_are_used(used)
            flags = finish().bool().tolist()
        for axis in self._replicas:
            alive = axis()
            assert alive is not None
            flags = any_of_flags(flags, alive)
        if self._agreement is not None:
            flags = self._agreement.agree(flags, [p.requires_grad for group in self._groups for p in group.params])
        agreed = iter(flags)
        return [[next(agreed) for _ in of_group] for of_group in used]

    def _describe_flag(self, index: int) -> str:
        names = [name for group in self._groups for name in group.names]
        return f"the frozen parameter {names[index]!r} got a gradient"

    def _reduce_where_all_are_used(self, used: Sequence[Sequence[bool]]) -> None:
        """Begin the reductions that do not depend on the flags of other ranks, up to the first one that may do so."""
        for group, of_group in zip(self._groups, used, strict=True):
            if not of_group or group.is_reduced:
                continue
            if not all(of_group):  # Ranks must reduce the groups in the same order.
                return
            group.reduce_late()
            self.has_reduced = True
