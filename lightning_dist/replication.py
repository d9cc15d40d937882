"""Data parallelism without sharding: every rank has the whole parameters, and gradients are averaged over the replicas.

It does the work of torch's DistributedDataParallel (Li et al., 2020) for a module that keeps its class. Gradients are
copied into buckets, and each bucket is all-reduced while the backward goes on. Ranks may leave different parameters
without a gradient: a rank contributes zeros for those that another rank has used, and a parameter that no rank used
keeps its gradient, or has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from lightning_dist._compat import at_end_of_backward, post_accumulate_hooks
from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.technique import Parallel, Technique
from lightning_dist.units import Unit

__all__ = ["Replication"]

_BUCKET_BYTES = 25 * 2**20
"""The size of a bucket, as in DistributedDataParallel."""

_STALE = 2
"""The state of a bucket that must be reduced again."""

_FIRST_BUCKET_BYTES = 2**20
"""The size of the bucket whose gradients come first: the sooner it is full, the sooner communication begins."""


class ReplicatedGroup(ParameterGroup):
    """Manage plain parameters, which are the same whether a step or an optimizer uses them.

    Args:
        params: The parameters by their full names.
        mesh: The mesh whose ranks have parts of the batch.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self._params = dict(params)
        self._mesh = mesh
        self._syncs_gradients = True

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
        """Whether the modules hold the whole parameters: always."""
        return True

    @property
    def needs_gather(self) -> bool:
        """Whether a call of the module is a collective: never."""
        return False

    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` is one of the parameters."""
        return any(own is param for own in self._params.values())

    def gather(self) -> None:
        """Do nothing: the modules hold the parameters."""

    def free(self) -> None:
        """Do nothing: the modules hold the parameters."""

    def copy_requires_grad(self) -> None:
        """Do nothing: the parameters that a step uses are those that the optimizer sees."""

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
        reduce_dtype: The dtype that gradients are reduced in; None: that of each parameter.
    """

    def __init__(self, mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None) -> None:
        self._mesh = mesh
        self._reduce_dtype = reduce_dtype
        self._groups: list[ReplicatedGroup] = []
        self._buckets: list[_Bucket] = []
        self._num_launched = 0
        self._is_armed = False
        self._hooks_of_users: list[tuple[Tensor, dict[int, Any]]] = []

    def attach(self, parallel: Parallel) -> None:
        """Let embeddings have dense gradients, which can be reduced in buckets; the values are the same."""
        self._parallel = parallel
        for part in parallel.module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False

    def manage_unit(self, unit: Unit) -> ReplicatedGroup:
        """Take charge of the parameters of ``unit``, which stay as they are."""
        self._groups.append(ReplicatedGroup(unit.params, self._mesh))
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
                bucket.hook_ids.append(param.register_post_accumulate_grad_hook(hook).id)  # type: ignore[no-untyped-call]
                param.requires_grad_(requires_grad)
            self._buckets.append(bucket)

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
            bucket.is_stale |= bucket.is_launched
            return
        bucket.has_fired[index] = True
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

    def reduce_microbatches(self, reduces: bool) -> None:
        """Reduce the gradients that microbatches have added up. A collective if gradients are reduced."""
        if not self._buckets or not reduces:
            return
        self._begin()
        for bucket in self._buckets:
            bucket.has_fired = [param.grad is not None for param in bucket.params]
        self._end()

    def _begin(self) -> None:
        self._num_launched = 0
        for bucket in self._buckets:
            bucket.begin()
            for param, hook_id in zip(bucket.params, bucket.hook_ids, strict=True):
                # Hooks of users are to see the reduced gradient, once.
                if others := post_accumulate_hooks(param, but=hook_id):
                    self._hooks_of_users.append((param, others))

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
        hooks, self._hooks_of_users = self._hooks_of_users, []
        for param, others in hooks:
            for hook_id, hook in others.items():
                post_accumulate_hooks(param)[hook_id] = hook
                if param.grad is not None:
                    hook(param)

    def after_error(self) -> None:
        """Forget what a step has left that raised an error."""
        self._is_armed = False
        for param, others in self._hooks_of_users:
            post_accumulate_hooks(param).update(others)
        self._hooks_of_users = []

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict whose parameters are replicated DTensors, so that each replica writes a part of them."""
        names = {name for group in self._groups for name in group.names}
        return {name: self._replicated(value) if name in names else value for name, value in state.items()}

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state whose tensors are replicated DTensors, so that each replica writes a part."""
        return {**state, "state": tree_map(self._replicated, state["state"])}

    def _replicated(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_meta or value.ndim == 0:
            return value
        return DTensor.from_local(value.detach(), self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


def _on_gradient(replication: weakref.ref[Replication], bucket_index: int, index: int, param: Tensor) -> None:
    alive = replication()
    if alive is not None:
        alive.on_gradient(bucket_index, index)


def _bucketed(params: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters of one dtype, each about as large as a bucket, in the order of ``params``."""
    limit, num_bytes, bucket = _FIRST_BUCKET_BYTES, 0, list[nn.Parameter]()
    for param in params:
        itemsize = (reduce_dtype or param.dtype).itemsize
        if bucket and (param.dtype != bucket[0].dtype or num_bytes + param.numel() * itemsize > limit):
            yield bucket
            limit, num_bytes, bucket = _BUCKET_BYTES, 0, []
        bucket.append(param)
        num_bytes += param.numel() * itemsize
    if bucket:
        yield bucket


class _Bucket:
    """All-reduce the gradients of some parameters as one tensor.

    Args:
        params: The parameters, of one dtype.
        mesh: The mesh over whose first axis the parameters are replicated.
        dtype: The dtype that gradients are reduced in; None: that of the parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.params = list(params)
        self.hook_ids: list[int] = []
        self.has_fired = [False] * len(params)
        """Which parameters have got a gradient in the backward that runs."""
        self.has_accumulated = [False] * len(params)
        """Which parameters have got a gradient that was not reduced, in earlier backwards."""
        self.is_stale = False
        """Whether a gradient came after the all-reduce had begun."""
        self.num_pending = self.num_expected = 0
        self._mesh = mesh
        self._scale = 1.0 / mesh.size()
        numel = sum(param.numel() for param in params)
        # Behind the gradients is, for each parameter, on how many ranks it was used.
        self._flat = torch.zeros(numel + len(params), dtype=dtype or params[0].dtype, device=params[0].device)
        parts = torch.split(self._flat[:numel], [param.numel() for param in params])
        self._views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        self._counts = self._flat[numel:]
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
        self.is_stale = False
        self.num_expected = self.num_pending = sum(param.requires_grad for param in self.params)
        self._work = None

    @torch.no_grad()
    def launch(self) -> None:
        """Begin to all-reduce the gradients, after the last all-reduce of the bucket. A collective."""
        if self._work is not None:
            self._work.wait()
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is None:
                view.zero_()
            else:
                if param.grad.layout != torch.strided:
                    param.grad = param.grad.to_dense()
                torch.mul(param.grad.to(view.dtype), self._scale, out=view)
        self._counts.copy_(torch.tensor(self.is_used, dtype=self._counts.dtype))
        self._work = dist.all_reduce(self._flat, group=self._mesh.get_group(0), async_op=True)

    @torch.no_grad()
    def hand_out(self) -> None:
        """Wait for the all-reduce, if it has begun, and give the parameters that any rank used the mean gradient."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        is_used = self.is_used
        self.has_accumulated = [False] * len(self.params)
        # On an accelerator, reading the counts waits for it; they are known if this rank has used all.
        counts = self._counts.tolist() if not all(is_used) else [1.0] * len(self.params)
        for param, view, count in zip(self.params, self._views, counts, strict=True):
            if count == 0:
                continue
            if param.grad is None:
                param.grad = view.to(param.dtype, copy=True)
            else:
                param.grad.copy_(view)
