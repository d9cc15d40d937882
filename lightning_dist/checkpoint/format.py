"""Write, verify and read a checkpoint, which is one directory that all ranks write and any layout can load.

Its files are::

    manifest.json   all files with size and digest, and the location of every tensor; written last
    state.pt        the checkpoint's dictionary, each tensor replaced by a reference to it
    rank_N.bin      the bytes of the tensor shards that rank N wrote
    rank_N.pt       rank N's own state: its random number generators, its position in the data, its buffers

Every rank writes shards of DTensors that it holds. Rank 0 writes all other tensors.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_dist.checkpoint.locate import storage_at
from lightning_dist.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointNotFoundError,
    FileEntry,
    Manifest,
    new_digest,
)
from lightning_dist.checkpoint.parts import Written, gathered, merged, merged_sections, own_parts, write_tensors
from lightning_dist.checkpoint.snapshot import Snapshot, put_back, references, unpickled
from lightning_dist.checkpoint.storage import CheckpointStorage, Reader
from lightning_dist.checkpoint.tensors import read_tensors
from lightning_dist.mesh.consensus import OtherRankError, raise_on_all_ranks

__all__ = [
    "LoadedCheckpoint",
    "TensorInfo",
    "Verify",
    "find",
    "is_sharded_checkpoint",
    "not_written",
    "read",
    "read_for_rank",
    "read_manifest",
    "verify",
    "write",
]

Path = str | os.PathLike[str]

Verify = Literal["full", "size", "off"]
"""How to check a checkpoint: ``full`` checks sizes and digests of all files, ``size`` only sizes, ``off`` no files.

The manifest is checked in any case.
"""

_STATE = "state.pt"
_PIECE = 8 * 2**20


@dataclass(frozen=True)
class TensorInfo:
    """Describe a tensor in a checkpoint before it is read.

    Args:
        path: Keys that lead to the tensor in the checkpoint's dictionary: ``("state_dict", "model.norm.weight")``.
        shape: Shape of the whole tensor.
        dtype: Dtype in which the tensor is stored.
        was_whole: Whether the tensor was a plain tensor, and not a DTensor, when it was saved.
    """

    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype
    was_whole: bool = False


def write(
    path: Path,
    snapshot: Snapshot,
    group: dist.ProcessGroup | None = None,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> tuple[float, int]:
    """Write ``snapshot`` to ``path`` and replace whatever is there. This is a collective over all processes.

    Args:
        path: Path of the checkpoint; the same on all ranks, in a storage that all of them share.
        snapshot: This rank's part of the checkpoint, from :func:`~lightning_dist.checkpoint.snapshot.take_snapshot`.
        group: Process group of all processes; None: the default group.
        parts: Copies of this rank's :func:`~lightning_dist.checkpoint.parts.own_parts`; None: use the live tensors.

    Returns:
        The time of the save in seconds since the epoch, as the manifest has it in ``saved_at``, and on the first rank
        the number of bytes of all files; 0 on other ranks.

    Raises:
        CheckpointError: On all ranks, if any rank failed. A previous checkpoint at ``path`` is then still there.
    """
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    is_first = rank == 0
    place, (save_id, saved_at) = storage_at(path), _agreed((uuid.uuid4().hex[:8], time.time()), group)
    try:
        with raise_on_all_ranks("creating it", group):
            if is_first:
                place.begin(save_id)
                _check_space(place, snapshot, num_ranks)
        with raise_on_all_ranks("writing its files", group):
            files, written = _write_files(place, save_id, snapshot, parts, rank)
        of_ranks, num_bytes = gathered(files, written, num_ranks, group), 0
        with raise_on_all_ranks("putting it in place", group):
            if of_ranks is not None:
                files = {name: entry for of_rank in of_ranks for name, entry in of_rank.files.items()}
                listed, sections = merged(of_rank.listed for of_rank in of_ranks), merged_sections(of_ranks)
                prefix, about = place.prefix(save_id), dict(snapshot.about)
                manifest = Manifest(files, listed, num_ranks, saved_at, about, sections, prefix)
                if absent := sorted(snapshot.names - manifest.tensors.keys()):
                    raise CheckpointError(f"no rank has written {absent[0]}")
                place.commit(save_id, manifest.encode())
                num_bytes = manifest.num_bytes
        return saved_at, num_bytes
    except Exception as error:
        if is_first:
            with suppress(Exception):  # The next run that locks the folder removes what cannot be removed now.
                place.abort(save_id)
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Return the error that reports that the save to ``path`` failed because of ``error``."""
    who = ""
    if dist.is_initialized() and not isinstance(error, CheckpointError | OtherRankError):
        who = f"rank {dist.get_rank()} failed: "
    return CheckpointError(
        f"The checkpoint {os.fspath(path)} was not written: {who}{_reason(error)}. What was there before is unchanged."
    )


def _write_files(
    place: CheckpointStorage, save_id: str, snapshot: Snapshot, parts: Mapping[str, torch.Tensor] | None, rank: int
) -> tuple[dict[str, FileEntry], Written]:
    """Write this rank's files, and return their entries and the description of the tensors in them."""
    prefix = place.prefix(save_id)
    try:
        file = place.create(save_id, f"{prefix}rank_{rank}.bin")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} does not see the folder that rank 0 created for this save ({error.filename}). Save to a file"
            " system that all ranks share"
        ) from error
    try:
        own = own_parts(snapshot.tensors, is_first=rank == 0) if parts is None else parts
        written = write_tensors(file, snapshot.tensors, own, rank)
    except BaseException:
        file.abandon()
        raise
    files = {file.name: file.close()}
    for name, content in ((_STATE, snapshot.state() if rank == 0 else b""), (f"rank_{rank}.pt", snapshot.rank_state)):
        if content:
            file = place.create(save_id, f"{prefix}{name}")
            files[file.name] = file.write_all(content)
    return files, written


def _check_space(place: CheckpointStorage, snapshot: Snapshot, num_ranks: int) -> None:
    free, needed = place.free_bytes(), snapshot.num_bytes + num_ranks * len(snapshot.rank_state)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, f"it needs {needed / 2**20:.0f} MiB, and there is space for {free / 2**20:.0f} MiB")


def read(
    path: Path,
    template: Callable[[TensorInfo], torch.Tensor | None],
    weights_only: bool = True,
    check: Verify = "full",
) -> dict[str, Any]:
    """Read the checkpoint at ``path`` in one process.

    Args:
        path: Path of a checkpoint that :func:`write` wrote.
        template: Function that is called for each stored tensor. It returns the tensor to read it into (a DTensor of
            any placement, or a whole tensor), or None to leave it out of the result.
        weights_only: Whether to refuse pickled objects other than tensors, plain Python values and instances of
            :data:`~lightning_dist.checkpoint.snapshot.SAFE`.
        check: Which files are checked, and how (see :data:`Verify`).

    Raises:
        CheckpointError: If ``path`` is missing, damaged, incomplete, or of another kind or version.
    """
    return read_for_rank(path, 0, 1, template, weights_only, check).state


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Hold what one rank has read of a checkpoint.

    Args:
        state: The checkpoint's dictionary, with the tensors for which there were templates.
        rank_state: State of its own that the rank with the same number saved; empty if there was none.
        manifest: Manifest of the checkpoint.
    """

    state: dict[str, Any]
    rank_state: dict[str, Any]
    manifest: Manifest


def read_for_rank(
    path: Path,
    rank: int,
    num_ranks: int,
    template: Callable[[TensorInfo], torch.Tensor | None],
    weights_only: bool = True,
    check: Verify = "full",
) -> LoadedCheckpoint:
    """Read what one of ``num_ranks`` ranks needs, and check this rank's share of the files, without communication.

    Each rank checks other files, so what was read is valid only if no rank raises an error. The remaining arguments
    and the errors are those of :func:`read`.
    """
    with _opened(path) as (reader, manifest):
        mine = _check_small_files(reader, manifest, check, (rank, num_ranks))
        state = unpickled(_content(reader, manifest, _STATE), weights_only)
        wanted: dict[str, torch.Tensor] = {}
        for key, place, was_whole in references(state):
            entry = manifest.tensors.get(key)
            if entry is None:
                raise CheckpointError(f"it has no {key}")
            tensor = template(TensorInfo(place, torch.Size(entry.shape), entry.torch_dtype, was_whole))
            if tensor is not None:
                wanted[key] = tensor
        for name in read_tensors(reader, manifest, wanted, mine):
            _check_digest(reader, manifest, name)
        rank_state = _content(reader, manifest, f"rank_{rank}.pt", optional=True)
        return LoadedCheckpoint(
            put_back(state, wanted), unpickled(rank_state, weights_only) if rank_state else {}, manifest
        )


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: If there is no manifest, or it is damaged, or of another format or version.
    """
    with _opened(path, hint=False) as (_, manifest):
        return manifest


def verify(path: Path, check: Verify = "full", share: tuple[int, int] = (0, 1)) -> Manifest:
    """Check the files of the checkpoint at ``path``.

    Args:
        path: Path of a checkpoint that :func:`write` wrote.
        check: Which files are checked, and how (see :data:`Verify`).
        share: This rank and the number of ranks; each rank checks its share of the files.

    Raises:
        CheckpointError: If a file is missing, or differs from what was written.
    """
    with _opened(path) as (reader, manifest):
        _check_files(reader, manifest, check, share)
        return manifest


def find(folder: Path, recurse: bool = False) -> list[tuple[str, Manifest | CheckpointError]]:
    """Return the paths and manifests of the checkpoints in ``folder``, oldest first.

    Checkpoints whose manifest cannot be read come first, with the error in place of the manifest. Only manifests are
    read; :func:`verify` checks the other files.

    Args:
        folder: Path or URL of the folder.
        recurse: Whether to look into the folders below it as well, except hidden ones.
    """
    found: list[tuple[str, Manifest | CheckpointError]] = []
    for path in sorted(storage_at(folder).children(recurse)):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            found.append((path, error))
    return sorted(found, key=lambda item: item[1].saved_at if isinstance(item[1], Manifest) else 0.0)


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether there is a checkpoint at ``path`` that :func:`write` has written."""
    return storage_at(path).is_checkpoint()


@contextmanager
def _opened(path: Path, hint: bool = True) -> Iterator[tuple[Reader, Manifest]]:
    """Open the checkpoint at ``path`` and yield the reader of its files and its manifest.

    Errors raised in this context become a CheckpointError that names ``path`` and, with ``hint``, other checkpoints
    nearby.
    """
    place = storage_at(path)
    try:
        if not place.exists():
            raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
        if not place.is_checkpoint():
            raise _OtherKindError(f"{path} is not a lightning-dist checkpoint: it has no {MANIFEST}.")
        with place.open() as reader:
            manifest = Manifest.decode(bytes(_read_file(reader, MANIFEST, reader.size(MANIFEST))))
            yield reader, manifest
    except Exception as error:
        is_there = not isinstance(error, (CheckpointNotFoundError, _OtherKindError))
        text = f"The checkpoint {path} cannot be read: {_reason(error)}." if is_there else str(error)
        kind = CheckpointNotFoundError if isinstance(error, CheckpointNotFoundError) else CheckpointError
        raise kind(text + (_others(path) if hint else "")) from error


class _OtherKindError(CheckpointError):
    """Report a file or folder that is not a checkpoint of this project, as opposed to a damaged one."""


def _check_files(reader: Reader, manifest: Manifest, check: Verify, share: tuple[int, int]) -> None:
    for name in _check_small_files(reader, manifest, check, share):
        _check_digest(reader, manifest, name)


def _check_small_files(reader: Reader, manifest: Manifest, check: Verify, share: tuple[int, int]) -> list[str]:
    """Check this rank's share of the files without tensors, and return the names of its files with tensors.

    The sizes of files with tensors are checked as well.
    """
    share_of_rank = _share_of(manifest, share) if check != "off" else []
    _check_sizes(reader, manifest, share_of_rank)
    mine = share_of_rank if check == "full" else []
    for name in mine:
        if not name.endswith(".bin"):
            _check_digest(reader, manifest, name)
    return [name for name in mine if name.endswith(".bin")]


def _share_of(manifest: Manifest, share: tuple[int, int]) -> list[str]:
    """Return the names of the files that this rank checks: rank N modulo num_ranks checks the files of rank N.

    If as many ranks load the checkpoint as saved it, each one checks the files that it is likely to read anyway.
    """
    rank, num_ranks = share
    number = re.compile(r"rank_(\d+)\.")
    writers = {name: int(found[1]) if (found := number.search(name)) else 0 for name in manifest.files}
    return sorted(name for name, writer in writers.items() if writer % num_ranks == rank)


def _check_sizes(reader: Reader, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        entry = manifest.files[name]
        try:
            size = reader.size(name)
        except FileNotFoundError:
            raise CheckpointError(f"its file {name} is missing") from None
        if size != entry.size:
            raise CheckpointError(f"its file {name} has {size} bytes, and had {entry.size} when it was written")


def _check_digest(reader: Reader, manifest: Manifest, name: str) -> None:
    entry, digest = manifest.files[name], new_digest()
    buffer = memoryview(bytearray(min(entry.size, _PIECE)))
    for start in range(0, entry.size, _PIECE):
        digest.update(buffer[: reader.read_into(name, start, buffer[: entry.size - start])])
    if digest.hexdigest() != entry.digest:
        raise CheckpointError(f"its file {name} is damaged: its content is not what was written")


def _content(reader: Reader, manifest: Manifest, name: str, optional: bool = False) -> bytearray:
    """Return the content of the file ``name``, given without prefix; empty if ``optional`` and missing."""
    full_name = next((file for file in manifest.files if os.path.basename(file) == name), None)
    if full_name is None and optional:
        return bytearray()
    if full_name is None:
        raise CheckpointError(f"it has no {name}")
    return _read_file(reader, full_name, manifest.files[full_name].size)


def _read_file(reader: Reader, name: str, size: int) -> bytearray:
    content = bytearray(size)
    try:
        num_read = reader.read_into(name, 0, memoryview(content))
    except FileNotFoundError:
        raise CheckpointError(f"its file {name} is missing") from None
    if num_read != size:
        raise CheckpointError(f"its file {name} is too short")
    return content


def _others(path: Path) -> str:
    """Return a sentence that names the newest checkpoints in or beside ``path``; empty if there are none."""
    text = os.fspath(path)
    try:
        found = find(text) or find(os.path.dirname(text))
    except Exception:  # The problem that makes the checkpoint unreadable may make its folder unreadable as well.
        return ""
    names = [name for name, manifest in found if isinstance(manifest, Manifest) and name != text]
    return f" There is {' and '.join(names[-2:])}." if names else ""


def _reason(error: BaseException) -> str:
    """Return ``error`` as a clause that fits into a sentence."""
    if isinstance(error, CheckpointError | OtherRankError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {error}".rstrip(".")


def _agreed(value: tuple[str, float], group: dist.ProcessGroup | None) -> tuple[str, float]:
    """Return the first rank's ``value`` on all ranks. This is a collective over ``group``."""
    agreed = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(agreed, group=group, group_src=0)
    return agreed[0]
