"""Describe by a rule which part of each tensor a rank has written, and where in its file it is.

The DTensors on one mesh of ranks are a section of a checkpoint. How a tensor is split follows from its layout, and
each rank writes its parts in the order of the section, aligned, so that their positions follow from their sizes. The
description of a section therefore does not grow with the number of ranks, apart from the list of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ALIGNMENT", "Chunk", "Cut", "Layout", "Section", "SectionFiles"]

ALIGNMENT = 64
"""Positions of chunks in their file are multiples of this number of bytes."""

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Describe a rectangular block of a tensor's elements, stored contiguously and in C order in one file.

    Args:
        file: Name of the file, a key of :attr:`Manifest.files`.
        start: Position of the first byte in the file.
        offsets: First index of the block in the tensor, per dimension.
        sizes: Number of elements of the block, per dimension.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Cut(NamedTuple):
    """Describe that a mesh axis splits a dimension of a tensor as ``torch.chunk`` does.

    Args:
        dim: Dimension of the tensor.
        axis: Index of the mesh axis.
        num_packed: Number of equal parts of the dimension that are split each on its own; usually 1.
    """

    dim: int
    axis: int
    num_packed: int = 1


class _Boxes(NamedTuple):
    """Hold the block of a tensor at each position of a mesh, counted in C order.

    Args:
        offsets: First indices of the first block, of shape ``(number of positions, number of dimensions)``.
        sizes: Sizes of each block, of the same shape.
        numel: Number of elements of each block, of shape ``(number of positions,)``; 0 where nothing is written.
        step: Distances between the first indices of blocks that belong to one position, per dimension.
        number: Number of blocks at each position.
    """

    offsets: _Integers
    sizes: _Integers
    numel: _Integers
    step: _Integers
    number: int


@dataclass(frozen=True)
class Layout:
    """Describe how a tensor is split over a mesh.

    Args:
        shape: Shape of the whole tensor.
        dtype: torch's name of the dtype, such as ``"float32"``.
        cuts: The cuts of dimensions, in the order in which they are applied. Axes without a cut have replicas.
        writer: Index of the replica that has written the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[Cut, ...]
    writer: int

    def boxes(self, mesh_sizes: Sequence[int]) -> _Boxes:
        """Return the blocks at all positions of a mesh.

        Args:
            mesh_sizes: Number of ranks along each axis of the mesh.
        """
        coordinates = np.indices(mesh_sizes, dtype=np.int64).reshape(len(mesh_sizes), math.prod(mesh_sizes))
        num_positions, step, number = coordinates.shape[1], np.zeros(len(self.shape), np.int64), 1
        offsets = np.zeros((num_positions, len(self.shape)), np.int64)
        sizes = np.tile(np.array(self.shape, np.int64), (num_positions, 1))
        replica = np.zeros(num_positions, np.int64)
        axes = {cut.axis for cut in self.cuts}
        for axis, size in enumerate(mesh_sizes):
            if axis not in axes:
                replica = replica * size + coordinates[axis]
        for dim, axis, num_packed in self.cuts:
            rows = sizes[:, dim] // num_packed
            if num_packed > 1:
                number, step[dim] = num_packed, self.shape[dim] // num_packed
            first = np.minimum(coordinates[axis] * -(-rows // mesh_sizes[axis]), rows)
            sizes[:, dim] = np.minimum(first + -(-rows // mesh_sizes[axis]), rows) - first
            offsets[:, dim] += first
        return _Boxes(offsets, sizes, sizes.prod(axis=1) * (replica == self.writer), step, number)

    def num_bytes(self, numel: _Integers) -> _Integers:
        """Return the number of bytes that blocks take in a file, with the padding after them.

        Args:
            numel: Number of elements of each block.
        """
        num_bytes: _Integers = numel * getattr(torch, self.dtype).itemsize
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Section:
    """Describe the DTensors on meshes of the same sizes, of which each has a complete copy of the tensors.

    Args:
        mesh_sizes: Number of ranks along each axis of a mesh.
        meshes: Ranks of each mesh, in C order. Copies are read from the first mesh.
        layouts: The different layouts of the tensors.
        tensors: Index of each tensor's layout by the tensor's name, in the order in which each rank has written them.
    """

    mesh_sizes: tuple[int, ...]
    meshes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    tensors: Mapping[str, int]

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> Section:
        """Return the section that JSON has made of the attributes of one."""
        layouts = tuple(
            Layout(tuple(shape), dtype, tuple(Cut(*cut) for cut in cuts), writer)
            for shape, dtype, cuts, writer in fields["layouts"]
        )
        return cls(tuple(fields["mesh_sizes"]), tuple(map(tuple, fields["meshes"])), layouts, fields["tensors"])

    def encode(self) -> dict[str, Any]:
        """Return the attributes as JSON has them."""
        layouts = [(layout.shape, layout.dtype, layout.cuts, layout.writer) for layout in self.layouts]
        return {**vars(self), "layouts": layouts}

    @property
    def first_name(self) -> str:
        """Return the name of the first tensor, by which the sections of a rank are ordered."""
        return next(iter(self.tensors))


class SectionFiles:
    """Find the chunks of the tensors of sections in the files of the ranks.

    Args:
        sections: The sections of a checkpoint, in any order.
        prefix: What the names of the ranks' files begin with.
    """

    def __init__(self, sections: Sequence[Section], prefix: str) -> None:
        self._prefix = prefix
        self._sections = [_Places(section) for section in sorted(sections, key=lambda section: section.first_name)]
        self._starts: dict[int, dict[int, _Integers]] = {}

    def tensors(self) -> dict[str, tuple[Layout, SectionChunks]]:
        """Return the layout and the chunks of each tensor by its name."""
        found: dict[str, tuple[Layout, SectionChunks]] = {}
        for number, places in enumerate(self._sections):
            for row, (name, layout) in enumerate(places.section.tensors.items()):
                if name not in found:  # Ranks that share no mesh have each written a copy.
                    found[name] = places.section.layouts[layout], SectionChunks(self, number, row, layout)
        return found

    def places(self, section: int) -> _Places:
        """Return the blocks of the section with this number."""
        return self._sections[section]

    def file(self, rank: int) -> str:
        """Return the name of a rank's file."""
        return f"{self._prefix}rank_{rank}.bin"

    def start(self, rank: int, section: int, row: int) -> int:
        """Return the position in a rank's file of its first chunk of a section's tensor.

        Args:
            rank: Rank that has written the file.
            section: Number of the section.
            row: Number of the tensor in the section.
        """
        if rank not in self._starts:
            end, starts = 0, {}
            for number, places in enumerate(self._sections):
                position = places.position_of.get(rank)
                if position is not None:
                    ends = end + np.cumsum(places.num_bytes[:, position][places.layout_of_row])
                    starts[number] = np.concatenate(([end], ends))
                    end = int(ends[-1])
            self._starts[rank] = starts
        return int(self._starts[rank][section][row])


class _Places:
    """Compute the blocks of a section at all positions of its meshes, when they are needed."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.layout_of_row = np.array(list(section.tensors.values()), np.int64)
        self._boxes: dict[int, _Boxes] = {}

    @cached_property
    def position_of(self) -> dict[int, int]:
        """Return the position of each rank in its mesh."""
        return {rank: position for ranks in self.section.meshes for position, rank in enumerate(ranks)}

    def boxes(self, layout: int) -> _Boxes:
        """Return the blocks of the tensors of the layout with this number."""
        if layout not in self._boxes:
            self._boxes[layout] = self.section.layouts[layout].boxes(self.section.mesh_sizes)
        return self._boxes[layout]

    @cached_property
    def num_bytes(self) -> _Integers:
        """Return the bytes in a file of a tensor of each layout, of shape ``(layouts, positions)``, with padding."""
        layouts = [(layout, self.boxes(number)) for number, layout in enumerate(self.section.layouts)]
        return np.stack([layout.num_bytes(boxes.numel) * boxes.number for layout, boxes in layouts])


@dataclass(frozen=True)
class SectionChunks:
    """Make the chunks of a tensor of a section when they are asked for.

    Args:
        files: The files of the checkpoint.
        section: Number of the section.
        row: Number of the tensor in the section.
        layout: Number of the tensor's layout in the section.
    """

    files: SectionFiles
    section: int
    row: int
    layout: int

    def __iter__(self) -> Iterator[Chunk]:
        """Yield all chunks."""
        boxes = self.files.places(self.section).boxes(self.layout)
        return self._at(np.flatnonzero(boxes.numel))

    def of_rank(self, rank: int) -> list[Chunk]:
        """Return the chunks that a rank of the first mesh has written."""
        places = self.files.places(self.section)
        position = places.position_of[rank]
        return list(self._at([position])) if places.boxes(self.layout).numel[position] else []

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that may have elements in common with a block.

        Args:
            offsets: First index of the block, per dimension.
            sizes: Number of its elements, per dimension.
        """
        boxes = self.files.places(self.section).boxes(self.layout)
        begin = np.array(offsets, np.int64)
        end = begin + np.array(sizes, np.int64)
        last = boxes.offsets + boxes.step * (boxes.number - 1) + boxes.sizes
        overlaps = (boxes.offsets < end).all(axis=1) & (last > begin).all(axis=1) & (boxes.numel > 0)
        return self._at(np.flatnonzero(overlaps))

    def _at(self, positions: Sequence[int] | _Integers) -> Iterator[Chunk]:
        """Yield the chunks at positions of the first mesh that have written the tensor."""
        places = self.files.places(self.section)
        boxes, ranks = places.boxes(self.layout), places.section.meshes[0]
        for position in positions:
            rank = ranks[position]
            start, sizes = self.files.start(rank, self.section, self.row), boxes.sizes[position]
            size = int(places.section.layouts[self.layout].num_bytes(boxes.numel[position]))
            for index in range(boxes.number):
                offsets = boxes.offsets[position] + boxes.step * index
                yield Chunk(self.files.file(rank), start + index * size, tuple(offsets.tolist()), tuple(sizes.tolist()))
