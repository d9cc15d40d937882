"""Define the technique that cuts a module into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist.mesh.consensus import check_agreement, raise_on_all_ranks
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.mesh.timeline import Timeline
from lightning_dist.model.initialization import broadcast_tensors
from lightning_dist.model.original_module import OriginalModule
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_norms import total_norm_of
from lightning_dist.parameters.shard_step import OwnStates
from lightning_dist.techniques.pipeline.in_turn import StagesInTurn
from lightning_dist.techniques.pipeline.outside_of_steps import AllStages
from lightning_dist.techniques.pipeline.replay import Replay
from lightning_dist.techniques.pipeline.schedule_runner import PreparedStep, ScheduleRunner
from lightning_dist.techniques.pipeline.shared import SharedParameters
from lightning_dist.techniques.pipeline.simulation import simulate
from lightning_dist.techniques.pipeline.stages import PipelineConfig, drop_remote, find_stages, own_units
from lightning_dist.techniques.pipeline.whole_model import whole_model
from lightning_dist.techniques.pipeline.whole_state import (
    optimizer_state_of_all,
    with_one_writer_per_tensor,
    with_replicated_tensors,
)
from lightning_dist.techniques.protocol import RemoteParts, Rows, SavedState, Scheduled
from lightning_dist.tracing.step_graph import KnownPaths, Readable, StepGraph

__all__ = ["Pipeline"]


class Pipeline(RemoteParts, SavedState, Scheduled):
    """Cut a module into stages, and run its steps on the stages of this rank.

    Creating an instance is a collective over all processes.

    Args:
        root: The user's module with the parameters of all stages, before it is changed in any way.
        config: Number of ranks and stages, schedule, and the step that is traced to cut the module.
        units: All units of the module, from :func:`~lightning_dist.model.units.find_units`; those of the kind ``block``
            are its repeated blocks.
        group: Process group of the pipeline's ranks, for collectives.
        stage_to_stage: Process group of the same ranks, for sends and receives.
        parameter_mesh: Device mesh of the ranks that have the same stages.
        data_parallel_rank: Index of this rank's part of the global batch; ranks with different parts draw different
            random numbers.
        splits_backward: Whether a schedule may compute the gradients of weights later than those of inputs (see
            :class:`~lightning_dist.techniques.pipeline.schedule_runner.ScheduleRunner`).

    Raises:
        OtherRankError: If the module cannot be cut on another rank, or is cut differently there.
    """

    runs_before_first_step = False

    def __init__(
        self,
        root: nn.Module,
        config: PipelineConfig,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        stage_to_stage: dist.ProcessGroup,
        parameter_mesh: DeviceMesh,
        data_parallel_rank: int,
        splits_backward: bool = True,
    ) -> None:
        device = torch.device(parameter_mesh.device_type)
        self._original_module = OriginalModule(root)
        blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
        with raise_on_all_ranks("cutting the model into stages"):
            self.stages = find_stages(root, config, blocks, device)
        check_agreement("The split of the model into stages", str(sorted(self.stages.stages_of_param.items())))
        self.config = config
        self.group = group
        self._stage_to_stage = stage_to_stage
        self.own_stages = config.stages_on(dist.get_rank(group))
        self.is_last = self.stages.num_stages - 1 in self.own_stages
        self.last_rank = config.rank_of(self.stages.num_stages - 1)
        self._splits_backward = splits_backward
        self._root = root
        self._device = device
        self._mesh = parameter_mesh
        self._data_parallel_rank = data_parallel_rank
        self.readable: Readable = {}
        """The classes, besides modules, whose attributes a step's path may depend on, with these attributes' names."""
        self.differs_between_ranks: tuple[type, ...] = ()
        """Classes of objects whose attributes ranks change differently, such as metrics that only one rank updates."""
        self._paths: dict[object, KnownPaths] = {}

    @property
    def stages_in_turn(self) -> StagesInTurn:
        """Return the object that lets the stages work in turn.

        Raises:
            RuntimeError: If they work by a schedule.
        """
        if self.in_turn is None:
            raise RuntimeError("The stages of this pipeline work by a schedule, and not in turn.")
        return self.in_turn

    @property
    def schedule(self) -> str:
        """Return the name of the schedule."""
        return self.config.schedule

    def timeline(self) -> Timeline | None:
        """Return when each action of the latest step with a backward ran. This is a collective over ``pp``."""
        return self.runner.timeline(self.group)

    def expected_bubble(self) -> float:
        """Return the fraction of time that ranks are idle by the schedule, if all actions take equally long."""
        return simulate(self.runner.order).bubble

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Move the tensors that only other ranks' stages need to the meta device, and return this rank's units."""
        self._remote = drop_remote(self._root, self.stages, self.own_stages, units)
        return own_units(units, self._remote)

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers of other ranks' stages, which are on the meta device here."""
        return self._remote.tensors

    def finish(self) -> None:
        """Route the calls of parts through :class:`Replay`, and build what runs the steps on this rank's stages."""
        modules = dict(self._root.named_modules())
        parts = {name: modules[name] for name in self.stages.parts}
        self._replay = Replay(self._root, parts, self._remote.parts, self._device)
        self.runner = ScheduleRunner(
            self._root,
            self.config,
            self.stages,
            self._stage_to_stage,
            self._replay,
            self._data_parallel_rank,
            self._splits_backward,
            self._device,
        )
        self.shared = SharedParameters(self._root, self.stages, self.config, self._stage_to_stage)
        self.all_stages = AllStages(self._root, self._holders(), self.group, self._device)
        self.in_turn: StagesInTurn | None = None
        """The object that runs steps with backwards of their own; None: steps run by a schedule."""
        if self.config.in_turn:
            homes = {part: self.config.rank_of(stages[0]) for part, stages in self.stages.stages_of_part.items()}
            self.in_turn = StagesInTurn(
                self._root,
                homes,
                self._replay,
                self.all_stages,
                self.shared,
                self.group,
                self._data_parallel_rank,
                self._device,
            )
        self._original_module.record_changes()

    def after_microbatches(self, reduces: bool) -> None:
        """Sum the gradients of parameters that several stages share, if gradients are reduced now.

        This is a collective over ``pp`` in that case.

        Args:
            reduces: Whether gradients are reduced now, and not only added up.
        """
        if reduces:
            self.shared.sum_gradients()

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which hooks, too, see the parameters of other stages as meta tensors."""
        return self.all_stages.switched_off()

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends to other stages in a step."""
        num_bytes = self.runner.take_bytes_sent() + (self.in_turn.take_bytes_sent() if self.in_turn else 0)
        return {"comm/pp_mib_per_step": num_bytes / num_steps / 2**20}

    def table_rows(self) -> Rows:
        """Return the rows of the start-up table that show on which ranks the stages are, and how they are run."""
        for stage, share in enumerate(self.stages.costs):
            parts = [part for part in self.stages.parts if stage in self.stages.stages_of_part[part]]
            span = parts[0] if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
            where = f"{stage} on {self.config.rank_of(stage)}"
            yield "" if stage else "stages", f"{where}: {span}, {share:.0%} of the time as estimated"
        shared = sum(len(needed) > 1 for needed in self.stages.stages_of_param.values())
        if shared:
            yield "", f"{shared} parameters are on several stages, their gradients summed"
        if self.config.in_turn:
            yield "schedule", "none: with manual optimization the stages work in turn, each on a rank's whole batch"
            return
        yield "schedule", self.config.description

    def known_path(self, key: object, arguments: Sequence[Any] = ()) -> int:
        """Return the number of the known path that a step takes on this rank, or -1 if it must be traced.

        Args:
            key: Hashable key of the kind of step (such as the shapes of its batch). Each key has its own known paths.
            arguments: The arguments of the step after its batch, on which its path may depend.
        """
        return self._paths.setdefault(key, KnownPaths(self._root, self.readable)).taken(arguments)

    def is_same_on_all_ranks(self, key: object, path: int) -> bool:
        """Return whether a known path depends on no attributes that only one rank may have changed.

        Args:
            key: The key for which :meth:`known_path` was called before.
            path: The number that :meth:`known_path` returned. The result is False for -1.
        """
        if path < 0 or self._paths[key].known(path).changed_in_parts:
            return False
        return not self._paths[key].reads_from(path, self.differs_between_ranks)

    def trace(self, key: object, trace: Callable[[Sequence[Any]], StepGraph], arguments: Sequence[Any] = ()) -> int:
        """Trace a step, and return the number of a known path that is equal to its path, or -1 if there is none.

        Args:
            key: The key for which :meth:`known_path` was called before.
            trace: Function that traces the step on a microbatch with the arguments that it is given.
            arguments: The arguments of the step after its batch.
        """
        return self._paths[key].trace(arguments, trace)

    def prepare(
        self, key: object, path: int, is_traced: bool, microbatches: Sequence[Any], has_backward: bool
    ) -> PreparedStep:
        """Plan how the next step runs on the stages, or return the plan of an earlier step that took the same path.

        Args:
            key: The key for which :meth:`known_path` was called before.
            path: The number of the step's path, on which all ranks of the pipeline agree, or -1 if the path is new.
            is_traced: Whether :meth:`trace` has just traced the step.
            microbatches: The microbatches into which the batch of this step is split.
            has_backward: Whether a backward is run for each microbatch, as in training.
        """
        paths = self._paths[key]
        graph = paths.remember(path) if is_traced else paths.known(path)
        prepared = self.runner.prepare(graph, len(microbatches), has_backward)
        if has_backward:
            self.shared.record_used_parameters(graph)
        return prepared

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank the whole model in this context, so that it may call the model alone.

        This is a collective over ``pp``.
        """
        with whole_model(self._root, self.group, self._device), self._replay.calls_allowed_outside_steps():
            yield

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with meta tensors in place of those that ranks of other stages write.

        These are the tensors of other stages and the buffers in :attr:`buffers_of_others`.

        Args:
            state: A state dict of the module, with meta tensors for the parameters of other stages.
        """
        return with_replicated_tensors(state, self._mesh, self.buffers_of_others)

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Refuse to run a block again within which a stage may end.

        Raises:
            RuntimeError: When a forward of such a block begins.
        """
        parts = [self._root.get_submodule(part) for part in self.stages.parts]
        if any(module is block for part in parts for module in part.modules()):
            return lambda: nullcontext
        name = next(name for name, module in self._root.named_modules() if module is block)

        def begin() -> Callable[[], AbstractContextManager[None]]:
            raise RuntimeError(
                f"activation_checkpointing with pp_size={self.config.pp_size}: {name} cannot run again in the backward,"
                " because the step uses its layers other than by calling the block, so that a stage may end inside it."
                " Use it by block(...) alone, or leave activation_checkpointing out."
            )

        return begin

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let hooks use the states of ``optimizer`` as those of all stages, also after a state was loaded."""

        def show(optimizer: Optimizer) -> None:
            if isinstance(optimizer.state, OwnStates):
                optimizer.state.before_look_up = partial(self.all_stages.show_states, optimizer)

        show(optimizer)
        return optimizer.register_load_state_dict_post_hook(show).remove

    def hook_state_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint in which one stage writes each tensor that others lack.

        This is a collective over ``pp``.

        Args:
            checkpoint: The entries of a checkpoint other than the states of the module and of the optimizers.
        """
        with self.all_stages.switched_off():
            return with_one_writer_per_tensor(checkpoint, self.group, self._mesh)

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the meta tensors that the module has for other stages to a state dict read from a checkpoint."""
        with self.all_stages.switched_off():
            for name, value in self._root.state_dict().items():
                if isinstance(value, Tensor) and is_remote(value):
                    state.setdefault(name, value)

    def collect_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Gather the dictionaries of all stages into one list. This is a collective over ``pp``."""
        return [part for of_stage in gather_objects(parts, self.group) for part in of_stage]

    def original(self) -> AbstractContextManager[None]:
        """Return a context in which the module is as it was before it was parallelized."""
        return self._original_module.restored()

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state together with that of other stages. This is a collective over ``pp``."""
        return optimizer_state_of_all(state, self.group, self._mesh)

    def agree_on_buffers(self) -> None:
        """Copy the last stage's buffers outside of parts to all ranks of the pipeline.

        This is a collective over ``pp``. Code between parts may change these buffers, and only the last stage runs all
        of that code.
        """
        broadcast_tensors(list(self._buffers_between().values()), self.group, self.last_rank)

    @property
    def buffers_of_others(self) -> frozenset[str]:
        """Return the names of the buffers of this rank whose values are up to date only on the rank of the last stage.

        The result is empty on that rank.
        """
        return frozenset() if self.is_last else frozenset(self._buffers_between())

    def _buffers_between(self) -> dict[str, Tensor]:
        """Return the buffers outside of parts, by name."""
        parts = tuple(f"{part}." for part in self.stages.parts)
        return {name: buffer for name, buffer in self._root.named_buffers() if not name.startswith(parts)}

    def _holders(self) -> dict[str, frozenset[int]]:
        """Return the ranks of the pipeline that have each parameter, and each buffer of a part, by name."""
        held = {name: self.stages.stages_of_param[name] for name, _ in self._root.named_parameters()}
        for part, stages in self.stages.stages_of_part.items():
            held |= {f"{part}.{name}": stages for name, _ in self._root.get_submodule(part).named_buffers()}
        return {name: frozenset(map(self.config.rank_of, stages)) for name, stages in held.items()}

    def total_norm(self, gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages, counting shared parameters once.

        This is a collective over ``pp``.

        Args:
            gradients: The gradients of this rank's parameters. Meta tensors among them, which stand for gradients of
                other stages, are left out.
            order: The order of the norm: positive, and possibly infinite.
        """
        with self.all_stages.switched_off():
            return self._total_norm([gradient for gradient in gradients if not is_remote(gradient)], order)

    def _total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        params = {param.grad: name for name, param in self._root.named_parameters() if param.grad is not None}
        counted = [g for g in gradients if g not in params or self._is_first_with(params[g])]
        norm = total_norm_of(counted, order) if counted else torch.zeros((), device=self._device)
        # All ranks choose the same dtype, also those that have none of the gradients.
        dtypes = {param.dtype for param in self._root.parameters()}
        norm = norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, norm, group=self.group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total

    def _is_first_with(self, name: str) -> bool:
        return self.stages.stages_of_param[name][0] in self.own_stages
