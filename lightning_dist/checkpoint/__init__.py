"""Write and read checkpoints: directories that appear atomically, carry digests, and load under any layout.

The modules, from the lowest layer up:

- ``sections``: Describes by a rule which part of each sharded tensor a rank has written, and where in its file it is.
- ``manifest``: Lists a checkpoint's files and tensors, with digests.
- ``storage``: Defines the interface of a storage; ``file_system`` and ``object_store`` implement it, so that a
  checkpoint appears atomically; ``locate`` picks the storage for a path.
- ``parts``: Decides which rank writes which part of each tensor, and describes the parts for the manifest.
- ``tensors``: Reads the parts of tensors that a rank needs.
- ``snapshot``: Splits a checkpoint's dictionary into its tensors and the rest.
- ``format``: Writes, verifies and reads a checkpoint.
- ``writer``: Writes checkpoints in the background.
- ``state``: Converts the state of a module and its optimizers to and from full parameter names.
- ``mapped``: Holds tensors in a temporary file instead of in memory.
- ``single_file``: Converts a checkpoint into one file that can be read without lightning-dist.
- ``between_replicas``: Turns a run's state into one that a process with another device mesh can receive.
- ``whole_files``: Makes torch's own calls read and write whole state dicts and files of a sharded module.
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
from lightning_dist.checkpoint.single_file import (
    NUM_SEEN,
    TECHNIQUES,
    consolidate,
    keep_positions_apart,
    put_positions_back,
    read_whole,
)
from lightning_dist.checkpoint.snapshot import Snapshot, take_snapshot
from lightning_dist.checkpoint.writer import Save, Writer

__all__ = [
    "NUM_SEEN",
    "TECHNIQUES",
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
    "keep_positions_apart",
    "put_positions_back",
    "read",
    "read_for_rank",
    "read_manifest",
    "read_whole",
    "take_snapshot",
    "verify",
    "write",
]
