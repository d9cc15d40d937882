"""Checkpoints: a directory that is whole or not there, proves itself, and that any layout can load.

From the ground up:

- ``manifest``: what a checkpoint says of itself.
- ``place``, ``file_system``, ``object_store``: how one appears at once; ``storage``: which of them a path means.
- ``tensors``: which rank writes, and reads, which part of the tensors.
- ``snapshot``: a dictionary without its tensors.
- ``format``: writing, verifying, reading.
- ``writer``: writing in the background.
- ``state``: what is saved of a module and its optimizers, by full name; ``single_file``: one file for others to read.
"""

from lightning_dist.checkpoint.format import (
    LoadedCheckpoint,
    TensorInfo,
    Verify,
    find,
    is_sharded_checkpoint,
    read,
    read_for_rank,
    read_manifest,
    verify,
    write,
)
from lightning_dist.checkpoint.manifest import CheckpointError, CheckpointNotFoundError, Manifest
from lightning_dist.checkpoint.single_file import consolidate, read_whole
from lightning_dist.checkpoint.snapshot import Snapshot, take_snapshot
from lightning_dist.checkpoint.writer import Save, Writer

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "LoadedCheckpoint",
    "Manifest",
    "Save",
    "Snapshot",
    "TensorInfo",
    "Verify",
    "Writer",
    "consolidate",
    "find",
    "is_sharded_checkpoint",
    "read",
    "read_for_rank",
    "read_manifest",
    "read_whole",
    "take_snapshot",
    "verify",
    "write",
]
