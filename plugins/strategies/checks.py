"""Refuse modules, callbacks and options that a strategy cannot run, with errors that name alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from traceback import walk_tb
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallel_module import parallelized
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import scales_losses
from lightning_dist.plugins.strategies.wrapped_hooks import defines_hook

if TYPE_CHECKING:
    from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist._compat import is_compiled

__all__ = [
    "check_optimizers",
    "refuse_for_pipeline",
    "refuse_step_in_backward",
    "refuse_what_cannot_work",
    "warn_of_idle_arguments",
]


def refuse_what_cannot_work(strategy: MeshStrategy, trainer: Trainer) -> None:
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


def warn_of_idle_arguments(config: ParallelConfig, layout: ParallelLayout) -> None:
    """Warn about arguments for sharding that have no effect because the sizes of the mesh leave nothing to shard.

    This is not an error, so that a configuration for several devices can be tried on one.

    Args:
        config: The configuration from the strategy's arguments.
        layout: The sizes of the mesh's axes.
    """
    if layout.num_shards == 1 and (idle := config.for_shards()):
        asked = ", ".join(f"{name}={value!r}" for name, value in idle.items())
        rank_zero_warn(f"{asked} has no effect: dp_shard_size is 1, so that nothing is sharded.")
    if layout.cp == 1 and config.context_parallel.attention != "auto":
        asked = f"attention={config.context_parallel.attention!r}"
        rank_zero_warn(f"{asked} has no effect: cp_size is 1, so that no sequence is split.")
    if layout.ep == layout.tp == 1 and config.expert_capacity is not None:
        asked = f"expert_capacity={config.expert_capacity}"
        rank_zero_warn(f"{asked} has no effect: ep_size and tp_size are 1, so that no experts are distributed.")


def refuse_step_in_backward(config: ParallelConfig, layout: ParallelLayout, trainer: Trainer) -> None:
    """Refuse ``step_in_backward`` where something needs all gradients at once, or nothing would be saved.

    Raises:
        MisconfigurationException: If another argument, the module or a callback does not fit.
    """
    if not config.step_in_backward or trainer.state.fn != TrainerFn.FITTING:
        return
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    hooks = (
        "backward", "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step"
    )  # fmt: skip
    reasons = {
        f"{layout}: nothing is sharded, so that all gradients exist in any case": layout.num_shards == 1,
        f"pp_size={layout.pp}: a pipeline reduces all gradients at the end": layout.pp > 1,
        f"gradient_clip_val={trainer.gradient_clip_val}: the norm needs all gradients": trainer.gradient_clip_val,
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": trainer.accumulate_grad_batches > 1,
        "GradientAccumulationScheduler": _compat.changes_accumulation(trainer),
        f"precision={plugin.precision!r} with a loss scale: an overflow skips the whole step": scales_losses(plugin),
        f"{type(plugin).__name__} with master weights": getattr(plugin, "master_weights", None),
        "compression": config.compression,
        "sync": config.sync,
        "automatic_optimization = False": not module.automatic_optimization,
        **{
            f"{type(hooked).__name__}.{hook}, which would see updated weights and no gradients": defines_hook(
                hook, hooked
            )
            for hooked in (module, *trainer.callbacks)  # type: ignore[attr-defined]
            for hook in hooks
        },
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise MisconfigurationException(f"step_in_backward=True with {reason}. Leave one of the two out.")


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
