"""Shard parameters, gradients and optimizer states over ``dp_shard`` by FSDP2.

With one replica this is ZeRO-3 (Rajbhandari et al., 2020). With several it is hybrid sharding (Zhao et al., 2023): the
all-gathers and reduce-scatters stay inside a replica, and only each rank's shard of the gradient is all-reduced between
replicas.

The FSDP root is a small module around the user's module, without parameters. A step runs inside its forward, and the
user's module keeps its class. Blocks are gathered when they run. Outer units (embeddings, norms, heads; all of a small
model) are gathered for the whole step, as FSDP2's root is, so that ``F.linear(x, self.embedding.weight)`` or
``self.model.encode(x)`` works as in one process.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional

from lightning_dist._compat import NORM, backend_of, own_parameters, tree_map
from lightning_dist.mesh.collectives import DirectAllGather, Transfer, TwoShotReduceScatter, begin_exchange
from lightning_dist.model.units import Unit, merge_units
from lightning_dist.parameters.group import MAX_BYTES_UNDER_WAY
from lightning_dist.parameters.on_use import GatheredOnUse, call_after_writes, whole_for_step
from lightning_dist.techniques.protocol import (
    Parallel,
    ParameterForms,
    ParameterRules,
    Rows,
    bound,
    find_gradient_reducer,
    find_shard_memory,
)
from lightning_dist.techniques.sharding import _compat
from lightning_dist.techniques.sharding._compat import ShardedGroup, WrapShard
from lightning_dist.techniques.sharding.many_ranks import OneEmptyShard
from lightning_dist.techniques.sharding.same_path import Action, SamePath
from lightning_dist.techniques.sharding.unused_parameters import UnusedParameters

__all__ = ["Sharding", "ShardingConfig"]


@dataclass(frozen=True)
class ShardingConfig:
    """Configure how units are sharded.

    Args:
        param_dtype: The dtype that parameters are gathered and computed in; None: the dtype that they are stored in.
        reduce_dtype: The dtype that gradients are reduced in; None: the dtype that they are computed in.
        reshard_after_forward: Whether all blocks except the last one are freed after their forward and gathered again
            in the backward, which saves memory. False: they stay gathered, which saves one gather. A number: they stay
            sharded over that many ranks.
        merges_units: Whether few exchanges carry the parameters of all units, if they stay gathered and the collectives
            of :mod:`lightning_dist.mesh.collectives` are used. Nothing is then computed while data are under way.
        direct_collectives: Whether to use the collectives of :mod:`lightning_dist.mesh.collectives`; None: on gloo
            only.
        gather_as: Function of a module and a parameter's name in it, which returns how the parameter is gathered as a
            tensor of another class, in fewer bytes; None: as it is. It is called for the parameters of units that are
            gathered for their forward only.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int = True
    merges_units: bool = False
    direct_collectives: bool | None = None
    gather_as: Callable[[nn.Module, str], WrapShard | None] | None = None


class Sharding(ParameterForms):
    """Shard the parameters of each unit over the last axis of ``mesh`` by FSDP2.

    Args:
        mesh: A mesh with the axes ``(dp_shard,)`` or ``(dp_replicate, dp_shard)``.
        config: Dtypes of parameters and gradients, and when gathered units are freed.
    """

    def __init__(self, mesh: DeviceMesh, config: ShardingConfig) -> None:
        self._mesh = mesh
        self._config = config
        # FSDP2 would also cast data, such as timesteps, targets and masks, which autocast leaves as they are.
        self._policy = MixedPrecisionPolicy(config.param_dtype, config.reduce_dtype, cast_forward_inputs=False)
        if config.gather_as is not None and config.reshard_after_forward not in (True, False):
            raise ValueError(
                f"float8_all_gather=True with reshard_after_forward={config.reshard_after_forward!r}: FSDP2 keeps parts"
                " of weights over fewer ranks only in their own dtype. Use True or False."
            )
        self._is_direct = config.direct_collectives
        on_host = backend_of(mesh.get_group(mesh.ndim - 1)) == "gloo" and mesh.device_type == "cpu"
        if self._is_direct and not on_host:
            raise ValueError(
                f"direct_collectives=True sends tensors of the CPU over gloo, and this run has tensors on"
                f" {mesh.device_type}: leave it out, or use False."
            )
        if self._is_direct is None:
            self._is_direct = on_host
        self._num_bytes_sent = self._num_bytes_to_replicas = 0
        self._groups: list[ShardedGroup] = []
        self._reductions: deque[Transfer] = deque()
        self._bytes_under_way = 0
        self._holders: list[nn.Module] = []
        self._gathered_wrapped: list[nn.Parameter] = []

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units that are gathered and reduced together."""
        return merge_units(units, _MAX_MERGED_BYTES) if self._config.merges_units and self._is_direct else units

    def attach(self, parallel: Parallel) -> None:
        """Keep the module and its units, and collect what other techniques require of the sharding."""
        self._parallel = parallel
        self._module = parallel.module
        for part in self._module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False  # FSDP2 reduces only dense gradients; their values are the same.
        units = parallel.units
        self._last_block = next((unit for unit in reversed(units) if unit.kind == "block"), None)
        names = [" and ".join(filter(None, unit.names)) or type(self._module).__name__ for unit in units]
        # Units that stay sharded over some ranks after their forward are gathered over a smaller group.
        under_way = deque[Transfer]()
        self._paths: defaultdict[str, SamePath] = defaultdict(lambda: SamePath(names, under_way))
        self._shard_dims = bound(parallel.techniques, ParameterRules.shard_dim)
        self._param_dtypes = bound(parallel.techniques, ParameterRules.param_dtype)
        self._write_back_data = bound(parallel.techniques, ParameterForms.write_back_data)
        self._is_form = bound(parallel.techniques, ParameterForms.is_form_of_parameter)
        self._reducer = find_gradient_reducer(parallel.techniques)
        self._memory = find_shard_memory(parallel.techniques)
        self._offload = OffloadPolicy()
        if self._memory is not None:
            self._offload = CPUOffloadPolicy(pin_memory=self._memory.is_pinned)

    def manage_unit(self, unit: Unit) -> ShardedGroup:
        """Let FSDP2 shard the parameters of ``unit``. This is a collective over the mesh."""
        mesh = self._mesh if unit.mesh is None else unit.mesh
        modules: list[nn.Module] = unit.modules if unit.has_forward else [_Holder(unit.params.values())]
        group = self._shard(unit, modules, mesh)
        self._cast_inputs_of(unit)
        if not unit.has_forward:
            self._holders.append(modules[0])
            group.put_into(_places(unit.params.values(), unit.owners))
        if unit.stays_gathered:
            group.wait_for_end_of_backward()
        index = next(index for index, other in enumerate(self._parallel.units) if other is unit)
        if self._config.gather_as is not None and not unit.stays_gathered:
            self._gathered_wrapped += group.gather_wrapped(
                self._config.gather_as, partial(self._max_over_ranks, index, mesh)
            )
        if self._is_direct:
            self._exchange_directly(group, cast(FSDPModule, modules[0]), index, mesh)
        if self._memory is not None:
            group.keep_shards_in(self._memory)
        if self._write_back_data:
            group.write_back_data = self._was_replaced
        if self._is_form:
            group.is_other_form = self._is_other_form
        if self._reducer is not None:
            group.reduce_between_replicas_by(self._reducer)
        self._groups.append(group)
        return group

    def _shard(self, unit: Unit, modules: list[nn.Module], mesh: DeviceMesh) -> ShardedGroup:
        """Shard the parameters of ``unit``, which ``modules`` hold, over ``mesh``, and return their group."""
        # The last block's backward directly follows its forward, for which it would have to be gathered again.
        stays_gathered = unit.stays_gathered
        stays_gathered |= unit is self._last_block and self._config.reshard_after_forward is True
        reshards = self._config.reshard_after_forward
        if reshards not in (True, False) and mesh.size(mesh.ndim - 1) % reshards:
            reshards = True  # Experts are sharded over fewer ranks than other parameters.
        originals = {
            (part, key): param
            for top in modules
            for part in top.modules()
            for key, param in part.named_parameters(recurse=False, remove_duplicate=False)
        }
        dtypes = {
            id(param): dtype
            for owner in unit.owners
            if (dtype := self._own_dtype(owner)) is not None
            for param in owner.parameters(recurse=False)
        }
        with OneEmptyShard():
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                reshard_after_forward=False if stays_gathered else reshards,
                mp_policy=self._policy,
                offload_policy=self._offload,
                ignored_params=set(self._module.parameters()) - set(unit.params.values()),
                shard_placement_fn=self._placement if self._shard_dims else None,
            )
        group = _compat.sharded_group(modules[0])
        group.count_bytes = self._count_bytes
        group.count_bytes_to_replicas = self._count_bytes_to_replicas
        group.take_hooks(originals)
        if dtypes:
            group.gather_in(lambda place: dtypes.get(id(originals[place])))
        return group

    def _cast_inputs_of(self, unit: Unit) -> None:
        """Let the modules of ``unit`` cast their inputs if parameters are gathered in another dtype than stored."""
        low, stored = self._config.param_dtype, {param.dtype for param in unit.params.values()}
        if low is not None and any(dtype.is_floating_point and dtype != low for dtype in stored):
            for module in unit.modules if unit.has_forward else ():
                if self._own_dtype(module) is None:
                    module.register_forward_pre_hook(_CastHiddenStates(low), with_kwargs=True)
            for owner in unit.owners:
                if isinstance(owner, _ONE_DTYPE) and self._own_dtype(owner) is None:
                    owner.register_forward_pre_hook(partial(_cast_inputs, low), with_kwargs=True)

    def _exchange_directly(self, group: ShardedGroup, sharded: FSDPModule, index: int, mesh: DeviceMesh) -> None:
        """Let ``group``, that of the unit number ``index``, exchange parameters and gradients in one round."""
        # torch names the interface of these objects only in a private module.
        all_gather: Any = DirectAllGather(partial(self._begin_exchange, "gather", index))
        reduce_scatter: Any = TwoShotReduceScatter(
            partial(self._begin_exchange, "reduce", index), partial(self._take_reduction, group)
        )
        sharded.set_custom_all_gather(all_gather)
        sharded.set_custom_reduce_scatter(reduce_scatter)
        # Ranks then wait for each other once in a forward, and not in each block.
        if self._config.reshard_after_forward is False:
            group.gather_for_step()
        group.reduces_in_background = mesh.ndim == 1 and mesh.size() > 1
        group.finish_other_reductions = self._finish_reductions

    def _placement(self, param: nn.Parameter) -> Shard | None:
        dims = (shard_dim(param) for shard_dim in self._shard_dims)
        dim = next((dim for dim in dims if dim is not None), None)
        return None if dim is None else Shard(dim)

    def _own_dtype(self, owner: nn.Module) -> torch.dtype | None:
        """Return the dtype in which ``owner`` computes with its own parameters; None: that of the configuration.

        Norms with running statistics compute with parameters as they are stored, like the statistics, which torch needs
        to have the same dtype.
        """
        dtypes = (param_dtype(owner) for param_dtype in self._param_dtypes)
        found = next((dtype for dtype in dtypes if dtype is not None), None)
        if found is None and isinstance(owner, NORM) and self._config.param_dtype is not None:
            stored = next((param.dtype for param in owner.parameters(recurse=False)), None)
            return None if stored == self._config.param_dtype else stored
        return found

    def _was_replaced(self, param: nn.Parameter) -> bool:
        return any(write_back_data(param) for write_back_data in self._write_back_data)

    def _is_other_form(self, module: nn.Module, name: str, held: Tensor | None) -> bool:
        return any(is_form(module, name, held) for is_form in self._is_form)

    def finish(self) -> None:
        """Create the FSDP root, after all units have got their groups.

        Raises:
            ValueError: If parameters were to be gathered as tensors of another class, and none can be.
        """
        if self._config.gather_as is not None and not self._gathered_wrapped:
            raise ValueError(
                "float8_all_gather=True: no weight can be gathered in float8. It must be that of a converted layer in a"
                " repeated block (name their classes as units=[...]), be tied to no other, and divide by"
                f" dp_shard_size={self._mesh.size(self._mesh.ndim - 1)}. Leave it out."
            )
        for group in self._groups:
            if group.unit.has_forward:
                for module in group.unit.modules:
                    _compat.gather_before_views(module)
        self._unused = UnusedParameters(
            self._groups, self._mesh, self._begin_end if self._is_direct else None, self._finish_reductions
        )
        self._root = _StepRoot(self._module, self._holders)
        fully_shard(self._root, mesh=self._mesh, ignored_params=set(self._module.parameters()))
        _compat.initialize_root(self._root)
        if self._groups and self._mesh.device_type != "cpu":
            call_after_writes(self._groups[0].let_gathers_follow_writes)

    def _begin_exchange(
        self, action: Action, unit: int, received: Tensor, sent: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Transfer:
        """Begin to exchange data, and check that all ranks take the same action if they run equal numbers of steps."""
        if self._parallel.stays_gathered:
            return begin_exchange(received, sent, group)
        return self._paths[group.group_name].begin(action, unit, received, sent, group)

    def _take_reduction(self, group: ShardedGroup, reduction: Transfer, output: Tensor) -> bool:
        """Return whether the end of the backward waits for ``reduction``, and keep it in this case.

        Few reductions are under way at the same time, so that they do not take much memory.
        """
        if not group.reduces_later:
            return False

        num_bytes = output.nbytes * group.mesh.size()

        def finish() -> None:
            self._bytes_under_way -= num_bytes
            reduction.wait()
            group.finish_reduction(output)

        self._reductions.append(Transfer(finish))
        self._bytes_under_way += num_bytes
        while self._bytes_under_way > MAX_BYTES_UNDER_WAY and len(self._reductions) > 1:
            self._reductions.popleft().wait()
        return True

    def _finish_reductions(self) -> None:
        while self._reductions:
            self._reductions.popleft().wait()

    def _max_over_ranks(self, unit: int, mesh: DeviceMesh, values: Tensor) -> Tensor:
        """Return the elementwise maximum of ``values`` over the ranks that gather ``unit``. This is a collective."""
        group = mesh.get_group(mesh.ndim - 1)
        if not self._is_direct:
            dist.all_reduce(values, dist.ReduceOp.MAX, group)
            return values
        received = values.repeat(group.size(), 1)
        self._begin_exchange("gather", unit, received, [values] * group.size(), group).wait()
        return received.amax(dim=0)

    def table_rows(self) -> Rows:
        """Return a row of the start-up table with the number of parameters that are gathered in fewer bytes."""
        if self._config.gather_as is not None:
            yield "gather", f"{len(self._gathered_wrapped)} weights in float8"

    def _begin_end(self, flags: Tensor) -> Callable[[], Tensor]:
        """Begin to check that all ranks that share the parameters have ended the forward or the backward.

        This is a collective over the last axis of the mesh.

        Args:
            flags: Numbers of dtype uint8, of shape ``(m,)``.

        Returns:
            A function that waits for the check, and returns the largest of each rank's flags.
        """
        group = self._mesh.get_group(self._mesh.ndim - 1)
        # The message is long enough to carry the check.
        sent = functional.pad(flags, (0, 16))
        received = sent.repeat(group.size(), 1)
        exchange = self._begin_exchange("end", 0, received, [sent] * group.size(), group)

        def finish() -> Tensor:
            exchange.wait()
            return received.amax(dim=0)[: flags.numel()]

        return finish

    def wrap_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that runs ``step`` as a forward of the FSDP root."""
        return partial(self._root, step)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Let the step in this context use sharded parameters, which are then gathered on use."""
        for group in self._groups:
            group.begin_stand_ins(self._stand_in)
        try:
            yield
        finally:
            for group in self._groups:
                group.end_stand_ins()

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Let a rerun use sharded parameters of ``unit``, which are then gathered on use, as in the forward.

        No hook gathers them if the step has called the block other than by ``block(...)``.
        """

        def begin() -> Callable[[], AbstractContextManager[None]]:
            has_run = False

            @contextmanager
            def context() -> Iterator[None]:
                nonlocal has_run
                is_rerun, has_run = has_run, True
                group = next((group for group in self._groups if group.unit is unit), None) if is_rerun else None
                if group is None or group.is_gathered:
                    yield
                    return
                group.begin_stand_ins(self._stand_in)
                try:
                    yield
                finally:
                    group.end_stand_ins()

            return context

        return begin

    def _stand_in(self, param: Tensor, dtype: torch.dtype | None, on_gradient: Callable[[], None]) -> Tensor:
        # The ranks of ep, among which only experts are distributed, have different parts of the batch as well.
        axes = (*(self._mesh.mesh_dim_names or ()), "ep")
        gather = partial(whole_for_step, data_parallel_axes=axes, dtype=dtype, on_gradient=on_gradient)
        return GatheredOnUse(param, gather)

    def copies(self) -> Iterable[tuple[str, Tensor, nn.Parameter]]:
        """Yield name, gathered parameter and shard of the parameters that have been gathered before."""
        for group in self._groups:
            yield from group.copies()

    def after_step(self, backward_follows: bool) -> None:
        """Check that all ranks have ended the forward, if no backward follows. This is a collective in that case."""
        if self._is_direct and not backward_follows and not self._parallel.stays_gathered:
            self._begin_end(torch.empty(0, dtype=torch.uint8))()

    def after_error(self) -> None:
        """Reset FSDP2's state, and drop the gradients of a step that failed in its microbatches."""
        self._reductions.clear()
        self._bytes_under_way = 0
        _compat.reset_after_error(self._root)
        if self._parallel.runs_microbatches:
            for group in self._groups:
                group.drop_unreduced()

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Agree between ranks on which parameters have gradients, at the end of the backward in this context.

        This is a collective over the mesh.
        """
        with self._unused.agreed():
            yield

    def after_backward(self, reduces: bool) -> None:
        """Reduce the gradients that no hook of a module has reduced, and let the device wait for all reductions.

        FSDP2 makes the device wait at the end of a backward, before the ranks have agreed on used parameters.
        """
        if self._unused.has_reduced or any(group.has_unreduced_gradients() for group in self._groups):
            _compat.flush_gradients(self._root)

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to gather parameters and to reduce gradients."""
        sent = {"comm/dp_shard_mib_per_step": self._num_bytes_sent}
        if self._mesh.ndim > 1 and self._reducer is None:  # Else the reducer counts what it sends.
            sent["comm/dp_replicate_mib_per_step"] = self._num_bytes_to_replicas
        self._num_bytes_sent = self._num_bytes_to_replicas = 0
        return {name: num_bytes / num_steps / 2**20 for name, num_bytes in sent.items()}

    def _count_bytes(self, num_bytes: int) -> None:
        """Add up what training steps send; those of an evaluation are left out."""
        if self._module.training:
            self._num_bytes_sent += num_bytes

    def _count_bytes_to_replicas(self, num_bytes: int) -> None:
        self._num_bytes_to_replicas += num_bytes

    def around_microbatches(self) -> AbstractContextManager[None]:
        """Return a context in which backwards add up gradients without reducing them."""
        return _compat.accumulating(self._root, self._groups)

    def reduce_microbatches(self, reduces: bool) -> None:
        """Reduce the gradients that the backwards of microbatches have added up."""
        if reduces:
            with self._unused.agreed():
                _compat.reduce_gradients(self._root, self._groups)


_MAX_MERGED_BYTES = 16 * 2**20
"""Size of a merged unit. Larger messages take no less time per byte, and need memory."""

_ONE_DTYPE = (
    nn.EmbeddingBag, nn.GroupNorm, nn.LayerNorm, nn.PReLU, nn.RMSNorm, nn.RNNBase, nn.RNNCellBase
)  # fmt: skip
"""Classes of layers that autocast does not convert on every device, and that need inputs of their parameters' dtype."""


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast all floating-point inputs of a layer to ``dtype``."""

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(converted, args), tree_map(converted, kwargs)


class _CastHiddenStates:
    """Cast the hidden states among the inputs of a block to ``dtype``, but not its data, such as masks or timesteps.

    Hidden states are floating-point tensors that require gradients. When gradients are disabled, the arguments that
    were hidden states in training are cast.

    Args:
        dtype: The dtype that parameters are gathered in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._hidden: set[int | str] = set()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of ``module`` with cast hidden states; this is a forward pre-hook."""

        def converted(key: int | str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return tree_map(lambda leaf: self._lower(leaf) if _is_hidden(leaf) else leaf, value)
            if _is_hidden(value):
                self._hidden.add(key)
            elif torch.is_grad_enabled() or key not in self._hidden:
                return value
            return self._lower(value)

        return (
            tuple(converted(place, value) for place, value in enumerate(args)),
            {key: converted(key, value) for key, value in kwargs.items()},
        )

    def _lower(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


class _StepRoot(nn.Module):
    """Represent the FSDP root, whose forward is a step of the user's module."""

    def __init__(self, module: nn.Module, holders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.holders = nn.ModuleList(holders)

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()


class _Holder(nn.Module):
    """Hold parameters for ``fully_shard`` whose own modules must keep their class and get no hooks."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self.register_parameter(str(index), param)


def _places(params: Iterable[nn.Parameter], owners: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that hold it and its names there."""
    held = [(owner, key, param) for owner in owners for key, param in own_parameters(owner).items()]
    return [[(owner, key) for owner, key, other in held if other is param] for param in params]
