"""Convert from and to directories of torch.distributed.checkpoint, as Lightning's sharded strategies save them."""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_dist.checkpoint import CheckpointError
from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.checkpoint.snapshot import SAFE
from lightning_dist.run.convert.formats import Checkpoint, Options, unfinished, with_bookkeeping
from lightning_dist.run.convert.lightning_file import load_file

__all__ = ["DistributedCheckpoint"]

_METADATA = ".metadata"
_REST = "meta.pt"
"""File of Lightning's sharded strategies with all of the checkpoint but the module's and the optimizers' states."""

_OPTIMIZER = "optimizer_"

_LARGE = 16 * 2**20
"""Bytes above which a tensor is read by itself."""


class DistributedCheckpoint:
    """Read and write directories of torch.distributed.checkpoint.

    The names in them are those of Lightning's FSDPStrategy and ModelParallelStrategy. Directories of other programs are
    read for their weights, which they have under ``"model"`` or without any name before those of the parameters.
    """

    name = "dcp"
    about = "directory of torch.distributed.checkpoint"
    has_weights_alone = False

    def is_at(self, path: str) -> bool:
        """Return whether there is a directory with the metadata of such a checkpoint."""
        return (Path(path) / _METADATA).is_file()

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the checkpoint, of which each rank's part is read in turn."""
        try:
            nested = _read_all(Path(path), options.trust, mapped, weights_alone)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds objects that are neither tensors nor plain values ({error}), and reading those can run"
                " any code. If you trust the source of the directory, add --trust."
            ) from error
        rest_file = Path(path) / _REST
        rest = load_file(rest_file, options.trust) if rest_file.is_file() and not weights_alone else {}
        if "state_dict" in nested:
            names = sorted((name for name in nested if name.startswith(_OPTIMIZER)), key=_number)
            states = {"optimizer_states": [nested.pop(name) for name in names]} if names else {}
            return {**rest, **nested, **states} if rest or states else with_bookkeeping(nested["state_dict"])
        is_nested = isinstance(nested.get("model"), Mapping)
        found = nested["model"] if is_nested else nested
        weights = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        if left_out := sorted({*nested, *found} - weights.keys() - ({"model"} if is_nested else set())):
            warnings.warn(
                f"{path} is of another program: {', '.join(map(str, left_out[:5]))} is left out.", stacklevel=2
            )
        return with_bookkeeping(weights)

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write the checkpoint as Lightning's sharded strategies do."""
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        states = checkpoint.get("optimizer_states", [])
        sharded = {"state_dict": dict(checkpoint["state_dict"])}
        sharded |= {f"{_OPTIMIZER}{index}": state for index, state in enumerate(states)}
        with unfinished(Path(path)) as new:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.save(sharded, storage_writer=FileSystemWriter(new, thread_count=1), no_dist=True)
            torch.save(rest, new / _REST)
        return checkpoint


def _number(name: str) -> int:
    return int(name.removeprefix(_OPTIMIZER))


def _read_all(path: Path, trust: bool, mapped: MappedTensors, weights_alone: bool) -> dict[str, Any]:
    """Return everything in the directory, in dictionaries as it was saved."""
    reader = FileSystemReader(path) if trust else _SafeReader(path)
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            if not (weights_alone and name.startswith(_OPTIMIZER)):
                wanted[name] = mapped.empty(about.size, about.properties.dtype)
        elif not weights_alone:
            wanted[name] = None
    # The reader holds a tensor until it has read the next one.
    large = [name for name, value in wanted.items() if value is not None and value.nbytes > _LARGE]
    try:
        for names in (wanted.keys() - large, *([name] for name in large)):
            part = {name: wanted[name] for name in names}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(part, storage_reader=reader, planner=_Planner(trust), no_dist=True)
            wanted |= part
    except dcp.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, pickle.UnpicklingError):
            raise first from error
        raise CheckpointError(f"{path} cannot be read: {first}.") from error
    paths = metadata.planner_data or {}
    nested: dict[str, Any] = {}
    for name, value in wanted.items():
        _set(nested, paths.get(name, (name,)), value)
    whole: dict[str, Any] = _with_lists(nested)
    return whole


def _set(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _with_lists(value: Any, is_state: bool = False) -> Any:
    """Return dictionaries whose keys are the positions in a list as this list.

    The keys of dictionaries were saved as texts, also those of optimizer states, which are positions of parameters.
    """
    if not isinstance(value, dict):
        return value
    result = {key: _with_lists(item, is_state=key == "state") for key, item in value.items()}
    if is_state:
        return {int(key) if str(key).isdigit() else key: item for key, item in result.items()}
    if result and all(isinstance(key, int) for key in result):
        return [result[index] for index in sorted(result)]
    return result


class _Planner(DefaultLoadPlanner):
    """Load objects other than tensors with ``weights_only``, unless they are trusted."""

    def __init__(self, trust: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals(list(SAFE)):
            loaded = torch.load(value, map_location="cpu", weights_only=not self._trust)
        self.state_dict[read_item.dest_index.fqn] = loaded


class _SafeReader(FileSystemReader):
    """Read the metadata, which are pickled, with their own classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Refuse all classes but those of torch's metadata, which run no code of others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # Python 3.11.0 to 3.11.3 pickled members of enumerations with it.
            return _member
        is_plain = (module, name) in _PLAIN
        found = super().find_class(module, name) if is_plain or module.startswith("torch") else None
        is_metadata = isinstance(found, type) and module.startswith("torch.distributed.checkpoint.")
        if is_plain or is_metadata or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} in its {_METADATA}")


def _member(kind: Any, name: str) -> Enum:
    """Return the member ``name`` of an enumeration, and no attribute of anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} in its {_METADATA}")
    return kind[name]


def _name_of(function: Any) -> tuple[str, str]:
    return function.__module__, function.__qualname__


_PLAIN = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    _name_of(copyreg.dispatch_table[torch.layout](torch.strided)[0]),
}
