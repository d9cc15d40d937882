"""Split a batch, which may be nested in containers, into microbatches along dimension 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

__all__ = [
    "SPLIT_BY_HAND",
    "batch_size_of",
    "check_divides",
    "greatest_divisor",
    "map_leaves",
    "signature",
    "split_batch",
]

SPLIT_BY_HAND = "define split_batch(batch, num_microbatches) on the module, which returns a list of microbatches"
"""What users are told to do if a batch cannot be split along dimension 0."""


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of ``batch``: the size of dimension 0 of its tensors; 0 if it has no such tensors.

    The lengths of lists of samples, and of objects that can be sliced, count as well.

    Raises:
        ValueError: If the sizes differ. The message names two of the tensors by their paths in the batch.
    """
    sizes: dict[int, tuple[str, str]] = {}

    def look(path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.ndim > 0:
                sizes.setdefault(value.shape[0], (path, f"shape {tuple(value.shape)}"))
        elif _is_sliceable(value) or _is_list_of_samples(value):
            sizes.setdefault(len(value), (path, f"{len(value)} samples"))
        return value

    map_leaves(batch, look)
    if len(sizes) > 1:
        (first, a), (second, b), *_ = sizes.values()
        raise ValueError(
            f"batch{first} has {a} and batch{second} has {b}: a pipeline splits every tensor of a batch into"
            " microbatches along dimension 0, so that its size must be the same for all. If a tensor does not belong"
            " to the samples, give it a leading dimension of the batch's size, or keep it on the module as a buffer;"
            f" or {SPLIT_BY_HAND}."
        )
    return next(iter(sizes), 0)


def check_divides(size: int, num_microbatches: int) -> None:
    """Check that a full batch can be split into microbatches of equal size.

    Args:
        size: The number of samples of this rank's batch.
        num_microbatches: The number of microbatches that the user has set.

    Raises:
        ValueError: If ``num_microbatches`` does not divide ``size``.
    """
    if size == 0:
        raise ValueError("This rank's batch has no samples: a pipeline's step needs at least one for each microbatch.")
    if size % num_microbatches:
        divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ValueError(
            f"num_microbatches={num_microbatches} does not divide the batch of {size} samples that this rank has. Use"
            f" one of {divisors}, or another batch size."
        )


def greatest_divisor(size: int, most: int) -> int:
    """Return the greatest number up to ``most`` that divides ``size``; 1 if ``size`` is 0."""
    return max((number for number in range(1, most + 1) if size and size % number == 0), default=1)


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split ``batch`` into ``num_microbatches`` equal parts: views of its tensors, in containers of the same types.

    Besides tensors, the following are split: lists of as many strings or numbers as there are samples, lists of
    samples, and arrays and other objects that have a length and can be sliced. Each microbatch has everything else
    unchanged.

    Raises:
        ValueError: If the sizes of dimension 0 differ (see :func:`batch_size_of`).
    """
    size = batch_size_of(batch)
    part = size // num_microbatches

    def take(index: int) -> Callable[[str, Any], Any]:
        def of(path: str, value: Any) -> Any:
            is_split = value.ndim > 0 if isinstance(value, Tensor) else _is_sliceable(value)
            if is_split or (isinstance(value, list | tuple) and len(value) == size):
                return value[index * part : (index + 1) * part]
            return value

        return of

    return [map_leaves(batch, take(index)) for index in range(num_microbatches)]


def signature(batch: Any) -> tuple[object, ...]:
    """Return the properties of ``batch`` on which the control flow of a step can depend.

    These are the structure of the batch, the shapes and dtypes of its tensors, its integers, booleans and None, and the
    types of other values.
    """
    found: list[object] = []

    def look(path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append((path, tuple(value.shape), value.dtype))
        elif _is_sliceable(value):
            inside = [(key, item) for key, item in getattr(value, "__dict__", {}).items() if isinstance(item, Tensor)]
            shapes = tuple((key, tuple(item.shape), item.dtype) for key, item in inside)
            found.append((path, type(value), len(value), getattr(value, "shape", None), shapes))
        elif _is_list_of_samples(value):
            for index, sample in enumerate(value):
                found.append((path, index, *signature(sample)))
        else:
            found.append((path, value if isinstance(value, bool | int | None) else type(value)))
        return value

    map_leaves(batch, look)
    return tuple(found)


def map_leaves(value: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return ``value`` with each leaf replaced by ``function(path, leaf)``.

    Leaves are tensors, whole lists and tuples of strings or numbers, whole lists of samples, and any object that is
    neither a container nor a dataclass.

    Args:
        value: A batch, or a part of one.
        function: Function that is called with the path to a leaf and the leaf, and returns what replaces the leaf.
        path: The path to ``value``, such as ``['images'][0]``, with which the paths of leaves begin.
    """
    if isinstance(value, Tensor) or _is_list_of_samples(value):
        return function(path, value)
    if isinstance(value, Mapping):
        items = {key: map_leaves(item, function, f"{path}[{key!r}]") for key, item in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(items)  # type: ignore[call-arg]  # such as OrderedDict or Hugging Face's BatchEncoding
        except TypeError:
            return items
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, str | bytes | int | float) for item in value):
            return function(path, value)
        items_ = [map_leaves(item, function, f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items_)
        return type(value)(items_)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_leaves(getattr(value, f.name), function, f"{path}.{f.name}") for f in fields(value)}
        return replace(value, **{name: changed[name] for name in changed if _is_init(value, name)})
    return function(path, value)


def _is_sliceable(value: Any) -> bool:
    """Return whether ``value`` is an object, such as an array, that has a length and can be sliced."""
    if isinstance(value, str | bytes | list | tuple | type) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def _is_list_of_samples(value: Any) -> bool:
    """Return whether ``value`` is a list of samples, which are containers without a dimension of samples.

    A container counts as a sample if it holds a number or a tensor without dimensions. The containers in a list of
    batches, which several loaders return, hold neither.
    """
    if not isinstance(value, list) or not value:
        return False
    items = [item.values() if isinstance(item, Mapping) else item for item in value]
    return all(
        isinstance(item, Iterable)
        and not isinstance(item, str | bytes | Tensor)
        and any(isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and leaf.ndim == 0) for leaf in item)
        for item in items
    )


def _is_init(value: Any, name: str) -> bool:
    return any(f.name == name and f.init for f in fields(value))
