"""Format the table that is printed when a run begins, which shows the layout and what each rank holds and runs."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins.precision import Float8Precision, MeshPrecision
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.techniques.protocol import ParameterRules, bound

__all__ = ["startup_table"]


_LABELS = {"root": "on the LightningModule itself", "shared": "shared by blocks", "scalars": "scalar"}


def startup_table(strategy: Host, module: ParallelModule) -> str:
    """Return the layout, units, precision and checks of ``strategy`` as lines of text."""
    kinds: dict[str, list[tuple[int, int]]] = {}
    in_float32 = bound(module.techniques, ParameterRules.numel_in_float32)
    for unit, group in zip(module.units, module.groups, strict=True):
        name = type(unit.modules[0]).__name__.removeprefix("FSDP")
        label = _LABELS.get(unit.kind, f"{name} ({unit.kind})")
        kept = sum(numel(unit) for numel in in_float32)
        kinds.setdefault(label, []).append((group.numel, kept))
    units = [
        f"{len(sizes)} x {label}: {_range([size for size, _ in sizes])}{_kept(sizes)}" for label, sizes in kinds.items()
    ]
    numel = sum(param.numel() for param in module.module.parameters())
    layout, policy = strategy.layout, strategy.precision_policy
    dtypes = (param.dtype for param in module.module.parameters() if param.is_floating_point())
    stored = next(dtypes, torch.get_default_dtype())
    computed = policy.param_dtype or stored
    plugin = strategy.precision_plugin
    options = plugin.table_text() if isinstance(plugin, MeshPrecision) else ""
    rows = [
        ("layout", f"{layout} = {layout.world_size} processes ({strategy.process_group_backend})"),
        ("parameters", f"{numel:,}, of which a rank holds {_held(module):,}"),
        *(("units" if not index else "", text) for index, text in enumerate(units)),
        (
            "precision",
            f"{plugin.precision}: stored in {_name(stored)}, computed in {_name(computed)},"
            f" gradients reduced in {_name(policy.reduce_dtype or computed)}{options}",
        ),
    ]
    if isinstance(plugin, Float8Precision):
        rows.append(("", plugin.describe()))
    for technique in module.techniques:
        rows += technique.table_rows()
    rows += strategy.optimizer_rows
    return "\n".join([strategy.strategy_name, *(f"  {key:<12}{value}" for key, value in rows)])


def _held(module: ParallelModule) -> int:
    """Return the number of elements of the parameters on a rank, taking the largest shard of each parameter."""
    return sum(
        math.prod(-(-size // parts) for size, parts in zip(param.shape, _parts(param), strict=True))
        for param in module.module.parameters()
        if not is_remote(param)
    )


def _parts(param: torch.Tensor) -> list[int]:
    """Return the number of shards that each dimension of ``param`` is split into."""
    parts = [1] * param.ndim
    if isinstance(param, DTensor):
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            dim = getattr(placement, "dim", None)  # Shard and its variants have a dim.
            if dim is not None:
                parts[dim] *= size
    return parts


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,} parameters" + (" each" if len(sizes) > 1 else "") if low == high else f"{low:,} to {high:,} each"


def _kept(sizes: list[tuple[int, int]]) -> str:
    """Return how many parameters of a kind of unit are computed in float32 apart from the others; "" if none are.

    Args:
        sizes: For each unit, the number of its parameters, and of those that are computed in float32.
    """
    if not any(kept for _, kept in sizes):
        return ""
    if all(kept == size for size, kept in sizes):
        return ", computed in float32"
    counts = sorted({kept for _, kept in sizes})
    of_each = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f", of which {of_each} are computed in float32"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
