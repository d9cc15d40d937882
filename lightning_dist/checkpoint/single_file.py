"""Convert a sharded checkpoint directory into one file that can be read without lightning_dist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint.format import TensorInfo, read
from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.checkpoint.state import by_index

__all__ = ["NUM_SEEN", "TECHNIQUES", "consolidate", "keep_positions_apart", "put_positions_back", "read_whole"]

Empty = Callable[[torch.Size, torch.dtype], torch.Tensor]
"""A function that returns a new tensor of a shape and a dtype."""

NUM_SEEN = "num_seen"
"""The key of a position in an ordinary data loader: the number of samples that all ranks have seen in the epoch."""

_POSITIONS = "lightning_dist.positions_in_data"

TECHNIQUES = "lightning_dist.techniques"
"""The key of the states of techniques, such as residuals of compressed gradients, in sharded checkpoints only."""


def read_whole(
    source: str | Path,
    map_location: Any = None,
    weights_only: bool = True,
    weights_alone: bool = False,
    empty: Empty | None = None,
) -> dict[str, Any]:
    """Read the checkpoint directory ``source`` in one process, and return what ``torch.load`` returns for a file.

    Args:
        source: Checkpoint directory that a sharded run saved.
        map_location: Device, or name of the device, for the tensors. With any other value that ``torch.load`` accepts,
            they stay on the CPU.
        weights_only: Whether to refuse pickled objects other than tensors and plain values.
        weights_alone: Whether to read only the tensors of the module's state dict.
        empty: Function that returns the tensor to read another one into. None: in memory, on the device.

    Returns:
        Lightning's checkpoint dictionary with whole tensors, and with optimizer states in the form that torch's
        optimizers load.

    Raises:
        CheckpointError: If ``source`` is not a sharded checkpoint or cannot be read.
    """
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"

    def whole(info: TensorInfo) -> torch.Tensor | None:
        is_left_out = info.path[0] != "state_dict" if weights_alone else info.path[0] == TECHNIQUES
        if is_left_out:
            return None
        if empty is not None:
            return empty(info.shape, info.dtype)
        return torch.empty(info.shape, dtype=info.dtype, device=device)

    checkpoint = read(source, whole, weights_only)
    checkpoint.pop(TECHNIQUES, None)
    if "optimizer_states" not in checkpoint:
        return checkpoint
    states = [by_index(state) if "param_groups" in state else state for state in checkpoint["optimizer_states"]]
    return {**checkpoint, "optimizer_states": states}


def consolidate(source: str | Path, destination: Path, trust: bool = False) -> None:
    """Convert the checkpoint directory ``source`` to one file, in one process, with the memory of about one tensor.

    The tensors are put together in a temporary file beside ``destination``.

    Args:
        source: Checkpoint directory that a sharded run saved.
        destination: File to write. ``*.ckpt`` becomes a Lightning checkpoint, for ``load_from_checkpoint`` and
            ``fit(ckpt_path=...)`` under any strategy; ``*.safetensors`` gets the weights alone.
        trust: Whether to read pickled objects of any class, which can run any code.

    Raises:
        CheckpointError: If ``source`` is not a sharded checkpoint or cannot be read.
        FileExistsError: If ``destination`` exists.
        ValueError: If ``destination`` ends in neither ``.ckpt`` nor ``.safetensors``.
    """
    if destination.suffix not in (".ckpt", ".safetensors"):
        raise ValueError(f"{destination} must end in .ckpt (a Lightning checkpoint) or .safetensors (weights alone).")
    if destination.exists():
        raise FileExistsError(f"{destination} exists; remove it, or name another file.")
    weights_alone = destination.suffix == ".safetensors"
    destination.parent.mkdir(parents=True, exist_ok=True)
    unfinished = destination.with_name(f".{destination.name}.tmp")
    with MappedTensors(destination.parent) as mapped:
        checkpoint = read_whole(source, None, not trust, weights_alone, mapped.empty)
        if weights_alone and "state_dict" not in checkpoint:
            raise ValueError(f"{source} has no weights (no 'state_dict'): choose a destination that ends in .ckpt.")
        if weights_alone:
            from safetensors.torch import save_file

            state = checkpoint["state_dict"]
            weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            save_file(weights, unfinished)
        else:
            keep_positions_apart(checkpoint)
            torch.save(checkpoint, unfinished)
    unfinished.replace(destination)


def _loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def keep_positions_apart(checkpoint: dict[str, Any]) -> None:
    """Move the positions in ordinary data loaders to a key that Lightning ignores.

    Lightning refuses a checkpoint with states for data loaders that do not have a state themselves.

    Args:
        checkpoint: Lightning's checkpoint dictionary with whole tensors; its ``"loops"`` are changed in place.
    """
    loops = _loop_state(checkpoint)
    states = loops.get("combined_loader", [])
    others = [state for state in states if not (isinstance(state, dict) and NUM_SEEN in state)]
    if len(others) < len(states):
        checkpoint[_POSITIONS] = states
        loops["combined_loader"] = others


def put_positions_back(checkpoint: dict[str, Any]) -> None:
    """Move the positions in data loaders back to where they were before :func:`consolidate` moved them.

    Args:
        checkpoint: A checkpoint dictionary that was read from a file; it is changed in place.
    """
    if _POSITIONS in checkpoint:
        _loop_state(checkpoint)["combined_loader"] = checkpoint.pop(_POSITIONS)
