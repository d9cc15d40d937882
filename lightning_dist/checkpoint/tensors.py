"""Read the parts of a checkpoint's tensors that a rank of any layout needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lightning_dist.checkpoint.manifest import CheckpointError, Manifest, TensorEntry, new_digest
from lightning_dist.checkpoint.parts import bytes_of
from lightning_dist.checkpoint.sections import ALIGNMENT, Chunk
from lightning_dist.checkpoint.storage import Reader
from lightning_dist.parameters.shard_slices import ShardSlices, local_part

__all__ = ["read_tensors"]


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
            return _Piece(self.chunk.start, bytes_of(self.target))
        if whole or not self.in_chunk:
            first, box, sizes = 0, self.in_chunk, self.chunk.sizes
        else:  # Only the needed rows are read, which are contiguous in the file.
            first, end = self.in_chunk[0].start, self.in_chunk[0].stop
            box, sizes = (slice(None), *self.in_chunk[1:]), (end - first, *self.chunk.sizes[1:])
        buffer = torch.empty(sizes, dtype=self.target.dtype)
        start = first * math.prod(self.chunk.sizes[1:]) * buffer.element_size()
        return _Piece(self.chunk.start + start, bytes_of(buffer), lambda: self.target.copy_(buffer[box]))


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
        try:
            num_read = reader.read_into(file, start, *(piece.buffer for piece in group))
        except FileNotFoundError:
            raise CheckpointError(f"its file {file} is missing") from None
        if num_read != end - start:
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
        for chunk in entry.chunks_within(box.offsets, box.sizes):
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
