"""Let linear layers compute in float8 by torchao, which is an optional package: import this module only where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_utils import EPS
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

__all__ = ["Float8Linear", "can_compute_in_float8", "compute_in_float8", "float8_config", "wrap_shard"]


def float8_config(recipe: str, emulate: bool) -> Float8LinearConfig:
    """Return torchao's configuration for one of its recipes.

    Args:
        recipe: Name of the recipe, such as ``"tensorwise"``.
        emulate: Whether matrices that were rounded to float8 are multiplied in float32.
    """
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def _attributes_of_torchao(config: Float8LinearConfig) -> dict[str, Any]:
    """Return the attributes that a layer of torchao has besides those of ``nn.Linear``, which say how it scales."""
    ordinary = nn.Linear(1, 1, device="meta")
    converted = convert_to_float8_training(ordinary, config=config)
    return {name: value for name, value in vars(converted).items() if name not in vars(ordinary)}


_Float8Linear: type[nn.Linear] = type(convert_to_float8_training(nn.Linear(1, 1, device="meta")))
"""The class of torchao's layers, for which torchao has no public name."""


class Float8Linear(_Float8Linear):  # type: ignore[misc, valid-type]
    """Compute a linear layer in float8, under the autocast of any device; torchao's layer knows that of CUDA only."""

    computes_in_float8: bool
    """Whether a Trainer with Float8Precision runs; otherwise the layer computes as before it was converted."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the dtype of autocast, or else in the dtype of ``input``."""
        if not self.computes_in_float8:
            return nn.Linear.forward(self, input)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return cast(Tensor, super().forward(input))


def compute_in_float8(layer: nn.Linear, config: Float8LinearConfig) -> None:
    """Let ``layer`` compute in float8, in place.

    The layer stays the same object, so that its parameters, hooks and references to it are kept. Its class becomes one
    that inherits from :class:`Float8Linear` and from the class that it had.

    Args:
        layer: A layer whose forward is that of ``nn.Linear``, or one that has been converted before.
        config: How numbers are scaled, from :func:`float8_config`.
    """
    for name, value in _attributes_of_torchao(config).items():
        setattr(layer, name, value)
    layer.__class__ = _in_float8(type(layer))
    layer.computes_in_float8 = True  # type: ignore[assignment]


_classes: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: Float8Linear}
"""The class of the converted layers of each class."""


def _in_float8(cls: type[nn.Linear]) -> type[nn.Linear]:
    if issubclass(cls, Float8Linear):
        return cls
    if cls not in _classes:
        _classes[cls] = type(f"Float8{cls.__name__}", (Float8Linear, cls), {"__module__": cls.__module__})
    return _classes[cls]


def can_compute_in_float8(layer: nn.Linear) -> bool:
    """Return whether the model calls ``layer``, with the forward of ``nn.Linear``."""
    if isinstance(layer, Float8Linear):
        return True
    # torch's MultiheadAttention reads the weights of such a layer, and does not call it.
    is_called = not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return is_called and type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def wrap_shard(module: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return how a shard of the parameter ``name`` of ``module`` is gathered in float8; None: in its own dtype."""
    if not isinstance(module, Float8Linear) or name != "weight":
        return None
    layer = cast(Any, module)
    dtype = layer.config.cast_config_weight.target_dtype

    def wrap(shard: Tensor, largest: Tensor) -> Tensor:
        scale = torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=EPS)
        return WeightWithDynamicFloat8CastTensor(shard, layer.linear_mm_config, dtype, scale.to(torch.float32))

    return wrap
