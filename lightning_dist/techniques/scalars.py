"""Replicate 0-dimensional parameters (a temperature, CLIP's logit scale), which FSDP2 does not support.

Outside of steps they are replicated DTensors, so that optimizers, clipping and checkpoints see only one kind of
parameter. In a step, their modules hold plain tensors that share the DTensors' memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist._compat import call_post_accumulate_hooks, local_of, move_hooks, own_parameters, share_hooks
from lightning_dist.mesh.flag_agreement import FlagAgreement
from lightning_dist.model.units import Unit
from lightning_dist.parameters.accumulated_gradients import AccumulatedGradients
from lightning_dist.parameters.forms import SameRequiresGrad, put_into_memory
from lightning_dist.parameters.gradient_reducer import LocalGradient
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.techniques.protocol import Parallel, ParameterForms

__all__ = ["Scalars"]


class Scalars(ParameterForms):
    """Replicate the 0-dimensional parameters on every rank.

    Args:
        mesh: The mesh over which gradients are averaged.
        parameter_mesh: The mesh over which the parameters are DTensors, as the module's other parameters are.
    """

    def __init__(self, mesh: DeviceMesh, parameter_mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parameter_mesh = parameter_mesh
        self._groups: list[ScalarGroup] = []
        self._agreement: FlagAgreement | None = None

    def _describe_flag(self, index: int) -> str:
        return f"the frozen parameter {self._groups[0].names[index]!r} got a gradient"

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, in which parameters are replaced."""
        self._module = parallel.module

    def manage_unit(self, unit: Unit) -> ParameterGroup | None:
        """Return a group for the unit of 0-dimensional parameters, and None for any other.

        This is a collective over the mesh if there are such parameters.
        """
        if unit.kind != "scalars":
            return None
        if self._agreement is None and self._mesh.size() > 1:
            self._agreement = FlagAgreement(self._mesh.mesh.flatten().tolist(), "used scalars", self._describe_flag)
        self._groups.append(ScalarGroup(self._module, unit.params, self._mesh, self._parameter_mesh))
        return self._groups[-1]

    def copies(self) -> Iterable[tuple[str, Tensor, nn.Parameter]]:
        """Yield name, plain tensor and DTensor of the parameters."""
        for group in self._groups:
            yield from group.copies()

    def after_backward(self, reduces: bool) -> None:
        """Reduce the gradients unless they are accumulated. This is a collective over the mesh if they are reduced."""
        for group in self._groups:
            group.reduce(self._agreement)

    after_microbatches = after_backward


class ScalarGroup(ParameterGroup):
    """Manage the 0-dimensional parameters of a module.

    Args:
        module: The model; each of its submodules that holds one of the parameters gets the replicated one instead.
        params: The parameters by full name.
        mesh: The mesh over which gradients are averaged.
        parameter_mesh: The mesh over which the parameters are replicated DTensors.
    """

    def __init__(
        self, module: nn.Module, params: Mapping[str, nn.Parameter], mesh: DeviceMesh, parameter_mesh: DeviceMesh
    ) -> None:
        self._names = list(params)
        self._is_gathered = False
        self._accumulated = AccumulatedGradients()
        self._mesh = mesh
        self._parameter_mesh, self._placements = parameter_mesh, [Replicate()] * parameter_mesh.ndim
        self._owners: list[list[tuple[nn.Module, str]]] = []
        self._whole: list[nn.Parameter] = []
        self._replicated: list[nn.Parameter] = []
        for param in params.values():
            self._owners.append(
                [
                    (owner, key)
                    for owner in module.modules()
                    for key, value in owner.named_parameters(recurse=False, remove_duplicate=False)
                    if value is param
                ]
            )
            local = param.detach()
            self._whole.append(nn.Parameter(local, param.requires_grad))
            dtensor = DTensor.from_local(local, parameter_mesh, self._placements, run_check=False)
            self._replicated.append(nn.Parameter(dtensor, param.requires_grad))
            move_hooks(param, self._replicated[-1])
        self._requires_grad = [SameRequiresGrad() for _ in self._whole]
        self._put(self._replicated)

    @property
    def is_gathered(self) -> bool:
        """Return whether the modules hold plain tensors now."""
        return self._is_gathered

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh over which gradients are averaged."""
        return self._mesh

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the replicated parameters, which are DTensors."""
        return list(self._replicated)

    @property
    def names(self) -> list[str]:
        """Return the full names of the parameters."""
        return list(self._names)

    def copies(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield name, plain tensor and DTensor of the parameters."""
        yield from zip(self._names, self._whole, self._replicated, strict=True)

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is one of the plain tensors that the modules hold in a step."""
        return any(own is param for own in self._whole)

    def gather(self) -> None:
        """Put the plain tensors into the modules, without communication."""
        if not self._is_gathered:
            self._put(self._whole)
            self._is_gathered = True
        self.copy_requires_grad()

    def write_back(self) -> None:
        """Copy values that a step has assigned by ``param.data = ...`` into the parameters.

        Nothing else needs to be copied, because all other changes are made in the memory of the parameters.
        """
        for whole, replicated in zip(self._whole, self._replicated, strict=True):
            put_into_memory(whole, local_of(replicated))

    def free(self) -> None:
        """Put the DTensors back into the modules."""
        if self._is_gathered:
            self.write_back()
            for same, whole, replicated in zip(self._requires_grad, self._whole, self._replicated, strict=True):
                same.take_from(whole, replicated)
            self._put(self._replicated)
            self._is_gathered = False

    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` and the tensor hooks from the DTensors to the plain tensors.

        If a step has set ``requires_grad`` of a plain tensor, it is copied to the DTensor instead.
        """
        for same, whole, replicated in zip(self._requires_grad, self._whole, self._replicated, strict=True):
            same.copy_to(whole, replicated)
            share_hooks(replicated, whole)

    def drop_cleared(self) -> None:
        """Drop the accumulated gradients that the step has cleared."""
        for name in self._accumulated.take_cleared():
            self._whole[self._names.index(name)].grad = None

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters whose gradient was left on the plain tensors."""
        return [name for name, whole in zip(self._names, self._whole, strict=True) if whole.grad is not None]

    def drop_unreduced(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop the accumulated gradients of ``params``; None: of all parameters."""
        wanted = None if params is None else {id(param) for param in params}
        for whole, replicated in zip(self._whole, self._replicated, strict=True):
            if wanted is None or id(replicated) in wanted:
                whole.grad = None

    def watch_unreduced(self) -> None:
        """Begin to detect whether the step clears accumulated gradients."""
        params = zip(self._names, self._whole, self._replicated, strict=True)
        self._accumulated.watch({name: param for name, whole, param in params if whole.grad is not None})

    def reduce(self, agreement: FlagAgreement | None) -> None:
        """Average the accumulated gradients over the mesh, and add them to those of the DTensors. This is a collective.

        If gradients are not reduced now, they stay on the plain tensors.

        Args:
            agreement: The object by which the ranks agree on which parameters have gradients; None: there is one rank.
        """
        if not self.syncs_gradients or not any(param.requires_grad for param in self._whole):
            return
        # A parameter may have a gradient on only some ranks. If no rank has one, it stays None.
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._whole]
        is_used = [p.grad is not None for p in self._whole]
        if self.observer is not None:
            self.observer.observe([LocalGradient(*pair) for pair in zip(self._names, grads, strict=True)], 1.0)
        if agreement is not None:
            is_used = agreement.agree(is_used, [p.requires_grad for p in self._whole])
        sent = torch.stack(grads)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(sent, group=self._mesh.get_group(axis))
        for whole, replicated, mean, used in zip(
            self._whole, self._replicated, sent.div_(self._mesh.size()), is_used, strict=True
        ):
            whole.grad = None
            if not used:
                continue
            if replicated.grad is None:
                local = mean.to(replicated.dtype, copy=True)
                replicated.grad = DTensor.from_local(local, self._parameter_mesh, self._placements, run_check=False)
            else:
                replicated.grad.to_local().add_(mean)  # type: ignore[attr-defined]
            call_post_accumulate_hooks(replicated)

    def _put(self, params: list[nn.Parameter]) -> None:
        for owners, param in zip(self._owners, params, strict=True):
            for owner, key in owners:
                own_parameters(owner)[key] = param
