"""Between a checkpoint's dictionary and what is stored: its tensors, and the rest without them, pickled."""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint.manifest import CheckpointError

__all__ = ["SAFE", "Snapshot", "pickled", "put_back", "references", "take_snapshot", "unpickled"]

_REFERENCE = "lightning_dist.tensor"
_SCALAR = "lightning_dist.scalar"
_SCALAR_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
"""Those that are written as numbers: an optimizer has one for each parameter, and pickling a tensor takes long."""
_FIXED = (type(None), bool, int, float, str, bytes, torch.dtype, torch.Size)
"""Values that cannot change."""


@dataclass(frozen=True)
class Snapshot:
    """What a rank has of a checkpoint.

    Args:
        tensors: Path in the dictionary to tensor; the live ones.
        state: Pickles the dictionary without them, as it was.
        own: What only this rank will read, pickled.
        about: For listings; plain JSON.
    """

    tensors: dict[str, torch.Tensor]
    state: Callable[[], bytes]
    own: bytes = b""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of the tensors; DTensors count whole."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def take_snapshot(
    checkpoint: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Split ``checkpoint`` into tensors and the rest, which may change afterwards.

    Args:
        checkpoint: Dictionaries, lists and tuples of anything that pickles.
        own: What this rank alone has, and the same rank of as many will read.
        about: For listings; plain JSON.
    """
    tensors: dict[str, torch.Tensor] = {}
    changeable: list[Any] = []
    rest = _take_out(checkpoint, (), tensors, changeable)
    state = partial(pickled, rest)  # later: it takes a while, and only one rank's is written
    if changeable:
        content = state()
        state = partial(bytes, content)
    return Snapshot(tensors, state, pickled(own) if own else b"", about or {})


SAFE: tuple[Any, ...] = (
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    collections.defaultdict,
    collections.deque,
)
"""What ``weights_only`` lets through besides what torch does: making one of these runs nobody's code."""


def pickled(value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpickled(content: bytearray, weights_only: bool) -> Any:
    """The inverse of :func:`pickled`.

    Raises:
        CheckpointError: If ``weights_only``, and there are objects other than tensors, plain values and :data:`SAFE`.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE)):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        raise CheckpointError(
            f"it holds objects of {', '.join(names)}, and reading those can run any code. If you trust where it comes"
            " from, pass weights_only=False"
        ) from error


def _take_out(value: Any, path: tuple[str | int, ...], tensors: dict[str, torch.Tensor], changeable: list[Any]) -> Any:
    """A copy of ``value`` with references in the place of tensors, which go into ``tensors``; scalars stay.

    What is in it that cannot be copied goes into ``changeable``.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta:  # another rank has it
            return {_REFERENCE: "/".join(map(str, path))}
        if not isinstance(value, DTensor) and value.ndim == 0 and value.dtype in _SCALAR_DTYPES:
            return {_SCALAR: [value.item(), str(value.dtype).removeprefix("torch.")]}
        if not isinstance(value, DTensor) and (value.ndim == 0 or value.layout != torch.strided):
            changeable.append(value)
            return value.detach().cpu()
        key = "/".join(map(str, path))
        if key in tensors:
            raise ValueError(f"Two tensors of the checkpoint have the path {key}: a key must not contain '/'.")
        tensors[key] = value
        return {_REFERENCE: key}
    if type(value) in (dict, OrderedDict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        taken = [(key, _take_out(item, (*path, key), tensors, changeable)) for key, item in items]
        if hasattr(value, "_metadata"):  # a module's state_dict
            return dict(taken)
        return type(value)(taken) if isinstance(value, dict) else type(value)(item for _, item in taken)
    if type(value) not in _FIXED:
        _refuse_dtensors(value, path)
        changeable.append(value)
    return value


def _refuse_dtensors(value: Any, path: tuple[str | int, ...]) -> None:
    """Look for DTensors where none is taken out: pickled, each would be the part of it that one rank has."""
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        items = vars(value).values()
    for item in items:
        if isinstance(item, DTensor):
            raise TypeError(
                f"{'/'.join(map(str, path))} of the checkpoint is a {type(value).__name__} that holds sharded tensors:"
                " put them into a dict, an OrderedDict, a list or a tuple"
            )
        if isinstance(item, Mapping | list | tuple):
            _refuse_dtensors(item, path)


def references(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str, tuple[str | int, ...]]]:
    """Of each tensor that was taken out of ``value``, its key among the tensors and its path in the dictionary."""
    if isinstance(value, dict) and value.keys() == {_REFERENCE}:
        return [(value[_REFERENCE], path)]
    if type(value) in (dict, OrderedDict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, item in items for found in references(item, (*path, key))]
    return []


def put_back(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with its tensors in it again; those that are not given are left out of dictionaries."""

    def is_left_out(item: Any) -> bool:
        return isinstance(item, dict) and item.keys() == {_REFERENCE} and item[_REFERENCE] not in tensors

    if isinstance(value, dict):
        if value.keys() == {_REFERENCE}:
            return tensors.get(value[_REFERENCE])
        if value.keys() == {_SCALAR}:
            number, dtype = value[_SCALAR]
            return torch.tensor(number, dtype=getattr(torch, dtype))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, put_back(item, tensors)) for key, item in value.items() if not is_left_out(item))
    if type(value) in (list, tuple):
        return type(value)(put_back(item, tensors) for item in value)
    return value
