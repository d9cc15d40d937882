"""Turn Lightning's ``precision=`` into FSDP2's mixed-precision policy.

================  ==================  =================  ==================  ====================
``precision=``    parameters stored   gathered, computed  gradients reduced  autocast in the step
================  ==================  =================  ==================  ====================
``32-true``       float32             float32             float32            no
``64-true``       float64             float64             float64            no
``bf16-mixed``    float32             bfloat16            float32            yes, as Lightning's
``bf16-true``     bfloat16            bfloat16            float32            no
``16-mixed``      float32             float16             float32            yes, as Lightning's
``16-true``       float16             float16             float32            no
================  ==================  =================  ==================  ====================

:class:`~lightning_dist.plugins.precision.MeshPrecision` has the dtypes of the precision that it is named after, except
those that its arguments choose.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.plugins.precision.float8 import Float8Precision
from lightning_dist.plugins.precision.mesh_precision import MeshPrecision
from lightning_dist.techniques.options import PrecisionPolicy

__all__ = ["PrecisionPolicy", "check_reduce_dtype", "precision_policy", "refuse_uncomputable"]

_REFUSED: dict[type[Precision], str] = {
    BitsandbytesPrecision: (
        "stores weights in quantized form, which can be neither sharded nor split, and does not train them. To save"
        " memory, use precision='bf16-true', MeshPrecision(master_weights='stochastic') or offload='both' of the"
        " strategy; to train adapters of a quantized model, use Lightning's strategy 'ddp'"
    ),
    TransformerEnginePrecision: (
        "replaces layers by those of Transformer Engine, whose scaling factors and weights these strategies cannot keep"
        " equal or shard. To compute in float8, use plugins=[Float8Precision()] of lightning_dist and no precision="
    ),
}
"""Plugins of Lightning that do not work with any strategy of this package, and why."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def check_reduce_dtype(reduce_dtype: object) -> None:
    """Check the argument ``reduce_dtype`` of a strategy.

    Raises:
        ValueError: If it is neither None nor the name of a dtype in which gradients can be reduced.
    """
    if reduce_dtype is not None and reduce_dtype not in _DTYPES:
        meant = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}.get(str(reduce_dtype).removeprefix("torch."))
        meant = meant or str(reduce_dtype).removeprefix("torch.")
        hint = f"; did you mean {meant!r}?" if meant in _DTYPES else "."
        raise ValueError(f"reduce_dtype={reduce_dtype!r} must be one of {', '.join(map(repr, _DTYPES))}, or None{hint}")


def refuse_uncomputable(policy: PrecisionPolicy, precision: str, device: torch.device) -> None:
    """Refuse dtypes that ``device`` cannot compute in, such as float64 on Apple's GPUs, by trying a small product.

    Args:
        policy: The dtypes of sharding.
        precision: Lightning's name of the precision.
        device: The device of this rank, which may be initialised now.

    Raises:
        MisconfigurationException: If the device cannot multiply matrices in one of the dtypes.
    """
    dtypes = [torch.float64] if precision == "64-true" else [policy.param_dtype, policy.reduce_dtype]
    for dtype in filter(None, dtypes):
        try:
            ones = torch.ones(2, 2, dtype=dtype, device=device)
            ones @ ones
        except (RuntimeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise MisconfigurationException(
                f"precision={precision!r}: the device {device.type!r} cannot compute in"
                f" {str(dtype).removeprefix('torch.')} ({reason}). Use precision='32-true', or another accelerator."
            ) from error


def precision_policy(plugin: Precision, reduce_dtype: str | None = None) -> PrecisionPolicy:
    """Return the policy for Lightning's precision ``plugin``.

    Args:
        plugin: The plugin that ``Trainer(precision=...)`` created, or that was passed by ``Trainer(plugins=...)``.
        reduce_dtype: Dtype in which gradients are reduced: ``"float32"``, ``"float64"`` or ``"bfloat16"``; None: the
            dtype in the table above.

    Raises:
        ValueError: If sharded training does not support ``plugin``, or if ``plugin`` has another ``reduce_dtype``.
    """
    own = plugin.reduce_dtype if isinstance(plugin, MeshPrecision) else None
    if own is not None and reduce_dtype not in (None, own):
        raise ValueError(
            f"reduce_dtype={reduce_dtype!r} of the strategy contradicts MeshPrecision(reduce_dtype={own!r}): leave one"
            " of the two out."
        )
    reduce_dtype = reduce_dtype or own
    reduced_in = _DTYPES[reduce_dtype] if reduce_dtype else None
    if isinstance(plugin, Float8Precision):
        gather_as = plugin.gather_as if plugin.float8_all_gather else None
        return replace(precision_policy(plugin.base, reduce_dtype), gather_as=gather_as)
    keep_fp32 = plugin.keep_fp32 if isinstance(plugin, MeshPrecision) else ()
    is_mesh_in_float32 = isinstance(plugin, MeshPrecision) and plugin.param_dtype == "float32"
    if type(plugin) in (Precision, DoublePrecision) or is_mesh_in_float32:
        return PrecisionPolicy(None, reduced_in)
    if isinstance(plugin, MixedPrecision | HalfPrecision) and plugin.precision in ("bf16-mixed", "bf16-true"):
        return PrecisionPolicy(torch.bfloat16, reduced_in or torch.float32, keep_fp32)
    if isinstance(plugin, MixedPrecision | HalfPrecision):
        return PrecisionPolicy(torch.float16, reduced_in or torch.float32, keep_fp32)
    for cls, why in _REFUSED.items():
        if isinstance(plugin, cls):
            raise ValueError(f"{type(plugin).__name__} {why}.")
    raise ValueError(
        f"The plugin {type(plugin).__name__} (precision={plugin.precision!r}) is not supported by the strategies of"
        " lightning_dist: leave it out, and use precision='32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed'"
        " or '16-true'."
    )
