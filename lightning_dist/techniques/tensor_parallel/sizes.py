"""Find the sizes in the code of a split unit that have to be those of a rank's part.

The outputs of split layers have a rank's features or heads only. The code between the layers takes their sizes from the
attributes of its module, from a configuration, or from its input; which of them is found by trying.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature

from torch import Tensor, nn

from lightning_dist.model.configurations import configured_values
from lightning_dist.model.layers import convolution, linear_layer
from lightning_dist.techniques.tensor_parallel.infer import innermost_around
from lightning_dist.techniques.tensor_parallel.plan import Entry, is_inside
from lightning_dist.tracing.step_graph import Dataflow
from lightning_dist.tracing.step_graph.dataflow import Call, is_learned

__all__ = ["SizeFinder", "Sizes"]

_IS_NO_WIDTH = re.compile(r"window|max|len|position|vocab|context|block_size|seq")
"""Names of attributes that may happen to equal the width, but mean something else."""


@dataclass(frozen=True)
class Sizes:
    """Represent the sizes that the modules of a split unit read as those of a rank's part.

    The fields mean the same as ``sizes`` and ``widths`` of a :class:`~lightning_dist.techniques.tensor_parallel.Plan`.
    """

    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    widths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class SizeFinder:
    """Find sizes that are worth a trial.

    Args:
        root: The model with whole parameters.
        dataflow: The recorded data flow of a step; None: no step could be run.
        calls: The first call of each module in that step, by the module's full name.
        num_ranks: Number of ranks that layers are split over.
    """

    def __init__(self, root: nn.Module, dataflow: Dataflow | None, calls: Mapping[str, Call], num_ranks: int) -> None:
        self._root = root
        self._dataflow = dataflow
        self._calls = calls
        self._num_ranks = num_ranks

    def candidates(self, name: str, entries: Mapping[str, Entry]) -> Iterator[Sizes]:
        """Yield the sizes to divide, with the most likely ones first.

        Attributes come first: none, those that count heads, those that count features, and both;
        ``num_key_value_groups`` is adapted in each of them. Then the same with the width of the input, and with
        attributes of configurations.

        Args:
            name: Full name of the unit.
            entries: The entries of the plan for the unit's modules, by full name.
        """
        widths = dict(self._widths(name, entries))
        tried: list[Sizes] = []
        for has_configurations in (False, True):
            for its_widths in ({}, widths):
                for heads, features in ((False, False), (True, False), (False, True), (True, True)):
                    attributes = self._attributes(name, entries, heads, features, has_configurations)
                    if (sizes := Sizes(attributes, its_widths)) not in tried:
                        tried.append(sizes)
                        yield sizes

    def _widths(self, name: str, entries: Mapping[str, Entry]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the modules around split layers, and their arguments that are as wide as what the layers exchange."""
        for row, cols, features in self._rows(entries):
            around = innermost_around((row, *(col for col in cols if col in entries)), self._calls)
            if not is_inside(around, name):
                continue
            found = tuple(_named_as_wide(self._root.get_submodule(around), self._calls[around], features))
            if found:
                yield around, found

    def _attributes(
        self, name: str, entries: Mapping[str, Entry], heads: bool, features: bool, has_configurations: bool
    ) -> dict[str, dict[str, int]]:
        changed: dict[str, dict[str, int]] = {}
        for row, cols, width in self._rows(entries):
            for owner in sorted({key.rpartition(".")[0] for key in (row, *cols) if key.startswith(f"{name}.")}):
                module = self._root.get_submodule(owner)
                for key, value in _numbers(module, has_configurations):
                    if key == "num_key_value_groups":
                        new = self._groups_of_keys(module, value)
                    elif heads and re.search(r"heads?$", key) and value != width:
                        new = max(value // self._num_ranks, 1)
                    elif features and value == width and not _IS_NO_WIDTH.search(key):
                        new = value // self._num_ranks
                    else:
                        continue
                    if new != value:
                        changed.setdefault(owner, {})[key] = new
        return changed

    def _rows(self, entries: Mapping[str, Entry]) -> Iterator[tuple[str, set[str], int]]:
        """Yield the name of each ``rowwise`` layer, the sources of its input, and its number of input features."""
        for row in [key for key, entry in entries.items() if entry.style == "rowwise"]:
            module = self._root.get_submodule(row)
            layer = linear_layer(module) or convolution(module)
            if layer is not None:  # A plan that gives another module this style is refused when it is tried.
                sources = set() if self._dataflow is None else set(self._dataflow.input_sources[row])
                yield row, sources, layer.in_features

    def _groups_of_keys(self, module: nn.Module, groups: int) -> int:
        """Return the number of query heads that share a key head on one rank.

        It is ``groups`` as in the whole model, unless there are fewer key heads than ranks, so that several ranks have
        copies of the same key head.
        """
        head_dim, key = getattr(module, "head_dim", None), getattr(module, "k_proj", None)
        layer = linear_layer(key) if isinstance(key, nn.Module) else None
        if layer is None or not isinstance(head_dim, int):
            return groups
        num_key_heads = layer.out_features // head_dim
        return groups if num_key_heads >= self._num_ranks else max(groups * num_key_heads // self._num_ranks, 1)


def _numbers(module: nn.Module, has_configurations: bool) -> Iterator[tuple[str, int]]:
    """Yield the integers above 1 among the attributes of a module.

    Args:
        module: The module whose attributes are read.
        has_configurations: Whether to yield those of its configurations as well.

    Yields:
        The attribute's name, such as ``num_heads`` or ``config.num_heads``, and its value.
    """
    numbers = {**vars(module), **(dict(configured_values(module)) if has_configurations else {})}
    for key, value in numbers.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield key, value


def _named_as_wide(module: nn.Module, call: Call, features: int) -> Iterator[str]:
    """Yield the names of a call's arguments that are computed from layers and have ``features`` as their last size."""
    try:
        given = signature(module.forward).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):  # The function has no signature, or one of another function.
        return
    for name, value in given.arguments.items():
        if isinstance(value, Tensor) and value.ndim and is_learned(value):
            size = value.shape[-1]  # A symbolic size depends on values, and cannot be compared.
            if isinstance(size, int) and size == features:
                yield name
