"""``strategy="pipeline_parallel"``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.consensus import go_on
from lightning_dist.initialization import broadcast_weights
from lightning_dist.layout import REMAINING
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.pipeline import SCHEDULES, Pipeline, PipelineConfig, note_exchange
from lightning_dist.pipeline.whole_state import optimizer_state_of_all, written_by_stage
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.checks import refuse_for_pipeline
from lightning_dist.plugins.strategies.exact_resume import MODELS
from lightning_dist.plugins.strategies.example_input import run_example
from lightning_dist.plugins.strategies.example_step import example_args, fake_step, parameters_unchanged
from lightning_dist.plugins.strategies.hooks_of_all_stages import hooks_of_all_stages
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.plugins.strategies.microbatching import BatchSplitter
from lightning_dist.plugins.strategies.pipelined_steps import PipelinedSteps
from lightning_dist.plugins.strategies.step_collectives import stand_ins_for_collectives
from lightning_dist.plugins.strategies.wrapped_hooks import WrappedHooks

__all__ = ["PipelineParallelStrategy"]


class PipelineParallelStrategy(MeshStrategy):
    """Cuts a model into stages on different devices, through which microbatches of a batch follow each other.

    The module and its steps stay as they are; the ranks of one pipeline have the same part of the batch.

    Args:
        pp_size: Number of processes that stages are on. None: the devices of a node, or what the other sizes leave.
        num_microbatches: Into how many microbatches a rank's part of the batch is split. None: the greatest number up
            to 4 a stage that divides it, and leaves BatchNorm at least two samples.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``interleaved_zero_bubble``, ``zbv`` or
            ``dualpipev``.
        virtual_stages: Number of stages on a process. None: 1, or 2 for a schedule that needs several.
        split: Names of the modules that each stage but the first begins with, such as ``[layers.4, layers.9]``. None:
            balanced by cost.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: what is left.
        dp_replicate_size: Number of replicas. None: 1.
        kwargs: As of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "pipeline_parallel"

    def __init__(
        self,
        pp_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        split: Sequence[str] | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        PipelineConfig(1, schedule, virtual_stages)  # raises for what does not go together
        if num_microbatches is not None and num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1.")
        self._pp_size = pp_size
        self._num_microbatches = num_microbatches
        self._schedule = schedule
        self._virtual_stages = virtual_stages
        self._split_at = split
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._steps: PipelinedSteps | None = None
        self._is_following = False
        self._gradients: list[tuple[Tensor, Tensor]] = []

    @property
    def _pipeline(self) -> Pipeline | None:
        return None if self._sharded is None else self._sharded.get(Pipeline)

    def _requested_sizes(self) -> dict[str, int]:
        pp, shard = self._pp_size, self._dp_shard_size
        if pp is None:
            pp = self.num_processes if shard is None else REMAINING
        return {
            "pp": pp,
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None else shard,
        }

    def _pipeline_config(self, module: LightningModule) -> PipelineConfig | None:
        if self.layout.pp == 1 or not any(True for _ in module.parameters()):
            return None
        args, why_not = example_args(self._trainer)
        config = PipelineConfig(
            self.layout.pp, self._schedule, self._virtual_stages, self._num_microbatches or 1, self._split_at
        )
        if why_not:
            return replace(config, why_no_step=why_not)
        splitter = BatchSplitter(module)
        number = splitter.choose_number(args[0], self._num_microbatches, 4 * config.num_stages)
        config = replace(config, num_microbatches=number)
        if not SCHEDULES[config.schedule].fits(number, config.pp_size, config.num_stages):
            raise ValueError(
                f"num_microbatches={number} is too few for schedule={config.schedule!r} with {config.num_stages}"
                f" stages, or no multiple of what it takes at a time: use a multiple of {config.num_stages}, with a"
                f" batch size that it divides, or schedule={SCHEDULES[config.schedule].for_few!r}."
            )
        part = splitter.split(args[0], number)[0]
        name = _compat.step_name(self._trainer)
        make = partial(fake_step, module, self._trainer, name, (part, *args[1:]), {}, self._following)
        return replace(config, step=make(), step_in_run=make(is_in_run=True), has_loss=name == "training_step")

    def _shard(self, module: LightningModule, copied: ParallelModule | None = None) -> ParallelModule:
        existing = parallelized(module)
        spread = super()._shard(module, copied)
        if existing is not None and copied is None:
            self._check_same_stages(existing, module)
        if spread.get(Pipeline) is not None and copied is None:
            self._steps = PipelinedSteps(module, spread, self._step_context, self._scale, self._following, self._peers)
        return spread

    def _check_same_stages(self, existing: ParallelModule, module: LightningModule) -> None:
        """A module that an earlier Trainer has cut stays as it is."""
        pipeline = existing.get(Pipeline)
        was = None if pipeline is None else pipeline.config
        now = PipelineConfig(self.layout.pp, self._schedule, self._virtual_stages)
        is_cut = self.layout.pp > 1 and any(True for _ in module.parameters())
        wanted = None if not is_cut else (now.pp_size, now.schedule, now.stages_per_rank)
        found = None if was is None else (was.pp_size, was.schedule, was.stages_per_rank)
        other_number = was is not None and self._num_microbatches not in (None, was.num_microbatches)
        if wanted != found or other_number:
            raise MisconfigurationException(
                f"This {type(module).__name__} is cut into stages by an earlier Trainer, with {found} as pp_size,"
                f" schedule and virtual_stages, and cannot be cut as {wanted} as well. Make a new one, and load the"
                " weights from a checkpoint."
            )

    @property
    def _peers(self) -> range:
        """The ranks that have the same stages as this one."""
        per_stage = self.world_size // self.layout.pp
        first = self.global_rank // per_stage * per_stage
        return range(first, first + per_stage)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Around a step that runs on fake tensors: what it gathers and reduces is made of this rank's tensors."""
        before, self._is_following = self._is_following, True
        try:
            assert self.lightning_module is not None
            with stand_ins_for_collectives(self._peers), parameters_unchanged(self.lightning_module):
                yield
        finally:
            self._is_following = before

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks that have a part of the batch; in a step, those of a microbatch."""
        if self._is_following:
            note_exchange(tensor)
            return torch.stack([tensor if sync_grads else tensor.detach()] * self.layout.num_data_parallel)
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a metric over the ranks that have a part of the batch."""
        if self._is_following:
            if not isinstance(tensor, Tensor):
                return tensor
            note_exchange(tensor)
            return tensor.clone()
        return super().reduce(tensor, group, reduce_op)

    def _step_context(self, name: str) -> Any:
        plugin = self.precision_plugin
        return {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }[name]()

    def _scale(self, loss: Tensor) -> Tensor:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def setup(self, trainer: Trainer) -> None:
        """Cut the module into stages, then make its optimizers.

        Raises:
            MisconfigurationException: If the module does something that a pipeline cannot.
        """
        assert self.lightning_module is not None
        if self.layout.pp > 1:
            refuse_for_pipeline(self.lightning_module)
        elif self._num_microbatches or self._virtual_stages or self._split_at:
            rank_zero_warn(
                f"{type(self).__name__} has pp_size=1, so there are no stages: num_microbatches, virtual_stages, split"
                " and schedule have no effect. Use accumulate_grad_batches for smaller batches."
            )
        super().setup(trainer)
        if self._pipeline is not None:
            _compat.run_examples_by(run_example)

    def _wrapped_hooks(self, module: LightningModule, spread: ParallelModule) -> WrappedHooks:
        pipeline = spread.get(Pipeline)
        if pipeline is None:
            return super()._wrapped_hooks(module, spread)
        return hooks_of_all_stages(module, pipeline.all_stages)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; weights of other stages are on the meta device, as this rank's module has them."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._steps is not None and self.lightning_module is not None:
            for name, value in self.lightning_module_state_dict().items():
                if isinstance(value, Tensor) and value.is_meta:
                    for weights in (checkpoint[key] for key in checkpoint.keys() & set(MODELS)):
                        weights.setdefault(name, value)
        return checkpoint

    @contextmanager
    def _outside_of_hooks(self) -> Iterator[None]:
        """Around what a hook may call of the strategy, which works on each rank's own parameters."""
        with nullcontext() if self._steps is None else self._steps.all_stages.switched_off():
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint as a directory, every rank its part."""
        with self._outside_of_hooks():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict; parameters of other stages are on the meta device."""
        with self._outside_of_hooks():
            return super().lightning_module_state_dict()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer; gradients are clipped by the norm of all stages'."""
        if self._pipeline is None:
            return super().optimizer_step(*args, **kwargs)
        with _compat.total_norms(self._pipeline.total_norm):
            return super().optimizer_step(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``training_step`` on microbatches, and their backwards; a collective, as all steps are."""
        if self._steps is None:
            return super().training_step(*args, **kwargs)
        go_on()
        self._checkpoints.before_step()
        if self._begins_accumulation:
            for param in self._steps.parameters:
                param.grad = None
        self._check_batch("training_step", args, kwargs)
        assert self._sharded is not None
        self._sharded.before_training_step(self._begins_accumulation)
        output = self._steps.train(self._weights, args, kwargs)
        # Lightning clears gradients next, before it asks for the backward: they are set aside, and handed back there.
        self._gradients = [(param, param.grad) for param in self._steps.parameters if param.grad is not None]
        for updated, _ in self._gradients:
            updated.grad = None
        return output

    def _step(self, name: str, backward_follows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        if self._steps is None:
            return super()._step(name, backward_follows, args, kwargs)
        self._check_batch(name, args, kwargs)
        return self._steps.evaluate(name, args, kwargs)

    def _agree_on_buffers(self) -> None:
        if self._pipeline is None:
            super()._agree_on_buffers()
            return
        self._checkpoints.before_update()
        assert self.lightning_module is not None
        broadcast_weights(self.lightning_module, buffers_only=True, group=self._data_parallel_group)
        self._pipeline.agree_on_buffers()

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        own = super()._rank_state(checkpoint)
        if self._pipeline is not None:
            mesh = self.layout.parameter_mesh(self.mesh)
            of_others = self._pipeline.buffers_of_others
            for key in checkpoint.keys() & set(MODELS):
                checkpoint[key] = written_by_stage(checkpoint[key], mesh, of_others)
        return own

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, that of other stages on the meta device. A collective."""
        with self._outside_of_hooks():
            state = super().optimizer_state(optimizer)
            if self._pipeline is None or not state:
                return state
            self._arrive_to_save()
            mesh = self.layout.parameter_mesh(self.mesh)
            return optimizer_state_of_all(state, self._pipeline.group, mesh)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand back the gradients that the step has made."""
        if self._steps is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        for param, gradient in self._gradients:
            param.grad = gradient
        self._gradients = []
        if self._syncs_gradients:
            num_microbatches = self._trainer.accumulate_grad_batches
            self._weights.normalize(self.lightning_module.parameters(), num_microbatches)
        return self.precision_plugin.post_backward(loss, self.lightning_module)
