"""Explain which parameters a plan does not split, so that every rank of ``tp`` has them whole, and why."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from lightning_dist.model.layers import CONVOLUTIONS, convolution, linear_layer
from lightning_dist.techniques.tensor_parallel.attention_heads import why_whole
from lightning_dist.techniques.tensor_parallel.plan import Entry, PlanError
from lightning_dist.tracing.step_graph import Dataflow

__all__ = ["ENOUGH", "check_share", "reasons_for_whole", "share_split"]

ENOUGH = 0.8
"""Fraction of the parameters that is to be split: below it, more layers are split with a gathered output, or a warning
says that little is split."""

_SMALL = 0.01
"""A reason is left out if it concerns less than this fraction of the model's parameters."""


def reasons_for_whole(
    root: nn.Module,
    entries: Mapping[str, Entry],
    parameters: Mapping[str, int],
    dataflow: Dataflow | None,
    num_ranks: int,
) -> Iterator[str]:
    """Yield a line for each reason why parameters are not split, with the reason that concerns the most first.

    Args:
        root: The model with whole parameters.
        entries: The entries of the plan that was found, by full module name.
        parameters: The dimension of the split of each split parameter that belongs to no split layer, by full name.
        dataflow: The record of a step; None: no step could be run.
        num_ranks: Number of ranks that layers are split over.
    """
    split = _split(root, entries, parameters)
    numbers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, param in root.named_parameters():
        if param not in split:
            short = re.sub(r"\.\d+(?=\.)", ".*", name)
            numbers[_reason(root, name, param, entries, dataflow, num_ranks)][short] += param.numel()
    total = sum(param.numel() for param in root.parameters())
    for reason, names in sorted(numbers.items(), key=lambda item: -sum(item[1].values())):
        part = sum(names.values()) / total
        if part >= _SMALL:
            largest = sorted(names, key=lambda name: -names[name])
            more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
            yield f"whole, {part:.0%}: {', '.join(largest[:3])}{more}: {reason}"


def share_split(root: nn.Module, entries: Mapping[str, Entry], parameters: Mapping[str, int]) -> float:
    """Return the fraction of the model's parameters that are split, between 0 and 1.

    Args:
        root: The model with whole parameters.
        entries: As for :func:`reasons_for_whole`.
        parameters: As for :func:`reasons_for_whole`.
    """
    total = sum(param.numel() for param in root.parameters())
    return sum(param.numel() for param in _split(root, entries, parameters)) / max(total, 1)


def check_share(share: float, num_ranks: int, reasons: Sequence[str]) -> None:
    """Check that ranks do not hold and compute most of a model several times. The first rank warns if they do.

    Args:
        share: The fraction of the model's parameters that are split, between 0 and 1.
        num_ranks: Number of ranks that layers are split over.
        reasons: Texts that say why parameters are not split, with the reason that concerns the most first.

    Raises:
        PlanError: If nothing is split.
    """
    why = f" ({reasons[0]})" if reasons else ""
    if not share:
        raise PlanError(
            f"tp_size={num_ranks}: no layer of this model is split{why}, so that {num_ranks} ranks would do the"
            " same work. Use these ranks otherwise, such as by full_shard, give a plan, or set strict_plan=False to"
            " train nevertheless."
        )
    if share < ENOUGH and dist.get_rank() == 0:
        warnings.warn(
            f"tp_size={num_ranks}: {share:.0%} of the parameters are split. All ranks of tp hold the others whole, and"
            f" do the same work with them{why}. Give a plan, or use these ranks otherwise, such as by full_shard;"
            " strict_plan=False leaves this warning out.",
            stacklevel=2,
        )


def _split(root: nn.Module, entries: Mapping[str, Entry], parameters: Mapping[str, int]) -> set[nn.Parameter]:
    split = {param for name, param in root.named_parameters() if name in parameters}
    for name, entry in entries.items():
        if entry.is_split:
            split |= {
                param
                for key, param in root.get_submodule(name).named_parameters(recurse=entry.is_of_submodules)
                if key == "weight" or entry.style != "rowwise"
            }
    return split


def _reason(
    root: nn.Module,
    name: str,
    param: nn.Parameter,
    entries: Mapping[str, Entry],
    dataflow: Dataflow | None,
    num_ranks: int,
) -> str:
    owner = name.rpartition(".")[0]
    module = root.get_submodule(owner)
    entry = entries.get(owner)
    if entry is not None and not entry.is_split and entry.why:
        return entry.why
    if param.ndim < 2:
        return "norms, biases and other vectors are small"
    if dataflow is None:
        return "no step could be run on fake tensors"
    if not dataflow.readers.get(name):
        return "the recorded part of the step did not use them"
    if isinstance(module, nn.Embedding):
        return "an embedding is split only if a head has as many outputs as the embedding has rows"
    if isinstance(module, CONVOLUTIONS) and module.groups > 1:
        return "convolutions with groups are not split"
    if isinstance(module, nn.MultiheadAttention) and (why_not := why_whole(module, num_ranks)):
        return f"it {why_not}"
    layer = linear_layer(module) or convolution(module)
    if layer is not None and layer.out_features % num_ranks:
        return f"their {layer.out_features} outputs do not divide by tp_size={num_ranks}"
    if layer is not None:
        return "they are in no pair of layers whose output is added to the hidden states"
    return "only linear layers, convolutions and embeddings are split"
