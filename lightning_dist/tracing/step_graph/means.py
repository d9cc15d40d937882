"""Find out which tensors of a traced step are means over samples.

The mean of such a tensor over microbatches, weighted by their numbers of samples, is its value for the whole batch.
This does not hold for other tensors without dimensions, such as ``loss.exp()``, ``x.std()`` or ``mask.sum()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dist._compat import tree_leaves

__all__ = ["follow", "is_known_mean", "is_mean", "is_same_value"]

_SAMPLES, _MEAN, _OTHER = "samples", "mean", "other"
"""The kinds of tensors: those with a value for each sample, means over samples, and everything else."""

_COPIES = frozenset({
    "alias", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "detach_", "double", "float", "half",
    "requires_grad_", "reshape", "squeeze", "to", "type", "unsqueeze", "view", "view_as", "__get__",
})  # fmt: skip
"""Functions whose result has the values of their first argument; ``__get__`` is that of attributes such as ``data``."""

_LINEAR = frozenset({
    "add", "add_", "__add__", "__radd__", "__iadd__", "cat", "concat", "expand", "mean", "neg", "__neg__", "stack",
    "sub", "sub_", "__sub__", "__rsub__", "__isub__", "subtract", "sum", "__getitem__", "unbind", "lerp",
})  # fmt: skip
"""Functions that are linear in all of their tensors together."""

_LINEAR_IN_FIRST = frozenset({
    "div", "div_", "__div__", "__truediv__", "__itruediv__", "divide", "mul", "mul_", "__mul__", "__rmul__",
    "__imul__", "multiply", "true_divide",
})  # fmt: skip
"""Functions that are linear in their first argument if the others are numbers or constants."""

_LOSSES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div"})
"""Loss functions of torch whose name does not end with ``_loss``."""


def is_mean(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has dimensions, or is a mean over samples judging by the functions that computed it."""
    return tensor.ndim > 0 or _kind(tensor) != _OTHER


def is_known_mean(tensor: Tensor) -> bool:
    """Return whether ``tensor`` was computed as a mean over samples, and was not multiplied by a number since."""
    return tensor.ndim == 0 and tensor.__dict__.get("_kind") == _MEAN and not tensor.__dict__.get("_is_scaled", False)


def is_same_value(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same one, or a detached or converted copy of it."""
    return _source(tensor) is _source(other)


def follow(name: str, args: Any, kwargs: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Record the kind of each tensor that a torch function between parts returns.

    Args:
        name: Name of the torch function, such as ``__add__``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        inputs: The tensors among the arguments, in their order.
        outputs: The tensors that the function returned or changed in place, on which their kind is recorded.
    """
    for output in outputs:
        if not inputs or any(output is given for given in inputs[1:]):
            continue
        kind = _kind_of_result(name, args, kwargs, inputs, output)
        source = _source(inputs[0])
        output.__dict__["_kind"] = kind
        output.__dict__["_is_scaled"] = name in _LINEAR_IN_FIRST or any(
            tensor.__dict__.get("_is_scaled", False) for tensor in inputs
        )
        output.__dict__["_summed"] = _num_summed(name, inputs, output)
        if name in _COPIES and output is not source:
            output.__dict__["_source"] = source
        elif output is inputs[0]:  # It was changed in place.
            output.__dict__.pop("_source", None)


def _source(tensor: Tensor) -> Tensor:
    source: Tensor = tensor.__dict__.get("_source", tensor)
    return source


def _kind(tensor: Tensor) -> str:
    """Return the kind of ``tensor``. A 0-dimensional tensor that a part of the model returns counts as a mean."""
    kind: str | None = tensor.__dict__.get("_kind")
    return kind or (_SAMPLES if tensor.ndim else _MEAN)


def _kind_of_result(name: str, args: Any, kwargs: Any, inputs: Sequence[Tensor], output: Tensor) -> str:
    kinds = [_kind(tensor) for tensor in inputs if not _is_constant(tensor)]
    is_by_number = name in _DIVISIONS and len(args) > 1 and isinstance(args[1], int | float)
    if is_by_number and args[1] in inputs[0].__dict__.get("_summed", ()):
        return _MEAN
    if _OTHER in kinds:
        return _OTHER
    if name in _COPIES:
        return _kind(inputs[0])
    if _SAMPLES not in kinds:
        is_linear = name in _LINEAR or (
            name in _LINEAR_IN_FIRST and kinds.count(_MEAN) <= 1 and args and args[0] is inputs[0]
        )
        return _MEAN if is_linear or not kinds else _OTHER
    if name == "masked_select" or (name == "__getitem__" and _is_mask(args[1])):
        return _OTHER  # Microbatches have unequal numbers of the chosen elements.
    samples = next(tensor for tensor in inputs if not _is_constant(tensor) and _kind(tensor) == _SAMPLES)
    if name == "mean" or name.endswith("_loss") or name in _LOSSES:
        if "sum" in [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, str)]:
            return _OTHER
        return _SAMPLES if _is_as_long(output, samples) else _MEAN
    if name in _REDUCTIONS:
        return _SAMPLES if _is_as_long(output, samples) else _OTHER
    return _SAMPLES if output.ndim else _OTHER


def _is_constant(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter, or a number in a buffer or of the step."""
    marks = tensor.__dict__
    return "_param_name" in marks or (tensor.ndim == 0 and "_kind" not in marks and "_marks" not in marks)


_DIVISIONS = frozenset({"div", "__div__", "__truediv__", "divide", "true_divide"})


def _num_summed(name: str, inputs: Sequence[Tensor], output: Tensor) -> tuple[int, ...]:
    """Return the divisors that turn a sum over samples into a mean: the number of its terms, or of the samples."""
    if name in _COPIES:
        known: tuple[int, ...] = inputs[0].__dict__.get("_summed", ())
        return known
    shape = inputs[0].shape
    if name != "sum" or output.ndim or _kind(inputs[0]) != _SAMPLES or not all(type(size) is int for size in shape):
        return ()
    return (inputs[0].numel(), shape[0])


def _is_mask(index: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(index))


_REDUCTIONS = frozenset({
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "max", "median", "min", "nanmean",
    "nansum", "norm", "prod", "quantile", "std", "sum", "var",
})  # fmt: skip
"""Functions that may reduce over samples, in which case their result is not a mean."""


def _is_as_long(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the sizes of dimension 0 are known and equal; that of a fake tensor may depend on values."""
    sizes = [shape[0] if shape else None for shape in (tensor.shape, other.shape)]
    return all(type(size) is int for size in sizes) and sizes[0] == sizes[1]
