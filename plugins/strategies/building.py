"""Make the user's module parallel, as the options of techniques and the precision ask for."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import cast
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_dist._compat import convert
from lightning_dist.model.deferred_init import deferred_init
from lightning_dist.model.tensor_state import is_uninitialized
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.parallelize import check_change, parallelize
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import (
    Float8Precision,
    refuse_uncomputable,
    scales_losses,
    use_precision_again,
)
from lightning_dist.plugins.strategies.checks import as_misconfiguration
from lightning_dist.plugins.strategies.gpus import refuse_bfloat16
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.steps.choice import FirstSteps
from lightning_dist.plugins.strategies.steps.tracing import StepTracing

__all__ = ["ModuleBuilder"]


_precisions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The precision that each module was converted to, such as ``"bf16-mixed"``."""


def _stored(precision: str) -> str:
    """Return the precision in which weights are stored, given that of a run."""
    return precision if precision.endswith("-true") else "32-true"


class ModuleBuilder:
    """Make the modules of a run parallel.

    Args:
        host: The strategy, whose processes have been launched.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """

    def __init__(self, host: Host, tracing: StepTracing) -> None:
        self._host = host
        self._tracing = tracing
        self.has_averages = False
        """Whether callbacks keep averages of the weights."""

    def build(self, module: LightningModule, copied: ParallelModule | None = None) -> ParallelModule:
        """Make ``module`` parallel, unless an earlier Trainer has done so. This is a collective over all processes.

        Args:
            module: The user's module, or a copy of it.
            copied: The parallel module whose module ``module`` is a copy of; None: it is not a copy.
        """
        existing = parallelized(module)
        if existing is not None:
            self._take_over(existing)
            return existing
        host = self._host
        if host.layer_sync is not None:
            host.layer_sync.apply(module)
        self._convert(module, host.precision_plugin)
        self.move_to_device(module)
        return parallelize(
            module,
            host.layout,
            host.groups,
            host.config,
            FirstSteps(module, host.trainer, self._tracing),
            precision=host.precision_policy,
            scales_losses=scales_losses(host.precision_plugin),
            is_automatic=module.automatic_optimization,
            copied=copied,
        )

    def _take_over(self, existing: ParallelModule) -> None:
        """Check that an earlier Trainer has made the module parallel in the same way, and use its precision again."""
        host = self._host
        before, now = _precisions.get(existing.module, ""), str(host.precision_plugin.precision)
        if before and _stored(before) != _stored(now):
            raise MisconfigurationException(
                f"An earlier Trainer has made this {type(existing.module).__name__} parallel with precision={before!r},"
                f" which stores other weights than {now!r}. Make a new one, and load the weights from a checkpoint."
            )
        is_fit = host.trainer.state.fn == TrainerFn.FITTING
        with as_misconfiguration():
            check_change(existing, host.config, host.layout, host.precision_policy, is_fit=is_fit)
        use_precision_again(existing.module, host.precision_plugin)

    def _convert(self, module: LightningModule, plugin: Precision) -> None:
        """Let the precision plugin convert the module, and refuse dtypes that the device or the backend lacks."""
        host = self._host
        if isinstance(plugin, Float8Precision):
            plugin.prepare(host.root_device, host.layout)
        policy, precision = host.precision_policy, str(plugin.precision)
        refuse_uncomputable(policy, precision, host.root_device)
        refuse_bfloat16(policy, precision, str(host.process_group_backend))
        is_deferred = any(is_uninitialized(param) for param in module.parameters())
        with deferred_init(host.root_device) if is_deferred else nullcontext():
            plugin.convert_module(module)
        _precisions[module] = precision

    def build_averages(self) -> None:
        """Make the averages of the weights parallel that callbacks keep. This is a collective over all processes.

        Raises:
            MisconfigurationException: If replicas train on their own for some steps, so that averages would differ.
        """
        host, arguments = self._host, self._host.config.arguments
        for callback in host.trainer.callbacks:  # type: ignore[attr-defined]
            average = _compat.average_model(callback)
            if average is None:
                continue
            if arguments.lets_replicas_differ:
                raise MisconfigurationException(
                    f"{type(callback).__name__} with sync={arguments['sync']}: each replica would average its own"
                    " weights. Remove one of the two."
                )
            self.has_averages = True
            module = cast(LightningModule, average.module)
            module.trainer = host.trainer  # A copy has none, which a traced step of manual optimization asks for.
            try:
                self.build(module, copied=host.parallel)
            finally:
                module.trainer = None

    def move_to_device(self, module: LightningModule) -> None:
        """Move a module to this rank's device, except tensors that ``configure_model`` left on the meta device."""
        device = self._host.root_device
        tensors = chain(module.parameters(), module.buffers())
        if any(tensor.device != device and not is_uninitialized(tensor) for tensor in tensors):
            convert(module, lambda tensor: tensor if is_uninitialized(tensor) else tensor.to(device))
