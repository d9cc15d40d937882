"""The private names of FSDP2 that sharding uses, each with what would replace it. Checked with torch 2.13."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    call_post_accumulate_hooks,
    is_in_backward,
    local_of,
    move_hooks,
    overwrite,
    share_hooks,
)
from lightning_dist.parameter_group import ParameterGroup

__all__ = [
    "ShardedGroup", "accumulating", "drop_gradients", "flush_gradients", "gather_before_views", "initialize_root",
    "reduce_gradients", "reset_after_error", "sharded_group",
]  # fmt: skip


class ShardedGroup(ParameterGroup):
    """One unit's parameters as FSDP2 communicates them (``FSDPParamGroup``).

    Replaced by the public methods of ``FSDPModule`` once a module can be managed without its class being changed.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._waits_for_end = False
        self._is_kept = False
        self._is_held = False
        self._awaits_agreement = False
        self._used: set[int] = set()
        self._is_reduced = False
        # FSDP2 reduces and frees a group when the gradients of its modules' inputs are known. Uses of its parameters
        # outside of those modules come later. Replaced by: a public way to reduce at the end of a backward.
        self._post_backward = group.post_backward
        group.post_backward = self._after_backward  # type: ignore[method-assign]
        register = FSDPParamGroup._register_post_backward_hook
        inside = _InsideBackward(self)
        group._register_post_backward_hook = partial(register, inside)  # type: ignore[method-assign, arg-type]
        # FSDP2 has no hooks at which parameters are gathered or freed. Replaced by: such hooks.
        group._to_unsharded = self._put_whole  # type: ignore[method-assign]
        group._to_sharded = self._put_shards  # type: ignore[method-assign]
        # After load_state_dict, FSDP2 takes what modules hold for the shards. Replaced by: its asking what it is.
        for index, param in enumerate(group.fsdp_params):
            param.reset_sharded_param = partial(self._take_shards, index)  # type: ignore[method-assign]
        self._stand_ins: list[nn.Parameter] | None = None
        self._has_stand_ins = False
        self._versions: dict[FSDPParam, int] = {}
        self._writes_through_data = False
        self._changed: list[str] = []
        self.take_replaced: Callable[[nn.Parameter], bool] = lambda param: False
        self.is_other_form: Callable[[nn.Module, str, torch.Tensor | None], bool] = lambda module, name, held: False

    def _put_whole(self) -> None:
        """Put the gathered parameters into the modules, with the hooks that the sharded ones have now."""
        replaced = [
            (module, name, current)
            for index, param in enumerate(self._group.fsdp_params)
            for module, name, current in _held(param)
            if not self._is_own(index, param, current) and not self.is_other_form(module, name, current)
        ]
        FSDPParamGroup._to_unsharded(self._group)  # type: ignore[no-untyped-call]
        for module, name, current in replaced:
            module._parameters[name] = current  # type: ignore[assignment]
        for param in self._group.fsdp_params:
            share_hooks(param.sharded_param, param._unsharded_param)

    def _is_own(self, index: int, param: FSDPParam, current: torch.Tensor | None) -> bool:
        """Whether a module holds a form of the parameter, and not what ``torch.func.functional_call`` has put there."""
        return (
            current is None
            or current is param.sharded_param
            or current is getattr(param, "_unsharded_param", None)
            or (self._stand_ins is not None and current is self._stand_ins[index])
            or current is getattr(param, "_sharded_post_forward_param", None)
        )

    def _put_shards(self) -> None:
        """Put the sharded parameters into the modules, or what stands in for them, and free the gathered ones."""
        if self._is_held:
            return
        if self._group.is_unsharded:
            self._written_back(compares=False)
        self._keep_what_numpy_shares()
        FSDPParamGroup._to_sharded(self._group)  # type: ignore[no-untyped-call]
        if self._has_stand_ins:
            self._put_stand_ins()

    def _take_shards(self, index: int) -> None:
        """Take what a module holds for the shards, unless that is the gathered parameter, or stands in for it."""
        param = self._group.fsdp_params[index]
        _, _, current = next(_held(param))
        is_stand_in = self._stand_ins is not None and current is self._stand_ins[index]
        if self._group.is_sharded and not is_stand_in:
            FSDPParam.reset_sharded_param(param)  # type: ignore[no-untyped-call]

    def _keep_what_numpy_shares(self) -> None:
        """Do not free gathered parameters that a NumPy array shares: torch does not let their memory go any more."""
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
        """From now on, let something stand in the modules for a parameter while it is sharded.

        Args:
            make: Makes it of a sharded parameter, the dtype that the parameter is computed in, and what is to be called
                when it gets a gradient.
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
        """Put the sharded parameters back into the modules, and let nothing stand in for them."""
        self._has_stand_ins = False
        if self._group.is_sharded:
            for param in self._group.fsdp_params:
                param._setattr_on_modules(param.sharded_param)

    def write_back(self, compares: bool = False) -> None:
        """Write what a step has changed in the gathered parameters into the shards.

        Args:
            compares: Whether to compare values as well. Changes are seen by the version of a tensor, which those
                through ``param.data`` leave as it is; once such a change is found, values are always compared.
        """
        self._changed += self._written_back(compares)

    def take_changed(self) -> list[str]:
        """Return the names of the parameters that :meth:`write_back` has written since the last call of this method."""
        changed, self._changed = self._changed, []
        return changed

    @torch.no_grad()
    def _written_back(self, compares: bool) -> list[str]:
        compares = compares or self._writes_through_data
        changed: list[str] = []
        for param in self._group.fsdp_params:
            is_changed = self.take_replaced(param._unsharded_param)
            whole = local_of(param._unsharded_param)
            memory = param.all_gather_outputs[0] if len(param.all_gather_outputs) == 1 else whole
            version = whole._version
            is_replaced = whole.data_ptr() != memory.data_ptr()
            is_changed |= is_replaced or version != self._versions.get(param, 0)
            if not is_changed and not compares:
                continue
            self._versions[param] = version
            if is_replaced:
                gathered = torch.as_strided(memory, whole.size(), whole.stride())
                overwrite(gathered, whole)
                whole.data = gathered
            shard, own = _own_part(param, whole)
            if shard.data_ptr() == own.data_ptr() or torch.equal(shard.to(own.dtype), own):
                continue
            self._writes_through_data |= compares
            shard.copy_(own)
            changed.append(_name(param))
        return changed

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def names(self) -> list[str]:
        """Full names of the parameters in the user's module."""
        return [_name(param) for param in self._group.fsdp_params]

    def holds(self, param: torch.Tensor) -> bool:
        """Whether ``param`` is one of the gathered parameters."""
        return any(getattr(own, "_unsharded_param", None) is param for own in self._group.fsdp_params)

    def unwritten(self) -> list[str]:
        """Return the names of gathered parameters whose values are not those of the shards."""
        found = []
        for param in self._group.fsdp_params:
            shard, own = _own_part(param, local_of(param._unsharded_param))
            if not torch.equal(shard.to(own.dtype), own):
                found.append(_name(param))
        return found

    def lost_hooks(self) -> list[str]:
        """Return the names of parameters with tensor hooks that their gathered ones do not have."""
        return [
            _name(param)
            for param in self._group.fsdp_params
            if (param.sharded_param._backward_hooks or {}).keys()
            - (param._unsharded_param._backward_hooks or {}).keys()
        ]

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters of which a backward left a gradient on the gathered ones."""
        unreduced = self._unreduced()
        return [name for index, name in enumerate(self.names) if index in unreduced]

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters that got a gradient in the last backward here, and have no reduced one."""
        params = self._group.fsdp_params
        return [_name(params[index]) for index in sorted(self._used) if params[index].sharded_param.grad is None]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The gathered parameters, plain: this rank's part of those that are split over ``tp``."""
        return [local_of(param._unsharded_param.detach()) for param in self._group.fsdp_params]

    def take_hooks(self, originals: Mapping[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Let the parameters have the hooks that were put on them before they were sharded.

        Args:
            originals: The parameters as they were, by the module that holds them and the name there.
        """
        for param in self._group.fsdp_params:
            move_hooks(originals[param._module_info.module, param._module_info.param_name], param.sharded_param)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the parameters are sharded and replicated over."""
        return self._group.mesh_info.mesh

    def wait_for_end_of_backward(self) -> None:
        """From now on, reduce gradients and free parameters at the end of a backward, and not within it.

        It is for parameters that a step may use through other ways than the forward of the group's modules.
        """
        self._waits_for_end = True

    def inside_backward(self) -> None:
        """Handle that the gradients of the modules' inputs are known, within a backward."""
        if torch.is_grad_enabled():  # create_graph=True: a second backward reads the parameters before any hook runs
            self._is_kept = True
        if not self._waits_for_end and not self._is_kept:
            self._reduce()

    def _after_backward(self, *unused: Any) -> None:
        """Handle the end of a backward; with create_graph=True, gradients are not final and parameters are needed."""
        if is_in_backward() and torch.is_grad_enabled():
            return
        if self._waits_for_end or self._is_kept:
            # Without gradients it is the end of torch.autograd.grad.
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
        """Return the indices of the parameters of which backwards left gradients on the gathered ones."""
        return {
            index
            for index, param in enumerate(self._group.fsdp_params)
            if param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
        }

    def forget_used(self) -> None:
        """Begin anew to note which parameters get gradients here: before a backward."""
        self._used.clear()

    def begin_agreement(self) -> list[bool]:
        """From now on, reduce zeros for a parameter that has no gradient on this rank, as others may have one.

        A group that waits for the end of a backward waits for :meth:`end_agreement`.

        Returns:
            For each parameter, whether it has a reduced gradient already.
        """
        self._awaits_agreement = self._group.reduce_scatter_unused_params = True
        self._is_reduced = False
        return [param.sharded_param.grad is not None for param in self._group.fsdp_params]

    def used(self) -> list[bool]:
        """Return, for each parameter, whether backwards since :meth:`forget_used` gave it a gradient here."""
        used = self._used | self._unreduced()
        return [index in used for index in range(len(self._group.fsdp_params))]

    def end_agreement(self, used: Sequence[bool], had_gradient: Sequence[bool]) -> None:
        """Reduce what is left to reduce, and take the zeros of parameters that no rank used away.

        Args:
            used: For each parameter, whether any rank has a gradient.
            had_gradient: What :meth:`begin_agreement` returned.
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
        """Whether the modules hold the whole parameters now."""
        return self._group.is_unsharded

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing frees the parameters, such as moving the module to a device, which FSDP2 does with shards."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds a part of each parameter only."""
        return self.mesh.size(self.mesh.ndim - 1) > 1

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameters."""
        return sum(param.sharded_param.numel() for param in self._group.fsdp_params)

    @contextmanager
    def kept_after_forward(self) -> Iterator[None]:
        """Inside, do not free the parameters after a forward; ``set_reshard_after_forward`` cannot be undone."""
        before, self._group.post_forward_mesh_info = self._group.post_forward_mesh_info, None
        try:
            yield
        finally:
            self._group.post_forward_mesh_info = before

    @contextmanager
    def whole_state_dict(self) -> Iterator[None]:
        """Inside, let ``state_dict()`` take the gathered parameters; FSDP2 puts the shards back into the modules.

        Replaced by: a public way to take the whole parameters of modules that are gathered.
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

        What is made by the first gather is used for good: it must not be an inference tensor, which cannot be trained.
        """
        with torch.inference_mode(False):
            self._group.unshard()
            self._group.wait_for_unshard()

    def put_into(self, places: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
        """Put the parameters into modules that ``fully_shard`` was not given, now and whenever they change.

        Replaced by: a ``fully_shard`` of parameters instead of modules.

        Args:
            places: For each parameter, the modules that hold it, and its names there.
        """
        for param, modules in zip(self._group.fsdp_params, places, strict=True):
            for module, name in modules:
                param._module_info.shared_modules.append(module)
                param._module_info.shared_param_names.append(name)
            param._setattr_on_modules(param.sharded_param)

    def gather_in_place(self) -> None:
        """From now on, let the whole parameters be the memory of the shards, where no other rank has any of them.

        FSDP2 copies them all the same. Replaced by: its not doing so. Not where there are replicas, nor where a forward
        writes into a parameter: a replica's forwards must not change it, nor any forward what is being saved.
        """
        if self._group.mesh_info.mesh.size() > 1:
            return
        for param in self._group.fsdp_params:
            data = param._sharded_param_data
            owners = [param._module_info.module, *param._module_info.shared_modules]
            if any(getattr(owner, "max_norm", None) is not None for owner in owners):
                continue
            is_all = data.storage_offset() == 0 and data.untyped_storage().size() == data.numel() * data.itemsize
            is_plain = type(data) is torch.Tensor and not hasattr(param._sharded_local_tensor, "fsdp_post_all_gather")
            if is_all and is_plain and param.param_dtype is None and not param.offload_to_cpu:
                param.all_gather_outputs = [data]
                param.free_unsharded_param = _do_nothing  # type: ignore[method-assign]  # it would free the shard

    def free(self) -> None:
        """Put the sharded parameters back into the modules."""
        self._is_kept = False
        self._group._to_sharded()  # type: ignore[no-untyped-call]

    def has_unreduced_gradients(self) -> bool:
        """Whether backwards left gradients on the gathered parameters, which may have been freed since."""
        return bool(self._unreduced())

    def copy_requires_grad(self) -> None:
        """Let the gathered parameters require gradients as the sharded ones do now. FSDP2 does it only on a gather."""
        for param in self._group.fsdp_params:
            if param._unsharded_param.requires_grad != param.sharded_param.requires_grad:
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)

    @property
    def syncs_gradients(self) -> bool:
        """What :meth:`set_gradient_sync` said last."""
        return bool(self._group.reduce_grads)

    def set_gradient_sync(self, enabled: bool) -> None:
        """As ``FSDPModule.set_requires_gradient_sync``."""
        self._group.reduce_grads = enabled
        self._group.all_reduce_grads = enabled

    def set_collectives(self, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
        """As ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``."""
        self._group._all_gather_comm = all_gather
        self._group._reduce_scatter_comm = reduce_scatter


def _held(param: FSDPParam) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
    """Yield each module that holds ``param``, the name there, and what it holds now."""
    info = param._module_info
    for module, name in (
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ):
        yield module, name, module._parameters.get(name)


def _hooks(tensor: torch.Tensor) -> dict[int, Any]:
    return tensor._backward_hooks or {}


def _name(param: FSDPParam) -> str:
    return (param._param_fqn or "").removeprefix("module.")


def _own_part(param: FSDPParam, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's shard, and the part of the gathered parameter that it is a copy of."""
    shard = local_of(param.sharded_param)
    info, dim = param.mesh_info, param.fsdp_placement.dim
    rank = info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0
    start = min(rank * param.padded_sharded_param_size[dim], whole.size(dim))
    return shard, whole.narrow(dim, start, shard.size(dim))


def _state(module: nn.Module) -> FSDPState:
    state = _get_module_fsdp_state(module)
    assert state is not None, "fully_shard was not applied to this module"
    return state


def sharded_group(module: nn.Module) -> ShardedGroup:
    """The parameters that ``fully_shard(module)`` took charge of."""
    group = _state(module)._fsdp_param_group
    assert group is not None
    return ShardedGroup(group)


def initialize_root(root: nn.Module) -> None:
    """Make ``root`` the FSDP root now. FSDP2 would take whichever module runs first, and refuse the real root then."""
    _state(root)._lazy_init()


class _InsideBackward:
    """Takes the place of a parameter group in the autograd node that tells it of the gradients of its inputs.

    Args:
        group: The group.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group

    def post_backward(self) -> None:
        """Tell the group."""
        self._group.inside_backward()


def gather_before_views(module: nn.Module) -> None:
    """Gather the parameters of ``module`` before its backward also where a step changes its output, a view, in place.

    FSDP2 puts its hook on what the module returns, and warns: where a view is changed in place, autograd drops it. A
    hook on what the view is of stays. Replaced by: FSDP2's doing so.
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
    """Reduce what a backward left unreduced: FSDP2's end of backward, which only a module's output starts."""
    with torch.no_grad():
        _state(root)._root_post_backward_final_callback()


@contextmanager
def accumulating(root: nn.Module, groups: Sequence[ShardedGroup]) -> Iterator[bool]:
    """Inside, backwards leave parameters gathered and gradients unreduced; forwards and backwards come in any order.

    Replaced by: ``set_reshard_after_backward`` and its like on a root without parameters, undone afterwards.

    Yields:
        Whether FSDP2's hooks would have nothing to do; if not, it casts, and ``root`` must be called.
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
            yield not _casts(groups)
    finally:
        context.is_last_backward = True
        for group, (reshard, reduce, all_reduce) in zip(groups, before, strict=True):
            group._group.reshard_after_backward = reshard
            group._group.reduce_grads = reduce
            group._group.all_reduce_grads = all_reduce


def _casts(groups: Sequence[ShardedGroup]) -> bool:
    policies = [group._group.mp_policy for group in groups]
    return any((p.param_dtype, p.reduce_dtype, p.output_dtype) != (None, None, None) for p in policies)


def _do_nothing() -> None:
    pass


def reduce_gradients(root: nn.Module, groups: Sequence[ShardedGroup]) -> None:
    """Reduce what backwards inside :func:`accumulating` have left; as torch's own pipeline stages do it."""
    alone = [group for group in groups if group._group.mesh_info.mesh.size() == 1]
    for group in alone:
        _keep_gradients(group._group)
    if len(alone) < len(groups) or _casts(groups):
        for group in reversed(groups):
            group._reduce()
        _state(root)._root_post_backward_final_callback()
        return
    # What else that callback does, where forwards outside of steps have come by FSDP2's hooks.
    _state(root)._comm_ctx.post_forward_order.clear()
    for group in groups:
        group._group._post_forward_indices.clear()


def drop_gradients(groups: Sequence[ShardedGroup]) -> None:
    """Forget the gradients that backwards have left, of a step that failed."""
    for group in groups:
        for param in group._group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _keep_gradients(group: FSDPParamGroup) -> None:
    """What ``post_backward`` does, where there is nobody to reduce with: it would copy each gradient twice."""
    for param in group.fsdp_params:
        if not hasattr(param, "_unsharded_param"):
            continue
        param.accumulate_unsharded_grad_if_needed()
        if param.unsharded_accumulated_grad is not None:
            gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
        elif param.unsharded_param.grad is not None:
            gradient, param.unsharded_param.grad = param.unsharded_grad_data, None
        else:
            continue
        gradient = param.to_sharded_dtensor(gradient.to(param.orig_dtype).view(param.sharded_size))
        if param.sharded_param.grad is None:
            param.sharded_param.grad = gradient
        else:
            param.sharded_param.grad += gradient
        call_post_accumulate_hooks(param.sharded_param)


def reset_after_error(root: nn.Module) -> None:
    """As ``FSDPModule.reset_iter_state``, which torch has from 2.12 on."""
    state = _state(root)
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
