"""Give names of their own to what Lightning keeps private in strategies and precision plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.optim import Optimizer

from lightning_dist.plugins._compat.processes import ForkLauncher, ScriptLauncher

__all__ = ["LightningStrategy", "clip_after_closure", "explain_strategy_errors"]


class LightningStrategy(ParallelStrategy):
    """Extend ParallelStrategy by public names of what its subclasses have to override and to set.

    This could be replaced by public names in Lightning.
    """

    def configure_launcher(self) -> None:
        """Choose what starts the processes; Lightning calls this when the Trainer has given the strategy all else."""

    def _configure_launcher(self) -> None:
        self.configure_launcher()

    def set_launcher(self, launcher: ScriptLauncher | ForkLauncher) -> None:
        """Set the object that ``launcher`` returns."""
        self._launcher = launcher

    def set_precision_plugin(self, plugin: Precision | None) -> None:
        """Set the object that ``precision_plugin`` returns, which a subclass may check before; None: the default."""
        self._precision_plugin = plugin

    def set_checkpoint_io(self, io: CheckpointIO) -> None:
        """Set the object that ``checkpoint_io`` returns, which a subclass may check before."""
        self._checkpoint_io = io

    @property
    def layer_sync(self) -> LayerSync | None:
        """Return what ``Trainer(sync_batchnorm=True)`` asks for; None: nothing."""
        return self._layer_sync


def explain_strategy_errors(hint: Callable[[Mapping[str, Any], Exception], str]) -> None:
    """Append a hint to the errors that the Trainer raises about its strategy or devices; calling this again is safe.

    This could be replaced by a list of names, and by the name of the argument, in Lightning's own messages.

    Args:
        hint: Function of the Trainer's arguments and the error that returns a sentence, or an empty string.
    """
    init = _AcceleratorConnector.__init__
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except Exception as error:
            meant = hint(kwargs, error)
            if meant and len(error.args) == 1:
                error.args = (f"{error} {meant}",)
            raise

    _AcceleratorConnector.__init__ = explained  # type: ignore[method-assign]


def clip_after_closure(plugin: Precision, module: LightningModule, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step``, and clip gradients as the Trainer was told to, after a closure has run.

    This could be replaced by a public method of precision plugins.
    """
    plugin._after_closure(module, optimizer)
