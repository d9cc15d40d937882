"""Audit the first step: raise an error that names the parameter if a step would silently train it wrongly.

The first step of a fit is checked, and again the next step after parameters, their hooks or ``requires_grad`` change:

- Every parameter is in exactly one parameter group, so that it is sharded or replicated, and its gradient is reduced.
- The step's in-place changes of gathered parameters are in the shards, and are the same on all ranks.
- Hooks that users put on parameters are on the tensors that autograd computes gradients for.
- After a backward that reduces gradients, no gradient is left on a gathered copy, and each that arrived was reduced.
- Replicated parameters are equal on all ranks after the optimizer step.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_dist._compat import gradient_hooks, local_of
from lightning_dist.mesh.consensus import timed_barrier
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.techniques.protocol import Parallel, ParameterForms
from lightning_dist.techniques.replicas import bit_sums, differ

__all__ = ["AuditError", "FirstStepAudit"]

_ROUNDING = 64
"""The largest difference between ranks, in units of the dtype's rounding error, that kernels without a fixed order of
summation may cause."""


class AuditError(RuntimeError):
    """Report that a step would have trained a parameter wrongly; the text names the parameter."""


class FirstStepAudit(ParameterForms):
    """Check the first step, and the next step after parameters, their hooks or ``requires_grad`` change."""

    def __init__(self) -> None:
        self._seen: object = None
        self._has_new = True
        self.is_due = True
        """Whether the current step is checked."""
        self._weights_are_due = True
        self.compares_weights = True
        """Whether replicated parameters are compared between ranks; a caller that does so itself switches it off."""
        self._agreed: set[int] = set()
        self._compares = False
        handle = register_module_parameter_registration_hook(_mark(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def attach(self, parallel: Parallel) -> None:
        """Record the hooks that parameters have before they get their groups."""
        self._parallel = parallel
        self._module = parallel.module
        self._hooks: dict[str, Mapping[int, Any]] = {
            name: hooks for name, param in self._module.named_parameters() if (hooks := gradient_hooks(param))
        }

    def finish(self) -> None:
        """Let parameter groups report which parameters a step has changed."""
        for group in self._groups:
            group.on_change = self._compare_changes

    @property
    def _groups(self) -> tuple[ParameterGroup, ...]:
        return self._parallel.groups

    def parameter_registered(self) -> None:
        """Check before the next step that every parameter is in a group, because a module registered a new one."""
        self._has_new = True

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Decide whether this step is checked, and check the parameters' groups and hooks if anything has changed.

        Raises:
            AuditError: If a parameter is in no group, or in several, or a hook on it would not be called.
        """
        seen = tuple((len(gradient_hooks(param)), param.requires_grad) for param in self._params())
        if seen != self._seen or self._has_new:
            self._seen = seen
            self.is_due = self._weights_are_due = True
        if self._has_new:
            self._check_groups()
            self._has_new = False
        if self.is_due:
            self._check_hooks_kept()

    def _params(self) -> list[Tensor]:
        return [param for group in self._groups for param in group.params]

    def _check_groups(self) -> None:
        counts = Counter(id(param) for param in self._params())
        for name, param in self._module.named_parameters():
            count = counts[id(param)]
            if count != 1 and not is_remote(param) and not (count == 0 and self._is_gathered(param)):
                raise AuditError(
                    f"The parameter {name!r} is in {count or 'no'} parameter group{'s' if count > 1 else ''}, so that"
                    " each rank would train it by itself. Create all parameters before the Trainer starts, in __init__"
                    " or configure_model, and replace their values rather than the parameters."
                )

    def _is_gathered(self, param: Tensor) -> bool:
        return any(group.is_gathered and group.holds(param) for group in self._groups)

    def _check_hooks_kept(self) -> None:
        params = dict(self._module.named_parameters())
        for name, hooks in self._hooks.items():
            param = params.get(name)
            if param is not None and not is_remote(param) and hooks:
                missing = hooks.keys() - gradient_hooks(param).keys()
                if missing:
                    raise AuditError(f"A hook that was put on the parameter {name!r} before it was sharded is lost.")

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Compare a step's changes of gathered parameters between ranks, whenever they are freed in this context."""
        self._compares = True
        try:
            yield
        finally:
            self._compares = False

    def write_back(self) -> None:
        """Check the step's in-place changes of gathered parameters.

        This is a collective over the mesh of each group in which a parameter was changed.

        Raises:
            AuditError: If a change is not in the shards, ranks changed a parameter differently, or a hook would not be
                called.
        """
        gathered = [group for group in self._groups if group.is_gathered]
        sharded = [group for group in gathered if group.is_sharded]
        # Changes through ``param.data`` are not reported, and may be in the parts of some ranks only.
        is_checked = self.is_due and torch.is_grad_enabled() and bool(sharded)
        is_changed = is_checked and any(group.unwritten() for group in sharded)
        with self.around_step():
            for group in gathered:
                group.write_back()
            if is_checked and _has_any_rank(is_changed, max((g.mesh for g in sharded), key=lambda mesh: mesh.size())):
                for group in sharded:
                    self._compare_changes(group, group.names)
        for group in self._groups if self.is_due else ():
            if not group.is_gathered:
                continue
            for name in group.unwritten():
                raise AuditError(
                    f"The step changed the parameter {name!r} in place, and the change is not in its shards: it would"
                    " be lost. Change it in a hook such as on_train_batch_end instead."
                )
            for name in group.lost_hooks():
                raise AuditError(
                    f"A hook was put on the parameter {name!r} and would not be called, since the gradient is that of"
                    " its gathered copy."
                )

    def _compare_changes(self, group: ParameterGroup, names: Sequence[str]) -> None:
        """Compare the gathered parameters of ``group``, which the step has changed, between ranks.

        This is a collective over the group's mesh, unless the comparison is switched off.

        Args:
            group: A gathered parameter group.
            names: Names of the parameters that this rank's step changed.

        Raises:
            AuditError: If ranks changed a parameter differently.
        """
        if not self._compares or group.mesh.size() == 1 or self._parallel.stays_gathered:
            return
        tensors = group.gathered
        if not tensors:
            return
        if id(group) not in self._agreed:
            ranks = sorted(group.mesh.mesh.flatten().tolist())
            timed_barrier(f"changing {names[0]} in place in a step", 30.0, ranks)
            self._agreed.add(id(group))
        sums = torch.stack([bit_sums(tensor) for tensor in tensors])
        found = differ(sums, [group.mesh.get_group(axis) for axis in range(group.mesh.ndim)]).tolist()
        for name, is_different in zip(group.names, found, strict=True):
            if is_different:
                raise AuditError(
                    f"The step changed the parameter {name!r} in place, and not alike on all ranks: each rank has"
                    " computed it from its own part of the batch. Average what it is computed from over the ranks, or"
                    " replace max_norm of an nn.Embedding by a normalisation of your own in on_train_batch_end."
                )

    def after_backward(self, reduces: bool) -> None:
        """Check that gradients were reduced, after a backward that reduces them.

        Raises:
            AuditError: If a gradient is left on a gathered copy, or was lost in the reduction.
        """
        if not self.is_due or not reduces:
            return
        for group in self._groups:
            for name in group.unreduced_names():
                raise AuditError(
                    f"The gradient of the parameter {name!r} is left on its gathered copy: it was not reduced, and the"
                    " optimizer would not see it."
                )
            for name in group.names_without_gradient():
                raise AuditError(
                    f"The parameter {name!r} got a gradient on this rank, and has none after the reduction."
                )

    after_microbatches = after_backward

    def before_optimizer_step(self) -> None:
        """Check that the step has left no gradient on a gathered parameter.

        Raises:
            AuditError: If a gathered parameter has a gradient.
        """
        if not self.is_due:
            return
        for name in self._parallel.gradients_left():
            raise AuditError(
                f"The gradient of the parameter {name!r} was set on its gathered copy, as by torch.autograd.grad: the"
                " optimizer would not see it, and it is of this rank's part of the batch alone. Let"
                " self.manual_backward(loss) make the gradients, which reduces them."
            )

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Compare replicated parameters between ranks.

        This is a collective over the mesh axes over which they are replicated.

        Raises:
            AuditError: If a parameter differs by more than rounding errors.
        """
        self.is_due = False
        if not self._weights_are_due or not self.compares_weights:
            return
        self._weights_are_due = False
        for (axis, group), held in self._replicated().items():
            # Offloaded shards are on the CPU, and parameters without dimensions on the device.
            device = next((local.device for _, local in held if local.device.type != "cpu"), torch.device("cpu"))
            found = differ(torch.stack([bit_sums(local).to(device) for _, local in held]), [group]).tolist()
            for (name, local), is_different in zip(held, found, strict=True):
                if is_different:
                    self._raise_unless_rounding(name, local, axis, group)

    def _replicated(self) -> dict[tuple[str, dist.ProcessGroup], list[tuple[str, Tensor]]]:
        """Return, for each mesh axis, the parameters that are replicated over it.

        Returns:
            A mapping from the name and process group of a mesh axis to the parameters' names and local tensors.
        """
        found: dict[tuple[str, dist.ProcessGroup], list[tuple[str, Tensor]]] = defaultdict(list)
        managed = [
            (name, param, group.mesh)
            for group in self._groups
            for name, param in zip(group.names, group.params, strict=True)
        ]
        for name, param, group_mesh in managed:
            own = local_of(param.detach())
            # All ranks of the group's mesh have the same parameter, unless its DTensor placements say otherwise.
            axes = {axis: (group, True) for axis, group in _axes(group_mesh)}
            if isinstance(param, DTensor):
                for (axis, group), placement in zip(_axes(param.device_mesh), param.placements, strict=True):
                    axes[axis] = group, isinstance(placement, Replicate)
            for axis, (group, is_replicated) in axes.items():
                if is_replicated and group.size() > 1 and own.numel():
                    found[axis, group].append((name, own))
        return found

    def _raise_unless_rounding(self, name: str, local: Tensor, axis: str, group: dist.ProcessGroup) -> None:
        values = local.double() if local.is_floating_point() else local
        highest, lowest = values.clone(), values.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group)
        difference, largest = float((highest - lowest).abs().max()), float(highest.abs().max())
        text = f"The parameter {name!r} differs between ranks of {axis}, which replicate it, by up to {difference:.1e}"
        if local.is_floating_point() and difference <= _ROUNDING * torch.finfo(local.dtype).eps * largest:
            warnings.warn(
                f"{text}: these are rounding errors of kernels without a fixed order of summation. The difference grows"
                " slowly over a run.",
                stacklevel=2,
            )
            return
        raise AuditError(
            f"{text} after the optimizer step. Its gradient was not reduced, or the parameter was changed by code under"
            " `if rank == 0`, or by a value that depends on a rank's own data."
        )


def _has_any_rank(is_true: bool, mesh: DeviceMesh) -> bool:
    """Return whether a condition is true on any rank of ``mesh``. This is a collective over the mesh."""
    flag = torch.tensor([is_true], dtype=torch.int32, device=mesh.device_type)
    for _, group in _axes(mesh):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


def _axes(mesh: DeviceMesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield the name and the process group of each axis of ``mesh``."""
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        yield name, mesh.get_group(dim)


def _mark(audit: weakref.ref[FirstStepAudit]) -> Callable[[nn.Module, str, Any], None]:
    """Return a hook that calls ``audit.parameter_registered`` whenever any module registers a parameter.

    It does nothing once the audit has been deleted.
    """

    def on_parameter(module: nn.Module, name: str, param: Any) -> None:
        alive = audit()
        if alive is not None and param is not None:
            alive.parameter_registered()

    return on_parameter
