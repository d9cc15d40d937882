"""Check that the replicas of a sharded model hold the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.options import Build, TechniqueOptions
from lightning_dist.techniques.protocol import Parallel, Rows, SavedState, Technique

__all__ = ["ReplicaComparison", "ReplicaOptions", "ReplicasDifferError", "bit_sums", "check_replicas", "differ"]


class ReplicasDifferError(RuntimeError):
    """Report that the replicas of the model no longer hold the same weights."""


@dataclass(frozen=True)
class ReplicaOptions(TechniqueOptions):
    """Choose when replicas are compared.

    Args:
        check_replicas_every_n_steps: Number of optimizer steps after which the replicas' weights are compared bit by
            bit; a difference raises an error. None: they are never compared.

    Raises:
        ValueError: If the number is less than 1.
    """

    check_replicas_every_n_steps: int | None = None

    is_for_training = True

    def __post_init__(self) -> None:
        if self.check_replicas_every_n_steps is not None and self.check_replicas_every_n_steps < 1:
            raise ValueError(
                f"check_replicas_every_n_steps={self.check_replicas_every_n_steps} must be at least 1, or None for"
                " never."
            )

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique, which also says in the start-up table that replicas are not compared."""
        yield ReplicaComparison(build.mesh, self.check_replicas_every_n_steps)


class ReplicaComparison(SavedState):
    """Compare the replicas' weights at regular intervals of optimizer steps, and raise an error if they differ.

    Args:
        mesh: Device mesh with all axes of the layout, of which ``dp_replicate`` is compared.
        every_n_steps: Number of optimizer steps after which weights are compared; None: never.
    """

    def __init__(self, mesh: DeviceMesh, every_n_steps: int | None) -> None:
        self._mesh = mesh
        self._has_replicas = "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh["dp_replicate"].size() > 1
        self._every_n_steps = every_n_steps
        self._num_steps = 0

    def attach(self, parallel: Parallel) -> None:
        """Keep the module for the comparisons."""
        self._module = parallel.module

    def after_optimizer_step(self) -> None:
        """Compare the replicas if a comparison is due. This is a collective over all processes in that case.

        Raises:
            ReplicasDifferError: On every rank, if any parameter differs.
        """
        self._num_steps += 1
        if self._has_replicas and self._every_n_steps and self._num_steps % self._every_n_steps == 0:
            check_replicas(self._module, self._mesh)

    def state(self) -> dict[str, Any]:
        """Return the number of optimizer steps, if replicas are compared."""
        return {"num_steps": self._num_steps} if self._every_n_steps else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the number of optimizer steps, so that comparisons come in the same steps as before."""
        self._num_steps = state["num_steps"]

    def table_rows(self) -> Rows:
        """Return a row that says whether replicas are compared, if there are any."""
        if self._has_replicas:
            every = self._every_n_steps
            yield "replicas", f"compared every {every} optimizer steps" if every else "not compared"


def check_replicas(module: nn.Module, mesh: DeviceMesh, axis: str = "dp_replicate") -> None:
    """Compare every parameter, bit by bit, over the ranks of ``axis``. This is a collective over all processes.

    Ranks send 16 bytes per parameter: two sums over the bits of its local shard, one of them weighted by position.

    Args:
        module: Model with its parameters in sharded form, as they are outside of steps.
        mesh: Device mesh with all axes of the layout.
        axis: Name of the mesh axis over which weights are replicated.

    Raises:
        ReplicasDifferError: On every rank, if any parameter differs anywhere; the text names up to three parameters.
    """
    names, sums = [], []
    for name, param in module.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        names.append(name)
        # Parameters of other pipeline stages (on the meta device) are compared by the ranks of these stages.
        sums.append(
            torch.zeros(2, dtype=torch.int64, device=mesh.device_type)
            if is_remote(local)
            else bit_sums(local.detach()).to(mesh.device_type)  # Offloaded shards are on the CPU.
        )
    fingerprint = torch.stack(sums)
    differs = differ(fingerprint, [mesh[axis].get_group()]).to(torch.int32)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs.any():
        wrong = [name for name, flag in zip(names, differs.tolist(), strict=True) if flag]
        raise ReplicasDifferError(
            f"{len(wrong)} of {len(names)} parameters differ between the replicas ({axis}), the first of them"
            f" {', '.join(wrong[:3])}. Something changed weights on one rank only, or depended on that rank's data"
            " (code under `if rank == 0`, an unseeded re-initialisation, an optimizer step that one rank skipped)."
        )


def differ(sums: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Compare fingerprints over the ranks of all ``groups`` together. This is a collective over each group.

    Args:
        sums: Results of :func:`bit_sums` for ``n`` tensors, of shape ``(n, 2)``.
        groups: Process groups, one for each mesh axis to compare over.

    Returns:
        Boolean tensor of shape ``(n,)`` that says for each tensor whether it differs between any ranks.
    """
    highest, lowest = sums.clone(), sums.clone()
    for group in groups:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group)
    return (highest != lowest).any(dim=1)


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return two int64 sums (modulo 2**64) of the elements' bits as shape ``(2,)``: plain and weighted by position."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(width).to(torch.int64)
    return torch.stack([bits.sum(), (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()])
