"""Checkpoint activations: compute those of a block again in the backward (Chen et al., 2016).

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance, so that the block's
hooks do not run again in the backward. The rerun has the buffers and random numbers that the forward had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from lightning_dist._compat import tree_map
from lightning_dist.model.reruns import Begin, StateOfForward, together
from lightning_dist.model.units import Unit
from lightning_dist.techniques.activation_checkpointing.block_state import BlockState
from lightning_dist.techniques.activation_checkpointing.copies import Copies
from lightning_dist.techniques.activation_checkpointing.mode import CheckpointingMode
from lightning_dist.techniques.activation_checkpointing.offload import offload
from lightning_dist.techniques.activation_checkpointing.outside_state import OutsideState
from lightning_dist.techniques.activation_checkpointing.saved_operations import selective_contexts
from lightning_dist.techniques.protocol import Parallel, Rows, Technique, bound, others_of, unchanged_in

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(Technique):
    """Keep fewer activations of blocks for the backward.

    Args:
        mode: Choice of the activations that are kept, and of the blocks to which it applies.
        units: All units of the model, also those of other stages.

    Raises:
        ValueError: If no block is chosen.
    """

    def __init__(self, mode: CheckpointingMode, units: Sequence[Unit]) -> None:
        self._mode = mode
        self._copies = Copies()
        blocks = [module for unit in units if unit.kind == "block" for module in unit.modules]
        self._chosen = {block for index, block in enumerate(blocks) if mode.chooses(index)}
        self._num_blocks = len(blocks)
        if blocks and not self._chosen:
            raise ValueError(
                f"activation_checkpointing={{'every': {mode.every}}} chooses none of the model's {len(blocks)} blocks:"
                " use a smaller number, or 'none'."
            )

    def attach(self, parallel: Parallel) -> None:
        """Collect the contexts that other techniques need around a block that runs again."""
        self._around_rerun = bound(parallel.techniques, Technique.around_rerun)
        self._parallel = parallel

    def prepare_unit(self, unit: Unit) -> None:
        """Replace the forwards of those of the unit's modules that are chosen blocks."""
        for block in unit.modules:
            if block not in self._chosen:
                continue
            if self._mode.kind == "offload":
                offload(block, self._copies)
                continue
            around = [around_rerun(unit, block) for around_rerun in self._around_rerun]
            unchanged = unchanged_in(block, self._parallel, "activation_checkpointing")
            around += [unchanged.begin, StateOfForward(block).begin, OutsideState(block).begin, BlockState(block).begin]
            contexts = selective_contexts if self._mode.kind == "selective" else noop_context_fn
            _recompute(block, together(around), contexts, others_of(block, self._parallel).are_there)

    def table_rows(self) -> Rows:
        """Return a row that says what is computed again, or where it is kept."""
        is_all = len(self._chosen) == self._num_blocks
        blocks = "blocks" if is_all else f"{len(self._chosen)} of {self._num_blocks} blocks"
        if self._mode.kind == "offload":
            yield "offloaded", f"activations of {blocks}, to the memory of the CPU"
        elif self._mode.kind == "selective":
            yield (
                "recomputed",
                f"activations of {blocks} but attention and every second matrix product, in the backward",
            )
        else:
            yield "recomputed", f"activations of {blocks}, in the backward"


def _recompute(
    block: nn.Module,
    begin: Begin,
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    has_other_parameters: Callable[[], bool],
) -> None:
    """Replace the forward of ``block`` by one that runs again in the backward.

    Args:
        block: A module of a unit of the kind ``block``, whose ``forward`` is replaced on the instance.
        begin: Function that lets the block have the same state in reruns as in their forward.
        contexts: Function that returns a context around that forward and one around the rerun.
        has_other_parameters: Function that returns whether a forward computes with other tensors than the block's
            parameters; its activations are kept.
    """
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or has_other_parameters():
            return forward(*args, **kwargs)
        same_state = begin()
        has_run = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if has_run:  # A hook that the block puts on its input would otherwise be on the input twice.
                args, kwargs = tree_map(_alias, (args, kwargs))
            has_run = True
            with same_state():
                return forward(*args, **kwargs)

        # The rerun must not stop early, because hooks that run after a forward undo what those before it have done.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = recomputed


def _alias(value: Any) -> Any:
    """Return a tensor with the same memory and no history in place of a tensor that requires gradients."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()
