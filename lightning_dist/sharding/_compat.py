"""Wrap every private name of FSDP2 that sharding uses. Checked with torch 2.13.

"Replaced by" says which public feature of torch would make the code unnecessary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.utils._pytree import tree_leaves

from lightning_dist._compat import (
    is_in_backward,
    local_of,
    move_hooks,
    overwrite,
    share_hooks,
)
from lightning_dist.accumulated_gradients import AccumulatedGradients
from lightning_dist.parameter_group import ParameterGroup

__all__ = [
    "ShardedGroup", "accumulating", "flush_gradients", "gather_before_views", "initialize_root",
    "reduce_gradients", "reset_after_error", "sharded_group",
]  # fmt: skip


class ShardedGroup(ParameterGroup):
    """Manage the parameters of a unit that FSDP2 shards together (its ``FSDPParamGroup``).

    Replaced by: the public methods of ``FSDPModule``, once FSDP2 can manage a module without changing its class.

    Args:
        group: FSDP2's group of the unit's parameters.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._waits_for_end = False
        self._is_kept = False
        self._is_held = False
        self._awaits_agreement = False
        self._used: set[int] = set()
        self._is_reduced = False
        self._accumulated = AccumulatedGradients()
        # FSDP2 reduces and frees a group when the gradients of its modules' inputs are known. Gradients from uses of
        # its parameters outside of these modules may come later. Replaced by: a public way to reduce at the end of a
        # backward.
        self._post_backward = group.post_backward
        group.post_backward = self._after_backward  # type: ignore[method-assign]
        register = FSDPParamGroup._register_post_backward_hook
        inside = _InsideBackward(self)
        group._register_post_backward_hook = partial(register, inside)  # type: ignore[method-assign, arg-type]
        # FSDP2 has no hooks that run when parameters are gathered or freed. Replaced by: such hooks.
        group._to_unsharded = self._put_whole  # type: ignore[method-assign]
        group._to_sharded = self._put_shards  # type: ignore[method-assign]
        group._to_sharded_post_forward = self._put_parts  # type: ignore[method-assign]
        # After load_state_dict, FSDP2 takes the parameters that the modules hold to be the shards, without a check.
        # Replaced by: such a check in FSDP2.
        for index, param in enumerate(group.fsdp_params):
            param.reset_sharded_param = partial(self._take_shards, index)  # type: ignore[method-assign]
        self._stand_ins: list[nn.Parameter] | None = None
        self._has_stand_ins = False
        self._versions: dict[FSDPParam, int] = {}
        self._shard_versions: dict[FSDPParam, tuple[int, int]] = {}
        """The versions of shards when they were gathered; one that has changed since is newer than its copy."""
        self._requires_grad: dict[FSDPParam, bool] = {}
        """The last value of ``requires_grad`` that sharded and gathered parameters had in common."""
        self.take_replaced: Callable[[nn.Parameter], bool] = lambda param: False
        self.is_other_form: Callable[[nn.Module, str, torch.Tensor | None], bool] = lambda module, name, held: False

    def _put_whole(self) -> None:
        """Put the gathered parameters into the modules, with the hooks that the sharded ones have now."""
        replaced = self._of_other_code()
        FSDPParamGroup._to_unsharded(self._group)  # type: ignore[no-untyped-call]
        for module, name, current in replaced:
            module._parameters[name] = current  # type: ignore[assignment]
        for param in self._group.fsdp_params:
            share_hooks(param.sharded_param, param._unsharded_param)
            self._shard_versions[param] = _shard_version(param)
        self.copy_requires_grad()

    def _of_other_code(self) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
        """Return the tensors that other code has put in the place of parameters: module, name and tensor."""
        return [
            (module, name, current)
            for index, param in enumerate(self._group.fsdp_params)
            for module, name, current in _held(param)
            if not self._is_own(index, param, current) and not self.is_other_form(module, name, current)
        ]

    def _is_own(self, index: int, param: FSDPParam, current: torch.Tensor | None) -> bool:
        """Return whether ``current`` is a form of the parameter at ``index``, rather than a tensor of other code.

        ``torch.func.functional_call`` puts such tensors into modules. None, for an empty place, counts as a form.
        """
        return (
            current is None
            or current is param.sharded_param
            or current is getattr(param, "_unsharded_param", None)
            or (self._stand_ins is not None and current is self._stand_ins[index])
            or current is getattr(param, "_sharded_post_forward_param", None)
        )

    def _put_shards(self) -> None:
        """Put the sharded parameters or their stand-ins into the modules, and free the gathered ones."""
        if self._is_held:
            return
        if self._group.is_unsharded:
            self._leave_gathered()
        self._keep_what_numpy_shares()
        # Inside torch.func.functional_call, a block may run again, with the same tensors.
        replaced = self._of_other_code() if self._has_stand_ins and self._group.is_unsharded else []
        FSDPParamGroup._to_sharded(self._group)  # type: ignore[no-untyped-call]
        if self._has_stand_ins:
            self._put_stand_ins()
        for module, name, current in replaced:
            module._parameters[name] = current  # type: ignore[assignment]

    def _put_parts(self) -> None:
        """Put parameters that stay sharded over some of the ranks until the backward into the modules."""
        self._leave_gathered()
        FSDPParamGroup._to_sharded_post_forward(self._group)  # type: ignore[no-untyped-call]

    def _leave_gathered(self) -> None:
        self.write_back()
        self._take_requires_grad()
        self._requires_grad.clear()

    def _take_shards(self, index: int) -> None:
        """Take the tensor that a module holds as the new shard, unless it is the gathered parameter or a stand-in."""
        param = self._group.fsdp_params[index]
        _, _, current = next(_held(param))
        is_stand_in = self._stand_ins is not None and current is self._stand_ins[index]
        if self._group.is_sharded and not is_stand_in:
            FSDPParam.reset_sharded_param(param)  # type: ignore[no-untyped-call]

    def _keep_what_numpy_shares(self) -> None:
        """Never free gathered parameters whose memory a NumPy array shares, because torch cannot resize it any more."""
        if self._group.device.type != "cpu":
            return
        for param in self._group.fsdp_params:
            tensors = (*param.all_gather_outputs, *param._unsharded_inner_tensors)
            if not all(tensor.untyped_storage().resizable() for tensor in tensors):
                param.free_unsharded_param = _do_nothing  # type: ignore[method-assign]

    def _put_stand_ins(self) -> None:
        assert self._stand_ins is not None
        for param, stand_in in zip(self._group.fsdp_params, self._stand_ins, strict=True):
            param._setattr_on_modules(stand_in)

    def begin_stand_ins(
        self, make: Callable[[torch.Tensor, torch.dtype | None, Callable[[], None]], torch.Tensor]
    ) -> None:
        """Let the modules hold stand-ins from now on, while the parameters are sharded.

        Args:
            make: Function that makes a stand-in of a sharded parameter, the dtype that it is computed in (None: its
                own), and a function that must be called when a backward computes its gradient.
        """
        if self._stand_ins is None:
            self._stand_ins = [
                cast(nn.Parameter, make(param.sharded_param, param.param_dtype, partial(self._used.add, index)))
                for index, param in enumerate(self._group.fsdp_params)
            ]
        self._has_stand_ins = True
        if self._group.is_sharded:
            self._put_stand_ins()

    def end_stand_ins(self) -> None:
        """Put the sharded parameters back into the modules in place of the stand-ins."""
        self._has_stand_ins = False
        if self._group.is_sharded:
            for param in self._group.fsdp_params:
                param._setattr_on_modules(param.sharded_param)

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the step's changes of the gathered parameters into the shards.

        Values are compared, because a change through ``param.data`` does not increase the version counter of a tensor.
        """
        changed: list[str] = []
        for param in self._group.fsdp_params:
            is_changed = self.take_replaced(param._unsharded_param)
            whole = local_of(param._unsharded_param)
            memory = param.all_gather_outputs[0] if len(param.all_gather_outputs) == 1 else whole
            version = whole._version
            is_replaced = whole.data_ptr() != memory.data_ptr()
            is_changed |= is_replaced or version != self._versions.get(param, 0)
            self._versions[param] = version
            if is_replaced:
                gathered = torch.as_strided(memory, whole.size(), whole.stride())
                overwrite(gathered, whole)
                whole.data = gathered
            if is_changed:
                changed.append(_name(param))
            shard, own = _own_part(param, whole)
            if is_changed or self._shard_versions.get(param) in (None, _shard_version(param)):
                _store(shard, own)
                self._shard_versions[param] = _shard_version(param)
        if changed:
            self.on_change(self, changed)

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the sharded parameters."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def names(self) -> list[str]:
        """Return the full names of the parameters in the user's module."""
        return [_name(param) for param in self._group.fsdp_params]

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is one of the gathered parameters."""
        return any(getattr(own, "_unsharded_param", None) is param for own in self._group.fsdp_params)

    def copies(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield name, gathered parameter and shard of those that have been gathered before."""
        for param in self._group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                yield _name(param), param._unsharded_param, param.sharded_param

    def unwritten(self) -> list[str]:
        """Return the names of gathered parameters whose values are not those of the shards."""
        found = []
        for param in self._group.fsdp_params:
            shard, own = _own_part(param, local_of(param._unsharded_param))
            if not torch.equal(shard.to(own.dtype), own):
                found.append(_name(param))
        return found

    def lost_hooks(self) -> list[str]:
        """Return the names of parameters that have tensor hooks which are missing on their gathered copies."""
        return [
            _name(param)
            for param in self._group.fsdp_params
            if (param.sharded_param._backward_hooks or {}).keys()
            - (param._unsharded_param._backward_hooks or {}).keys()
        ]

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters whose gradient a backward left on the gathered copies."""
        unreduced = self._unreduced()
        return [name for index, name in enumerate(self.names) if index in unreduced]

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters with a gradient from this rank's last backward, but without a reduced one."""
        params = self._group.fsdp_params
        return [_name(params[index]) for index in sorted(self._used) if params[index].sharded_param.grad is None]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """Return the gathered parameters as plain tensors: this rank's part of those that are split over ``tp``."""
        return [local_of(param._unsharded_param.detach()) for param in self._group.fsdp_params]

    def take_hooks(self, originals: Mapping[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Move the hooks that were put on the parameters before they were sharded to the sharded ones.

        Args:
            originals: The parameters from before, by the module that holds them and the name there.
        """
        for param in self._group.fsdp_params:
            move_hooks(originals[param._module_info.module, param._module_info.param_name], param.sharded_param)

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh that the parameters are sharded and replicated over."""
        return self._group.mesh_info.mesh

    def wait_for_end_of_backward(self) -> None:
        """Reduce gradients and free parameters at the end of a backward from now on, and not within it.

        This is for parameters that a step may use outside of the forwards of the group's modules.
        """
        self._waits_for_end = True

    def inside_backward(self) -> None:
        """Reduce the gradients once those of the modules' inputs are known, unless the end must be waited for."""
        if torch.is_grad_enabled():  # Under create_graph=True, a second backward reads the parameters before any hook.
            self._is_kept = True
        if not self._waits_for_end and not self._is_kept:
            self._reduce()

    def _after_backward(self, *unused: Any) -> None:
        """Reduce the gradients at the end of a backward, unless they were reduced within it.

        Under ``create_graph=True`` nothing is done: gradients are not final, and a second backward needs the
        parameters.
        """
        if is_in_backward() and torch.is_grad_enabled():
            return
        if self._waits_for_end or self._is_kept:
            # If there are no gradients, this is the end of torch.autograd.grad.
            if self._awaits_agreement or not self.has_unreduced_gradients():
                return
            self._is_kept = False
        self._reduce()

    def _reduce(self) -> None:
        if self._group.reduce_grads:
            self._used |= self._unreduced()
            self._is_reduced = True
        self._post_backward()

    def _unreduced(self) -> set[int]:
        """Return the indices of the parameters whose gradients backwards left on the gathered copies."""
        return {
            index
            for index, param in enumerate(self._group.fsdp_params)
            if param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
        }

    def drop_cleared(self) -> None:
        """Drop the unreduced gradients that the step has cleared."""
        cleared = self._accumulated.take_cleared()
        for param in self._group.fsdp_params if cleared else ():
            if _name(param) in cleared:
                _drop_gradient(param)

    def drop_unreduced(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop the unreduced gradients of ``params``; None: of all parameters."""
        wanted = None if params is None else {id(param) for param in params}
        for param in self._group.fsdp_params:
            if wanted is None or id(param.sharded_param) in wanted:
                _drop_gradient(param)

    def watch_unreduced(self) -> None:
        """Let the step clear unreduced gradients."""
        if unreduced := self._unreduced():
            params = self._group.fsdp_params
            self._accumulated.watch({_name(params[index]): params[index].sharded_param for index in unreduced})

    def forget_used(self) -> None:
        """Forget which parameters got gradients on this rank; called before a backward."""
        self._used.clear()

    def begin_agreement(self) -> list[bool]:
        """Let ranks agree on which parameters are used: reduce zeros for those that get no gradient on this rank.

        Other ranks may have a gradient for them. A group that waits for the end of a backward reduces its gradients in
        :meth:`end_agreement`.

        Returns:
            For each parameter, whether it has a reduced gradient from an earlier backward.
        """
        self._awaits_agreement = self._group.reduce_scatter_unused_params = True
        self._is_reduced = False
        return [param.sharded_param.grad is not None for param in self._group.fsdp_params]

    def used(self) -> list[bool]:
        """Return for each parameter whether a backward since :meth:`forget_used` gave it a gradient on this rank."""
        used = self._used | self._unreduced()
        return [index in used for index in range(len(self._group.fsdp_params))]

    def end_agreement(self, used: Sequence[bool], had_gradient: Sequence[bool]) -> None:
        """Reduce the gradients that are still unreduced, and remove those of parameters that no rank has used.

        Args:
            used: For each parameter, whether any rank has a gradient.
            had_gradient: The value that :meth:`begin_agreement` returned.
        """
        if any(used) and not self._is_reduced:
            self._is_kept = False
            self._reduce()
        self._awaits_agreement = self._group.reduce_scatter_unused_params = False
        for param, is_used, had in zip(self._group.fsdp_params, used, had_gradient, strict=True):
            if not is_used and not had:
                param.sharded_param.grad = None

    def abandon_agreement(self) -> None:
        """Undo :meth:`begin_agreement` after a backward that failed."""
        self._awaits_agreement = self._group.reduce_scatter_unused_params = False

    @property
    def is_gathered(self) -> bool:
        """Return whether the modules hold the gathered parameters now."""
        return self._group.is_unsharded

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters gathered inside.

        Moving the module to another device, for example, would free them, because FSDP2 moves shards.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def is_sharded(self) -> bool:
        """Return whether this rank holds only a part of each parameter."""
        return self.mesh.size(self.mesh.ndim - 1) > 1

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole parameters."""
        return sum(param.sharded_param.numel() for param in self._group.fsdp_params)

    @contextmanager
    def kept_after_forward(self) -> Iterator[None]:
        """Keep the parameters gathered after a forward inside.

        Replaced by: ``set_reshard_after_forward``, once it can be undone.
        """
        before, self._group.post_forward_mesh_info = self._group.post_forward_mesh_info, None
        try:
            yield
        finally:
            self._group.post_forward_mesh_info = before

    @contextmanager
    def whole_state_dict(self) -> Iterator[None]:
        """Let ``state_dict()`` inside return the gathered parameters; otherwise FSDP2's hook reshards them first.

        Replaced by: a public way to get the state dict of gathered modules with whole parameters.
        """
        taken: list[tuple[dict[int, Any], int, Any]] = []
        for module, handle in self._group._module_to_pre_save_state_dict_hook_handle.items():
            hooks = module._state_dict_pre_hooks
            if handle.id in hooks:
                taken.append((hooks, handle.id, hooks.pop(handle.id)))
        try:
            yield
        finally:
            for hooks, number, hook in taken:
                hooks[number] = hook

    def gather(self) -> None:
        """All-gather the parameters, if they are sharded now. A collective.

        FSDP2 reuses the tensors that the first gather creates. Inference mode is off while they are created, because
        inference tensors cannot be trained.
        """
        with torch.inference_mode(False):
            self._group.unshard()
            self._group.wait_for_unshard()

    def put_into(self, places: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
        """Register further modules that hold the parameters, besides those that ``fully_shard`` was given.

        They get the sharded parameters now, and the gathered or sharded ones whenever FSDP2 swaps them.

        Replaced by: a ``fully_shard`` that takes parameters instead of modules.

        Args:
            places: For each parameter, the modules that hold it and its names there.
        """
        for param, modules in zip(self._group.fsdp_params, places, strict=True):
            for module, name in modules:
                param._module_info.shared_modules.append(module)
                param._module_info.shared_param_names.append(name)
            param._setattr_on_modules(param.sharded_param)

    def free(self) -> None:
        """Put the sharded parameters back into the modules."""
        self._is_kept = False
        self._group._to_sharded()  # type: ignore[no-untyped-call]

    def has_unreduced_gradients(self) -> bool:
        """Return whether backwards left gradients on the gathered parameters, which may have been freed since."""
        return bool(self._unreduced())

    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the sharded to the gathered parameters, as FSDP2 does only when it gathers.

        Where a step has set that of a gathered parameter, it is copied to the sharded one instead.
        """
        self._take_requires_grad()
        for param in self._group.fsdp_params:
            if param._unsharded_param.requires_grad != param.sharded_param.requires_grad:
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
            self._requires_grad[param] = param.sharded_param.requires_grad
        # FSDP2 finds out once in which dtypes it reduces gradients, and does not if all parameters are frozen then.
        if getattr(self._group, "_orig_dtype", torch.float32) is None and any(self._requires_grad.values()):
            self._group._init_mp_dtypes()

    def _take_requires_grad(self) -> None:
        """Copy ``requires_grad`` of gathered parameters that a step has set to the sharded ones."""
        for param, before in self._requires_grad.items():
            gathered = param._unsharded_param.requires_grad
            if gathered != before and param.sharded_param.requires_grad == before:
                param.sharded_param.requires_grad_(gathered)

    @property
    def syncs_gradients(self) -> bool:
        """Return whether gradients are reduced after a backward (see :meth:`set_gradient_sync`)."""
        return bool(self._group.reduce_grads)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether gradients are reduced after a backward, like ``FSDPModule.set_requires_gradient_sync``."""
        self._group.reduce_grads = enabled
        self._group.all_reduce_grads = enabled

    def set_collectives(self, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
        """Set the collectives, like ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``."""
        self._group._all_gather_comm = all_gather
        self._group._reduce_scatter_comm = reduce_scatter


def _held(param: FSDPParam) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
    """Yield each module that holds ``param``, the parameter's name there, and the tensor that it holds now."""
    info = param._module_info
    for module, name in (
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ):
        yield module, name, module._parameters.get(name)


def _name(param: FSDPParam) -> str:
    return (param._param_fqn or "").removeprefix("module.")


def _own_part(param: FSDPParam, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's shard, and the part of the gathered parameter that it is a copy of."""
    shard = local_of(param.sharded_param)
    info, dim = param.mesh_info, param.fsdp_placement.dim
    rank = info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0
    start = min(rank * param.padded_sharded_param_size[dim], whole.size(dim))
    return shard, whole.narrow(dim, start, shard.size(dim))


def _shard_version(param: FSDPParam) -> tuple[int, int]:
    """Return a value that changes when a shard is changed in place, as a DTensor or as a plain tensor."""
    return param.sharded_param._version, local_of(param.sharded_param)._version


def _store(shard: torch.Tensor, own: torch.Tensor) -> None:
    """Copy the elements of ``own`` that differ from those of ``shard``; the others keep their precision."""
    if shard.data_ptr() == own.data_ptr():
        return
    # On other devices, the host would have to wait for the result of a comparison.
    if shard.device.type == "cpu" and torch.equal(shard.to(own.dtype), own):
        return
    if shard.dtype == own.dtype:
        shard.copy_(own)
    else:
        shard.copy_(torch.where(shard.to(own.dtype) == own, shard, own))


def _state(module: nn.Module) -> FSDPState:
    state = _get_module_fsdp_state(module)
    assert state is not None, "fully_shard was not applied to this module"
    return state


def sharded_group(module: nn.Module) -> ShardedGroup:
    """Return the group of the parameters that ``fully_shard(module)`` manages."""
    group = _state(module)._fsdp_param_group
    assert group is not None
    return ShardedGroup(group)


def initialize_root(root: nn.Module) -> None:
    """Make ``root`` the FSDP root now.

    FSDP2 would otherwise take the module that runs first as the root, and raise when the real root runs.
    """
    _state(root)._lazy_init()


class _InsideBackward:
    """Stand in for FSDP2's parameter group in the autograd node that calls ``post_backward`` within a backward.

    FSDP2 registers that node on the inputs of the group's modules; it runs when their gradients are known.

    Args:
        group: The group whose :meth:`ShardedGroup.inside_backward` is called.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group

    def post_backward(self) -> None:
        """Call :meth:`ShardedGroup.inside_backward`."""
        self._group.inside_backward()


def gather_before_views(module: nn.Module) -> None:
    """Gather the parameters of ``module`` before its backward even if a step changes its output, a view, in place.

    FSDP2 registers its pre-backward hook on the module's output. If the output is a view, FSDP2 warns, because autograd
    drops the hook when the view is changed in place. A hook on the view's base, as registered here, stays.

    Replaced by: an FSDP2 that registers its hook on the base.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            base = tensor._base if isinstance(tensor, torch.Tensor) and tensor.requires_grad else None
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(before_backward)

    def before_backward(gradients: Any) -> None:
        _state(module)._pre_backward(cast(torch.Tensor, None))

    module.register_forward_hook(hook)


def flush_gradients(root: nn.Module) -> None:
    """Reduce the gradients that a backward left unreduced, by FSDP2's callback for the end of a backward.

    FSDP2 itself queues the callback only if the backward goes through the output of one of its modules.
    """
    with torch.no_grad():
        _state(root)._root_post_backward_final_callback()


@contextmanager
def accumulating(root: nn.Module, groups: Sequence[ShardedGroup]) -> Iterator[None]:
    """Keep parameters gathered and gradients unreduced inside, while forwards and backwards run in any order.

    Replaced by: ``set_reshard_after_backward`` and similar methods, once they work on a root without parameters and
    can be undone.
    """
    before = [(g._group.reshard_after_backward, g._group.reduce_grads, g._group.all_reduce_grads) for g in groups]
    for group in groups:
        group._group.reshard_after_backward = group._group.reduce_grads = group._group.all_reduce_grads = False
    context = _state(root)._state_ctx
    context.is_last_backward = False
    try:
        with ExitStack() as kept:
            for group in groups:
                kept.enter_context(group.kept_after_forward())
            yield
    finally:
        context.is_last_backward = True
        for group, (reshard, reduce, all_reduce) in zip(groups, before, strict=True):
            group._group.reshard_after_backward = reshard
            group._group.reduce_grads = reduce
            group._group.all_reduce_grads = all_reduce


def _do_nothing() -> None:
    pass


def reduce_gradients(root: nn.Module, groups: Sequence[ShardedGroup]) -> None:
    """Reduce the gradients that backwards inside :func:`accumulating` left."""
    for group in reversed(groups):
        group._reduce()
    _state(root)._root_post_backward_final_callback()


def _drop_gradient(param: FSDPParam) -> None:
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def reset_after_error(root: nn.Module) -> None:
    """Reset FSDP2's state after a failed step, like ``FSDPModule.reset_iter_state``; torch has it from 2.12 on."""
    state = _state(root)
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
