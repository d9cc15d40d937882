"""Checkpoints: a directory that is whole or not there, proves itself, and that any layout can load."""

from lightning_dist.checkpoint.format import (
    Part,
    TensorInfo,
    Verify,
    find,
    is_sharded_checkpoint,
    read,
    read_manifest,
    read_part,
    verify,
    write,
)
from lightning_dist.checkpoint.manifest import CheckpointError, Manifest
from lightning_dist.checkpoint.single_file import consolidate
from lightning_dist.checkpoint.snapshot import Snapshot, take_snapshot
from lightning_dist.checkpoint.writer import Save, Writer

__all__ = [
    "CheckpointError",
    "Manifest",
    "Part",
    "Save",
    "Snapshot",
    "TensorInfo",
    "Verify",
    "Writer",
    "consolidate",
    "find",
    "is_sharded_checkpoint",
    "read",
    "read_manifest",
    "read_part",
    "take_snapshot",
    "verify",
    "write",
]
