"""Explain which parameters a plan does not split, so that every rank of ``tp`` has them whole, and why."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from lightning_dist.model.layers import linear_layer
from lightning_dist.techniques.tensor_parallel.plan import Entry
from lightning_dist.tracing.step_graph import Dataflow

__all__ = ["reasons_for_whole"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_SMALL = 0.01
"""A reason is left out if it concerns less than this fraction of the model's parameters."""


def reasons_for_whole(
    root: nn.Module,
    entries: Mapping[str, Entry],
    parameters: Mapping[str, int],
    dataflow: Dataflow | None,
) -> Iterator[str]:
    """Yield a line for each reason why parameters are not split, with the reason that concerns the most first.

    Args:
        root: The model with whole parameters.
        entries: The entries of the plan that was found, by full module name.
        parameters: The dimension of the split of each split parameter that belongs to no split layer, by full name.
        dataflow: The record of a step; None: no step could be run.
    """
    split = {param for name, param in root.named_parameters() if name in parameters}
    for name, entry in entries.items():
        if entry.is_split:
            split |= {
                param
                for key, param in root.get_submodule(name).named_parameters(recurse=False)
                if key == "weight" or entry.style != "rowwise"
            }
    numbers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, param in root.named_parameters():
        if param not in split:
            short = re.sub(r"\.\d+(?=\.)", ".*", name)
            numbers[_reason(root, name, param, entries, dataflow)][short] += param.numel()
    total = sum(param.numel() for param in root.parameters())
    for reason, names in sorted(numbers.items(), key=lambda item: -sum(item[1].values())):
        part = sum(names.values()) / total
        if part >= _SMALL:
            largest = sorted(names, key=lambda name: -names[name])
            more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
            yield f"whole, {part:.0%}: {', '.join(largest[:3])}{more}: {reason}"


def _reason(
    root: nn.Module, name: str, param: nn.Parameter, entries: Mapping[str, Entry], dataflow: Dataflow | None
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
    if isinstance(module, _CONVOLUTIONS):
        return "convolutions are not split"
    if linear_layer(module) is not None:
        return "linear layers are split only in pairs whose output is added to the hidden states"
    return "only linear layers and embeddings are split"
