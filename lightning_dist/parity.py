"""Verify that a distributed model computes the same as the model in a single process."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.parallel_module import parallelized
from lightning_dist.tensor_state import is_remote

__all__ = ["ParityError", "assert_parity", "errors", "whole_gradients", "whole_parameters"]

_NEGLIGIBLE = 1e-6
"""Errors are relative to the reference's norm, but at least to this fraction of the norm of all references together."""


class ParityError(AssertionError):
    """Report that tensors of the distributed model differ from those of the reference."""


def errors(candidate: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return ``norm(c - r) / max(norm(r), 1e-6 * norm(all of r))`` by name, computed in float64; infinity for NaN.

    Args:
        candidate: Whole tensors ``c`` of the distributed model by name.
        reference: Whole tensors ``r`` of the single-process model by name.

    Raises:
        ParityError: If the names or the shapes differ.
    """
    if candidate.keys() != reference.keys():
        raise ParityError(
            f"these names are in only one of candidate and reference: {sorted(candidate.keys() ^ reference.keys())}"
        )
    norms = {name: float(tensor.double().norm()) for name, tensor in reference.items()}
    scale = _NEGLIGIBLE * math.sqrt(sum(norm**2 for norm in norms.values()))
    result = {}
    for name, expected in reference.items():
        actual = candidate[name]
        if actual.shape != expected.shape:
            raise ParityError(f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        error = float((actual.double() - expected.double()).norm())
        error = error / max(norms[name], scale) if error else 0.0
        result[name] = math.inf if math.isnan(error) else error
    return result


def assert_parity(
    candidate: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    tolerance: float,
    leave_out: Collection[str] = (),
) -> float:
    """Check that no error of :func:`errors` exceeds ``tolerance``, and return the largest.

    Args:
        candidate: Whole tensors of the distributed model by name.
        reference: Whole tensors of the single-process model by name.
        tolerance: Largest accepted error: 1e-10 in float64, where rounding hides no bugs; 1e-5 in float32.
        leave_out: Names not to compare, such as weights under Adam whose true gradient is zero.

    Raises:
        ParityError: If an error exceeds the tolerance, with the worst names, or if nothing is left to compare.
    """
    found = {name: error for name, error in errors(candidate, reference).items() if name not in leave_out}
    if not found or all(not reference[name].any() for name in found):
        raise ParityError("there is nothing to compare: every tensor is left out or zero")
    worst = sorted(found.items(), key=lambda item: -item[1])
    if worst[0][1] > tolerance:
        lines = "\n".join(f"  {name}: {error:.2e}" for name, error in worst[:8] if error > tolerance)
        count = sum(error > tolerance for error in found.values())
        raise ParityError(f"{count} of {len(found)} tensors are off by more than {tolerance:.0e}:\n{lines}")
    return worst[0][1]


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every whole parameter of ``module`` by name, on the CPU.

    This is a collective if the module is distributed.
    """
    with _own_stages(module):
        own = {name: _whole(param) for name, param in module.named_parameters() if not is_remote(param)}
    return _of_all_stages(module, own)


def whole_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every whole gradient of ``module`` that is not None by parameter name, on the CPU.

    This is a collective if the module is distributed.
    """
    with _own_stages(module):
        own = {name: _whole(param.grad) for name, param in module.named_parameters() if param.grad is not None}
    return _of_all_stages(module, own)


def _own_stages(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a rank sees only its own pipeline stages, even in hooks, which otherwise see all."""
    parallel = parallelized(module)
    return nullcontext() if parallel is None else parallel.without_hook_views()


def _of_all_stages(module: nn.Module, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather the tensors of all stages of a pipeline, in the order of the parameters of ``module``.

    This is a collective if the module has a pipeline.

    Args:
        module: The model; if it has no pipeline, ``own`` is returned.
        own: Whole tensors of this rank's stages by parameter name.

    Raises:
        ParityError: If two stages share a parameter and have different values.
    """
    parallel = parallelized(module)
    if parallel is None:
        return own
    merged: dict[str, torch.Tensor] = {}
    for part in parallel.states.collect_parts(own):
        for name, tensor in part.items():
            if not torch.equal(merged.setdefault(name, tensor), tensor):
                raise ParityError(f"{name} is not the same on the stages that share it")
    return {name: merged[name] for name, _ in module.named_parameters() if name in merged}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()
