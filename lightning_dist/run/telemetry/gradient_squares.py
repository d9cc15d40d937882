"""Compute the squared norms of gradients before and after they are averaged over the ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist._compat import local_of
from lightning_dist.parameters.gradient_reducer import LocalGradient
from lightning_dist.parameters.group import ParameterGroup

__all__ = ["GradientSquares"]


class GradientSquares:
    """Add up the squares of the elements of this rank's gradients, and of those of their mean that this rank has.

    Nothing is sent, and the host does not wait for the device. What several ranks have counts in part on each of them,
    so that sums over all ranks count every element once.

    Args:
        groups: The groups of all parameters of the module, which let this object observe their gradients.
        num_ranks: Number of ranks that have these parameters or parts of them: all ranks, or those of a stage.
        num_data_parallel: Number of ranks with different parts of the batch.
    """

    def __init__(self, groups: Sequence[ParameterGroup], num_ranks: int, num_data_parallel: int) -> None:
        self._groups = groups
        self._num_ranks = num_ranks
        self._num_copies = num_ranks // num_data_parallel
        self._norms: dict[str, tuple[Tensor, float]] = {}
        """By the name of a parameter the norm of its gradient on this rank, and by what this was divided before."""

    def observe(self, gradients: Sequence[LocalGradient], divisor: float) -> None:
        """Compute the norms of gradients that are about to be averaged."""
        for name, value in gradients:
            self._norms[name] = _norm(value), divisor

    def miss(self, name: str) -> None:
        """Refuse a gradient that cannot be observed.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"The norm of this rank's gradients was asked for, and the step uses the parameter {name!r} outside of the"
            " forward of its block, where its gradient is averaged as soon as it is computed. Use it in the forward of"
            " its block, or strategy='data_parallel', which shards no parameter."
        )

    @torch.no_grad()
    def take(self) -> Tensor | None:
        """Return the sums of the last backward, and forget them; None if no gradient was averaged in it.

        Returns:
            Two numbers on the device, of dtype float64 and shape ``(2,)``. Their sums over all ranks are the sum of the
            squared norms of the data-parallel ranks' gradients, and the squared norm of the mean of these gradients.
        """
        if not self._norms:
            return None
        own, means = _Squares(), _Squares()
        for group in self._groups:
            over_batch = group.mesh.mesh_dim_names or ()
            for name, param in zip(group.names, group.params, strict=True):
                if name in self._norms:
                    norm, divisor = self._norms[name]
                    own.add(norm, divisor**2 * _num_parts(param, over_batch) / self._num_copies)
                if param.grad is not None:
                    means.add(_norm(local_of(param.grad)), _num_parts(param) / self._num_ranks)
        device = next(norm.device for norm, _ in self._norms.values())
        self._norms = {}
        return torch.stack([own.sum(device), means.sum(device)])


def _norm(value: Tensor) -> Tensor:
    """Return the Euclidean norm in float32, or in float64 if ``value`` has this dtype."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))
    return norm


def _num_parts(param: nn.Parameter, left_out: Iterable[str] = ()) -> int:
    """Return over how many ranks a parameter is divided.

    Args:
        param: The parameter as the optimizer sees it.
        left_out: Names of the axes of its mesh that do not count.
    """
    if not isinstance(param, DTensor):
        return 1
    mesh = param.device_mesh
    axes = zip(mesh.mesh_dim_names or (), param.placements, strict=True)
    return math.prod(
        mesh.size(axis)
        for axis, (name, placement) in enumerate(axes)
        if name not in left_out and not isinstance(placement, Replicate)
    )


class _Squares:
    """Add up squares of norms, each times its weight."""

    def __init__(self) -> None:
        # Offloaded gradients are on the CPU, and those of scalars are not.
        self._norms: dict[tuple[float, torch.device], list[Tensor]] = defaultdict(list)

    def add(self, norm: Tensor, weight: float) -> None:
        """Add a norm, a tensor without dimensions."""
        self._norms[weight, norm.device].append(norm)

    def sum(self, device: torch.device) -> Tensor:
        """Return the sum in float64, on ``device``."""
        parts = [weight * torch.stack(own).double().square().sum() for (weight, _), own in self._norms.items()]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([part.to(device, non_blocking=True) for part in parts]).sum()
