"""The tensors of a checkpoint: torch.distributed.checkpoint (DCP) decides who writes and reads what, this does it.

DCP plans: which rank writes which part of a DTensor, and which parts a rank of another layout has to read. Of its own
storage nothing is used, since it pickles, and does not notice a damaged file. Here each rank appends the bytes of its
parts to one file, and the manifest has the rest as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_dist.checkpoint.manifest import CheckpointError, Chunk, Manifest, TensorEntry, new_digest
from lightning_dist.checkpoint.place import NewFile, Reader

__all__ = ["TensorReader", "TensorWriter"]

ALIGNMENT = 64


class TensorWriter(StorageWriter):
    """Appends a rank's parts to ``file``.

    Args:
        file: This rank's. Left open.
    """

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self.tensors: dict[str, TensorEntry] = {}  # of all ranks, on the coordinator, when all have written

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Append the bytes of all items; a result's ``storage_data`` is the :class:`Chunk`."""
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            self._file.write(bytes(-self._file.size % ALIGNMENT))
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            start = self._file.size
            self._file.write(_bytes_of(tensor.detach().contiguous().cpu()))
            results.append(
                WriteResult(
                    item.index,
                    self._file.size - start,
                    Chunk(self._file.name, start, tuple(chunk.offsets), tuple(chunk.sizes)),
                )
            )
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put together where all tensors are."""
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for rank in results for result in rank):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[key] = TensorEntry(tuple(stored.size), dtype, tuple(chunks[key]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by DCP itself."""
        return False


class TensorReader(StorageReader):
    """Reads the parts that a rank needs, and checks on the way the files of which it needs all.

    Args:
        reader: The checkpoint's files.
        manifest: Where in them the tensors are, and their digests.
        to_check: The files to check.
    """

    def __init__(self, reader: Reader, manifest: Manifest, to_check: Collection[str]) -> None:
        self._reader = reader
        self._files = manifest.files
        self._tensors = manifest.tensors
        self.unchecked = set(to_check)
        """Those of which only a part was read."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP plans with."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(entry.torch_dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for key, entry in self._tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk once, in their order in the files, and copy the boxes of it that are wanted.

        Raises:
            CheckpointError: If a file is not what was written.
        """
        wanted: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        by_file: dict[str, list[tuple[Chunk, TensorEntry, list[Any]]]] = {}
        for index, items in wanted.items():
            entry = self._tensors[index.fqn]
            offsets = tuple(index.offset) if index.offset is not None else (0,) * len(entry.shape)
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
            by_file.setdefault(chunk.file, []).append((chunk, entry, items))
        for name, parts in by_file.items():
            whole = _WholeFile(self._reader, name) if name in self.unchecked else None
            for chunk, entry, items in sorted(parts, key=lambda part: part[0].start):
                content = self._read_chunk(chunk, entry, items, planner)
                if whole is not None:
                    whole.follow(chunk.start, content)
            if whole is not None and whole.is_at(self._files[name].size):
                if whole.hexdigest() != self._files[name].digest:
                    raise CheckpointError(f"its file {name} is damaged: its content is not what was written")
                self.unchecked.remove(name)
        return _done(None)

    def _read_chunk(self, chunk: Chunk, entry: TensorEntry, items: list[Any], planner: LoadPlanner) -> memoryview:
        """Fill the tensors that want a part of a chunk; returns the chunk's bytes."""
        targets = [planner.resolve_tensor(item).detach() for item in items]
        is_whole = len(items) == 1 and tuple(items[0].lengths) == chunk.sizes
        if is_whole and targets[0].is_contiguous() and targets[0].device.type == "cpu":
            read = targets[0]
            self._fill(read, entry, chunk)
        else:
            read = torch.empty(chunk.sizes, dtype=entry.torch_dtype)
            self._fill(read, entry, chunk)
            for item, target in zip(items, targets, strict=True):
                box = tuple(
                    slice(start, start + length)
                    for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target.copy_(read[box])
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        return _bytes_of(read)

    def _fill(self, tensor: Tensor, entry: TensorEntry, chunk: Chunk) -> None:
        if tensor.dtype != entry.torch_dtype:
            raise CheckpointError(f"a tensor is stored as {entry.dtype} and cannot be read as {tensor.dtype}")
        buffer = _bytes_of(tensor)
        if self._reader.read_into(chunk.file, chunk.start, buffer) != len(buffer):
            raise CheckpointError(f"its file {chunk.file} is too short")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by DCP itself."""
        return False


class _WholeFile:
    """The digest of a file of which all parts are read, in their order; those between them are padding."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._digest = new_digest()
        self._position = 0
        self._is_whole = True

    def follow(self, start: int, content: memoryview) -> None:
        """The next part is ``content``, from ``start`` on."""
        self._is_whole &= 0 <= start - self._position < ALIGNMENT
        if self._is_whole:
            gap = memoryview(bytearray(start - self._position))
            self._digest.update(gap[: self._reader.read_into(self._name, self._position, gap)])
            self._digest.update(content)
            self._position = start + len(content)

    def is_at(self, size: int) -> bool:
        """Whether nothing was left out of a file of ``size`` bytes."""
        return self._is_whole and self._position == size

    def hexdigest(self) -> str:
        """Of what was read."""
        return str(self._digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
