"""Convert a checkpoint to another format, and compare what was written with what was read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dist.checkpoint import CheckpointError, CheckpointNotFoundError
from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.run.convert.dcp import DistributedCheckpoint
from lightning_dist.run.convert.directory import Directory
from lightning_dist.run.convert.formats import Format, Options
from lightning_dist.run.convert.huggingface import HuggingFaceFolder
from lightning_dist.run.convert.lightning_file import LightningFile
from lightning_dist.run.convert.safetensors_file import SafetensorsFile

__all__ = ["FORMATS", "Conversion", "convert"]

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (Directory(), DistributedCheckpoint(), LightningFile(), SafetensorsFile(), HuggingFaceFolder())
}
"""The formats by the names of ``--to``."""

_BY_SUFFIX = {".ckpt": "lightning", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class Conversion:
    """Say what was converted.

    Args:
        read: Name of the format that was read.
        written: Name of the format that was written.
        num_tensors: Number of tensors that were written.
        num_bytes: Number of bytes of these tensors.
        left_out: What the checkpoint had and the new format does not have.
    """

    read: str
    written: str
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]


def convert(source: str, destination: str, to: str | None = None, options: Options | None = None) -> Conversion:
    """Convert the checkpoint at ``source``, and compare each written tensor with the one that was read, bit by bit.

    Tensors are mapped from files, or made in a temporary file beside ``destination``, so that memory for about one of
    them is needed, and disk space for the checkpoint twice.

    Args:
        source: Path of a checkpoint of any format; of this project's directories also a URL.
        destination: Path at which nothing is.
        to: Name of the format to write. None: by the ending of ``destination``.
        options: How to convert. None: the defaults of :class:`Options`.

    Raises:
        CheckpointError: If ``source`` is damaged, or holds pickled objects that are not trusted.
        FileExistsError: If there is something at ``destination``.
        ValueError: If a format is unknown or cannot hold the checkpoint.
    """
    options = options or Options()
    target, kind = _format_to_write(destination, to), _format_of(source)
    if os.path.lexists(destination):
        raise FileExistsError(f"{destination} exists: remove it, or name another path.")
    folder = Path(destination).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with MappedTensors(folder) as mapped:
        checkpoint = kind.read(source, options, mapped, weights_alone=target.has_weights_alone)
        if not checkpoint.get("state_dict"):
            raise ValueError(f"{source} has no weights, so that there is nothing to convert.")
        weights = set(checkpoint["state_dict"])
        expected = target.write(destination, checkpoint, options, mapped)
        with MappedTensors(folder) as again:
            found = target.read(destination, options, again, weights_alone=target.has_weights_alone)
            num_tensors, num_bytes = _compare(expected, found, destination)
    left_out = tuple(sorted(weights - set(expected["state_dict"])))
    if target.has_weights_alone and not kind.has_weights_alone:
        left_out = (*left_out, "everything but the weights")
    return Conversion(kind.name, target.name, num_tensors, num_bytes, left_out)


def _format_of(path: str) -> Format:
    """Return the format of the checkpoint at ``path``.

    Raises:
        CheckpointNotFoundError: If nothing is there.
        ValueError: If it has no known format.
    """
    for one in FORMATS.values():
        if one.is_at(path):
            return one
    if "://" in path or not os.path.lexists(path):
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
    raise ValueError(f"{path} has none of the formats that can be read: {_known()}.")


def _format_to_write(destination: str, to: str | None) -> Format:
    if "://" in destination:
        raise ValueError(f"OUT={destination!r} must be a local path. Copy it to the store afterwards.")
    if to is not None and to not in FORMATS:
        raise ValueError(f"--to={to!r} is no format: use {', '.join(FORMATS)}.")
    name = to or _BY_SUFFIX.get(Path(destination).suffix)
    if name is None:
        raise ValueError(f"OUT={destination!r} does not say which format to write: add --to with {_known()}.")
    return FORMATS[name]


def _known() -> str:
    *others, last = (f"{name} ({one.about})" for name, one in FORMATS.items())
    return f"{', '.join(others)} or {last}"


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], path: str) -> tuple[int, int]:
    """Check that all tensors are there and have the same bits, and return their number and their bytes.

    Raises:
        CheckpointError: If a tensor is missing or differs.
    """
    theirs, num_bytes, number = dict(_tensors(found)), 0, 0
    for place, tensor in _tensors(expected):
        other = theirs.get(place)
        if other is None or not _is_same(tensor, other):
            name = "/".join(map(str, place))
            raise CheckpointError(f"{path} was written, but its {name} is not what was read: do not use it.")
        number, num_bytes = number + 1, num_bytes + tensor.nbytes
    return number, num_bytes


def _tensors(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, (*place, key))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_as_bytes(one), _as_bytes(other))  # As numbers, NaN would differ from itself.


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
