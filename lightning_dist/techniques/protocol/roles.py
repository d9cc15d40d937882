"""Define roles of techniques, each of which adds methods to :class:`Technique` that only some techniques need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.mesh.timeline import Timeline
from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_reducer import GradientReducer
from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.protocol.technique import Technique

__all__ = ["ParameterForms", "ParameterRules", "RemoteParts", "SavedState", "Scheduled", "TokenSplits"]


class ParameterRules(Technique):
    """Say how the technique that manages parameters stores, computes and reduces them."""

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension along which ``param`` must be sharded; None leaves it to the sharding technique."""

    def param_dtype(self, owner: nn.Module) -> torch.dtype | None:
        """Return the dtype in which ``owner`` computes with its own parameters; None leaves it to the sharding."""

    def numel_in_float32(self, unit: Unit) -> int:
        """Return the number of elements of parameters of ``unit`` that are computed in float32 apart from others."""
        return 0

    def gradient_reducer(self) -> GradientReducer | None:
        """Return an object that averages gradients over ``dp_replicate``; None leaves this to the next technique."""

    def shard_memory(self) -> ShardMemory | None:
        """Return the memory that keeps shards of parameters between uses; None leaves this to the next technique."""


class ParameterForms(Technique):
    """Put tensors in the place of parameters while a step runs.

    The optimizer, hooks and checkpoints see the parameters, which must have the changes and gradients of these tensors.
    """

    def copies(self) -> Iterable[tuple[str, Tensor, nn.Parameter]]:
        """Return the tensors that modules compute with in place of parameters that have gradients.

        Returns:
            For each parameter its name, the tensor that modules compute with, and the parameter. The latter is the one
            that the optimizer sees, or is in turn such a tensor of an outer technique.
        """
        return ()

    def write_back(self) -> None:
        """Write a step's changes of gathered parameters into the parameters that the optimizer sees."""

    def write_back_data(self, param: nn.Parameter) -> bool:
        """Copy a tensor that the step has put in the place of ``param`` into it, and return whether there was one."""
        return False

    def is_form_of_parameter(self, module: nn.Module, name: str, held: Tensor | None) -> bool:
        """Return whether ``held``, which ``module`` holds as ``name``, was put there by this technique."""
        return False

    def gradients_left(self) -> Iterable[str]:
        """Return the names of the parameters with a gradient that the optimizer would not see."""
        return ()


class TokenSplits(Technique):
    """Let ranks with the same batch run a module on different tokens, and split the work of others."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that share the work on a batch."""
        return 1

    def copied_modules(self, root: nn.Module) -> Collection[nn.Module]:
        """Return the modules in ``root`` of which all ranks do the whole work."""
        return ()

    def splits_tokens_of(self, module: nn.Module) -> bool:
        """Return whether the ranks of ``tp``, which have the same batch, now run ``module`` on different tokens."""
        return False

    def may_split_tokens_of(self, module: nn.Module) -> bool:
        """Return whether :meth:`splits_tokens_of` may be true in some step, on this rank or on another one."""
        return False


class SavedState(Technique):
    """Save states of the technique in checkpoints, or change how those of the module and of optimizers are saved."""

    def state(self) -> dict[str, Any]:
        """Return the technique's state for a checkpoint. This is a collective.

        The state must not change while the checkpoint is written in the background.

        Returns:
            Nested dictionaries with the same keys on all ranks, of values that ``torch.load`` accepts. Tensors that
            differ between ranks are DTensors, those that only other ranks have are on the meta device, and other values
            are the same on all ranks.
        """
        return {}

    def state_template(self, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor of any placement, to read a tensor of a saved :meth:`state` into; None leaves it out.

        Args:
            path: Keys that lead to the tensor in the state.
            shape: Shape of the whole tensor.
            dtype: Dtype of the tensor.
        """
        return torch.empty(shape, dtype=dtype)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned when a run with any layout saved the checkpoint."""

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` in the form in which this rank writes it into a checkpoint.

        Tensors that other ranks write become meta tensors; those that several ranks write in parts become DTensors.

        Args:
            state: A state dict of the module, or of a copy of it.
        """
        return state

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as :meth:`state_to_write` does, with that of other ranks. This is a collective.

        Args:
            state: The state by the full names of parameters, from :func:`lightning_dist.checkpoint.state.by_name`.
                Tensors that other ranks have are added on the meta device.
        """
        return state


class RemoteParts(Technique):
    """Let ranks have different parameters of the module, as the stages of a pipeline do."""

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers that only other ranks have; they stay on the meta device on this rank."""
        return ()

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the tensors that only other ranks have, on the meta device, to a state dict that was read."""

    def collect_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this rank's dictionaries of values by parameter name, and those of ranks that have other parameters.

        This is a collective over these ranks.

        Args:
            parts: Dictionaries of this rank, which must be picklable.
        """
        return parts

    def hook_state_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return other entries of a checkpoint in the form in which this rank writes them. This is a collective.

        Args:
            checkpoint: Entries that hooks and callbacks have added to the checkpoint, with the same keys on all ranks.
        """
        return checkpoint

    def agree_on_buffers(self) -> None:
        """Give all ranks the same buffers, if so far only ranks with the same parameters have the same buffers.

        This is a collective.
        """

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which code sees each rank's own tensors, and not the whole tensors that hooks see."""
        return nullcontext()

    def original(self) -> AbstractContextManager[None]:
        """Return a context in which the module has its original forwards, attributes and hooks.

        It is used to run the module on fake tensors.
        """
        return nullcontext()


class Scheduled(Technique):
    """Run a step as forwards and backwards of microbatches on several ranks, in the order of a schedule."""

    @property
    def schedule(self) -> str:
        """Return the name of the schedule."""
        raise NotImplementedError

    def timeline(self) -> Timeline | None:
        """Return when each action of the latest step ran; None: it is not known. This is a collective."""
        return None

    def expected_bubble(self) -> float:
        """Return the fraction of time that ranks are idle by the schedule, if all actions take equally long."""
        raise NotImplementedError
