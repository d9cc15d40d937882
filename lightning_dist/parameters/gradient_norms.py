"""Compute the norm of gradients that are distributed over several device meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

__all__ = ["total_norm_of"]


def total_norm_of(gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of all ``gradients`` together, a plain tensor without dimensions.

    torch's function accepts only DTensors over one mesh. This is a collective over all meshes of the gradients.

    Args:
        gradients: Plain tensors, and DTensors over any meshes.
        order: The order of the norm: positive, and possibly infinite.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [get_total_norm(group, order) for group in by_mesh.values()] or [get_total_norm([], order)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
