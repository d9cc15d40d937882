"""Format the table that is printed when a run begins: the layout, and what each rank holds and runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from lightning_dist.pipeline import Pipeline
from lightning_dist.sharding import ShardedModule
from lightning_dist.tensor_parallel import Entry

if TYPE_CHECKING:
    from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["startup_table"]


_LABELS = {"root": "on the LightningModule itself", "shared": "shared by blocks", "scalars": "scalar"}


def startup_table(strategy: MeshStrategy, module: ShardedModule) -> str:
    """Return the layout, units, precision and checks of ``strategy`` as lines of text."""
    kinds: dict[str, list[int]] = {}
    for unit, group in zip(module.units, module.groups, strict=True):
        name = type(unit.modules[0]).__name__.removeprefix("FSDP")
        label = _LABELS.get(unit.kind, f"{name} ({unit.kind})")
        kinds.setdefault(label, []).append(group.numel)
    units = [f"{len(sizes)} x {label}: {_range(sizes)}" for label, sizes in kinds.items()]
    numel = sum(param.numel() for param in module.module.parameters())
    layout, policy = strategy.layout, strategy.precision_policy
    stored = next((param.dtype for param in module.module.parameters()), torch.get_default_dtype())
    computed = policy.param_dtype or stored
    rows = [
        ("layout", f"{layout} = {layout.world_size} processes ({strategy.process_group_backend})"),
        ("parameters", f"{numel:,}, of which a rank holds {_held(module):,}"),
        *(("units" if not index else "", text) for index, text in enumerate(units)),
        (
            "precision",
            f"{strategy.precision_plugin.precision}: stored in {_name(stored)}, computed in {_name(computed)},"
            f" gradients reduced in {_name(policy.reduce_dtype or computed)}",
        ),
    ]
    if strategy.activation_checkpointing or strategy.compile_backend:
        done = ["run again in the backward"] if strategy.activation_checkpointing else []
        done += [f"compiled ({strategy.compile_backend})"] if strategy.compile_backend else []
        rows.append(("blocks", ", ".join(done)))
    if module.pipeline is not None:
        config, stages = module.pipeline.config, module.pipeline.stages
        rows += [("stages" if not index else "", text) for index, text in enumerate(_stages(module.pipeline))]
        shared = sum(len(needed) > 1 for needed in stages.stages_of_param.values())
        if shared:
            rows.append(("", f"{shared} parameters are on several stages, their gradients summed"))
        rows.append(("schedule", f"{config.schedule}, {config.num_microbatches} microbatches of a rank's batch"))
    if module.tensor_parallel is not None:
        plan = module.tensor_parallel.plan
        split = [
            f"{_split_over_tp(module):.0%} of the parameters",
            *_split(plan.entries),
            *_split_parameters(plan.parameters),
            *plan.notes,
        ]
        rows += [("split" if not index else "", text) for index, text in enumerate(split)]
    if layout.dp_replicate > 1:
        every = strategy.check_replicas_every_n_steps
        rows.append(("replicas", f"compared every {every} optimizer steps" if every else "not compared"))
    return "\n".join([strategy.strategy_name, *(f"  {key:<12}{value}" for key, value in rows)])


def _stages(pipeline: Pipeline) -> Iterator[str]:
    """Yield a line for each stage: its rank, its first and last part, and its share of a step's time."""
    config, stages = pipeline.config, pipeline.stages
    for stage, share in enumerate(stages.costs):
        parts = [part for part in stages.parts if stage in stages.stages_of_part[part]]
        span = parts[0] if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
        yield f"{stage} on {config.rank_of(stage)}: {span}, {share:.0%} of the time as estimated"


def _split(plan: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a line for each way of splitting, with its modules and the source of the decision."""
    lines: dict[tuple[str, str, str], dict[str, int]] = {}
    for name, entry in plan.items():
        names = lines.setdefault((entry.style, entry.source, entry.why), {})
        short = re.sub(r"\.\d+(?=\.)", ".*", name)
        names[short] = names.get(short, 0) + 1
    for (style, source, why), names in lines.items():
        counted = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        yield f"{style} ({source}{'; ' if why else ''}{why}): {counted}"


def _split_parameters(parameters: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for the parameters that are split with the heads of the attention around them."""
    names = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in parameters)
    if names:
        counted = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        yield f"with the heads (inferred): {counted}"


def _split_over_tp(module: ShardedModule) -> float:
    """Return the fraction of this rank's parameters that are split over ``tp``, counted by elements."""
    assert module.tensor_parallel is not None
    params = [param for param in module.module.parameters() if not param.is_meta]
    split = sum(param.numel() for param in params if module.tensor_parallel.splits(param))
    return split / max(sum(param.numel() for param in params), 1)


def _held(module: ShardedModule) -> int:
    """Return the number of elements of the parameters on a rank, taking the largest shard of each parameter."""
    return sum(
        math.prod(-(-size // parts) for size, parts in zip(param.shape, _parts(param), strict=True))
        for param in module.module.parameters()
        if not param.is_meta
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
