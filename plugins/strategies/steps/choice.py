"""Choose the kind of steps that a module runs, and complete its configuration from its first step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.checks import refuse_for_pipeline
from lightning_dist.plugins.strategies.steps.base import Steps
from lightning_dist.plugins.strategies.steps.example_step import FakeStep, example_args, example_step, fake_step
from lightning_dist.plugins.strategies.steps.in_turn import StepsInTurn
from lightning_dist.plugins.strategies.steps.manual_trace import manual_operations, manual_operations_on_fakes
from lightning_dist.plugins.strategies.steps.microbatching import BatchSplitter
from lightning_dist.plugins.strategies.steps.pipelined import PipelinedSteps
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.steps.whole import WholeSteps
from lightning_dist.techniques.compression import Compression, LocalUpdates
from lightning_dist.techniques.context_parallel import ContextParallel, ContextParallelConfig
from lightning_dist.techniques.expert_parallel import ExpertParallel
from lightning_dist.techniques.float32_modules import refuse_other_patterns
from lightning_dist.techniques.pipeline import SCHEDULES, Pipeline, PipelineConfig
from lightning_dist.techniques.tensor_parallel import TensorParallel, TensorParallelConfig
from lightning_dist.techniques.tiling import Tiling, TilingConfig

__all__ = ["complete_config", "make_steps", "refuse_other_config"]


def make_steps(module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing) -> Steps:
    """Create the object that runs the steps of ``module``, of the first kind that can run them.

    Args:
        module: The LightningModule whose steps are run.
        parallel: The engine's object for ``module``, which gathers its parameters and reduces its gradients.
        precision: Lightning's precision plugin, in whose contexts steps run and which scales losses.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """
    kinds: tuple[type[Steps], ...] = (StepsInTurn, PipelinedSteps, WholeSteps)
    kind = next(kind for kind in kinds if kind.can_run(parallel))
    return kind(module, parallel, precision, tracing)


def complete_config(
    config: ParallelConfig,
    layout: ParallelLayout,
    module: LightningModule,
    trainer: Trainer,
    tracing: StepTracing,
    copied: ParallelModule | None,
) -> ParallelConfig:
    """Add to ``config`` the first step, from which techniques find plans and stages.

    This is a collective over all processes.

    Args:
        config: The configuration from the strategy's arguments.
        layout: The sizes of the mesh's axes.
        module: The user's module, or a copy of it.
        trainer: The Trainer whose run begins, which gives the first batch.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
        copied: The parallel module of which ``module`` is a copy; None: it is not a copy.
    """
    return replace(
        config,
        tensor_parallel=_tensor_parallel(config.tensor_parallel, layout, module, trainer, copied),
        context_parallel=_context_parallel(config.context_parallel, layout, module, trainer, copied),
        tiling=_tiling(config.tiling, module, trainer, copied),
        pipeline=None if config.pipeline is None else _pipeline(config.pipeline, layout, module, trainer, tracing),
    )


def _tensor_parallel(
    config: TensorParallelConfig,
    layout: ParallelLayout,
    module: LightningModule,
    trainer: Trainer,
    copied: ParallelModule | None,
) -> TensorParallelConfig:
    """Return ``config`` with the plan of the module that ``module`` is a copy of, or with a step to find a plan by."""
    split = None if copied is None else copied.get(TensorParallel)
    if split is not None:
        return replace(config, planned=split.plan)
    if layout.tp == 1:
        return config
    step, why_not = _step_to_plan_by(module, trainer)
    return replace(config, step=step, why_no_step=why_not)


def _context_parallel(
    config: ContextParallelConfig,
    layout: ParallelLayout,
    module: LightningModule,
    trainer: Trainer,
    copied: ParallelModule | None,
) -> ContextParallelConfig:
    """Return ``config`` with the plan of the module that ``module`` is a copy of, or with a step to find a plan by."""
    split = None if copied is None else copied.get(ContextParallel)
    if split is not None:
        return replace(config, planned=split.plan)
    if layout.cp == 1:
        return config
    step, why_not = _step_to_plan_by(module, trainer)
    return replace(config, step=step, why_no_step=why_not)


def _tiling(
    config: TilingConfig, module: LightningModule, trainer: Trainer, copied: ParallelModule | None
) -> TilingConfig:
    """Return ``config`` with the plan of the module that ``module`` is a copy of, or with a step to find a plan by."""
    tiling = None if copied is None else copied.get(Tiling)
    if tiling is not None:
        return replace(config, planned=tiling.plan)
    if not config:
        return config
    step, why_not = _step_to_plan_by(module, trainer)
    return replace(config, step=step, why_no_step=why_not)


def _step_to_plan_by(module: LightningModule, trainer: Trainer) -> tuple[FakeStep | None, str]:
    """Return the step that ``trainer`` is about to run, and why there is none, as ``example_step`` does."""
    around = nullcontext if module.automatic_optimization else partial(manual_operations, module)
    return example_step(module, trainer, around)


def _pipeline(
    config: PipelineConfig, layout: ParallelLayout, module: LightningModule, trainer: Trainer, tracing: StepTracing
) -> PipelineConfig | None:
    """Return ``config`` with the number of microbatches and a step on a microbatch; None if there is nothing to cut.

    Raises:
        MisconfigurationException: If the module does something that a pipeline cannot.
        ValueError: If the number of microbatches does not fit the schedule.
    """
    if layout.pp == 1:
        if config.num_microbatches or config.virtual_stages or config.split:
            rank_zero_warn(
                f"{type(trainer.strategy).__name__} has pp_size=1, so there are no stages: num_microbatches,"
                " virtual_stages, split and schedule have no effect. Use accumulate_grad_batches for smaller batches."
            )
        return None
    if not any(True for _ in module.parameters()):
        return None
    refuse_for_pipeline(module)
    wanted = config.num_microbatches or None
    config = replace(config, pp_size=layout.pp, num_microbatches=wanted or 1)
    args, why_not = example_args(trainer)
    if why_not:
        return replace(config, why_no_step=why_not)
    name = _compat.step_name(trainer)
    if not module.automatic_optimization:
        if wanted or config.schedule != PipelineConfig.schedule:
            rank_zero_warn(
                f"{type(module).__name__} uses manual optimization, for which the stages of a pipeline work in turn on"
                " a rank's whole batch: num_microbatches and schedule have no effect."
            )
        around = partial(manual_operations_on_fakes, module, tracing)
        make = partial(fake_step, module, trainer, name, args, {}, around)
        return replace(config, step=make(), step_in_run=make(is_in_run=True), has_loss=False, in_turn=True)
    splitter = BatchSplitter(module)
    number = splitter.choose_number(args[0], wanted, 4 * config.num_stages)
    config = replace(config, num_microbatches=number)
    if not SCHEDULES[config.schedule].fits(number, config.pp_size, config.num_stages):
        raise ValueError(
            f"num_microbatches={number} is too few for schedule={config.schedule!r} with {config.num_stages}"
            f" stages, or no multiple of what it takes at a time: use a multiple of {config.num_stages}, with a"
            f" batch size that it divides, or schedule={SCHEDULES[config.schedule].fallback!r}."
        )
    part = splitter.split(args[0], number)[0]
    make = partial(fake_step, module, trainer, name, (part, *args[1:]), {}, partial(tracing.around, module))
    return replace(config, step=make(), step_in_run=make(is_in_run=True), has_loss=name == "training_step")


def refuse_other_config(existing: ParallelModule, config: ParallelConfig, layout: ParallelLayout) -> None:
    """Refuse a configuration that differs from the one by which an earlier Trainer has cut the module.

    Args:
        existing: The module as an earlier Trainer has made it parallel.
        config: The configuration from the arguments of this Trainer's strategy.
        layout: The sizes of the mesh's axes.

    Raises:
        MisconfigurationException: If the module is cut into other stages, splits sequences otherwise, or compresses
            gradients in another way.
        ValueError: If the module runs other modules in float32.
    """
    refuse_other_patterns(existing.module, config.keep_fp32)
    _refuse_other_reduction(existing, config)
    _refuse_other_splitting(existing, config, layout)
    _refuse_other_experts(existing, config, layout)
    _refuse_other_stages(existing, config, layout)


def _refuse_other_reduction(existing: ParallelModule, config: ParallelConfig) -> None:
    """Refuse another compression or synchronization, with the arguments of :func:`refuse_other_config`."""
    compression = existing.get(Compression)
    local_updates = existing.get(LocalUpdates)
    for name, before, after in (
        ("compression", compression and compression.compressor, config.compression and config.compression.compressor),
        ("sync", local_updates and local_updates.method, config.sync and config.sync.method),
    ):
        if (before and before.arguments) != (after and after.arguments):
            raise MisconfigurationException(
                f"An earlier Trainer has made this {type(existing.module).__name__} parallel with {name}={before},"
                f" which cannot be changed to {after}. Make a new one, and load the weights from a checkpoint."
            )


def _refuse_other_splitting(existing: ParallelModule, config: ParallelConfig, layout: ParallelLayout) -> None:
    """Refuse other parts of sequences or tiles, with the arguments of :func:`refuse_other_config`."""
    split = existing.get(ContextParallel)
    wanted_cp = (layout.cp, config.context_parallel.attention if layout.cp > 1 else "auto")
    found_cp = (1, "auto") if split is None else (split.num_ranks, split.plan.attention)
    if wanted_cp[0] != found_cp[0] or wanted_cp[1] not in ("auto", found_cp[1]):
        raise MisconfigurationException(
            f"This {type(existing.module).__name__} is made parallel by an earlier Trainer with {found_cp} as cp_size"
            f" and attention, and cannot be with {wanted_cp} as well. Make a new one, and load the weights from a"
            " checkpoint."
        )
    if split is not None and split.splits_evaluations != config.context_parallel.splits_evaluations:
        raise MisconfigurationException(
            f"An earlier Trainer has made this {type(existing.module).__name__} parallel with"
            f" split_evaluations={split.splits_evaluations}, which cannot be changed to {not split.splits_evaluations}."
            " Make a new one, and load the weights from a checkpoint."
        )
    tiling = existing.get(Tiling)
    found_tiles = (None, None) if tiling is None else (tiling.config.mlp, tiling.config.loss)
    wanted_tiles = (config.tiling.mlp, config.tiling.loss)
    if found_tiles != wanted_tiles:
        raise MisconfigurationException(
            f"This {type(existing.module).__name__} is made parallel by an earlier Trainer with {found_tiles} as"
            f" tiled_mlp and tiled_loss, and cannot be with {wanted_tiles} as well. Make a new one, and load the"
            " weights from a checkpoint."
        )


def _refuse_other_experts(existing: ParallelModule, config: ParallelConfig, layout: ParallelLayout) -> None:
    """Refuse another distribution of experts, with the arguments of :func:`refuse_other_config`."""
    distributed = existing.get(ExpertParallel)
    found_ep = 1 if distributed is None else distributed.num_ranks
    if layout.ep != found_ep:
        raise MisconfigurationException(
            f"An earlier Trainer has made this {type(existing.module).__name__} parallel with ep_size={found_ep}, which"
            f" cannot be changed to {layout.ep}. Make a new one, and load the weights from a checkpoint."
        )
    found_capacity = None if distributed is None else distributed.capacity
    if distributed is not None and config.expert_capacity != found_capacity:
        raise MisconfigurationException(
            f"An earlier Trainer has made this {type(existing.module).__name__} parallel with"
            f" expert_capacity={found_capacity}, which cannot be changed to {config.expert_capacity}. Make a new one,"
            " and load the weights from a checkpoint."
        )


def _refuse_other_stages(existing: ParallelModule, config: ParallelConfig, layout: ParallelLayout) -> None:
    """Refuse other stages, with the arguments of :func:`refuse_other_config`."""
    pipeline = existing.get(Pipeline)
    was = None if pipeline is None else pipeline.config
    is_cut = layout.pp > 1 and any(True for _ in existing.module.parameters())
    now = replace(config.pipeline, pp_size=layout.pp) if is_cut and config.pipeline is not None else None
    wanted = None if now is None else (now.pp_size, now.schedule, now.stages_per_rank)
    found = None if was is None else (was.pp_size, was.schedule, was.stages_per_rank)
    other_number = was is not None and now is not None and now.num_microbatches not in (0, was.num_microbatches)
    if wanted != found or other_number:
        raise MisconfigurationException(
            f"This {type(existing.module).__name__} is cut into stages by an earlier Trainer, with {found} as pp_size,"
            f" schedule and virtual_stages, and cannot be cut as {wanted} as well. Make a new one, and load the"
            " weights from a checkpoint."
        )
