"""Agree between ranks on overflows in float16 training."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_dist.plugins._compat import ShardedGradScaler

__all__ = ["agree_on_overflows", "scales_losses"]


def scales_losses(plugin: Precision) -> bool:
    """Return whether ``plugin`` multiplies losses by a scale, and skips steps whose gradients are not finite."""
    return isinstance(plugin, MixedPrecision) and plugin.scaler is not None


def agree_on_overflows(plugin: Precision) -> None:
    """Turn the scaler of ``plugin``, if it has one, into a :class:`ShardedGradScaler`.

    Raises:
        TypeError: If the scaler is of another class than ``GradScaler``, whose behaviour is unknown.
    """
    if not isinstance(plugin, MixedPrecision) or plugin.scaler is None or isinstance(plugin.scaler, ShardedGradScaler):
        return
    scaler: Any = plugin.scaler
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise TypeError(
            f"scaler={type(scaler).__name__} looks for overflows in the gradients of one rank only. Give MixedPrecision"
            " a torch.amp.GradScaler, or none."
        )
    scaler.__class__ = ShardedGradScaler  # The user may hold this object, so it is not replaced.
