"""Define a strategy that makes the user's module parallel."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_dist._compat import convert
from lightning_dist.model.deferred_init import deferred_init
from lightning_dist.model.tensor_state import is_uninitialized
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.parallelize import ParallelConfig, check_change, parallelize
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import (
    Float8Precision,
    PrecisionPolicy,
    agree_on_overflows,
    check_reduce_dtype,
    precision_policy,
    refuse_uncomputable,
    scales_losses,
    use_precision_again,
)
from lightning_dist.plugins.strategies.checkpointed import CheckpointedStrategy
from lightning_dist.plugins.strategies.checks import as_misconfiguration
from lightning_dist.plugins.strategies.gpus import refuse_bfloat16
from lightning_dist.plugins.strategies.steps.choice import FirstSteps

__all__ = ["ParallelizingStrategy"]


class ParallelizingStrategy(CheckpointedStrategy):
    """Create a module with or without values, and make it parallel as the configuration and the precision ask for.

    Args:
        config: The engine's configuration that the arguments of the strategy ask for.
        reduce_dtype: Name of the dtype in which gradients are reduced; None: as
            :class:`~lightning_dist.plugins.precision.PrecisionPolicy` says for the precision.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.checkpointed.CheckpointedStrategy`.

    Raises:
        ValueError: If gradients cannot be reduced in ``reduce_dtype``.
    """

    def __init__(self, config: ParallelConfig, reduce_dtype: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_reduce_dtype(reduce_dtype)
        self._config = config
        self._reduce_dtype = reduce_dtype

    @property
    def config(self) -> ParallelConfig:
        """Return the engine's configuration that the arguments of the strategy ask for."""
        return self._config

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """Return the dtypes in which parameters are gathered and gradients are reduced."""
        return precision_policy(self.precision_plugin, self._reduce_dtype)

    @property
    def precision_plugin(self) -> Precision:
        """Return Lightning's precision plugin, which determines the dtypes of sharding."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            precision_policy(plugin, self._reduce_dtype)
            agree_on_overflows(plugin)
        self.set_precision_plugin(plugin)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Return the context of ``trainer.init_module``, in which tensors are on the meta device with ``empty_init``.

        Such a module gets its values when it is sharded, like one from ``configure_model``, or from a checkpoint.

        Args:
            empty_init: Whether to create tensors without values. None: values are created.
        """
        on_device = deferred_init(self.root_device) if empty_init else self.root_device
        with on_device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Return the context in which ``configure_model`` creates meta tensors, which get their values when sharded."""
        with deferred_init(self.root_device):
            yield

    def _parallelize(self, module: LightningModule, copied: ParallelModule | None = None) -> ParallelModule:
        """Make ``module`` parallel, unless an earlier Trainer has done so. This is a collective over all processes.

        Args:
            module: The user's module, or a copy of it.
            copied: The parallel module whose module ``module`` is a copy of; None: it is not a copy.
        """
        existing = parallelized(module)
        if existing is not None:
            wanted = self.layout.sharding_mesh(self.mesh, self._config.arguments.lets_replicas_differ)
            if existing.mesh != wanted:
                raise MisconfigurationException(
                    f"This {type(module).__name__} is sharded over {existing.mesh} by an earlier Trainer, and cannot be"
                    f" sharded over {wanted} as well. Make a new one, and load the weights from a checkpoint."
                )
            with as_misconfiguration():
                check_change(existing, self._config.arguments, self.layout, self.precision_policy)
            use_precision_again(module, self.precision_plugin)
            return existing
        if self.layer_sync is not None:
            self.layer_sync.apply(module)
        if isinstance(self.precision_plugin, Float8Precision):
            self.precision_plugin.prepare(self.root_device, self.layout)
        policy = self.precision_policy
        refuse_uncomputable(policy, str(self.precision_plugin.precision), self.root_device)
        refuse_bfloat16(policy, str(self.precision_plugin.precision), str(self.process_group_backend))
        is_deferred = any(is_uninitialized(param) for param in module.parameters())
        with deferred_init(self.root_device) if is_deferred else nullcontext():
            self.precision_plugin.convert_module(module)
        self._move_to_device(module)
        assert self._tracing is not None
        return parallelize(
            module,
            self.layout,
            self.mesh,
            self._config,
            FirstSteps(module, self._trainer, self._tracing),
            precision=policy,
            scales_losses=scales_losses(self.precision_plugin),
            is_automatic=module.automatic_optimization,
            copied=copied,
            stage_to_stage=self._stage_to_stage_group,
            context=self._context_group,
        )

    def _parallelize_averages(self, trainer: Trainer) -> None:
        """Make the averages of the weights parallel that callbacks keep. This is a collective over all processes.

        Raises:
            MisconfigurationException: If replicas train on their own for some steps, so that averages would differ.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            average = _compat.average_model(callback)
            if average is None:
                continue
            arguments = self._config.arguments
            if arguments.lets_replicas_differ:
                raise MisconfigurationException(
                    f"{type(callback).__name__} with sync={arguments['sync']}: each replica would average its"
                    " own weights. Remove one of the two."
                )
            self._has_averages = True
            self._parallelize(cast(LightningModule, average.module), copied=self._parallel)

    @override
    def model_to_device(self) -> None:
        """Move the module to this rank's device, except tensors that ``configure_model`` left on the meta device."""
        assert self.lightning_module is not None
        self._move_to_device(self.lightning_module)

    def _move_to_device(self, module: LightningModule) -> None:
        convert(module, lambda tensor: tensor if is_uninitialized(tensor) else tensor.to(self.root_device))
