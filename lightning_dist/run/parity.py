"""Verify that a distributed model computes the same as the model in a single process."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parallel_module import parallelized
from lightning_dist.techniques.pipeline import Pipeline
from lightning_dist.techniques.replicas import bit_sums, differ

__all__ = [
    "NEGLIGIBLE", "Gathered", "ParityError", "assert_parity", "errors", "gather_gradients", "gather_parameters",
    "whole_buffers", "whole_gradients", "whole_parameters",
]  # fmt: skip

NEGLIGIBLE = 1e-6
"""Errors are relative to the reference's norm, but at least to this fraction of the norm of all references together."""


class ParityError(AssertionError):
    """Report that tensors of the distributed model differ from those of the reference."""


def errors(
    candidate: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], negligible: float = NEGLIGIBLE
) -> dict[str, float]:
    """Return ``norm(c - r) / max(norm(r), negligible * norm(all of r))`` by name, in float64; infinity for NaN.

    Args:
        candidate: Whole tensors ``c`` of the distributed model by name.
        reference: Whole tensors ``r`` of the single-process model by name.
        negligible: Fraction of the norm of all references below which the norm of one does not count.

    Raises:
        ParityError: If the names or the shapes differ.
    """
    if candidate.keys() != reference.keys():
        raise ParityError(
            f"these names are in only one of candidate and reference: {sorted(candidate.keys() ^ reference.keys())}"
        )
    norms = {name: float(tensor.double().norm()) for name, tensor in reference.items()}
    scale = negligible * math.sqrt(sum(norm**2 for norm in norms.values()))
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


def whole_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every buffer of ``module`` by name, on the CPU, each from a pipeline stage that has it.

    This is a collective if the module has a pipeline.
    """
    parallel = parallelized(module)
    pipeline = None if parallel is None else parallel.get(Pipeline)
    others = frozenset() if pipeline is None else pipeline.buffers_of_others
    own = {
        name: _whole(buffer) for name, buffer in module.named_buffers() if not is_remote(buffer) and name not in others
    }
    parts = [own] if parallel is None else parallel.states.collect_parts(own)
    return {name: buffer for part in parts for name, buffer in part.items()}


@dataclass
class Gathered:
    """Hold whole tensors of a distributed module, and how far ranks disagree about them.

    Args:
        tensors: Whole tensors by parameter name, on the CPU; empty except on rank 0.
        differing: For each tensor whose bits differ between ranks, the rank that is farthest from rank 0, and the norm
            of the difference between the two; infinity for NaN. It is the same on all ranks.
    """

    tensors: dict[str, Tensor]
    differing: dict[str, tuple[int, float]]


def gather_parameters(module: nn.Module, device: torch.device) -> Gathered:
    """Gather the whole parameters on rank 0, one at a time, and compare those of all ranks with them.

    This is a collective over all processes. A rank other than 0 never holds more than one whole parameter.

    Args:
        module: A module that a strategy of this package has distributed.
        device: Device of this rank on which the default process group communicates.

    Raises:
        ParityError: If two stages of a pipeline share a parameter and have different values.
    """
    return _gather(module, device, of_gradients=False)


def gather_gradients(module: nn.Module, device: torch.device) -> Gathered:
    """Gather the whole gradients that are not None on rank 0, as :func:`gather_parameters` gathers parameters."""
    return _gather(module, device, of_gradients=True)


def _gather(module: nn.Module, device: torch.device, of_gradients: bool) -> Gathered:
    names, sums, tensors = [], [], {}
    for name, tensor in _one_by_one(module, of_gradients):
        names.append(name)
        sums.append(torch.zeros(2, dtype=torch.int64, device=device) if tensor is None else bit_sums(tensor).to(device))
        if tensor is not None and dist.get_rank() == 0:
            tensors[name] = tensor
    world = dist.group.WORLD
    assert world is not None
    flags = differ(torch.stack(sums), [world]).tolist()
    differing = [name for name, is_different in zip(names, flags, strict=True) if is_different]
    return Gathered(tensors, _distances_from_first_rank(module, device, of_gradients, differing))


def _distances_from_first_rank(
    module: nn.Module, device: torch.device, of_gradients: bool, names: Collection[str]
) -> dict[str, tuple[int, float]]:
    """Return the rank that is farthest from rank 0, and its distance, for each tensor in ``names``."""
    shapes = {name: param.shape for name, param in module.named_parameters()}
    found = {}
    for name, tensor in _one_by_one(module, of_gradients, names):
        own = (torch.zeros(shapes[name]) if tensor is None else tensor).double().to(device)
        first = own.clone()
        dist.broadcast(first, 0)
        distances = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
        distances[dist.get_rank()] = (own - first).norm().nan_to_num(math.inf)
        dist.all_reduce(distances, dist.ReduceOp.MAX)
        found[name] = int(distances.argmax()), float(distances.max())
    return found


def _one_by_one(
    module: nn.Module, of_gradients: bool, names: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the whole tensor of every parameter or gradient, on the CPU; None for a missing gradient.

    This is a collective, and every rank must exhaust the iterator.

    Args:
        module: A module that a strategy of this package has distributed.
        of_gradients: Whether to yield gradients instead of parameters.
        names: Names of the parameters to yield; None: all.
    """
    with _own_stages(module):
        for name, param in module.named_parameters():
            if names is not None and name not in names:
                continue
            tensor = param.grad if of_gradients else param
            is_here = tensor is not None and not is_remote(param)
            own = {name: _whole(tensor)} if is_here and tensor is not None else {}
            yield name, _of_all_stages(module, own).get(name)


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
