"""Split a checkpoint's dictionary into its tensors and the pickled rest, and put the two together again."""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_dist._compat import module_versions, set_module_versions
from lightning_dist.checkpoint.manifest import CheckpointError
from lightning_dist.model.tensor_state import is_remote

__all__ = ["SAFE", "Snapshot", "pickled", "put_back", "references", "take_snapshot", "unpickled", "with_metadata"]

_REFERENCE = "lightning_dist.tensor"
_WHOLE = "lightning_dist.whole"
_METADATA = "lightning_dist.metadata"
_SCALAR = "lightning_dist.scalar"
_SCALAR_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
"""Dtypes of scalars stored as Python numbers, because pickling tensors is slow and optimizers have many scalars."""
_FIXED = (type(None), bool, int, float, str, bytes, torch.dtype, torch.Size)
"""Types of immutable values, which need no copy."""


@dataclass(frozen=True)
class Snapshot:
    """Hold one rank's part of a checkpoint that is to be saved.

    Args:
        tensors: Live tensors, not copies, by path in the dictionary.
        state: Function that returns the pickled dictionary without the tensors, as it was when the snapshot was taken.
        rank_state: Pickled state that only this rank will read.
        about: Values to show where checkpoints are listed; plain JSON.
        names: The paths of all tensors of the dictionary, including those that only other ranks have.
    """

    tensors: dict[str, torch.Tensor]
    state: Callable[[], bytes]
    rank_state: bytes = b""
    about: Mapping[str, Any] = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the whole tensors; a DTensor counts with its global shape."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def take_snapshot(
    checkpoint: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Split ``checkpoint`` into its tensors and the rest; the caller may change the rest, but no tensor, afterwards.

    Args:
        checkpoint: Nested dictionaries, lists and tuples of anything that pickles.
        rank_state: State that only this rank has, for the rank with the same number in a run with as many ranks.
        about: Values to show where checkpoints are listed; plain JSON.

    Raises:
        ValueError: If a key contains "/", so that two tensors have the same path.
        TypeError: If an object other than a dict, list or tuple holds DTensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    changeable: list[Any] = []
    rest = _take_out(checkpoint, (), tensors, changeable)
    state = partial(pickled, rest)  # It is pickled later, because that is slow and only rank 0 writes the result.
    if changeable:
        content = state()
        state = partial(bytes, content)
    names = frozenset(key for key, *_ in references(rest))
    return Snapshot(tensors, state, pickled(rank_state) if rank_state else b"", about or {}, names)


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
"""Classes that ``weights_only`` accepts in addition to torch's own, because unpickling them runs no foreign code."""


def pickled(value: Any) -> bytes:
    """Return ``value`` as the bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpickled(content: bytearray, weights_only: bool) -> Any:
    """Load the bytes of :func:`pickled`, with tensors on the CPU.

    Raises:
        CheckpointError: If ``weights_only`` is set and there are objects other than tensors, plain values and
            :data:`SAFE`.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE)):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        raise CheckpointError(
            f"it holds objects of {', '.join(names)}, and reading those can run any code. If you trust the source of"
            " the checkpoint, pass weights_only=False"
        ) from error


def _take_out(value: Any, path: tuple[str | int, ...], tensors: dict[str, torch.Tensor], changeable: list[Any]) -> Any:
    """Return a copy of ``value`` in which references replace the tensors, and add the tensors to ``tensors``.

    Scalar tensors are copied into the result as numbers. Values that are not copied, or that cannot be stored as raw
    bytes, are added to ``changeable``, because they may change before the result is pickled.
    """
    if isinstance(value, torch.Tensor):
        if is_remote(value):  # The tensor belongs to another rank of a pipeline.
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
        return {_REFERENCE: key} if isinstance(value, DTensor) else {_REFERENCE: key, _WHOLE: True}
    if type(value) in (dict, OrderedDict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        taken = [(key, _take_out(item, (*path, key), tensors, changeable)) for key, item in items]
        versions = module_versions(value)
        if versions is not None:
            return {**dict(taken), _METADATA: {name: dict(version) for name, version in versions.items()}}
        return type(value)(taken) if isinstance(value, dict) else type(value)(item for _, item in taken)
    if type(value) not in _FIXED:
        _refuse_dtensors(value, path)
        changeable.append(value)
    return value


def _refuse_dtensors(value: Any, path: tuple[str | int, ...]) -> None:
    """Check that an object from which no tensors are taken holds no DTensors.

    A DTensor inside it would be pickled with one rank's shard only.

    Raises:
        TypeError: If there is a DTensor in ``value``.
    """
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


def references(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, tuple[str | int, ...], bool]]:
    """Yield a description of each tensor that was taken out of ``value``.

    Args:
        value: The dictionary of a checkpoint, or a part of it, with references in place of tensors.
        path: Keys that lead to ``value`` in the checkpoint's dictionary.

    Yields:
        The tensor's key in ``Snapshot.tensors``, its path in the checkpoint's dictionary, and whether it was a plain
        tensor, and not a DTensor.
    """
    if _is_reference(value):
        yield value[_REFERENCE], path, _WHOLE in value
    elif type(value) in (dict, OrderedDict, list, tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from references(item, (*path, key))


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() in ({_REFERENCE}, {_REFERENCE, _WHOLE})


def put_back(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with ``tensors`` in the place of their references.

    References whose tensor is not given are removed from dictionaries, and become None elsewhere.
    """

    def is_left_out(item: Any) -> bool:
        return _is_reference(item) and item[_REFERENCE] not in tensors

    if isinstance(value, dict):
        if _is_reference(value):
            return tensors.get(value[_REFERENCE])
        if value.keys() == {_SCALAR}:
            number, dtype = value[_SCALAR]
            return torch.tensor(number, dtype=getattr(torch, dtype))
        if type(value) in (dict, OrderedDict):
            items = [(key, put_back(item, tensors)) for key, item in value.items() if not is_left_out(item)]
            return with_metadata(dict(items), value[_METADATA]) if _METADATA in value else type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(put_back(item, tensors) for item in value)
    return value


def with_metadata(state: Mapping[str, Any], metadata: Any) -> dict[str, Any]:
    """Return a module's state dict with the versions of its modules, which their loading code may use.

    Args:
        state: Values of the state dict by name; an entry that holds the versions is left out of the result.
        metadata: The versions of the state dict that ``state`` was made from; None: it has none.
    """
    if metadata is None:
        return dict(state)
    result = OrderedDict((key, value) for key, value in state.items() if key != _METADATA)
    set_module_versions(result, metadata)
    return result
