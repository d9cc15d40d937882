"""Refuse modules, callbacks and options that a strategy cannot run, with errors that name alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from traceback import walk_tb

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dist._compat import is_compiled
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import scales_losses
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.wrapped_hooks import defines_hook
from lightning_dist.techniques.options import Arguments, Fit, Run

__all__ = [
    "as_misconfiguration",
    "check_fit",
    "check_optimizers",
    "check_run",
    "explaining_optimizer_errors",
    "refuse_for_pipeline",
    "refuse_what_cannot_work",
    "warn_of_idle_arguments",
]


def refuse_what_cannot_work(strategy: Host, trainer: Trainer) -> None:
    """Refuse modules, callbacks and options that do not work with sharded parameters.

    Args:
        strategy: Strategy of the run, whose device and class name are used.
        trainer: The Trainer that is about to run its module.

    Raises:
        MisconfigurationException: If a fit has no parameters to train, a parameter is lazy, a callback is
            StochasticWeightAveraging or ModelPruning and ranks have parts of the model, or ``sync_batchnorm`` is set
            on the CPU.
    """
    module = trainer.lightning_module
    if trainer.state.fn == TrainerFn.FITTING and not any(True for _ in module.parameters()):
        raise MisconfigurationException(
            f"{type(module).__name__} has no parameters, so there is nothing to train. Create its layers in __init__ or"
            " in configure_model."
        )
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise MisconfigurationException(
                f"The parameter {name!r} of {type(module).__name__} is lazy and has no shape yet, so that it cannot be"
                " distributed. Run the module once on a sample in setup(), or use the layer that is not lazy."
            )
    is_spread = strategy.layout.world_size > strategy.layout.dp_replicate
    for callback in trainer.callbacks if is_spread else ():  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"StochasticWeightAveraging swaps whole modules and does not work with {type(strategy).__name__}; use"
                " WeightAveraging or EMAWeightAveraging, which do."
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                "ModelPruning replaces parameters by masked ones during training, and compares their sizes only within"
                f" each shard: it does not work with {type(strategy).__name__}. Prune the trained model instead: on"
                " every rank, enter lightning_dist.full_parameters(module), load its state_dict() into a new module,"
                " and use torch.nn.utils.prune on that."
            )
    if strategy.layer_sync is not None and strategy.root_device.type == "cpu":
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True) cannot be honoured on the CPU: torch's SyncBatchNorm works on accelerators"
            " only. Remove it, or use GroupNorm or LayerNorm."
        )


def check_run(strategy: Host) -> None:
    """Refuse arguments of techniques that cannot be combined, before processes start.

    Args:
        strategy: Strategy whose layout is known.

    Raises:
        ValueError: If the arguments do not fit each other, the precision or the device.
    """
    run = _run(strategy)
    for options in strategy.config.arguments.options:
        options.check(run, strategy.config.arguments)


def check_fit(strategy: Host, trainer: Trainer) -> None:
    """Refuse arguments of techniques that do not fit the module of a fit. Other runs are not checked.

    Args:
        strategy: Strategy of the run.
        trainer: The Trainer that is about to run its module.

    Raises:
        MisconfigurationException: If an argument does not fit the module, a callback or another argument.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    module, plugin = trainer.lightning_module, trainer.precision_plugin

    def overridden(hooks: Sequence[str]) -> list[str]:
        owners = (module, *trainer.callbacks)  # type: ignore[attr-defined]
        return [f"{type(owner).__name__}.{hook}" for owner in owners for hook in hooks if defines_hook(hook, owner)]

    fit = Fit(
        module=type(module).__name__,
        is_automatic=module.automatic_optimization,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        changes_accumulation=_compat.changes_accumulation(trainer),
        gradient_clip_val=trainer.gradient_clip_val,
        master_weights=type(plugin).__name__ if getattr(plugin, "master_weights", None) else "",
        overridden=overridden,
    )
    run = _run(strategy)
    with as_misconfiguration():
        for options in strategy.config.arguments.options:
            options.check_fit(run, fit, strategy.config.arguments)


def _run(strategy: Host) -> Run:
    plugin = strategy.precision_plugin
    return Run(
        strategy=strategy.strategy_name,
        layout=strategy.layout,
        device_type=strategy.root_device.type,
        num_devices=strategy.num_processes,
        precision=str(plugin.precision),
        scales_losses=scales_losses(plugin),
        gathers_float8=getattr(plugin, "float8_all_gather", False),
    )


def warn_of_idle_arguments(arguments: Arguments, layout: ParallelLayout) -> None:
    """Warn about arguments that have no effect with the sizes of the mesh.

    This is not an error, so that a configuration for several devices can be tried on one.

    Args:
        arguments: The options of all techniques.
        layout: The sizes of the mesh's axes.
    """
    for options in arguments.options:
        sentence = options.without_effect(layout)
        if sentence:
            rank_zero_warn(sentence)


@contextmanager
def as_misconfiguration() -> Iterator[None]:
    """Raise errors of the engine's checks as Lightning's errors of configuration."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def refuse_for_pipeline(module: LightningModule) -> None:
    """Refuse modules that a pipeline cannot run, because its schedule interleaves the forwards and the backwards.

    Args:
        module: The LightningModule that is to be cut into stages.

    Raises:
        MisconfigurationException: If the module overrides ``backward`` and uses automatic optimization, takes
            ``dataloader_iter`` in its training step, or was compiled by ``module.compile()``.
    """
    name = type(module).__name__
    instead = "use a strategy without stages, such as hybrid_shard or tensor_parallel"
    if module.automatic_optimization and is_overridden("backward", module):
        raise MisconfigurationException(
            f"{name} overrides backward, which a pipeline would never call: its schedule runs the backwards. Put what"
            f" it does into the loss, or into on_after_backward, or {instead}."
        )
    for path, part in module.named_modules():
        # The blocks of a module that is parallel already were compiled by its pipeline.
        if is_compiled(part) and parallelized(module) is None:
            raise MisconfigurationException(
                f"{path or name} was compiled by module.compile(), which a pipeline would undo: it decides itself which"
                " modules run. Set compile=True on the strategy, which compiles each block."
            )
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise MisconfigurationException(
            f"{name}.training_step takes dataloader_iter, from which each stage would take another batch. Take the"
            f" batch, or {instead}."
        )


_SMALLEST_FLOAT16 = 2.0**-24
"""Smallest positive number in float16."""

_NO_ZERO_REDUNDANCY = (
    "ZeroRedundancyOptimizer shards optimizer states of whole parameters, and {} has sharded the parameters and their"
    " optimizer states already. Use the optimizer inside it: it needs no more memory."
)


def _is_zero_redundancy(value: object) -> bool:
    """Return whether ``value`` is a ZeroRedundancyOptimizer, without importing the module that defines it."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(value).__mro__)


@contextmanager
def explaining_optimizer_errors(strategy_name: str) -> Iterator[None]:
    """Explain errors that a ZeroRedundancyOptimizer raises when ``configure_optimizers`` creates it in this context.

    Args:
        strategy_name: Name of the strategy, for the message.

    Raises:
        MisconfigurationException: If the error comes from a ZeroRedundancyOptimizer.
    """
    try:
        yield
    except Exception as error:
        if any(_is_zero_redundancy(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)):
            raise MisconfigurationException(_NO_ZERO_REDUNDANCY.format(strategy_name)) from error
        raise


def check_optimizers(
    optimizers: Sequence[Optimizer], module: LightningModule, strategy_name: str, device: torch.device
) -> None:
    """Check that the optimizers support sharded parameters, and that they hold those of ``module``.

    Args:
        optimizers: The optimizers of the run, in the order in which ``configure_optimizers`` returned them.
        module: The LightningModule, whose parameters are sharded already.
        strategy_name: Name of the strategy, for the messages.
        device: Device on which the module's steps run.

    Raises:
        MisconfigurationException: If an optimizer does not support sharded parameters, or the device.
        ValueError: If an optimizer holds parameters that are not the module's, and so would train nothing; or if its
            ``eps`` is zero in the parameters' dtype.
    """
    ours = {id(param) for param in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if _is_zero_redundancy(optimizer):
            raise MisconfigurationException(_NO_ZERO_REDUNDANCY.format(strategy_name))
        is_of_torch = type(optimizer).__module__.startswith("torch.optim")
        for group in optimizer.param_groups if is_of_torch else ():
            if group.get("capturable") and device.type == "cpu":
                raise MisconfigurationException(
                    f"Optimizer {index} is {name}(capturable=True) on the CPU: torch makes such steps, which a CUDA"
                    " graph can capture, on accelerators only. Leave capturable out."
                )
            eps = group.get("eps", 1.0)  # Adafactor has two, of which one may be None.
            if (
                isinstance(eps, float)
                and eps < _SMALLEST_FLOAT16
                and any(param.dtype == torch.float16 for param in group["params"])
            ):
                raise ValueError(
                    f"Optimizer {index} ({name}) has eps={eps}, which is zero in float16, in which 16-true"
                    " stores parameters and their moments: it would divide by zero. Set eps to 1e-4 or so, or use"
                    " precision='16-mixed' or 'bf16-true'."
                )
        num_foreign = sum(id(param) not in ours for param in params)
        if num_foreign:
            raise ValueError(
                f"Optimizer {index} ({name}) holds {num_foreign} of {len(params)} parameters that are not"
                f" {type(module).__name__}'s: it would not train them. It was created before the module was sharded, or"
                " with another module's parameters. Create it in configure_optimizers, from self.parameters()."
            )
