"""Every private name of torch that the engine uses, each with what would replace it. Checked with torch 2.13."""

from __future__ import annotations

import json
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer, swa_utils
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

__all__ = [
    "GROUPED_MM",
    "ROUTE",
    "AllGather",
    "ParameterGroup",
    "ReduceScatter",
    "accept_sequential_redistribution",
    "accumulating",
    "call",
    "call_forward_hooks",
    "call_gradient_hooks",
    "call_post_accumulate_hooks",
    "drop_gradients",
    "flush_gradients",
    "gather_before_views",
    "initialize_root",
    "is_in_backward",
    "keep_gathered",
    "leave_out_hooks",
    "move_hooks",
    "move_without_meta_tensors",
    "num_collectives",
    "num_packed",
    "on_equal",
    "on_scalar_read",
    "overwrite",
    "packed_shard",
    "parameter_group",
    "prepend_step_post_hook",
    "process_groups",
    "put_parameter",
    "recorded_collectives",
    "reduce_gradients",
    "replace_local",
    "reset_after_error",
    "route_calls",
    "share_hooks",
    "without_forward_hooks",
    "without_state_dict_hooks",
    "without_torch_functions",
]


class ParameterGroup:
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
        self.before_write_back: Callable[[nn.Parameter], bool] = lambda param: False
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
            self.write_back()
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

    @torch.no_grad()
    def write_back(self, compares: bool = False) -> list[str]:
        """Write what a step has changed in the gathered parameters into the shards.

        Args:
            compares: Compare values as well. Changes are seen by the version of a tensor, which those through
                ``param.data`` leave as it is; once they are found, values are always compared.

        Returns:
            Names of the parameters that have changed.
        """
        compares = compares or self._writes_through_data
        changed: list[str] = []
        for param in self._group.fsdp_params:
            is_changed = self.before_write_back(param._unsharded_param)
            whole = _local(param._unsharded_param)
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
            shard, own = _own_part(param, _local(param._unsharded_param))
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
        return [_local(param._unsharded_param.detach()) for param in self._group.fsdp_params]

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
    def numel(self) -> int:
        """Number of elements of the whole parameters."""
        return sum(param.sharded_param.numel() for param in self._group.fsdp_params)

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        """Which of the parameters require gradients."""
        return tuple(param.sharded_param.requires_grad for param in self._group.fsdp_params)

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


def put_parameter(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let ``module`` hold ``tensor``, which need not be a parameter; recurrent layers keep a list of their own.

    Replaced by: a public way to swap the tensors that a module computes with, as ``functional_call`` does in private.
    """
    module._parameters[key] = tensor  # type: ignore[assignment]
    names = vars(module).get("_flat_weights_names", ())
    if key in names:
        vars(module)["_flat_weights"][names.index(key)] = tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
    shard = _local(param.sharded_param)
    info, dim = param.mesh_info, param.fsdp_placement.dim
    rank = info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0
    start = min(rank * param.padded_sharded_param_size[dim], whole.size(dim))
    return shard, whole.narrow(dim, start, shard.size(dim))


@torch.no_grad()
def overwrite(memory: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``memory``, unseen by autograd: what was computed has used them, and not what was there.

    Replaced by: a public way not to count a write.
    """
    with torch.autograd._unsafe_preserve_version_counter(memory):
        memory.copy_(values)


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Let ``tensor`` be of another local tensor from now on; replaced by a setter of ``data`` that DTensor heeds."""
    tensor._local_tensor = local


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` have the tensor hooks of ``source``, also those that come and go later."""
    if source._backward_hooks and target._backward_hooks is not source._backward_hooks:
        if target._backward_hooks:
            source._backward_hooks.update(target._backward_hooks)
        target._backward_hooks = source._backward_hooks


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` have the hooks of ``source``; handles that were given out for them go on working.

    Replaced by: a public way to list a tensor's hooks.
    """
    share_hooks(source, target)
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks:
        target._post_accumulate_grad_hooks = hooks


def call_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call the post-accumulate-grad hooks of ``param``, whose gradient autograd has not set itself."""
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Call the tensor hooks of ``param``, whose gradient autograd does not compute itself; return what they make of it.

    Replaced by: as for :func:`move_hooks`.
    """
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _state(module: nn.Module) -> FSDPState:
    state = _get_module_fsdp_state(module)
    assert state is not None, "fully_shard was not applied to this module"
    return state


def parameter_group(module: nn.Module) -> ParameterGroup:
    """The parameters that ``fully_shard(module)`` took charge of."""
    group = _state(module)._fsdp_param_group
    assert group is not None
    return ParameterGroup(group)


def initialize_root(root: nn.Module) -> None:
    """Make ``root`` the FSDP root now. FSDP2 would take whichever module runs first, and refuse the real root then."""
    _state(root)._lazy_init()


class _InsideBackward:
    """Takes the place of a parameter group in the autograd node that tells it of the gradients of its inputs.

    Args:
        group: The group.
    """

    def __init__(self, group: ParameterGroup) -> None:
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
def accumulating(root: nn.Module, groups: Sequence[ParameterGroup]) -> Iterator[bool]:
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
        with keep_gathered(groups):
            yield not _casts(groups)
    finally:
        context.is_last_backward = True
        for group, (reshard, reduce, all_reduce) in zip(groups, before, strict=True):
            group._group.reshard_after_backward = reshard
            group._group.reduce_grads = reduce
            group._group.all_reduce_grads = all_reduce


def _casts(groups: Sequence[ParameterGroup]) -> bool:
    policies = [group._group.mp_policy for group in groups]
    return any((p.param_dtype, p.reduce_dtype, p.output_dtype) != (None, None, None) for p in policies)


@contextmanager
def without_forward_hooks(modules: Iterable[nn.Module], origins: tuple[str, ...]) -> Iterator[None]:
    """Inside, calls of ``modules`` do not come by the forward hooks that Python modules of ``origins`` have put there.

    A call with hooks takes as long as a small layer. The others stay in their order; hooks may come and go meanwhile.
    Replaced by: a way to disable a hook.

    Args:
        modules: Whose hooks.
        origins: How the names of the Python modules begin.
    """
    before: list[tuple[dict[int, Any], dict[int, Any], set[int]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            taken = {number for number, hook in hooks.items() if _origin(hook).startswith(origins)}
            if taken:
                before.append((hooks, dict(hooks), taken))
                for number in taken:
                    del hooks[number]
    try:
        yield
    finally:
        for hooks, were, taken in before:
            now = dict(hooks)
            hooks.clear()
            hooks.update({number: hook for number, hook in were.items() if number in now or number in taken})
            hooks.update(now)


_OURS = ("torch.distributed", "lightning_dist")


def leave_out_hooks(module: nn.Module) -> None:
    """Give ``module`` dictionaries of hooks without those of torch.distributed and of this package, in new ones."""
    for key in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict((number, hook) for number, hook in hooks if not _origin(hook).startswith(_OURS))


def _origin(hook: Any) -> str:
    """The Python module that a hook is written in; empty if it does not say."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def _do_nothing() -> None:
    pass


def reduce_gradients(root: nn.Module, groups: Sequence[ParameterGroup]) -> None:
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


def drop_gradients(groups: Sequence[ParameterGroup]) -> None:
    """Forget the gradients that backwards have left, of a step that failed."""
    for group in groups:
        for param in group._group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


ROUTE = "_compiled_call_impl"
"""The attribute of a module that :func:`route_calls` sets."""


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


def route_calls(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let ``function`` be called in the place of ``module``, hooks and all; :func:`call` calls the module itself.

    It is what ``nn.Module.compile`` uses. Replaced by: a hook that can give a module's output without running it.
    """
    setattr(module, ROUTE, function)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose calls are routed elsewhere."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Call the forward hooks that users and libraries have put on ``module``, for what they do besides.

    They are given a copy of ``output``, which is what they have made of it where the module ran. Those of
    torch.distributed and of this package are left out. Replaced by: as for :func:`route_calls`.
    """
    hooks = [(key, hook) for key, hook in module._forward_hooks.items() if not _origin(hook).startswith(_OURS)]
    if hooks:
        output = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    for key, hook in hooks:
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if result is None else result


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operation behind ``torch.nn.functional.grouped_mm``; its rule for fakes takes bfloat16 alone (torch 2.13)."""


def without_torch_functions() -> AbstractContextManager[None]:
    """Inside, tensors' ``__torch_function__`` is not called; torch's guide to extending it names this private class."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def without_state_dict_hooks(groups: Iterable[ParameterGroup]) -> Iterator[None]:
    """Inside, ``state_dict()`` does not put the shards back into the modules, as FSDP2 lets it do by a hook.

    Replaced by: a public way to take the whole parameters of modules that are gathered.
    """
    taken: list[tuple[dict[int, Any], int, Any]] = []
    for group in groups:
        for module, handle in group._group._module_to_pre_save_state_dict_hook_handle.items():
            hooks = module._state_dict_pre_hooks
            if handle.id in hooks:
                taken.append((hooks, handle.id, hooks.pop(handle.id)))
    try:
        yield
    finally:
        for hooks, number, hook in taken:
            hooks[number] = hook


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread; replaced by a public question to it."""
    return bool(torch._C._current_graph_task_id() != -1)


def reset_after_error(root: nn.Module) -> None:
    """As ``FSDPModule.reset_iter_state``, which torch has from 2.12 on."""
    state = _state(root)
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()


def packed_shard(dim: int, num_packed: int) -> Placement:
    """A part of each of ``num_packed`` equal parts along ``dim``; replaced by a public placement that can say so."""
    return _StridedShard(dim, split_factor=num_packed)


def num_packed(placement: Placement) -> int:
    """Of how many parts a :func:`packed_shard` is; 0 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def accept_sequential_redistribution() -> None:
    """Keep torch from warning, on each rank, that a norm over two axes of a mesh takes two all-reduces.

    Replaced by: a public way to flatten axes, which it asks for.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@contextmanager
def keep_gathered(groups: Sequence[ParameterGroup]) -> Iterator[None]:
    """No group frees its parameters after a forward (``set_reshard_after_forward`` cannot be undone)."""
    before = [group._group.post_forward_mesh_info for group in groups]
    for group in groups:
        group._group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group._group.post_forward_mesh_info = mesh_info


def prepend_step_post_hook(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """As ``register_step_post_hook``, before the hooks that are there; replaced by its ``prepend``, once it has one."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def on_scalar_read(function: Callable[[DTensor], int | float | bool | complex]) -> None:
    """Let ``function`` make the number that ``item()``, ``float()``, a comparison or a format reads from a DTensor.

    torch gives this rank's part of a sum or a norm that is still to be reduced, without a word, and refuses to format
    one. Replaced by: an ``item()`` of DTensor that reduces.
    """

    def read(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> int | float | bool | complex:
        return function(args[0])

    def format_whole(self: DTensor, specification: str) -> str:
        if self.ndim == 0 and not self.is_meta:
            return format(self.item(), specification)
        return object.__format__(self, specification)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = read
    DTensor.__format__ = format_whole  # type: ignore[method-assign, assignment]


def on_equal(function: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Let ``function`` answer ``torch.equal`` of tensors of which at least one is a DTensor.

    torch shards the second as the first is, which fails where it has fewer dimensions. Replaced by: a ``torch.equal``
    that says False of DTensors of other shapes.
    """

    def equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        return function(args[0], args[1])

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this rank is in; torch tells only of the default one."""
    return list(dist.distributed_c10d._world.pg_map)


def num_collectives(group: dist.ProcessGroup) -> int:
    """How many collectives of ``group`` this rank has entered; RuntimeError for a backend that does not count."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # the stub leaves it out
    return number


def recorded_collectives() -> list[dict[str, Any]]:
    """What the flight recorder has; CUDA builds have a second one, for NCCL. Only its pickled dump is documented."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries


def move_without_meta_tensors(root: nn.Module) -> None:
    """Let ``root.to``, ``cpu`` and the like leave tensors on the meta device alone, which have no values to move.

    Replaced by: an argument of ``nn.Module._apply`` for it.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own: Callable[..., nn.Module] = type(root)._apply
        return own(root, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    vars(root)["_apply"] = apply


@contextmanager
def averages_grouped_by_dtype(device: torch.device) -> Iterator[None]:
    """Let torch's AveragedModel take all tensors inside for ones on ``device``, and group them by their dtype alone.

    It groups them in C++, where tensors of other ranks are on the meta device, so that ranks would differ in the order.
    Replaced by: a group function that modes see.
    """
    own = swa_utils._group_tensors_by_device_and_dtype

    def group(lists: list[list[torch.Tensor]], with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = {}
        for index, first in enumerate(lists[0]):
            columns, indices = groups.setdefault((device, first.dtype), ([[] for _ in lists], []))
            for column, tensors in zip(columns, lists, strict=True):
                column.append(tensors[index])
            indices.append(index)
        return groups

    swa_utils._group_tensors_by_device_and_dtype = group  # type: ignore[assignment]
    try:
        yield
    finally:
        swa_utils._group_tensors_by_device_and_dtype = own
