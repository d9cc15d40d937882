"""Manage the parameters of a unit that FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lightning_dist._compat import (
    call_post_accumulate_hooks,
    give_post_accumulate_hooks,
    is_in_backward,
    local_of,
    move_hooks,
    share_hooks,
    take_post_accumulate_hooks,
)
from lightning_dist.parameters.accumulated_gradients import AccumulatedGradients
from lightning_dist.parameters.gradient_reducer import GradientReducer, LocalGradient
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.sharding._compat.param import MakeStandIn, ShardedParam, let_gathers_wait
from lightning_dist.techniques.sharding._compat.wrapped import MaxOverRanks, WrapShard, gather_wrapped

__all__ = ["ShardedGroup", "fsdp_state", "sharded_group"]


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
        self._is_reduced = False
        self._accumulated = AccumulatedGradients()
        self._has_own_dtypes = False
        self._is_trainable = False
        self._reducing: list[ShardedParam] = []
        self._means: dict[str, LocalGradient] = {}
        self.count_bytes: Callable[[int], None] = lambda num_bytes: None
        """Called with the number of bytes that this rank sends when it gathers parameters or reduces gradients."""
        self.count_bytes_to_replicas: Callable[[int], None] = lambda num_bytes: None
        """Called with the number of bytes that this rank sends when FSDP2 averages gradients over replicas."""
        # FSDP2 reduces and frees a group when the gradients of its modules' inputs are known. Gradients from uses of
        # its parameters outside of these modules may be computed later. Replaced by: a public way to reduce at the end
        # of a backward.
        self._post_backward = group.post_backward
        group.post_backward = self._after_backward  # type: ignore[method-assign]
        register = FSDPParamGroup._register_post_backward_hook
        inside = _InsideBackward(self)
        group._register_post_backward_hook = partial(register, inside)  # type: ignore[method-assign, arg-type]
        # FSDP2 has no hooks that run when parameters are gathered or freed. Replaced by: such hooks.
        group._to_unsharded = self._put_whole  # type: ignore[method-assign]
        group._to_sharded = self._put_shards  # type: ignore[method-assign]
        group._to_sharded_post_forward = self._put_parts  # type: ignore[method-assign]
        self._params = [ShardedParam(param, group, self._miss) for param in group.fsdp_params]
        self._has_stand_ins = False
        self._memory: ShardMemory | None = None
        self.reduces_in_background = False
        """Whether gradients are reduced by an object that can wait for the data at the end of a backward."""
        self.reduces_later = False
        """Whether nothing reads the gradients that are being reduced now before the end of the backward."""
        self.finish_other_reductions: Callable[[], None] = lambda: None
        """Called before gradients are reduced that something reads at once."""
        self._later_divisor = 1.0
        self._postponed: list[tuple[ShardedParam, dict[int, Any]]] = []
        self.write_back_data: Callable[[nn.Parameter], bool] = lambda param: False
        self.is_other_form: Callable[[nn.Module, str, torch.Tensor | None], bool] = lambda module, name, held: False

    def _put_whole(self) -> None:
        """Put the gathered parameters into the modules, with the hooks that the sharded ones have now."""
        group, replaced = self._group, self._of_other_code()
        info = cast(FSDPMeshInfo, group.post_forward_mesh_info if group.is_sharded_post_forward else group.mesh_info)
        FSDPParamGroup._to_unsharded(group)  # type: ignore[no-untyped-call]
        for module, name, current in replaced:
            module._parameters[name] = current  # type: ignore[assignment]
        for param in self._params:
            share_hooks(param.shard, param.whole)
            param.was_gathered()
        self.copy_requires_grad()
        self._count(info.shard_mesh_size, self._params, None)

    def _count(self, num_ranks: int, params: Sequence[ShardedParam], dtype: torch.dtype | None) -> None:
        """Count the bytes that a rank sends when ``params`` are gathered or reduced by a ring of ``num_ranks`` ranks.

        Args:
            num_ranks: Number of ranks of the ring.
            params: The parameters that are gathered or reduced together.
            dtype: The dtype that is sent; None: that of the gathered parameters.
        """
        if num_ranks > 1:
            whole = sum(
                local_of(p.whole).numel() * dtype.itemsize if dtype is not None else p.num_gathered_bytes
                for p in params
            )
            self.count_bytes(whole * (num_ranks - 1) // num_ranks)

    def _count_replicas(self, num_replicas: int, num_shards: int, dtype: torch.dtype | None) -> None:
        """Count the bytes that a rank sends when its shards of gradients are averaged by a ring of ``num_replicas``."""
        whole = sum(
            local_of(p.whole).numel() * (local_of(p.whole).dtype if dtype is None else dtype).itemsize
            for p in self._reducing
        )
        self.count_bytes_to_replicas(2 * whole * (num_replicas - 1) // (num_shards * num_replicas))

    def _of_other_code(self) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
        """Return module, name and tensor of each tensor that other code has put in the place of a parameter."""
        return [
            (module, name, held)
            for param in self._params
            for module, name, held in param.held()
            if not param.is_own(held) and not self.is_other_form(module, name, held)
        ]

    def _put_shards(self) -> None:
        """Put the sharded parameters or their stand-ins into the modules, and free the gathered ones."""
        if self._is_held:
            return
        if self._group.is_unsharded:
            self._leave_gathered()
        if self._group.device.type == "cpu" and not self._group.is_sharded:
            for param in self._params:
                param.keep_what_numpy_shares()
        # Inside torch.func.functional_call, a block may run again and must find the same tensors.
        replaced = self._of_other_code() if self._has_stand_ins and self._group.is_unsharded else []
        FSDPParamGroup._to_sharded(self._group)  # type: ignore[no-untyped-call]
        self._release_shards()
        if self._has_stand_ins:
            self._put_stand_ins()
        for module, name, current in replaced:
            module._parameters[name] = current  # type: ignore[assignment]

    def _put_parts(self) -> None:
        """Put the parameters into the modules that stay sharded over only some ranks until the backward."""
        self._leave_gathered()
        FSDPParamGroup._to_sharded_post_forward(self._group)  # type: ignore[no-untyped-call]
        self._release_shards()

    def keep_shards_in(self, memory: ShardMemory) -> None:
        """Move the shards, which are in the memory of the CPU, into ``memory``."""
        self._memory = memory
        for param in self._params:
            param.move_shard(memory)
        self._release_shards()

    def _release_shards(self) -> None:
        if self._memory is not None:
            self._memory.release(self.params)

    def _leave_gathered(self) -> None:
        self.write_back()
        for param in self._params:
            param.take_requires_grad()

    def _put_stand_ins(self) -> None:
        for param in self._params:
            param.put_stand_in()

    def begin_stand_ins(self, make: MakeStandIn) -> None:
        """Put stand-ins into the modules, now and later, whenever the parameters are sharded."""
        for param in self._params:
            param.begin_stand_in(make)
        self._has_stand_ins = True
        if self._group.is_sharded:
            self._put_stand_ins()

    def end_stand_ins(self) -> None:
        """Put the sharded parameters back into the modules in place of the stand-ins."""
        self._has_stand_ins = False
        if self._group.is_sharded:
            for param in self._params:
                param.put_shard()

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the step's changes of the gathered parameters into the shards."""
        changed = [param.name for param in self._params if param.write_back(self.write_back_data(param.whole))]
        if changed:
            self.on_change(self, changed)

    def let_gathers_follow_writes(self) -> None:
        """Let later gathers of all groups wait for writes of the current stream to a shard."""
        let_gathers_wait(getattr(self._group, "comm_ctx", None), self._group.device)

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the sharded parameters."""
        return [param.shard for param in self._params]

    @property
    def names(self) -> list[str]:
        """Return the full names of the parameters in the user's module."""
        return [param.name for param in self._params]

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is one of the gathered parameters."""
        return any(own.gathered is param for own in self._params)

    def copies(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield name, gathered parameter and shard of the parameters that have been gathered before."""
        for param in self._params:
            if param.gathered is not None:
                yield param.name, param.gathered, param.shard

    def unwritten(self) -> list[str]:
        """Return the names of gathered parameters whose values differ from those of the shards."""
        return [param.name for param in self._params if not param.is_written()]

    def lost_hooks(self) -> list[str]:
        """Return the names of parameters that have tensor hooks which are missing on their gathered copies."""
        return [
            param.name
            for param in self._params
            if (param.shard._backward_hooks or {}).keys() - (param.whole._backward_hooks or {}).keys()
        ]

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters whose gradient a backward left on the gathered copies."""
        return [param.name for param in self._params if param.has_unreduced_gradient]

    def is_used(self, param: nn.Parameter) -> bool:
        """Return whether a backward since :meth:`forget_used` gave ``param`` a gradient on this rank."""
        return any(own.is_used for own in self._params if own.shard is param)

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters with a gradient from this rank's last backward, but without a reduced one."""
        if self.steps_in_backward:
            return []
        return [param.name for param in self._params if param.is_used and param.shard.grad is None]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """Return the gathered parameters as plain tensors: this rank's part of those that are split over ``tp``."""
        return [param.gathered_memory for param in self._params]

    def gather_wrapped(
        self, wrap_of: Callable[[nn.Module, str], WrapShard | None], over_ranks: MaxOverRanks
    ) -> list[nn.Parameter]:
        """Gather parameters as tensors of another class, where possible (see :func:`gather_wrapped`).

        Returns:
            The sharded parameters that are gathered so.
        """
        gather_wrapped([param._param for param in self._params], wrap_of, over_ranks)
        return [param.shard for param in self._params if param.wrapped is not None]

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Gather no parameter as a tensor of another class in this context."""
        wrapped = [param.wrapped for param in self._params if param.wrapped is not None]
        if not wrapped:
            yield
            return
        self.free()
        for param in wrapped:
            param.set_wrapped(False)
        try:
            yield
        finally:
            self.free()
            for param in wrapped:
                param.set_wrapped(True)

    def take_hooks(self, originals: Mapping[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Move the hooks that were put on the parameters before they were sharded to the sharded ones.

        Args:
            originals: The original parameters by the module that held them and their name in it.
        """
        for param in self._params:
            move_hooks(originals[param.place], param.shard)

    def gather_in(self, dtype_of: Callable[[tuple[nn.Module, str]], torch.dtype | None]) -> None:
        """Gather some parameters in another dtype than the group's; all gradients are reduced in one dtype.

        Args:
            dtype_of: Function that returns the dtype of the parameter that a module holds, given the module and the
                parameter's name in it; None: that of the group.
        """
        self._has_own_dtypes = True
        for param in self._params:
            param.gather_in(dtype_of(param.place))

    def reduce_between_replicas_by(self, reducer: GradientReducer) -> None:
        """Let ``reducer`` average gradients between replicas, in place of FSDP2's all-reduce.

        FSDP2 calls a hook in place of the all-reduce only for a group without replicas. The group is therefore told
        that it has none; its parameters stay DTensors over the mesh with replicas.

        Replaced by: an ``FSDPModule.set_custom_all_reduce``, like ``set_custom_reduce_scatter``.

        Args:
            reducer: Object that averages the gradients.
        """
        info, after_forward = self._group.mesh_info, self._group.post_forward_mesh_info
        self._group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
        if after_forward is info:
            self._group.post_forward_mesh_info = self._group.mesh_info
        module = cast(FSDPModule, self._group.modules[0])
        module.set_all_reduce_hook(self._reduce_between_replicas)
        self.reducer = reducer

    def _reduce_between_replicas(self, flat: torch.Tensor) -> None:
        """Average the gradients over the replicas; FSDP2 calls this after the reduce-scatter.

        Args:
            flat: The shards of the gradients one after another, with padding.
        """
        assert self.reducer is not None
        gradients, begin = [], 0
        for param in self._reducing:
            value, size = param.gradient_in(flat, begin)
            gradients.append(LocalGradient(param.name, value))
            begin += size
        # FSDP2 puts views of this tensor into the parameters next. Only then may it still change afterwards.
        is_final = flat.dtype in (torch.float32, torch.bfloat16)
        is_final &= self._memory is None  # Offloaded gradients are copied next.
        if is_final and all(param.takes_gradient_as_it_is(flat.dtype) for param in self._reducing):
            self.reducer.reduce_later(flat, gradients)
        else:
            self.reducer.reduce(flat, gradients).wait()
            if flat.dtype not in (torch.float32, torch.bfloat16):  # FSDP2 divides other dtypes once more.
                gradients = [LocalGradient(name, value.clone()) for name, value in gradients]
        self._means = {gradient.name: gradient for gradient in gradients}

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh over which the parameters are sharded and replicated."""
        return self._group.mesh_info.mesh

    def wait_for_end_of_backward(self) -> None:
        """Make backwards reduce gradients and free parameters only at their end, and not within.

        This is for parameters that a step may use outside of the forwards of the group's modules.
        """
        self._waits_for_end = True

    def gather_for_step(self) -> None:
        """Gather the parameters for a whole step, and free them after its backward.

        A backward may use them after the gradients of the modules' inputs are known: a step may call a layer of a block
        before the block.
        """
        self.is_gathered_for_step = True
        self._group.reshard_after_backward = False
        disable = cast(Callable[[Any], Any], torch.compiler.disable)
        for module in self._group.modules:
            parts = set(module.modules())
            own = [param for param in self._params if param.place[0] in parts]
            module.register_forward_pre_hook(disable(partial(self._follow_requires_grad, own)), prepend=True)

    def _follow_requires_grad(self, params: Sequence[ShardedParam], *unused: Any) -> None:
        """Copy ``requires_grad`` if the step has set it on shards since they were gathered, as toggling does."""
        if self.is_gathered and any(param.whole.requires_grad != param.shard.requires_grad for param in params):
            self.copy_requires_grad()

    def inside_backward(self) -> None:
        """Reduce the gradients when those of the modules' inputs are known, unless the group waits for the end."""
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
            # Without gradients, this is the end of torch.autograd.grad and not of a backward.
            if self._awaits_agreement or not self.has_unreduced_gradients():
                return
            self._is_kept = False
        self._reduce()

    def _reduce(self) -> None:
        if self._group.reduce_grads:
            self._mark_used()
            self._is_reduced = True
            # FSDP2 accumulates gradients in the dtype of the reduction, and reduces a group's gradients in one dtype.
            if self._has_own_dtypes or any(param.has_accumulated_gradient for param in self._params):
                for param in self._params:
                    param.to_accumulated_gradient(self._group.reduce_scatter_unused_params)
            with_zeros = self._group.reduce_scatter_unused_params
            self._reducing = [param for param in self._params if param.is_reduced(with_zeros)]
            num_shards = self.mesh.size(self.mesh.ndim - 1)
            dtype = self._reducing[0].reduce_dtype if self._reducing else None
            self._count(num_shards, self._reducing, dtype)
            if self.mesh.ndim > 1 and self.reducer is None:
                self._count_replicas(self.mesh.size(0), num_shards, dtype)
            if self.observer is not None:
                found = [LocalGradient(p.name, value) for p in self._params if (value := p.unreduced()) is not None]
                self.observer.observe(found, 1.0)
            if self.reduces_in_background:
                self._choose_when_to_wait(num_shards, dtype)
            if self._awaits_agreement and not self.steps_in_backward:
                self._postpone_hooks()
        self._post_backward()

    def _miss(self, name: str) -> None:
        """Take note that a stand-in averages the gradient of the parameter ``name`` where it is computed."""
        if self.observer is not None:
            self.observer.miss(name)

    def _postpone_hooks(self) -> None:
        """Take the post-accumulate hooks off the parameters that may have no gradient on any rank.

        The reduction of the group gives them zeros, and FSDP2 would call the hooks.
        """
        for param in self._reducing:
            if not param.is_used and (hooks := take_post_accumulate_hooks(param.shard, None)):
                self._postponed.append((param, hooks))

    def _give_back_hooks(self, used: Collection[nn.Parameter] = ()) -> None:
        """Undo :meth:`_postpone_hooks`, and call the hooks of those parameters that are in ``used``."""
        postponed, self._postponed = self._postponed, []
        for param, hooks in postponed:
            give_post_accumulate_hooks(param.shard, hooks)
            if any(param.shard is other for other in used):
                call_post_accumulate_hooks(param.shard)

    def _choose_when_to_wait(self, num_shards: int, dtype: torch.dtype | None) -> None:
        """Find out whether the reduced gradients are read only after the backward."""
        self.reduces_later = (
            self._awaits_agreement
            and self._memory is None
            and self.reducer is None
            and dtype is not None
            and all(param.takes_gradient_as_it_is(dtype) for param in self._reducing)
        )
        self._later_divisor = 1.0
        if not self.reduces_later:
            self.finish_other_reductions()
        elif dtype is not None and dtype not in (torch.float32, torch.bfloat16):
            # In these dtypes, FSDP2 divides by about the square root of the number of ranks before the reduction, and
            # by the rest after it, when the data are not there yet.
            before = 1
            while num_shards % before == 0 and num_shards > before**2:
                before *= 2
            self._later_divisor = num_shards / before

    def finish_reduction(self, output: torch.Tensor) -> None:
        """Do with the sums of a reduction that was waited for later what FSDP2 does with those of others.

        Args:
            output: The shards of the gradients one after another, with padding.
        """
        if self._later_divisor != 1.0:
            output.div_(self._later_divisor)

    def _mark_used(self) -> None:
        for param in self._params:
            param.is_used |= param.has_unreduced_gradient

    def drop_cleared(self) -> None:
        """Drop the unreduced gradients that the step has cleared."""
        cleared = self._accumulated.take_cleared()
        for param in self._params if cleared else ():
            if param.name in cleared:
                param.drop_unreduced()

    def drop_unreduced(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop the unreduced gradients of ``params``; None: of all parameters."""
        wanted = None if params is None else set(map(id, params))
        for param in self._params:
            if wanted is None or id(param.shard) in wanted:
                param.drop_unreduced()

    def watch_unreduced(self) -> None:
        """Begin to detect whether the step clears unreduced gradients."""
        unreduced = {param.name: param.shard for param in self._params if param.has_unreduced_gradient}
        if unreduced:
            self._accumulated.watch(unreduced)

    def forget_used(self) -> None:
        """Forget which parameters got gradients on this rank, before a new backward."""
        for param in self._params:
            param.is_used = False

    def begin_agreement(self) -> list[bool]:
        """Make the backward reduce zeros for parameters without a gradient on this rank, as other ranks may have one.

        A group that waits for the end of a backward reduces its gradients in :meth:`end_agreement`.

        Returns:
            A list that says for each parameter whether it has a reduced gradient from an earlier backward.
        """
        self._awaits_agreement = self._group.reduce_scatter_unused_params = True
        self._is_reduced = False
        return [param.shard.grad is not None for param in self._params]

    def used(self) -> list[bool]:
        """Return, for each parameter, whether a backward since :meth:`forget_used` gave it a gradient on this rank."""
        return [param.is_used or param.has_unreduced_gradient for param in self._params]

    @property
    def is_reduced(self) -> bool:
        """Return whether the gradients have been reduced since :meth:`begin_agreement`."""
        return self._is_reduced

    def reduce_late(self) -> None:
        """Reduce the gradients, which the backward has left unreduced."""
        self._is_kept = False
        self._reduce()

    def end_agreement(self, used: Sequence[bool], had_gradient: Sequence[bool]) -> bool:
        """Reduce the gradients that are still unreduced, and remove those of parameters that no rank has used.

        The device may still be reducing them when this method returns.

        Args:
            used: For each parameter, whether any rank has a gradient.
            had_gradient: The value that :meth:`begin_agreement` returned.

        Returns:
            Whether gradients were reduced now.
        """
        is_late = any(used) and not self._is_reduced
        if is_late:
            self.reduce_late()
        self._awaits_agreement = self._group.reduce_scatter_unused_params = False
        for param, is_used, had in zip(self._params, used, had_gradient, strict=True):
            if not is_used and not had:
                param.shard.grad = None
                if self.reducer is not None and param.name in self._means:
                    self.reducer.discard([self._means[param.name]])
        self._means = {}
        self._give_back_hooks([param.shard for param, is_used in zip(self._params, used, strict=True) if is_used])
        return is_late

    def abandon_agreement(self) -> None:
        """Undo :meth:`begin_agreement` after a backward that failed, and remove gradients that are still reduced."""
        if self.reduces_later and self._is_reduced:
            for param in self._reducing:
                param.shard.grad = None
        self._awaits_agreement = self._group.reduce_scatter_unused_params = False
        self._give_back_hooks()

    @property
    def is_gathered(self) -> bool:
        """Return whether the modules hold the gathered parameters now."""
        return self._group.is_unsharded

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters gathered in this context.

        Moving the module to another device, for example, would otherwise free them, because FSDP2 moves shards.
        """
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    @property
    def is_sharded(self) -> bool:
        """Return whether this rank holds only a part of each parameter."""
        return self.mesh.size(self.mesh.ndim - 1) > 1

    @property
    def is_freed_after_forward(self) -> bool:
        """Return whether FSDP2 frees the gathered parameters after a forward."""
        return self._group.post_forward_mesh_info is not None

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of the gathered parameters of this rank."""
        num_shards = self.mesh.size(self.mesh.ndim - 1)
        return num_shards * sum(param.sent_bytes for param in self._params)

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole parameters."""
        return sum(param.shard.numel() for param in self._params)

    @contextmanager
    def kept_after_forward(self) -> Iterator[None]:
        """Keep the parameters gathered after forwards in this context.

        Replaced by: ``set_reshard_after_forward``, once it can be undone.
        """
        before, self._group.post_forward_mesh_info = self._group.post_forward_mesh_info, None
        try:
            yield
        finally:
            self._group.post_forward_mesh_info = before

    @contextmanager
    def whole_state_dict(self) -> Iterator[None]:
        """Make ``state_dict()`` in this context return the gathered parameters, which FSDP2's hook would reshard first.

        Replaced by: a public way to get the state dict of gathered modules with whole parameters.
        """
        with self.held():
            yield

    def gather(self) -> None:
        """All-gather the parameters if they are sharded now, which is a collective.

        FSDP2 reuses the tensors that the first gather creates. Inference mode is off while they are created, because
        inference tensors cannot be trained.
        """
        self.begin_gather()
        with torch.inference_mode(False):
            self._group.wait_for_unshard()

    def begin_gather(self) -> None:
        """Begin to all-gather the parameters if they are sharded now. :meth:`gather` waits for them."""
        if self._group.is_sharded and not self._has_stand_ins:
            for param in self._params:
                param.take_converted()
        with torch.inference_mode(False):
            self._group.unshard()

    def put_into(self, places: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
        """Register further modules that hold the parameters, besides those that ``fully_shard`` was given.

        These modules get the sharded parameters now, and later the gathered or sharded ones whenever FSDP2 swaps them.

        Replaced by: a ``fully_shard`` that takes parameters instead of modules.

        Args:
            places: For each parameter, the modules that hold it and its names in them.
        """
        for param, modules in zip(self._params, places, strict=True):
            param.put_into(list(modules))

    def free(self) -> None:
        """Put the sharded parameters back into the modules."""
        self._is_kept = False
        self._group._to_sharded()  # type: ignore[no-untyped-call]

    def has_unreduced_gradients(self) -> bool:
        """Return whether backwards left gradients on the gathered parameters, which may have been freed since."""
        return any(param.has_unreduced_gradient for param in self._params)

    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the sharded to the gathered parameters, as FSDP2 does only when it gathers.

        If a step has set ``requires_grad`` of a gathered parameter, it is copied to the sharded one instead.
        """
        for param in self._params:
            param.copy_requires_grad()
        # FSDP2 determines only once in which dtypes it reduces gradients, and cannot if all parameters are frozen then.
        before, self._is_trainable = self._is_trainable, any(param.shard.requires_grad for param in self._params)
        if self._is_trainable and not before:
            self._group.lazy_init()  # type: ignore[no-untyped-call]

    @property
    def syncs_gradients(self) -> bool:
        """Return whether gradients are reduced after a backward (see :meth:`set_gradient_sync`)."""
        return bool(self._group.reduce_grads)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether gradients are reduced after a backward, like ``FSDPModule.set_requires_gradient_sync``."""
        self._group.reduce_grads = enabled
        self._group.all_reduce_grads = enabled


def fsdp_state(module: nn.Module) -> FSDPState:
    """Return FSDP2's state of a module that ``fully_shard`` was applied to."""
    state: FSDPState | None = fully_shard.state(module)  # type: ignore[attr-defined]
    assert state is not None, "fully_shard was not applied to this module"
    return state


def sharded_group(module: nn.Module) -> ShardedGroup:
    """Return the group of the parameters that ``fully_shard(module)`` manages."""
    group = fsdp_state(module)._fsdp_param_group
    assert group is not None
    return ShardedGroup(group)


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
