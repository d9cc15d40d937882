"""Stand for tensors whose values only ranks of another pipeline stage have.

In hooks, :class:`~lightning_dist.techniques.pipeline.outside_of_steps.AllStages` sends values when they are needed. A
hook may keep such a tensor, and code outside of hooks may then need values that were never sent. The error of torch
would only name the meta device; that of these classes names the hook, and says how the hook can keep values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dist._compat import tree_leaves
from lightning_dist.techniques.pipeline.holders import holders_of, mark, mark_part

__all__ = ["RemoteParameter", "RemoteShards", "RemoteValue", "conversions_seen_by", "stand_in"]

_hooks = WeakTensorKeyDictionary()
"""The name of the hook in which a tensor was made."""


def stand_in(tensor: Tensor, is_sharded: bool, hook: str) -> Tensor:
    """Return ``tensor`` as one of the classes of this module.

    Args:
        tensor: A tensor on the meta device, with the shape of the whole tensor.
        is_sharded: Whether the ranks that have its values have a DTensor.
        hook: Name of the hook that runs.
    """
    with torch.DisableTorchFunction():
        found = tensor.as_subclass(RemoteShards if is_sharded else RemoteValue)
    _hooks[found] = hook
    return found


class RemoteValue(Tensor):
    """Explain errors that arise because the tensor has no values on this rank."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, whose results are of the same class."""
        remote = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteValue))
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise RuntimeError(_explanation(remote)) from error
        for leaf in tree_leaves(result):
            if isinstance(leaf, RemoteValue):
                _hooks.setdefault(leaf, _hook_of(remote))  # type: ignore[no-untyped-call]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy of the same class, of the same hook."""
        with torch.no_grad():
            copied = stand_in(torch.empty_like(_plain(self)), isinstance(self, RemoteShards), _hook_of(self))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a file keeps of a plain meta tensor, so that reading it does not need this class."""
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _ShardMethods:
    """Have the methods of DTensor by which hooks ask for values, since other ranks have a DTensor here."""

    def full_tensor(self: Any, **kwargs: Any) -> Tensor:
        """Return the whole tensor, which is no DTensor; its values are sent to this rank when they are needed."""
        whole = stand_in(_plain(self.detach()), False, _hook_of(self))
        holders = holders_of(self)
        return whole if holders is None else mark(whole, holders)

    def to_local(self: Any, **kwargs: Any) -> Tensor:
        """Return a tensor of which hooks cannot read values, because this rank has no part."""
        return mark_part(stand_in(_plain(self.detach()), False, _hook_of(self)))


class RemoteShards(_ShardMethods, RemoteValue):
    """Stand for a tensor that is a DTensor on the ranks that have its values."""


class RemoteParameter(_ShardMethods, nn.Parameter):
    """Stand for a parameter that is a DTensor on the ranks that have its values."""


class _Observer(Protocol):
    def converted(self, tensor: DTensor, convert: Callable[[], Tensor], is_part: bool) -> Tensor:
        """Return what ``convert`` makes of ``tensor``.

        Args:
            tensor: The tensor that is converted.
            convert: Function that returns the result.
            is_part: Whether the result is this rank's part.
        """


@contextmanager
def conversions_seen_by(observer: _Observer) -> Iterator[None]:
    """Let ``observer`` see when code in this context calls methods of DTensor that are no torch functions.

    Args:
        observer: An object whose ``converted`` is called.
    """
    names = ("full_tensor", "redistribute", "to_local")
    originals = {name: getattr(DTensor, name) for name in names}

    def watched(name: str) -> Callable[..., Tensor]:
        @wraps(originals[name])
        def method(tensor: DTensor, *args: Any, **kwargs: Any) -> Tensor:
            is_part = name == "to_local" and any(
                not isinstance(placement, Replicate) for placement in tensor.placements
            )
            return observer.converted(tensor, partial(originals[name], tensor, *args, **kwargs), is_part)

        return method

    for name in names:
        setattr(DTensor, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(DTensor, name, original)


def _hook_of(tensor: Tensor) -> str:
    return str(_hooks.get(tensor, "a hook"))  # type: ignore[no-untyped-call]


def _plain(tensor: Tensor) -> Tensor:
    with torch.DisableTorchFunction():
        return tensor.as_subclass(Tensor)


def _explanation(tensor: RemoteValue) -> str:
    return (
        f"{_hook_of(tensor)} kept a tensor of shape {[*tensor.shape]} of another stage, whose values only the ranks of"
        " that stage have, and the values are needed outside of the hook. In the hook, keep what all ranks can have:"
        " x.detach().numpy(), x.tolist() or float(x)."
    )
