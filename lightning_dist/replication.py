"""Data parallelism without sharding: every rank has the whole parameters, and gradients are averaged over the replicas.

It does the work of torch's DistributedDataParallel (Li et al., 2020) for a module that keeps its class. Gradients are
copied into buckets, and each bucket is all-reduced while the backward goes on. Ranks may leave different parameters
without a gradient: a rank contributes zeros for those that another rank has used, and a parameter that no rank used
keeps its gradient, or has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_map

from lightning_dist._compat import (
    at_end_of_backward,
    give_post_accumulate_hooks,
    local_of,
    put_parameter,
    take_post_accumulate_hooks,
)
from lightning_dist.gather_on_use import GatheredOnUse, whole_for_step
from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.technique import Parallel, Technique, bound
from lightning_dist.tensor_state import is_remote
from lightning_dist.units import Unit

__all__ = ["Replication"]

_BUCKET_BYTES = 25 * 2**20
"""The largest size of a bucket, as in DistributedDataParallel."""

_NUM_BUCKETS = 4
"""The number of buckets of a smaller model: with fewer, most of the communication would follow the backward."""

_STALE = 2
"""The state of a bucket that must be reduced again."""

_FIRST_BUCKET_BYTES = 2**20
"""The size of the bucket whose gradients come first: the sooner it is full, the sooner communication begins."""


class ReplicatedGroup(ParameterGroup):
    """Manage parameters that no rank shards: plain ones, or parts of layers that are split over ``tp``.

    Plain parameters are the same whether a step or an optimizer uses them. Parameters of split layers are DTensors over
    ``tp``. When they are gathered, :class:`~lightning_dist.tensor_parallel.TensorParallel` replaces them by this rank's
    parts, in the same memory. In a step, while the forward of their unit does not run, the modules hold stand-ins that
    are gathered over ``tp`` where they are used.

    Args:
        unit: The unit of the parameters.
        mesh: The mesh whose ranks have parts of the batch.
        techniques: All techniques.
    """

    def __init__(self, unit: Unit, mesh: DeviceMesh, techniques: Sequence[Technique]) -> None:
        self._params = dict(unit.params)
        self._mesh = mesh
        self._take_replaced = bound(techniques, "take_replaced")
        self._is_form = bound(techniques, "is_form_of_parameter")
        self._syncs_gradients = True
        split = {id(param) for param in self._params.values() if isinstance(param, DTensor)}
        self._places = [
            (owner, key, param)
            for owner in unit.owners
            for key, param in owner._parameters.items()
            if param is not None and id(param) in split
        ]
        self._is_gathered = self._gives_whole = not self._places
        self._is_kept = self._has_stand_ins = False
        self._stand_ins: dict[nn.Parameter, Tensor] = {}
        for owner in {owner for owner, _, _ in self._places}:
            owner.register_state_dict_post_hook(partial(self._put_into_state_dict))  # type: ignore[no-untyped-call]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters."""
        return list(self._params.values())

    @property
    def names(self) -> list[str]:
        """The full names of the parameters."""
        return list(self._params)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose ranks have parts of the batch."""
        return self._mesh

    @property
    def is_gathered(self) -> bool:
        """Whether the modules hold what they compute with: always, if the parameters are plain."""
        return self._is_gathered

    @property
    def needs_gather(self) -> bool:
        """Whether the modules hold DTensors outside of steps, with which they cannot compute."""
        return bool(self._places)

    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` is one of the parameters."""
        return any(own is param for own in self._params.values())

    def gather(self) -> None:
        """Put the DTensors into the modules, for techniques to replace them. There is nothing to communicate."""
        if self._is_gathered:
            return
        for owner, key, param in self._places:
            held = owner._parameters.get(key)
            # Another tensor was put there by torch.func.functional_call.
            is_own = held is None or held is param or held is self._stand_ins.get(param)
            if is_own or any(is_form(owner, key, held) for is_form in self._is_form):
                put_parameter(owner, key, param)
        self._is_gathered = True

    def free(self) -> None:
        """Put the DTensors, or their stand-ins, back into the modules."""
        self.write_back()
        for owner, key, param in self._places:
            put_parameter(owner, key, self._stand_ins[param] if self._has_stand_ins else param)
        self._is_gathered = not self._places

    def after_forward(self) -> None:
        """Free the parameters after a forward of the unit, so that what uses them next finds them as they are."""
        if not self._is_kept:
            self.free()

    @contextmanager
    def kept_after_forward(self) -> Iterator[None]:
        """Inside, parameters are not freed after a forward."""
        before, self._is_kept = self._is_kept, True
        try:
            yield
        finally:
            self._is_kept = before

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Inside, let the modules hold stand-ins while the parameters are free."""
        for param in {param for _, _, param in self._places} - self._stand_ins.keys():
            self._stand_ins[param] = GatheredOnUse(param, partial(whole_for_step, data_parallel_axes=()))
        self._has_stand_ins = True
        if not self._is_gathered:
            self.free()
        try:
            yield
        finally:
            self._has_stand_ins = False
            if not self._is_gathered:
                self.free()

    def write_back(self, compares: bool = False) -> None:
        """Keep values that a step has put in the place of those of a parameter, by ``param.data = ...``.

        Args:
            compares: It makes no difference, since all other changes are made in the memory of the parameters.
        """
        for _, _, param in self._places if self._is_gathered else ():
            for take_replaced in self._take_replaced:
                take_replaced(param)

    @contextmanager
    def whole_state_dict(self) -> Iterator[None]:
        """Inside, let ``state_dict()`` take what the modules hold."""
        before, self._gives_whole = self._gives_whole, True
        try:
            yield
        finally:
            self._gives_whole = before

    def _put_into_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        """Put the DTensors into the state dict of a module, also while it holds this rank's parts of them."""
        for owner, key, param in self._places if not self._gives_whole else ():
            name = prefix + key
            if owner is module and name in state_dict:
                state_dict[name] = param if isinstance(state_dict[name], nn.Parameter) else param.detach()

    def copy_requires_grad(self) -> None:
        """Do nothing: what modules compute with follows the parameters whenever they have been gathered."""

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether gradients are reduced after a backward, or added up on each rank (accumulation)."""
        self._syncs_gradients = enabled

    @property
    def syncs_gradients(self) -> bool:
        """The choice of :meth:`set_gradient_sync`."""
        return self._syncs_gradients


class Replication(Technique):
    """Average the gradients of whole parameters over the ranks of ``mesh``.

    Args:
        mesh: A mesh with the axes ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``, of which ``dp_shard`` has one rank.
        parameter_mesh: The same mesh, and ``tp`` as its last axis if layers are split.
        reduce_dtype: The dtype that gradients are reduced in; None: that of each parameter.
    """

    def __init__(self, mesh: DeviceMesh, parameter_mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None) -> None:
        self._mesh = mesh
        self._parameter_mesh = parameter_mesh
        self._reduce_dtype = reduce_dtype
        self._groups: list[ReplicatedGroup] = []
        self._buckets: list[_Bucket] = []
        self._num_launched = 0
        self._is_armed = False
        self._own_hooks: dict[nn.Parameter, int] = {}
        self._hooks_of_users: list[tuple[nn.Parameter, dict[int, Any]]] = []

    def attach(self, parallel: Parallel) -> None:
        """Let embeddings have dense gradients, which can be reduced in buckets; the values are the same."""
        self._parallel = parallel
        for part in parallel.module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False

    def manage_unit(self, unit: Unit) -> ReplicatedGroup:
        """Take charge of the parameters of ``unit``, which stay as they are."""
        self._groups.append(ReplicatedGroup(unit, self._mesh, self._parallel.techniques))
        return self._groups[-1]

    def finish(self) -> None:
        """Put the parameters into buckets, in the order in which a backward reaches them. A collective."""
        if self._mesh.size() == 1:
            return
        # What ranks have used is exchanged beside the buckets, whose order on a rank depends on it.
        ranks = dist.get_process_group_ranks(self._mesh.get_group(0))
        usage_group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True, group_desc="used parameters"
        )
        # torch.distributed keeps it: another reference would keep its connections open after an error on this rank.
        self._usage_group = weakref.ref(usage_group)
        params = [param for group in self._groups for param in group.params]
        for bucket_params in _bucketed(list(reversed(params)), self._reduce_dtype):
            bucket = _Bucket(bucket_params, self._mesh, self._reduce_dtype)
            for index, param in enumerate(bucket_params):
                requires_grad = param.requires_grad
                param.requires_grad_(True)  # to have a hook, also if it is frozen now
                # The garbage collector does not see what a parameter's hooks hold.
                hook = partial(_on_gradient, weakref.ref(self), len(self._buckets), index)
                self._own_hooks[param] = param.register_post_accumulate_grad_hook(hook).id  # type: ignore[no-untyped-call]
                param.requires_grad_(requires_grad)
            self._buckets.append(bucket)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Inside, let split parameters be used also while the forward of their unit does not run."""
        with ExitStack() as stack:
            for group in self._groups:
                if group.needs_gather:
                    stack.enter_context(group.with_stand_ins())
            yield

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Note that autograd has set a gradient, and reduce the bucket if it is full.

        Args:
            bucket_index: The index of the bucket.
            index: The index of the parameter in the bucket.
        """
        bucket = self._buckets[bucket_index]
        if not self._is_armed:
            if not self._parallel.reduces_gradients or self._parallel.runs_microbatches:
                bucket.has_accumulated[index] = True
                return
            # The step runs a backward of its own, past manual_backward.
            self._begin()
            self._is_armed = True
            at_end_of_backward(self._end)
        if bucket.has_fired[index]:  # a backward inside the backward, as of reentrant checkpointing, uses it again
            bucket.renew(index)
            return
        bucket.has_fired[index] = True
        if bucket.is_launched:  # a parameter that was frozen when the backward began
            bucket.renew(index)
            return
        bucket.copy_in(index)  # now, while the gradient is in the processor's cache
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            self._launch_full()

    def _launch_full(self) -> None:
        """All-reduce the buckets that are full. All ranks keep the order of the buckets."""
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].num_pending <= 0:
            bucket = self._buckets[self._num_launched]
            if bucket.num_expected:
                bucket.launch()
            self._num_launched += 1

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Reduce gradients while the backward inside runs, and wait for them. A collective if gradients are reduced."""
        if not self._buckets or not self._parallel.reduces_gradients:
            yield
            return
        self._begin()
        self._is_armed = True
        try:
            yield
        except BaseException:
            self.after_error()
            raise
        self._end()

    @contextmanager
    def around_microbatches(self) -> Iterator[None]:
        """Inside, hold back the hooks of users, which are to see the gradients of all microbatches together."""
        self._take_hooks_of_users()
        try:
            yield
        finally:
            self._give_hooks_back()

    def reduce_microbatches(self, reduces: bool) -> None:
        """Reduce the gradients that microbatches have added up. A collective if gradients are reduced."""
        if self._buckets and reduces:
            self._begin()
            for bucket in self._buckets:
                bucket.has_fired = [param.grad is not None for param in bucket.params]
            self._end()
        else:
            self._take_hooks_of_users()
            self._call_hooks_of_users()

    def _begin(self) -> None:
        self._num_launched = 0
        for bucket in self._buckets:
            bucket.begin()
        self._take_hooks_of_users()

    def _take_hooks_of_users(self) -> None:
        """Take the hooks of users from the parameters: they are to see the reduced gradient, once."""
        for group in self._groups:
            for param in group.params:
                if others := take_post_accumulate_hooks(param, self._own_hooks.get(param)):
                    self._hooks_of_users.append((param, others))

    def _give_hooks_back(self) -> list[tuple[nn.Parameter, dict[int, Any]]]:
        hooks, self._hooks_of_users = self._hooks_of_users, []
        for param, others in hooks:
            give_post_accumulate_hooks(param, others)
        return hooks

    def _call_hooks_of_users(self) -> None:
        for param, others in self._give_hooks_back():
            for hook in others.values() if param.grad is not None else ():
                hook(param)

    def _end(self) -> None:
        """Reduce the buckets that are not full on this rank but used on some, and hand out the means."""
        self._is_armed = False
        states = torch.tensor([bucket.state for bucket in self._buckets], dtype=torch.uint8)
        dist.all_reduce(states, dist.ReduceOp.MAX, self._usage_group())
        for bucket, state in zip(self._buckets, states.tolist(), strict=True):
            if state and not bucket.is_launched:
                bucket.launch()
        for bucket, state in zip(self._buckets, states.tolist(), strict=True):
            if state == _STALE:
                bucket.launch()
            bucket.hand_out()
        self._call_hooks_of_users()

    def after_error(self) -> None:
        """Forget what a step has left that raised an error."""
        self._is_armed = False
        self._give_hooks_back()

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict whose parameters are replicated DTensors, so that each replica writes a part of them."""
        names = {name for group in self._groups for name in group.names}
        return {
            name: self._replicated(value) if name in names or isinstance(value, DTensor) else value
            for name, value in state.items()
        }

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state whose tensors are replicated DTensors, so that each replica writes a part."""
        return {**state, "state": tree_map(self._replicated, state["state"])}

    def _replicated(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or is_remote(value) or self._mesh.size() == 1:
            return value
        replicated = [Replicate()] * self._mesh.ndim
        if isinstance(value, DTensor):  # over tp
            placements = [*replicated, *value.placements]
            return _dtensor(local_of(value.detach()), self._parameter_mesh, placements, value)
        return value if value.ndim == 0 else _dtensor(value.detach(), self._mesh, replicated, value)


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """Return a DTensor of the shape of ``like`` with the local tensor ``local``."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _on_gradient(replication: weakref.ref[Replication], bucket_index: int, index: int, param: Tensor) -> None:
    alive = replication()
    if alive is not None:
        alive.on_gradient(bucket_index, index)


def _bucketed(params: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters of one dtype, each about as large as a bucket, in the order of ``params``."""
    total = sum(local_of(param).numel() * (reduce_dtype or param.dtype).itemsize for param in params)
    largest = min(max(total // _NUM_BUCKETS, _FIRST_BUCKET_BYTES), _BUCKET_BYTES)
    limit, num_bytes, bucket = _FIRST_BUCKET_BYTES, 0, list[nn.Parameter]()
    for param in params:
        size = local_of(param).numel() * (reduce_dtype or param.dtype).itemsize
        if bucket and (param.dtype != bucket[0].dtype or num_bytes + size > limit):
            yield bucket
            limit, num_bytes, bucket = largest, 0, []
        bucket.append(param)
        num_bytes += size
    if bucket:
        yield bucket


class _Bucket:
    """All-reduce the gradients of some parameters as one tensor.

    The tensor is new for each backward, and the parameters' gradients are views of it afterwards: they need not be
    copied back, and a gradient that the user's code keeps stays what it is. It is freed with the gradients.

    Args:
        params: The parameters, of one dtype.
        mesh: The mesh over whose first axis the parameters are replicated.
        dtype: The dtype that gradients are reduced in; None: that of the parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.params = list(params)
        self.has_fired = [False] * len(params)
        """Which parameters have got a gradient in the backward that runs."""
        self.has_accumulated = [False] * len(params)
        """Which parameters have got a gradient that was not reduced, in earlier backwards."""
        self.is_stale = False
        """Whether a gradient came after the all-reduce had begun."""
        self.num_pending = self.num_expected = 0
        self._mesh = mesh
        self._scale = 1.0 / mesh.size()
        self._dtype = dtype or params[0].dtype
        self._shapes = [local_of(param).shape for param in params]
        self._is_copied = [False] * len(params)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    @property
    def is_launched(self) -> bool:
        """Whether the all-reduce has begun."""
        return self._work is not None

    @property
    def is_used(self) -> list[bool]:
        """Which parameters have a gradient to reduce on this rank."""
        return [fired or before for fired, before in zip(self.has_fired, self.has_accumulated, strict=True)]

    @property
    def state(self) -> int:
        """What this rank knows of the bucket: nothing was used, something was, or it must be reduced again."""
        return _STALE if self.is_stale else int(any(self.is_used))

    def begin(self) -> None:
        """Forget the last backward."""
        self.has_fired = [False] * len(self.params)
        self._is_copied = [False] * len(self.params)
        self.is_stale = False
        self.num_expected = self.num_pending = sum(param.requires_grad for param in self.params)
        self._flat, self._views, self._work = None, [], None

    @torch.no_grad()
    def copy_in(self, index: int) -> Tensor:
        """Copy the gradient of a parameter, divided by the number of ranks, or zeros where it has none.

        Args:
            index: The index of the parameter in the bucket.

        Returns:
            The tensor of the whole bucket: the gradients, and behind them, for each parameter, on how many ranks it was
            used.
        """
        if self._flat is None:
            sizes = [*(shape.numel() for shape in self._shapes), len(self.params)]
            self._flat = torch.empty(sum(sizes), dtype=self._dtype, device=self.params[0].device)
            parts = torch.split(self._flat, sizes)
            self._views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=False)]
        param = self.params[index]
        if param.grad is None:
            self._views[index].zero_()
        else:
            if param.grad.layout != torch.strided:
                param.grad = param.grad.to_dense()
            torch.mul(local_of(param.grad).to(self._dtype), self._scale, out=self._views[index])
        self._is_copied[index] = True
        return self._flat

    def renew(self, index: int) -> None:
        """Note that a gradient has changed that may be copied or reduced already."""
        self._is_copied[index] = False
        self.is_stale |= self.is_launched

    @torch.no_grad()
    def launch(self) -> None:
        """Begin to all-reduce the gradients, after the last all-reduce of the bucket. A collective."""
        if self._work is not None:
            self._work.wait()
            self._is_copied = [False] * len(self.params)
        for index, is_copied in enumerate(self._is_copied):
            if not is_copied:
                self.copy_in(index)
        assert self._flat is not None
        self._flat[-len(self.params) :] = torch.tensor(self.is_used, dtype=self._dtype)
        self._work = dist.all_reduce(self._flat, group=self._mesh.get_group(0), async_op=True)

    @torch.no_grad()
    def hand_out(self) -> None:
        """Wait for the all-reduce, if it has begun, and give the parameters that any rank used the mean gradient."""
        if self._work is None:
            return
        self._work.wait()
        assert self._flat is not None
        is_used = self.is_used
        self.has_accumulated = [False] * len(self.params)
        # On an accelerator, reading the counts waits for it; they are known if this rank has used all.
        counts = self._flat[-len(self.params) :].tolist() if not all(is_used) else [1.0] * len(self.params)
        for param, view, count in zip(self.params, self._views, counts, strict=True):
            if not count:
                continue
            gradient = view.to(param.dtype)
            if isinstance(param, DTensor):
                gradient = _dtensor(gradient, param.device_mesh, param.placements, param)
            param.grad = gradient
        self._flat, self._views, self._work = None, [], None
