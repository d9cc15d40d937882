"""Replicate parameters: every rank has the whole parameters, and gradients are averaged over the replicas.

This does the work of torch's DistributedDataParallel (Li et al., 2020) for a module that keeps its class. Gradients
are copied into buckets, and each bucket is all-reduced while the backward goes on. Ranks may leave different parameters
without a gradient: a rank contributes zeros for parameters that only other ranks have used. The gradient of a parameter
that no rank has used is left as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist._compat import (
    at_end_of_backward,
    give_post_accumulate_hooks,
    local_of,
    take_post_accumulate_hooks,
    tree_map,
    version_of,
)
from lightning_dist.mesh.flag_agreement import FlagAgreement
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.model.units import Unit, UnitKind
from lightning_dist.parameters.gradient_buckets import as_dtensor, in_buckets
from lightning_dist.parameters.gradient_observer import GradientObserver
from lightning_dist.techniques.protocol import Parallel, SavedState, find_gradient_reducer
from lightning_dist.techniques.replication.bucket import Bucket
from lightning_dist.techniques.replication.group import ReplicatedGroup

__all__ = ["Replication"]


class Replication(SavedState):
    """Average the gradients of whole parameters over the ranks of ``mesh``.

    Args:
        mesh: A mesh with the axes ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``, of which ``dp_shard`` has one rank.
        parameter_mesh: The same mesh, and ``tp`` as its last axis if layers are split.
        reduce_dtype: The dtype that gradients are reduced in; None: that of each parameter.
        kind: Kind of the units whose parameters are replicated; None: all units.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        parameter_mesh: DeviceMesh,
        reduce_dtype: torch.dtype | None = None,
        kind: UnitKind | None = None,
    ) -> None:
        self._mesh = mesh
        self._kind = kind
        self._parameter_mesh = parameter_mesh
        self._reduce_dtype = reduce_dtype
        self._groups: list[ReplicatedGroup] = []
        self._buckets: list[Bucket] = []
        self._num_launched = 0
        self._reduces_now = False
        self._params: list[tuple[nn.Parameter, int | None]] = []
        """The parameters of all groups, each with the key of this object's own hook on it."""
        self._places: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._hooks_of_users: list[tuple[nn.Parameter, dict[int, Any]]] = []

    def attach(self, parallel: Parallel) -> None:
        """Switch embeddings to dense gradients, which can be reduced in buckets and have the same values."""
        self._parallel = parallel
        self._reducer = find_gradient_reducer(parallel.techniques)
        for part in parallel.module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False

    def manage_unit(self, unit: Unit) -> ReplicatedGroup | None:
        """Return a group that manages the parameters of ``unit``, without changing them; None: of another kind."""
        if self._kind not in (None, unit.kind):
            return None
        # A stand-in must not keep this object alive, since hooks of tensors hold it.
        on_gradient = partial(_on_late_gradient, weakref.ref(self))
        self._groups.append(ReplicatedGroup(unit, self._mesh, self._parallel.techniques, on_gradient))
        self._groups[-1].reducer = self._reducer
        return self._groups[-1]

    def finish(self) -> None:
        """Put the parameters into buckets, in the order in which a backward reaches them. This is a collective."""
        params = [param for group in self._groups for param in group.params]
        self._names = {
            param: name for group in self._groups for name, param in zip(group.names, group.params, strict=True)
        }
        hooks = self._fill_buckets(params) if self._mesh.size() > 1 else {}
        self._params = [(param, hooks.get(param)) for param in params]

    def _fill_buckets(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
        """Put ``params`` into buckets. This is a collective.

        Returns:
            For each parameter, the key of the hook that copies its gradient into its bucket.
        """
        # The ranks tell each other which buckets they have used over a group of its own. On the buckets' group, ranks
        # that have launched different numbers of buckets so far would match different collectives with each other.
        ranks = dist.get_process_group_ranks(self._mesh.get_group(0))
        self._agreement = FlagAgreement(ranks, "used parameters", self._describe_flag)
        hooks: dict[nn.Parameter, int] = {}
        for bucket_params in in_buckets(list(reversed(params)), self._reduce_dtype):
            names = [self._names[param] for param in bucket_params]
            bucket = Bucket(bucket_params, self._mesh, self._reduce_dtype, names, self._reducer)
            for index, param in enumerate(bucket_params):
                requires_grad = param.requires_grad
                param.requires_grad_(True)  # A tensor takes a hook only then, and a frozen parameter needs one too.
                # The reference is weak, because the garbage collector does not see what a parameter's hooks hold.
                hook = partial(_on_gradient, weakref.ref(self), len(self._buckets), index)
                hooks[param] = param.register_post_accumulate_grad_hook(hook).id  # type: ignore[no-untyped-call]
                param.requires_grad_(requires_grad)
                self._places[param] = bucket, index
            self._buckets.append(bucket)
        return hooks

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to average gradients; a reducer counts what it sends itself."""
        if self._mesh.size() == 1 or self._reducer is not None:
            return {}
        num_bytes = sum(bucket.num_bytes_sent for bucket in self._buckets)
        for bucket in self._buckets:
            bucket.num_bytes_sent = 0
        return {"comm/dp_replicate_mib_per_step": num_bytes / num_steps / 2**20}

    def before_step(self) -> None:
        """Discard the state of a backward that failed in the last step, if the step has caught the error."""
        if self._reduces_now:
            self.after_error()

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Let a step in this context use split parameters outside of the forward of their unit as well."""
        with ExitStack() as stack:
            for group in self._groups:
                if group.needs_gather:
                    stack.enter_context(group.with_stand_ins())
            yield

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Record that autograd has set a gradient, and reduce the bucket if it is full.

        Args:
            bucket_index: The index of the bucket.
            index: The index of the parameter in the bucket.
        """
        bucket = self._buckets[bucket_index]
        if not self._reduces_now and not self._prepare_backward():
            bucket.has_accumulated[index] = True
            return
        if bucket.has_gradient[index]:  # A nested backward, as in reentrant checkpointing, uses the parameter again.
            bucket.mark_changed(index)
            return
        bucket.has_gradient[index] = True
        if bucket.is_launched:  # The parameter was frozen when the backward began.
            bucket.mark_changed(index)
            return
        bucket.copy_in(index)  # It is copied now because it is still in the processor's cache.
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            self._launch_full()

    def on_late_gradient(self, param: nn.Parameter) -> None:
        """Record that autograd is about to add a gradient, which the bucket must copy when the backward has ended.

        Args:
            param: A parameter in whose place a stand-in was used.
        """
        if param not in self._places:
            return
        bucket, index = self._places[param]
        if self._prepare_backward():
            bucket.has_gradient[index] = True
            bucket.mark_changed(index)
        else:
            bucket.has_accumulated[index] = True

    def _prepare_backward(self) -> bool:
        """Return whether the current backward reduces gradients, and prepare the buckets for it at its first gradient.

        Raises:
            RuntimeError: If the step runs a backward of its own, and a parameter has a hook of the user's.
        """
        if self._reduces_now:
            return True
        if not self._parallel.reduces_gradients or self._parallel.runs_microbatches:
            return False
        # The step has called backward() itself, without manual_backward.
        self._begin()
        if self._hooks_of_users:
            self._give_hooks_back()
            raise RuntimeError(
                "training_step calls backward() itself, and a parameter has a hook of"
                " register_post_accumulate_grad_hook, which would see gradients of this rank's part of the batch alone:"
                " call self.manual_backward(loss) instead."
            )
        self._reduces_now = True
        at_end_of_backward(self._end)
        return True

    @property
    def _observer(self) -> GradientObserver | None:
        """Return what looks at gradients before they are averaged, which is the same for all groups."""
        return self._groups[0].observer

    def _launch_full(self) -> None:
        """All-reduce the buckets that are full, in the same order on all ranks."""
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].num_pending <= 0:
            bucket = self._buckets[self._num_launched]
            if bucket.num_expected:
                bucket.launch(self._observer)
            self._num_launched += 1

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Reduce gradients while a backward runs in this context, and wait for the reduction at its end.

        This is a collective if gradients are reduced.
        """
        if not self._buckets:
            with self._hooks_held_back() if self._splits else nullcontext():
                yield
            return
        if not self._parallel.reduces_gradients:
            yield
            return
        self._begin()
        self._reduces_now = True
        try:
            yield
        except BaseException:
            self.after_error()
            raise
        self._end()

    @contextmanager
    def around_microbatches(self) -> Iterator[None]:
        """Hold back the hooks of users in this context, because they must see the gradients of all microbatches."""
        with self._hooks_held_back(calls=not self._buckets or not self._parallel.reduces_gradients):
            yield

    @contextmanager
    def _hooks_held_back(self, calls: bool = True) -> Iterator[None]:
        """Hold back the hooks of users in this context, and then call those of parameters with changed gradients.

        Args:
            calls: Whether to call the hooks at all.
        """
        self._take_hooks_of_users()
        before = [(param, param.grad, _version(param.grad)) for param, _ in self._hooks_of_users]
        try:
            yield
        except BaseException:
            self._give_hooks_back()
            raise
        changed = [p for p, grad, version in before if p.grad is not grad or version != _version(p.grad)]
        self._call_hooks_of_users(changed, calls)

    def reduce_microbatches(self, reduces: bool) -> None:
        """Reduce the gradients that microbatches have added up.

        This is a collective if gradients are reduced.
        """
        if self._buckets and reduces:
            self._begin()
            for bucket in self._buckets:
                # Schedules that split backwards set gradients without autograd's hooks.
                bucket.has_gradient = [param.grad is not None for param in bucket.params]
            self._end()

    def _begin(self) -> None:
        self._num_launched = 0
        for bucket in self._buckets:
            bucket.begin()
        self._take_hooks_of_users()

    def _take_hooks_of_users(self) -> None:
        """Take the hooks of users from the parameters, so that they are called only once, with the reduced gradient."""
        for param, own in self._params:
            if others := take_post_accumulate_hooks(param, own):
                self._hooks_of_users.append((param, others))

    def _give_hooks_back(self) -> list[tuple[nn.Parameter, dict[int, Any]]]:
        hooks, self._hooks_of_users = self._hooks_of_users, []
        for param, others in hooks:
            give_post_accumulate_hooks(param, others)
        return hooks

    def _call_hooks_of_users(self, params: Collection[nn.Parameter], calls: bool = True) -> None:
        if not self._hooks_of_users:
            return
        ids = {id(param) for param in params}
        for param, others in self._give_hooks_back():
            for hook in others.values() if calls and id(param) in ids else ():
                hook(param)

    def _end(self) -> None:
        """Reduce the buckets that some rank has used and that are not reduced yet, and set the mean gradients."""
        self._reduces_now = False
        is_used = [used for bucket in self._buckets for used in bucket.is_used]
        is_expected = [param.requires_grad for bucket in self._buckets for param in bucket.params]
        is_stale = [bucket.is_stale for bucket in self._buckets]
        flags = iter(self._agreement.agree([*is_stale, *is_used], [*([False] * len(is_stale)), *is_expected]))
        is_stale = [next(flags) for _ in self._buckets]
        is_used_by_any = [[next(flags) for _ in bucket.params] for bucket in self._buckets]
        # Buckets of frozen parameters come last on all ranks, because a rank whose other buckets were all full has
        # launched the others before.
        for is_frozen in (False, True):
            for bucket, used_by_any in zip(self._buckets, is_used_by_any, strict=True):
                if any(used_by_any) and not bucket.is_launched and (bucket.num_expected == 0) == is_frozen:
                    bucket.launch(self._observer)
        used: list[nn.Parameter] = []
        for bucket, stale_on_any, used_by_any in zip(self._buckets, is_stale, is_used_by_any, strict=True):
            if stale_on_any:
                bucket.launch(self._observer)
            used += bucket.set_gradients(used_by_any)
        self._call_hooks_of_users(used)

    def _describe_flag(self, index: int) -> str:
        if index < len(self._buckets):
            first = self._names[self._buckets[index].params[0]]
            return f"gradients came after the reduction of those of {first!r} had begun"
        params = [param for bucket in self._buckets for param in bucket.params]
        return f"the frozen parameter {self._names[params[index - len(self._buckets)]]!r} got a gradient"

    def after_error(self) -> None:
        """Discard the state that a step with an error has left behind."""
        self._reduces_now = False
        for bucket in self._buckets:
            bucket.keep_unreduced()
            bucket.begin()
        self._give_hooks_back()

    @property
    def _splits(self) -> bool:
        return any(group.needs_gather for group in self._groups)

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
        if isinstance(value, DTensor):  # It is split over tp.
            placements = [*replicated, *value.placements]
            return as_dtensor(local_of(value.detach()), self._parameter_mesh, placements, value)
        return value if value.ndim == 0 else as_dtensor(value.detach(), self._mesh, replicated, value)


def _version(gradient: Tensor | None) -> int:
    """Return a number that changes whenever a gradient is changed in place."""
    return 0 if gradient is None else version_of(gradient)


def _on_late_gradient(replication: weakref.ref[Replication], param: nn.Parameter) -> None:
    alive = replication()
    if alive is not None:
        alive.on_late_gradient(param)


def _on_gradient(replication: weakref.ref[Replication], bucket_index: int, index: int, param: Tensor) -> None:
    alive = replication()
    if alive is not None:
        alive.on_gradient(bucket_index, index)
