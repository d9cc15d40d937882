"""Decide which rank writes which part of a checkpoint's tensors, and read the parts that a rank of any layout needs.

A rank writes its parts one after another to one file, and the manifest records their positions. A rank derives its
parts from its DTensors alone, without communication. torch.distributed.checkpoint, whose protocol for DTensors is used
here, gathers the plans of all ranks on one rank and sends them back, which takes 0.1 s per save for 300 tensors on two
ranks, and longer with more tensors or ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint.manifest import CheckpointError, Chunk, Manifest, TensorEntry, new_digest
from lightning_dist.checkpoint.storage import NewFile, Reader
from lightning_dist.parameters.shard_slices import ShardSlices, local_part

__all__ = ["merged", "own_parts", "read_tensors", "write_tensors"]

ALIGNMENT = 64
"""Positions of chunks in their file are multiples of this number of bytes."""


def own_parts(tensors: Mapping[str, Tensor], is_first: bool) -> dict[str, Tensor]:
    """Return the local parts of ``tensors`` that this rank writes, by name, without communication.

    Where several ranks hold the same shard of a DTensor, one of them writes it, chosen so that each of them writes
    about as many bytes. Tensors that are not DTensors are written by the first rank.

    Args:
        tensors: The checkpoint's tensors by name. The names must be the same on all ranks, because the choice depends
            on them.
        is_first: Whether this is the first rank, which writes the tensors that are not DTensors.
    """
    own = []
    # The bytes that each replica writes are counted per mesh, because not all ranks need to be in each mesh.
    num_bytes: dict[Any, list[int]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, DTensor):
            if is_first:
                own.append(name)
            continue
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            continue
        replica, num_replicas = 0, 1
        for size, position, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
            if placement.is_replicate():
                replica, num_replicas = replica * size + position, num_replicas * size
        written = num_bytes.setdefault((tensor.device_mesh, num_replicas), [0] * num_replicas)
        writer = written.index(min(written))
        written[writer] += tensor.numel() * tensor.element_size()
        if writer == replica:
            own.append(name)
    return {name: local_part(tensors[name]) for name in own}


def write_tensors(file: NewFile, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Append the bytes of ``parts`` to ``file``, and return the entries of these tensors for the manifest.

    Args:
        file: This rank's file; it is left open.
        tensors: The DTensors or whole tensors that ``parts`` belong to, by name.
        parts: The result of :func:`own_parts`, or copies of the tensors in it.
    """
    entries, layouts = {}, ShardSlices()
    for name, part in parts.items():
        tensor, chunks = tensors[name], []
        for box in layouts.of(tensor) if part.numel() else ():
            file.write(bytes(-file.size % ALIGNMENT))
            chunks.append(Chunk(file.name, file.size, box.offsets, box.sizes))
            file.write(_bytes_of(part.detach()[box.in_part].contiguous().cpu()))
        entries[name] = TensorEntry(tuple(tensor.shape), str(part.dtype).removeprefix("torch."), tuple(chunks))
    return entries


def merged(entries_of_all: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the tensor entries that all ranks have written for the manifest.

    Raises:
        CheckpointError: If a part of a tensor is missing.
    """
    by_name: dict[str, list[TensorEntry]] = defaultdict(list)
    for entries in entries_of_all:
        for name, entry in entries.items():
            by_name[name].append(entry)
    result = {}
    for name, of_ranks in by_name.items():
        # Chunks are keyed by offsets, because replicas that share no mesh have each written the same chunk.
        chunks = {chunk.offsets: chunk for entry in of_ranks for chunk in entry.chunks}
        result[name] = TensorEntry(of_ranks[0].shape, of_ranks[0].dtype, tuple(chunks.values()))
        written, needed = sum(math.prod(chunk.sizes) for chunk in chunks.values()), math.prod(of_ranks[0].shape)
        if written != needed:
            raise CheckpointError(f"the ranks have written {written} of the {needed} elements of {name}")
    return result


def read_tensors(
    reader: Reader, manifest: Manifest, targets: Mapping[str, Tensor], to_check: Collection[str]
) -> set[str]:
    """Read this rank's parts of ``targets``. Each file is read once and in order.

    Args:
        reader: Reader of the checkpoint's files.
        manifest: Manifest of the checkpoint, with the positions of the tensors and the digests of the files.
        targets: Tensors to fill, by name: DTensors of any placement, or whole tensors.
        to_check: Names of the files whose digests to check while they are read.

    Returns:
        The names in ``to_check`` whose files were not read completely, and therefore were not checked.

    Raises:
        CheckpointError: If a file differs from what was written, or the shape or dtype of a tensor from its target's.
    """
    by_file: dict[str, list[_Overlap]] = defaultdict(list)
    layouts = ShardSlices()
    for name, target in targets.items():
        for overlap in _overlaps(name, manifest.tensors[name], target, layouts):
            by_file[overlap.chunk.file].append(overlap)
    unchecked = set(to_check)
    for file, overlaps in by_file.items():
        check = _WholeFile()
        for piece in _read_ahead(reader, file, _groups(overlaps, whole=file in unchecked)):
            if file in unchecked:
                check.follow(piece)
            piece.deliver()
        if file in unchecked and check.is_at(manifest.files[file].size):
            if check.hexdigest() != manifest.files[file].digest:
                raise CheckpointError(f"its file {file} is damaged: its content is not what was written")
            unchecked.remove(file)
    return unchecked


@dataclass(frozen=True)
class _Overlap:
    """Represent the intersection of a stored chunk with this rank's part of a target.

    Args:
        chunk: The stored chunk, with its place in a file and in the whole tensor.
        in_chunk: Slices that select the intersection in the chunk.
        target: View of the intersection in the rank's part, to which the elements are copied.
    """

    chunk: Chunk
    in_chunk: tuple[slice, ...]
    target: Tensor

    def piece(self, whole: bool) -> _Piece:
        """Return the piece of the file to read for this overlap; with ``whole``, the piece of the whole chunk."""
        is_all = self.target.shape == torch.Size(self.chunk.sizes)
        if is_all and self.target.is_contiguous() and self.target.device.type == "cpu":
            return _Piece(self.chunk.start, _bytes_of(self.target))
        if whole or not self.in_chunk:
            first, box, sizes = 0, self.in_chunk, self.chunk.sizes
        else:  # Only the needed rows are read, which are contiguous in the file.
            first, end = self.in_chunk[0].start, self.in_chunk[0].stop
            box, sizes = (slice(None), *self.in_chunk[1:]), (end - first, *self.chunk.sizes[1:])
        buffer = torch.empty(sizes, dtype=self.target.dtype)
        start = first * math.prod(self.chunk.sizes[1:]) * buffer.element_size()
        return _Piece(self.chunk.start + start, _bytes_of(buffer), lambda: self.target.copy_(buffer[box]))


@dataclass(frozen=True)
class _Piece:
    """Represent a range of bytes of a file that is to be read.

    Args:
        start: Position of the first byte in the file.
        buffer: Memory that the bytes are read into.
        deliver: Function that copies the buffer to its target, unless the buffer is the target's own memory.
    """

    start: int
    buffer: memoryview
    deliver: Callable[[], object] = lambda: None

    @property
    def end(self) -> int:
        """Return the position in the file after the last byte."""
        return self.start + len(self.buffer)


_GROUP_BYTES = 32 * 2**20
_GROUP_PIECES = 500  # The limit of preadv(2) is 1024 buffers, and padding takes one more buffer per piece.


def _groups(overlaps: Iterable[_Overlap], whole: bool) -> Iterator[list[_Piece]]:
    """Yield groups of contiguous pieces, each to be read by one call; padding between chunks becomes a piece too."""
    group: list[_Piece] = []
    end = 0
    for overlap in sorted(overlaps, key=lambda overlap: overlap.chunk.start):
        piece = overlap.piece(whole)
        is_next = 0 <= piece.start - end < ALIGNMENT
        is_full = end - group[0].start > _GROUP_BYTES or len(group) > _GROUP_PIECES if group else False
        if group and (is_full or not is_next):
            yield group
            group = []
        if is_next and piece.start > end:
            group.append(_Piece(end, memoryview(bytearray(piece.start - end))))
        group.append(piece)
        end = piece.end
    if group:
        yield group


def _read_ahead(reader: Reader, file: str, groups: Iterator[list[_Piece]]) -> Iterator[_Piece]:
    """Yield the filled pieces of ``groups``; while the caller uses one group, a thread reads the next."""

    def read(group: list[_Piece]) -> list[_Piece]:
        start, end = group[0].start, group[-1].end
        if reader.read_into(file, start, *(piece.buffer for piece in group)) != end - start:
            raise CheckpointError(f"its file {file} is too short")
        return group

    with ThreadPoolExecutor(1, "checkpoint reader") as thread:
        ahead = [thread.submit(read, group) for group in islice(groups, 1)]
        while ahead:
            group = ahead.pop().result()
            ahead = [thread.submit(read, following) for following in islice(groups, 1)]
            yield from group


def _overlaps(name: str, entry: TensorEntry, target: Tensor, layouts: ShardSlices) -> list[_Overlap]:
    if tuple(target.shape) != entry.shape or target.dtype != entry.torch_dtype:
        raise CheckpointError(
            f"{name} is stored as {entry.dtype} {list(entry.shape)} and cannot be read as"
            f" {str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        )
    part = local_part(target)
    overlaps = []
    for box in layouts.of(target) if part.numel() else ():
        box_part = part[box.in_part]
        for chunk in entry.chunks:
            starts = [max(pair) for pair in zip(box.offsets, chunk.offsets, strict=True)]
            ends = [
                min(offset + size, chunk_offset + chunk_size)
                for offset, size, chunk_offset, chunk_size in zip(
                    box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                in_chunk, in_box = (
                    tuple(
                        slice(start - zero, end - zero) for start, end, zero in zip(starts, ends, origin, strict=True)
                    )
                    for origin in (chunk.offsets, box.offsets)
                )
                overlaps.append(_Overlap(chunk, in_chunk, box_part[in_box]))
    if sum(overlap.target.numel() for overlap in overlaps) != part.numel():
        raise CheckpointError(f"it does not contain all elements of {name}")
    return overlaps


class _WholeFile:
    """Compute the digest of a file from its pieces, as long as these are read in order and without gaps."""

    def __init__(self) -> None:
        self._digest = new_digest()
        self._end = 0
        self._is_whole = True

    def follow(self, piece: _Piece) -> None:
        """Add the next piece that was read."""
        self._is_whole &= piece.start == self._end
        if self._is_whole:
            self._digest.update(piece.buffer)
            self._end = piece.end

    def is_at(self, size: int) -> bool:
        """Return whether all bytes of a file of ``size`` bytes were added."""
        return self._is_whole and self._end == size

    def hexdigest(self) -> str:
        """Return the digest of the pieces added so far, in hexadecimal."""
        return str(self._digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # NumPy's stub: no buffer
