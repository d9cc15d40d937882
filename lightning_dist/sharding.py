"""Full and hybrid sharding by FSDP2: parameters, gradients and optimizer states are spread over ``dp_shard``.

With one replica this is ZeRO-3 (Rajbhandari et al., 2020); with several, hybrid sharding (Zhao et al., 2023): gather
and reduce-scatter stay inside a replica, and only each rank's shard of the gradient is all-reduced between replicas.

The FSDP root is a thin module around the user's, without parameters: a step runs inside its forward, and the user's
module keeps its class. Blocks are gathered when they run. Outer units (embeddings, norms, heads; all of a small model)
are gathered for the whole step, as FSDP2's root is, so that ``F.linear(x, self.embedding.weight)`` or
``self.model.encode(x)`` work as in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_dist import _compat
from lightning_dist._compat import ParameterGroup
from lightning_dist.audit import FirstStepAudit
from lightning_dist.block_forward import compile_block, recompute_block, rerun_in_place
from lightning_dist.collectives import DirectAllGather, TwoShotReduceScatter
from lightning_dist.consensus import timed_barrier
from lightning_dist.gather_on_use import GatheredOnUse, whole_for_step
from lightning_dist.initialization import materialize, refuse_meta_attributes
from lightning_dist.pipeline import Pipeline
from lightning_dist.same_buffers import SameBuffers
from lightning_dist.same_path import SamePath
from lightning_dist.scalar_reads import read_whole_scalars
from lightning_dist.scalars import ScalarGroup
from lightning_dist.tensor_parallel import TensorParallel, whole_logits
from lightning_dist.units import Unit
from lightning_dist.unused_parameters import UnusedParameters
from lightning_dist.whole_files import register, whole_state_dicts

__all__ = ["NotInStepError", "ShardedModule", "ShardingConfig", "full_parameters", "shard", "sharded", "sharded_around"]


_GATHERED_FOR_THE_STEP = ("outer", "shared", "root")
"""Kinds of units whose parameters stay gathered for the whole step."""

_HELD_APART = ("shared", "root")
"""Kinds of units whose modules' forwards do not say when their parameters are needed."""


class NotInStepError(RuntimeError):
    """A sharded module was called where the other ranks may not call it too."""


@dataclass(frozen=True)
class ShardingConfig:
    """How units are sharded.

    Args:
        param_dtype: What parameters are gathered and computed in; None: what they are stored in.
        reduce_dtype: What gradients are reduced in; None: what they are computed in.
        reshard_after_forward: Whether blocks, but for the last, are freed after their forward and gathered again in the
            backward (less memory), or kept (one gather less); a number: kept sharded over that many ranks.
        direct_collectives: Use those of :mod:`lightning_dist.collectives`; None: on gloo only.
        recompute: Whether blocks are run again in the backward, in the place of keeping their activations.
        compile_backend: What compiles each block, such as ``"inductor"``; None: nothing does.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int = True
    direct_collectives: bool | None = None
    recompute: bool = False
    compile_backend: str | None = None


class _StepRoot(nn.Module):
    """The FSDP root. Its forward is a step of the user's module."""

    def __init__(self, module: nn.Module, holders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.holders = nn.ModuleList(holders)

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()


def shard(
    module: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    config: ShardingConfig,
    tensor_parallel: TensorParallel | None = None,
    scalar_mesh: DeviceMesh | None = None,
    left_on_meta: Collection[torch.Tensor] = (),
) -> ShardedModule:
    """Shard ``module``, in place, unit by unit. A collective over ``mesh``.

    Units on the meta device are initialised here, one at a time, so that no rank ever holds the whole model.

    Args:
        module: The user's module, its weights on the mesh's device (equal on all ranks) or on the meta device.
        units: From :func:`lightning_dist.units.find_units`; every parameter is in one.
        mesh: ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``.
        config: How.
        tensor_parallel: What splits a unit's parameters before they are sharded; None: nothing.
        scalar_mesh: What parameters without dimensions are replicated over; None: ``mesh``.
        left_on_meta: Parameters and buffers that are other ranks'.
    """
    read_whole_scalars()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # FSDP2 reduces dense gradients only; the values are the same
    device = torch.device(mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=config.param_dtype, reduce_dtype=config.reduce_dtype)
    is_direct = config.direct_collectives
    if is_direct is None:
        is_direct = dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo"
    last_block = next((unit for unit in reversed(units) if unit.kind == "block"), None)
    groups: list[ParameterGroup | ScalarGroup] = []
    holders: list[nn.Module] = []
    hooks = {name: param._backward_hooks for name, param in module.named_parameters() if param._backward_hooks}
    path = SamePath([" and ".join(filter(None, unit.names)) or type(module).__name__ for unit in units])
    for index, unit in enumerate(units):
        materialize(unit.modules, module, device, left_on_meta)
        if unit.kind == "scalars":
            groups.append(ScalarGroup(module, unit.params, mesh if scalar_mesh is None else scalar_mesh))
            unit.params.clear()
            continue
        if tensor_parallel is not None:
            split = tensor_parallel.split(unit.params.values(), unit.owners)
            unit.params = {name: split[param] for name, param in unit.params.items()}
        if unit.kind == "block":
            _change_forward(unit, config, tensor_parallel, module)
        # The last block's backward follows its forward: to free it would only be to gather it again.
        stays_gathered = unit.kind in _GATHERED_FOR_THE_STEP
        stays_gathered |= unit is last_block and config.reshard_after_forward is True
        modules: list[nn.Module] = [_Holder(unit.params.values())] if unit.kind in _HELD_APART else unit.modules
        originals = {
            (part, key): param
            for top in modules
            for part in top.modules()
            for key, param in part.named_parameters(recurse=False, remove_duplicate=False)
        }
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=False if stays_gathered else config.reshard_after_forward,
            mp_policy=policy,
            ignored_params=set(module.parameters()) - set(unit.params.values()),
            shard_placement_fn=None if tensor_parallel is None else partial(_shard_placement, tensor_parallel),
        )
        group = _compat.parameter_group(modules[0])
        group.take_hooks(originals)
        if unit.kind in _HELD_APART:
            holders.append(modules[0])
            group.put_into(_places(unit.params.values(), unit.owners))
        if unit.kind in _GATHERED_FOR_THE_STEP:
            group.wait_for_end_of_backward()
        if is_direct:
            group.set_collectives(
                DirectAllGather(partial(path.check, "gather", index)),
                TwoShotReduceScatter(partial(path.check, "reduce", index)),
            )
        groups.append(group)
        unit.params.clear()  # the whole parameters, of which nothing should stay
        originals.clear()
    materialize([module], module, device, left_on_meta)
    refuse_meta_attributes(module)
    audit = FirstStepAudit(module, groups, hooks)
    return ShardedModule(module, units, groups, holders, mesh, audit, path if is_direct else None, tensor_parallel)


class _Holder(nn.Module):
    """Give ``fully_shard`` parameters whose own modules must keep their class and get no hooks."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self.register_parameter(str(index), param)


def _places(params: Iterable[nn.Parameter], owners: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """For each parameter, the modules that hold it, and its names there."""
    held = [(owner, key, param) for owner in owners for key, param in owner._parameters.items()]
    return [[(owner, key) for owner, key, other in held if other is param] for param in params]


def _change_forward(
    unit: Unit, config: ShardingConfig, tensor_parallel: TensorParallel | None, root: nn.Module
) -> None:
    for block in unit.modules:
        if config.compile_backend is not None:
            compile_block(block, config.compile_backend)
        if tensor_parallel is None:
            if config.recompute:
                recompute_block(block)
            continue
        change = recompute_block if config.recompute else rerun_in_place
        change(block, partial(tensor_parallel.in_place, _in_order(root, unit), [block]))


def _in_order(root: nn.Module, unit: Unit) -> list[nn.Module]:
    """A unit's owners, in one order on all ranks: what tensor parallelism exchanges for them is."""
    return [owner for owner in root.modules() if owner in unit.owners]


def _shard_placement(tensor_parallel: TensorParallel, param: nn.Parameter) -> Shard | None:
    dim = tensor_parallel.shard_dim(param)
    return None if dim is None else Shard(dim)


_sharded: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()


def sharded(module: nn.Module) -> ShardedModule | None:
    """What :func:`shard` made of ``module``; None if it is not sharded."""
    reference = _sharded.get(module)
    return reference() if reference is not None else None


def sharded_around(module: nn.Module) -> ShardedModule | None:
    """What :func:`shard` made of the module that ``module`` is, or is a part of; None if it is not sharded."""
    for root, reference in list(_sharded.items()):
        if any(part is module for part in root.modules()):
            return reference()
    return None


@contextmanager
def full_parameters(module: nn.Module, timeout_s: float = 60.0) -> Iterator[None]:
    """Inside, every rank holds the whole of ``module`` and may call it alone, without gradients.

    To sample from a model, to export it, to look at a weight. Every rank must enter; a module that no strategy sharded
    needs nothing, so the same code works everywhere. Change no parameters inside: some are copies, and others are not.

    Args:
        module: A LightningModule in training or after it.
        timeout_s: Seconds to wait for the other ranks to enter.

    Raises:
        OtherRankError: If a rank does not enter in time.
    """
    whole = sharded(module)
    if whole is None:
        with torch.no_grad():
            yield
        return
    timed_barrier(f"full_parameters({type(module).__name__})", timeout_s)
    with whole.full_parameters():
        yield


class ShardedModule:
    """A module that :func:`shard` sharded: runs its steps, and keeps FSDP2 right where it would be silently wrong.

    Args:
        module: The user's module.
        units: Its units.
        groups: The parameter group of each unit.
        holders: What ``fully_shard`` was given in the place of modules of the user's.
        mesh: What they are sharded over.
        audit: Checks the first step.
        path: Checks that all ranks gather and reduce the same units; None: the collectives are the backend's own.
        tensor_parallel: What split them before; None: nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        groups: Sequence[ParameterGroup | ScalarGroup],
        holders: Sequence[nn.Module],
        mesh: DeviceMesh,
        audit: FirstStepAudit,
        path: SamePath | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.module = module
        self.units = tuple(units)
        self.mesh = mesh
        self.groups = tuple(groups)
        self._sharded_groups = [group for group in groups if isinstance(group, ParameterGroup)]
        self._scalars = [group for group in groups if isinstance(group, ScalarGroup)]
        by_kind = list(zip(units, groups, strict=True))
        self._outer = [group for unit, group in by_kind if unit.kind in (*_GATHERED_FOR_THE_STEP, "scalars")]
        self._own = [group for unit, group in by_kind if unit.kind in (*_HELD_APART, "scalars")]
        self.tensor_parallel = tensor_parallel
        self.pipeline: Pipeline | None = None
        self._owners = {group: _in_order(module, unit) for unit, group in by_kind if unit.kind != "scalars"}
        self._made_local: dict[ParameterGroup, tuple[bool, ...]] = {}
        self._audit = audit
        self._path = path
        self._unused = UnusedParameters(self._sharded_groups, mesh)
        self._buffers = SameBuffers(module, mesh)
        self.stays_gathered = False
        """Whether every rank holds the whole model (see :meth:`stay_gathered`)."""
        self._kept = ExitStack()
        self._running = 0
        self._in_step = False
        self._has_stepped = False
        for unit, group in by_kind:
            if isinstance(group, ParameterGroup):
                self._add_hooks(unit, group)
        self._root = _StepRoot(module, holders)
        fully_shard(self._root, mesh=mesh, ignored_params=set(module.parameters()))
        _compat.initialize_root(self._root)
        register(module, [owner for unit in units for owner in unit.modules])
        for group in self._sharded_groups:
            group.gather_in_place()
        # The modules' hooks hold this object; so it lives as long as the module.
        _sharded[module] = weakref.ref(self)

    def _add_hooks(self, unit: Unit, group: ParameterGroup) -> None:
        if self.tensor_parallel is not None:
            group.before_write_back = self.tensor_parallel.take_replaced
            group.is_other_form = self.tensor_parallel.put_there
        if unit.kind in _HELD_APART:
            return
        for module in unit.modules:
            module.register_forward_pre_hook(partial(self._before_unit, group), prepend=True)
            _compat.gather_before_views(module)
            if self.tensor_parallel is not None and unit.kind != "outer":
                # Between FSDP2's own hooks.
                module.register_forward_pre_hook(lambda module, args: self._use_local(group, [module]))
                undo = partial(self.tensor_parallel.use_whole, self._owners[group])
                module.register_forward_hook(lambda *args, undo=undo: undo(), prepend=True, always_call=True)
        if unit.kind == "outer":
            # Its modules may run through other methods than forward, or after a backward inside the step freed them.
            def gather(module: nn.Module, args: object) -> None:
                if group.is_gathered:
                    group.copy_requires_grad()
                    if not self._is_local(group):
                        self._use_local(group)
                else:
                    self._check_running(module, args)
                    self._gather(group)

            for owner in unit.owners:
                owner.register_forward_pre_hook(gather, prepend=True)

    def _before_unit(self, group: ParameterGroup, module: nn.Module, args: object) -> None:
        self._check_running(module, args)
        if torch.is_inference_mode_enabled():
            group.gather()  # FSDP2's own hook, which runs next, would make inference tensors

    def _check_running(self, module: nn.Module, args: object) -> None:
        if self._running:
            if self._in_step:
                self._gather_own()
            return
        if not self._has_stepped and self.pipeline is None:
            # Lightning's ModelSummary calls the model on every rank before the first step, if it has an example input.
            timed_barrier("calling a sharded model before its first step")
            return
        raise NotInStepError(
            f"{type(self.module).__name__} is sharded, and {type(module).__name__} was called outside of a training,"
            " validation, test or predict step: the other ranks would have to call it too, or all would hang. Call it"
            " inside `with lightning_dist.full_parameters(module):`, entered on every rank; within it, any rank may"
            " call the model alone."
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the module may be called, by all ranks alike: around a backward that recomputes activations."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def step(self, step: Callable[[], Any], backward_follows: bool) -> Any:
        """Run ``step``, which calls the module, and return what it returns. A collective.

        Args:
            step: The step, its arguments bound.
            backward_follows: Whether the caller runs a backward from what is returned; then outer units stay gathered.
        """
        self._in_step = self._has_stepped = True
        try:
            with self.running():
                if self.tensor_parallel is not None:
                    self.tensor_parallel.before_step()
                for group in self._outer:
                    self._gather(group)
                with self._stand_ins():
                    output = self._root(step)
                if self.tensor_parallel is not None:
                    output = whole_logits(output)
        except BaseException:
            _compat.reset_after_error(self._root)
            raise
        finally:
            self._in_step = False
        if not backward_follows:
            self._check_path()
            self.free()
        return output

    def before_training_step(self, has_reduced: bool) -> None:
        """Give all ranks the first one's buffers, if gradients were reduced after the last step. A collective then.

        Args:
            has_reduced: Whether they were; the same on all ranks, also in a run that was resumed.
        """
        # A call before the first step, as of an example input, has left outer units gathered.
        if any(group.is_gathered for group in self._sharded_groups):
            self.free()
        self._audit.before_step()
        if has_reduced:
            self._buffers.synchronize()

    def _check_path(self) -> None:
        if self._path is not None and not self.stays_gathered:
            self._path.check("end", 0, self.mesh.get_group(self.mesh.ndim - 1))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Reduce, after the backward inside, what no module's hook reduced. A collective where gradients are reduced.

        Inside, the module may be called, as blocks are that are run again.
        """
        with self._unused.agreed():
            with self.running():
                yield
            self._check_path()
        self.after_backward()

    @contextmanager
    def between(self) -> Iterator[None]:
        """Let hooks between a forward and its backward use and change parameters inside. A collective."""
        assert self.pipeline is None
        with self._stand_ins():
            yield

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Gather what a step uses while it is sharded, and write what the step has changed into the shards."""
        groups = self._sharded_groups
        for group in groups:
            group.begin_stand_ins(self._stand_in)
        try:
            yield
        finally:
            for group in groups:
                group.end_stand_ins()
        self.write_back()

    def write_back(self) -> None:
        """Write what a step has changed in gathered parameters into the shards. A collective where it has.

        Raises:
            AuditError: If ranks have changed a parameter differently.
        """
        for group in self._sharded_groups:
            if group.is_gathered:
                self._audit.after_change(group, group.write_back(compares=self._audit.is_due))
        self._audit.after_forward()

    def _stand_in(self, param: Tensor, dtype: torch.dtype | None, on_gradient: Callable[[], None]) -> Tensor:
        axes = self.mesh.mesh_dim_names or ()
        gather = partial(whole_for_step, data_parallel_axes=axes, dtype=dtype, on_gradient=on_gradient)
        return GatheredOnUse(param, gather)

    @contextmanager
    def microbatches(self, with_backward: bool) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Around the forwards and backwards of a pipeline's microbatches. A collective over the sharding mesh.

        Units stay gathered; each rank adds up its own gradients, for :meth:`after_microbatches`. What the microbatches
        change in parameters is kept if :meth:`write_back` is called inside.

        Args:
            with_backward: Whether there are backwards; else units are freed at the end.

        Yields:
            What runs a microbatch's step on a stage.
        """

        def run(step: Callable[[], Any]) -> Any:
            if self.tensor_parallel is None:
                return self._root(step)
            self.tensor_parallel.before_step()
            return whole_logits(self._root(step))

        self._in_step = self._has_stepped = True
        try:
            with self.running(), _compat.accumulating(self._root, self._sharded_groups) as is_idle:
                for group in self.groups:
                    self._gather(group)
                with self._hooks_off(is_idle):
                    yield call if is_idle and self.tensor_parallel is None else run
        except BaseException:
            _compat.reset_after_error(self._root)
            _compat.drop_gradients(self._sharded_groups)
            raise
        finally:
            self._in_step = False
        if not with_backward:
            self.free()

    def _hooks_off(self, is_idle: bool) -> AbstractContextManager[None]:
        """Inside, hooks that gather what is gathered are not called; ``is_idle``: nor those of FSDP2."""
        if not is_idle:
            return nullcontext()
        ours = ("lightning_dist.sharding",) if self.tensor_parallel is None else ()
        modules = [module for unit in self.units for module in (*unit.modules, *unit.owners)]
        return _compat.without_forward_hooks([self._root, *modules], ("torch.distributed.fsdp", *ours))

    def after_microbatches(self) -> None:
        """Reduce the gradients that backwards have left, if gradients are to be reduced now; free the units."""
        is_due = self._reduces_gradients
        if is_due:
            with self._unused.agreed():
                _compat.reduce_gradients(self._root, self._sharded_groups)
        for scalars in self._scalars:
            scalars.reduce()
        if is_due:
            self._audit.after_backward()
        self.free()
        if is_due and self.pipeline is not None:
            self.pipeline.shared.sum_gradients()

    def after_backward(self) -> None:
        """Reduce gradients that no module's hook reduced, and free units: to be called after every backward."""
        if any(group.has_unreduced_gradients() for group in self._sharded_groups):
            _compat.flush_gradients(self._root)
        for scalars in self._scalars:
            scalars.reduce()
        for group in self._outer:
            group.free()
        if self._reduces_gradients:
            self._audit.after_backward()

    @property
    def _reduces_gradients(self) -> bool:
        return all(group.syncs_gradients for group in self._sharded_groups)

    def before_optimizer_step(self) -> None:
        """Check that no gradient is where the optimizer does not see it."""
        self._audit.before_optimizer_step([] if self.tensor_parallel is None else self.tensor_parallel.left_gradients())

    def after_optimizer_step(self) -> None:
        """Forget whole parameters, which are stale: to be called after every optimizer step."""
        self.free()
        self._audit.after_optimizer_step()
        if self._in_step:
            self._gather_own()

    def _gather_own(self) -> None:
        # A step that runs backward itself goes on afterwards, and reads what hangs on the root module through no hook:
        # it is gathered again after an optimizer step, or when a unit runs.
        for group in self._own:
            self._gather(group)

    def _gather(self, group: ParameterGroup | ScalarGroup) -> None:
        group.gather()
        self._use_local(group)

    def _use_local(self, group: ParameterGroup | ScalarGroup, running: Collection[nn.Module] = ()) -> None:
        if self.tensor_parallel is not None and isinstance(group, ParameterGroup):
            self.tensor_parallel.use_local(self._owners[group], running)
            self._made_local[group] = group.requires_grad

    def _is_local(self, group: ParameterGroup) -> bool:
        """Whether the owners hold what tensor parallelism makes of a gathered group, with gradients as wanted now."""
        if self.tensor_parallel is None:
            return True
        # A backward may have gathered the group again.
        params = (param for owner in self._owners[group] for param in owner._parameters.values())
        is_replaced = any(isinstance(param, DTensor) for param in params)
        return not is_replaced and self._made_local.get(group) == group.requires_grad

    @property
    def holds_whole_model(self) -> bool:
        """Whether nothing is sharded, so that to gather parameters is no collective."""
        return self.mesh.size(self.mesh.ndim - 1) == 1

    def stay_gathered(self) -> None:
        """From now on, let steps without backwards gather nothing, so that ranks may run unequal numbers of them.

        Every rank holds the whole model until :meth:`stop_staying_gathered`. A collective.
        """
        with self.running():
            for group in self.groups:
                self._gather(group)
        self._kept.enter_context(_compat.keep_gathered(self._sharded_groups))
        self._set_stays_gathered(True)

    def stop_staying_gathered(self) -> None:
        """Undo :meth:`stay_gathered`, if it was called."""
        if self.stays_gathered:
            self._kept.close()
            self._set_stays_gathered(False)
            self.free()

    def _set_stays_gathered(self, stays: bool) -> None:
        self.stays_gathered = stays
        if self._path is not None:
            self._path.is_off = stays

    def free(self) -> None:
        """Put the sharded parameters into the module: what optimizers, callbacks and checkpoints read and write."""
        if self.stays_gathered:
            return
        for group in self.groups:
            group.free()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether a backward reduces gradients over the ranks, or each adds up its own (accumulation)."""
        for group in self.groups:
            group.set_gradient_sync(enabled)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Inside, every rank holds the whole model, and may call it alone, without gradients. Entered by all ranks."""
        outside = nullcontext() if self.pipeline is None else self.pipeline.all_stages.switched_off()
        with outside, _compat.keep_gathered(self._sharded_groups), self.running(), torch.no_grad():
            for group in self.groups:
                group.gather()
            try:
                with ExitStack() as whole:
                    if self.tensor_parallel is not None:
                        whole.enter_context(self.tensor_parallel.switched_off(self.module))
                    if self.pipeline is not None:
                        whole.enter_context(self.pipeline.whole())
                    whole.enter_context(whole_state_dicts(self.module, self._sharded_groups))
                    for sharded_group in self._sharded_groups:
                        whole.enter_context(sharded_group.held())
                    yield
            finally:
                self.free()
