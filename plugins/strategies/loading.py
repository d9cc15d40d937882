"""Load checkpoint directories and single files into the dictionary that Lightning restores from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_dist.checkpoint import (
    TECHNIQUES,
    CheckpointError,
    LoadedCheckpoint,
    TensorInfo,
    Verify,
    put_positions_back,
    read_for_rank,
)
from lightning_dist.checkpoint.state import OwnStates, load_model, load_optimizer
from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.plugins.strategies.exact_resume import MODELS
from lightning_dist.techniques.states import TechniqueStates

__all__ = ["load", "load_optimizers", "load_weights"]


def load(
    path: str,
    module: LightningModule,
    with_optimizers: bool,
    states: TechniqueStates | None,
    weights_only: bool,
    verify: Verify,
    go_on: Callable[[LoadedCheckpoint], None] | None = None,
) -> dict[str, Any]:
    """Read Lightning's checkpoint dictionary from ``path``. This is a collective over all processes.

    The weights of ``module`` are not changed: tensors are read into new ones, which are sharded as its parameters are.

    Args:
        path: A checkpoint directory, saved with any layout, or a file that any strategy of Lightning saved.
        module: The LightningModule, whose parameters are sharded already.
        with_optimizers: Whether the optimizers' states are read as well.
        states: States of the module's techniques, which are read as well if the optimizers' are; None: there are none.
        weights_only: Whether to refuse pickled objects other than tensors and plain values.
        verify: Extent of the check of a directory; every rank checks its part of the files.
        go_on: Function that is called with the checkpoint after it was read from a directory; its errors are raised on
            all ranks.

    Raises:
        CheckpointError: If ``path`` is missing, of another kind, damaged, or incomplete.
        OtherRankError: On the ranks that could read the checkpoint, if another rank could not.
    """
    with raise_on_all_ranks(f"reading the checkpoint {path}"):
        if Path(path).is_file():
            return _load_file(Path(path), weights_only)
        params = dict(module.named_parameters(remove_duplicate=False))
        targets = {**params, **module.state_dict()}

        def template(info: TensorInfo) -> torch.Tensor | None:
            if info.path[0] == "optimizer_states":
                if not with_optimizers:
                    return None
                # The path is ("optimizer_states", index, "state", full name of the parameter, name of the state).
                return _empty_like(params.get(str(info.path[3])), info)
            if info.path[0] == TECHNIQUES:
                if states is None or not with_optimizers:
                    return None
                return states.template(info.path[1:], info.shape, info.dtype)
            target = targets.get(str(info.path[-1]))
            if info.path[0] not in MODELS and (info.was_whole or (target is not None and is_remote(target))):
                return torch.empty(info.shape, dtype=info.dtype)  # Lightning reads such tensors on the CPU as well.
            return _empty_like(target, info)

        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        part = read_for_rank(path, rank, num_ranks, template, weights_only, verify)
        if go_on is not None:
            go_on(part)
        return part.state


def load_weights(checkpoint: Mapping[str, Any], module: LightningModule, strict: bool) -> None:
    """Load ``checkpoint["state_dict"]`` into the sharded ``module``; on an error its weights are unchanged.

    Args:
        checkpoint: Checkpoint dictionary that :func:`load` has returned.
        module: The LightningModule, whose sharded weights are overwritten.
        strict: Whether the names in the checkpoint must be exactly the module's.

    Raises:
        CheckpointError: If the checkpoint has no ``"state_dict"``, or one that does not fit the module.
    """
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"The checkpoint has no 'state_dict', only {', '.join(map(str, checkpoint))}.")
    load_model(module, checkpoint["state_dict"], strict)


def load_optimizers(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    module: LightningModule,
    keeps_dtypes: bool,
    own_states: Callable[[Optimizer], OwnStates | None],
) -> None:
    """Load ``checkpoint["optimizer_states"]``, which has one entry for each optimizer.

    Args:
        checkpoint: The loaded checkpoint, with one state for each optimizer.
        optimizers: The optimizers of ``module``.
        module: The module, which may be sharded.
        keeps_dtypes: Whether tensors keep the dtypes that they were saved in, and do not get those of the parameters.
        own_states: Function that returns which of the states of an optimizer this rank keeps; None: its shards of all.

    Raises:
        CheckpointError: If the number of states is not the number of optimizers, or a state does not fit its optimizer.
    """
    states = checkpoint["optimizer_states"]
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"The checkpoint has the states of {len(states)} optimizers, this run has {len(optimizers)}. Use the"
            " configure_optimizers that it was saved with."
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        load_optimizer(optimizer, module, state, keeps_dtypes, own_states(optimizer))


def _load_file(path: Path, weights_only: bool) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except Exception as error:
        raise CheckpointError(f"{path} is a file, but not one that torch.load can read: {error}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        kind = f"a dict of {', '.join(map(str, list(checkpoint)[:4]))}" if isinstance(checkpoint, dict) else "no dict"
        raise CheckpointError(f"{path} is not a Lightning checkpoint: it has no 'state_dict' ({kind}).")
    put_positions_back(checkpoint)
    return checkpoint


def _empty_like(target: torch.Tensor | None, info: TensorInfo) -> torch.Tensor | None:
    """Return an empty tensor for ``info``, sharded like ``target`` if the shape allows it; None for other stages."""
    if target is not None and is_remote(target):
        return None  # The parameter belongs to another stage.
    if isinstance(target, DTensor):
        if target.shape == info.shape:
            return torch.empty_like(target, dtype=info.dtype)
        # An optimizer's factored statistics have other shapes than the parameter. No rank reads all of them whole.
        whole = torch.empty(info.shape, dtype=info.dtype, device=target.device)
        if info.path[0] == "optimizer_states":
            can_be = [
                Shard(0) if isinstance(placement, Shard) and whole.ndim else Replicate()
                for placement in target.placements
            ]
            return distribute_tensor(whole, target.device_mesh, can_be, src_data_rank=None)
        return whole
    return torch.empty(info.shape, dtype=info.dtype, device=target.device if target is not None else None)
