"""Find layers that are in no pair of ``colwise`` and ``rowwise`` layers, to be split with a gathered output.

Each rank computes some of the output features of such a layer, which are the channels of a convolution, and all ranks
gather them. What is around the layer sees whole inputs and outputs, so that this computes the same, and no trial is
needed. It sends more than a pair does, and is therefore the last resort: it is used where less than
:data:`~lightning_dist.techniques.tensor_parallel.unsplit.ENOUGH` of the parameters are split otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from lightning_dist.model.layers import CONVOLUTIONS, LinearLayer, convolution, linear_layer
from lightning_dist.techniques.tensor_parallel.hooked import SPLITS_FEATURES
from lightning_dist.techniques.tensor_parallel.plan import Entry, SplitSequence, is_inside
from lightning_dist.techniques.tensor_parallel.unsplit import ENOUGH, share_split
from lightning_dist.tracing.step_graph import Dataflow

__all__ = ["layers_to_gather"]


def layers_to_gather(
    root: nn.Module,
    entries: Mapping[str, Entry],
    parameters: Mapping[str, int],
    sequence: SplitSequence | None,
    dataflow: Dataflow,
    num_ranks: int,
) -> dict[str, Entry]:
    """Return entries for further layers, the largest ones, with which enough of the parameters are split.

    Layers of the same size are treated alike.

    Args:
        root: The model with whole parameters.
        entries: The entries of the plan so far, by full module name.
        parameters: The dimension of the split of each split parameter that belongs to no split layer, by full name.
        sequence: Where hidden states are split along the sequence; None: nowhere. Ranks have different tokens there,
            so that their outputs cannot be gathered along the features.
        dataflow: The record of a whole step of the model on fake tensors.
        num_ranks: Number of ranks that layers are split over.
    """
    share = share_split(root, entries, parameters)
    if share >= ENOUGH:
        return {}
    total = sum(param.numel() for param in root.parameters())
    found = dict(_candidates(root, entries, parameters, dataflow, num_ranks))
    if sequence is not None:
        blocks = [block for chain in sequence.chains for block in chain]
        found = {name: size for name, size in found.items() if not any(is_inside(name, block) for block in blocks)}
    chosen: set[int] = set()
    for size, number in sorted(Counter(found.values()).items(), reverse=True):
        if share < ENOUGH and size * number >= _SMALL * total:
            share += size * number / total
            chosen.add(size)
    whys = {name: f"in no pair: {entries[name].why}" for name in found if name in entries and entries[name].why}
    return {
        name: Entry("colwise_gather_output", "inferred", whys.get(name, ""))
        for name, size in found.items()
        if size in chosen
    }


_SMALL = 0.01
"""Layers of one size that hold less than this fraction of the parameters are not split, because it saves little."""


def _candidates(
    root: nn.Module,
    entries: Mapping[str, Entry],
    parameters: Mapping[str, int],
    dataflow: Dataflow,
    num_ranks: int,
) -> Iterator[tuple[str, int]]:
    """Yield the full name of each layer that can be split with a gathered output, and the number of its parameters."""
    cols = {name for name, entry in entries.items() if entry.style in SPLITS_FEATURES}
    with_submodules = [name for name, entry in entries.items() if entry.is_of_submodules]
    names = {param: name for name, param in root.named_parameters()}
    holders = Counter(param for module in root.modules() for param in module.parameters(recurse=False))
    for name, module in root.named_modules():
        layer, entry = _plain_layer(module), entries.get(name)
        if layer is None or layer.out_features % num_ranks or name not in dataflow.called:
            continue
        if entry is not None and (entry.style != "replicate" or entry.source == "user"):
            continue
        if any(is_inside(name, other) for other in with_submodules) or dataflow.input_sources[name] & cols:
            continue
        own = list(module.parameters(recurse=False))
        if all(_is_free(names[param], name, holders[param], parameters, dataflow) for param in own):
            yield name, sum(param.numel() for param in own)


def _is_free(param: str, layer: str, num_holders: int, parameters: Mapping[str, int], dataflow: Dataflow) -> bool:
    """Return whether a layer reads its own parameter, and no other module holds or reads it; the step may read it."""
    readers = dataflow.readers[param]
    return num_holders == 1 and param not in parameters and layer in readers and readers <= {layer, ""}


def _plain_layer(module: nn.Module) -> LinearLayer | None:
    """Return the description of a layer whose forward is that of torch or Hugging Face, and None for other modules."""
    is_of_torch = type(module).__module__.startswith("torch.nn.modules.")
    is_of_hugging_face = type(module).__name__ == "Conv1D" and not isinstance(module, (nn.Linear, *CONVOLUTIONS))
    if not (is_of_torch or is_of_hugging_face) or "forward" in vars(module):
        return None
    return convolution(module) if isinstance(module, CONVOLUTIONS) else linear_layer(module)
