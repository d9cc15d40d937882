"""Checkpoints: one directory, written by all ranks, that any layout can load."""

from lightning_dist.checkpoint.format import CheckpointError, is_sharded_checkpoint, read, write
from lightning_dist.checkpoint.single_file import consolidate

__all__ = ["CheckpointError", "consolidate", "is_sharded_checkpoint", "read", "write"]
