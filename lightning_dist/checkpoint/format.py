"""What a checkpoint is on disk. The only module that knows.

A directory::

    checkpoint.json     {"format": "lightning-dist", "version": 1}
    state.pt            the checkpoint's dictionary, each tensor that is in the shards replaced by a reference to it
    .metadata, *.distcp the shards, torch.distributed.checkpoint (DCP), each tensor under its path in the dictionary

Every rank writes what it holds of a DTensor. Other tensors are rank 0's: DCP alone would take each from whichever rank
it likes, and mix. The directory is written beside its place, in ``.tmp/``, and renamed into it.
"""

from __future__ import annotations

import json
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_dist.consensus import together

__all__ = ["CheckpointError", "TensorInfo", "is_sharded_checkpoint", "read", "write"]

_MARKER = "checkpoint.json"
_STATE = "state.pt"
_FORMAT = {"format": "lightning-dist", "version": 1}
_REFERENCE = "lightning_dist.tensor"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, of another kind, or that does not hold what is asked of it."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint, before it is read.

    Args:
        path: Its keys in the checkpoint's dictionary: ``("state_dict", "model.norm.weight")``.
        shape: Its whole shape.
        dtype: What it is stored in.
    """

    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory that :func:`write` made."""
    return (path / _MARKER).is_file()


def write(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write ``checkpoint`` as the directory ``path``, in the place of what is there. A collective over all processes.

    Args:
        path: The same on all ranks, on a file system that all of them see.
        checkpoint: Dictionaries, lists and tuples of anything that pickles; DTensors and tensors go to the shards.

    Raises:
        CheckpointError: On all ranks, if a rank could not write its shards.
        OSError: On rank 0, if the directory could not be made or put in its place; on the others
            :class:`~lightning_dist.consensus.OtherRankError`. On any error what was at ``path`` stays.
    """
    tensors: dict[str, torch.Tensor] = {}
    state = _take_out(checkpoint, (), tensors)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    temporary = path.parent / ".tmp" / f"{path.name}-{_agreed_suffix()}"
    with together(f"creating {temporary}"):
        if is_first:
            temporary.mkdir(parents=True)
    mine = {key: tensor for key, tensor in tensors.items() if is_first or isinstance(tensor, DTensor)}
    # thread_count > 1 loses writers' errors: a full disk would look like success (pytorch #191391).
    writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, thread_count=1, overwrite=False)
    try:
        dcp.save(mine, storage_writer=writer, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {path} was not written: rank {', '.join(map(str, error.failures))} failed:"
            f" {_cause(error)}."
            " What was there before is unchanged."
        ) from error
    with together(f"writing {path}"):
        if is_first:
            torch.save(state, temporary / _STATE)
            (temporary / _MARKER).write_text(json.dumps(_FORMAT))
            _put_in_place(temporary, path)


def read(
    path: Path,
    template: Callable[[TensorInfo], torch.Tensor | None],
    weights_only: bool = False,
) -> dict[str, Any]:
    """Read the directory ``path``; each rank reads only what its templates need. No collective.

    Args:
        path: What :func:`write` made.
        template: For each tensor in the shards, the tensor to read it into: a DTensor of any placement, or a whole
            tensor. None leaves it out of the result.
        weights_only: Refuse pickled objects other than tensors and plain Python values.

    Raises:
        CheckpointError: If ``path`` is missing, is of another kind or version, or cannot be read.
    """
    _check_kind(path)
    try:
        state = torch.load(path / _STATE, map_location="cpu", weights_only=weights_only)
        reader = dcp.FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        wanted: dict[str, torch.Tensor] = {}
        for key, info in _references(state, ()):
            storage = stored.get(key)
            if not isinstance(storage, TensorStorageMetadata):
                raise CheckpointError(f"{path} is incomplete: it has no {'/'.join(map(str, info))}.")
            tensor = template(TensorInfo(info, storage.size, storage.properties.dtype))
            if tensor is not None:
                wanted[key] = tensor
        if wanted:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what is asked for
                dcp.load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {_cause(error)}") from error
    result: dict[str, Any] = _put_back(state, wanted)
    return result


def _cause(error: BaseException) -> BaseException:
    """The first rank's error in a DCP exception, which is no Exception and has a traceback for its text."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        first: BaseException = next(iter(error.failures.values()))[0]
        return first
    return error


def _check_kind(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}.{_others(path)}")
    if not is_sharded_checkpoint(path):
        kind = "a directory" if path.is_dir() else "a file"
        raise CheckpointError(
            f"{path} is {kind}, but not a lightning-dist checkpoint (it has no {_MARKER}).{_others(path)}"
        )
    found = json.loads((path / _MARKER).read_text())
    if found != _FORMAT:
        raise CheckpointError(f"{path} is a checkpoint of another version: {found}, where this reads {_FORMAT}.")


def _others(path: Path) -> str:
    """A hint that names the checkpoints beside (or inside) ``path``."""
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(str(child) for child in folder.iterdir() if is_sharded_checkpoint(child))
    except OSError:
        return ""
    return f" There are {', '.join(names[-3:])}." if names else ""


def _agreed_suffix() -> str:
    suffix = [uuid.uuid4().hex[:8]]
    if dist.is_initialized():
        dist.broadcast_object_list(suffix, src=0)
    return suffix[0]


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``; what was there is moved aside first and then removed."""
    old = temporary.with_name(temporary.name + "-old")
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    if old.is_dir():
        shutil.rmtree(old)
    elif old.exists():
        old.unlink()
    # Another save of this run may be using the folder of temporaries.
    if not any(temporary.parent.iterdir()):
        temporary.parent.rmdir()


def _take_out(value: Any, path: tuple[str | int, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` with references in the place of tensors, which go into ``tensors``; scalars stay."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and value.ndim == 0:
            return value.detach().cpu()
        key = "/".join(map(str, path))
        tensors[key] = value.detach()
        return {_REFERENCE: key}
    if type(value) in (dict, list, tuple) or hasattr(value, "_metadata"):  # a module's state_dict has _metadata
        items = value.items() if hasattr(value, "items") else enumerate(value)
        taken = [(key, _take_out(item, (*path, key), tensors)) for key, item in items]
        return dict(taken) if hasattr(value, "items") else type(value)(item for _, item in taken)
    return value


def _references(value: Any, path: tuple[str | int, ...]) -> list[tuple[str, tuple[str | int, ...]]]:
    if isinstance(value, dict) and value.keys() == {_REFERENCE}:
        return [(value[_REFERENCE], path)]
    if type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, item in items for found in _references(item, (*path, key))]
    return []


def _put_back(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of :func:`_take_out`; references that have no tensor are left out of dictionaries."""

    def is_left_out(item: Any) -> bool:
        return isinstance(item, dict) and item.keys() == {_REFERENCE} and item[_REFERENCE] not in tensors

    if isinstance(value, dict):
        if value.keys() == {_REFERENCE}:
            return tensors.get(value[_REFERENCE])
        if type(value) is dict:
            return {key: _put_back(item, tensors) for key, item in value.items() if not is_left_out(item)}
    if type(value) in (list, tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value
