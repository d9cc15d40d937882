"""Compute shapes instead of values, except of small tensors that no tensor without values has gone into."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import READ_NUMBER, DispatchMode, FakeTensor, FakeTensorMode, tree_leaves, written_arguments
from lightning_dist.run.simulation.messages import Echo
from lightning_dist.run.simulation.storages import StorageMeter
from lightning_dist.run.simulation.work import WorkMeter
from lightning_dist.tracing.step_graph import FakeRules

__all__ = ["ValuelessTensors"]

_LARGE = 16
"""Number of elements above which a tensor is created without values, except a range."""

_LONG = 2**14
"""Number of elements above which a range is created without values.

Models make positions and masks from ranges, and decide by their values. A mask of all pairs has the square of this
number of elements."""


class ValuelessTensors(DispatchMode):  # type: ignore[no-untyped-call]
    """Let operations in this context return tensors without values (torch's fakes), which take no memory.

    A tensor is without values if it is created with more than a few elements, or if a tensor without values has gone
    into it. What ranks tell each other (flags, numbers, digests), batches, positions and numbers of steps have values,
    and what depends on them is decided as in a real run. So have permutations, of which samplers read every number. A
    tensor with values loses them when one without values is written into it. :meth:`without_values` takes those of a
    model's weights away.

    A number that is read from a tensor without values is 0, and two of them are equal. Trials of blocks, which compare
    what a rank computes with what the whole block computes, therefore find no difference, and the first candidate of
    each plan is taken.

    Args:
        meter: Object that is shown every tensor that an operation returns.
        work: Object that is shown every operation.
    """

    def __init__(self, meter: StorageMeter, work: WorkMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self._rules = FakeRules(makes_up_sizes=True)
        self._meter = meter
        self._work = work
        self._echo = Echo()
        self._overwritten: set[int] = set()
        """The storages with values that an operation on tensors without values has changed, by ``id``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation, with or without values."""
        if func is torch.ops.prim.device.default:  # It is asked for more often than all others together.
            return args[0].fake_device
        if any(kind not in _PLAIN for kind in types):  # DTensors and the like call the operations of their parts.
            return NotImplemented
        kwargs = kwargs or {}
        has_fakes = FakeTensor in types or self._reads_overwritten(args, kwargs)
        result = self._result(func, has_fakes, args, kwargs)
        self._work.see(func, args, kwargs, result)
        if has_fakes:
            self._note_overwritten(func, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._meter.see(leaf)
        return result

    def without_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values of the same shape, strides, dtype and device."""
        with self._fakes:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._meter.see(empty)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    def _reads_overwritten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an argument has values that are no longer those of a real run."""
        if not self._overwritten:
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in (Tensor, nn.Parameter)]
        return any(id(tensor.untyped_storage()) in self._overwritten for tensor in tensors)

    def _note_overwritten(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember the tensors with values that an operation has changed by tensors without values."""
        written = (args, kwargs) if func.namespace == "c10d" else written_arguments(func, args, kwargs)
        for leaf in tree_leaves(written):
            if type(leaf) in (Tensor, nn.Parameter):
                storage = leaf.untyped_storage()
                if id(storage) not in self._overwritten:
                    self._overwritten.add(id(storage))
                    weakref.finalize(storage, self._overwritten.discard, id(storage))

    def _result(self, func: Any, has_fakes: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace == "c10d":
            return self._communicate(func, has_fakes, args, kwargs)
        if has_fakes:
            if func is READ_NUMBER:
                return _zero(args[0].dtype)
            if func is torch.ops.aten.equal.default:
                return True
            return self._shape_of(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) or (isinstance(leaf, torch.device) and leaf.type == "meta") for leaf in leaves):
            return func(*args, **kwargs)
        planned = self._shape_of(func, args, kwargs)
        if func.overloadpacket is torch.ops.aten.randperm:
            return func(*args, **kwargs)
        most = _LONG if func.overloadpacket is torch.ops.aten.arange else _LARGE
        is_large = any(isinstance(leaf, Tensor) and leaf.numel() > most for leaf in tree_leaves(planned))
        return planned if is_large else func(*args, **kwargs)

    def _shape_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._fakes, self._rules:
            return func(*args, **kwargs)

    def _communicate(self, func: Any, has_fakes: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if has_fakes:
            with self._fakes:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._echo(func.overloadpacket.__name__, args)
        return result


_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})


def _zero(dtype: torch.dtype) -> bool | float | int:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
