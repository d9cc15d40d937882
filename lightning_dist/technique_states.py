"""Ask the techniques for what checkpoints and the comparison of weights need of a distributed module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_dist.checkpoint.snapshot import with_metadata
from lightning_dist.initialization import broadcast_weights
from lightning_dist.technique import Points, Technique

__all__ = ["TechniqueStates"]


class TechniqueStates:
    """Complete the states of a module and its optimizers by what techniques know of other ranks.

    Args:
        module: The user's module.
        techniques: The techniques, from the outside in.
        points: Their methods.
    """

    def __init__(self, module: nn.Module, techniques: Sequence[Technique], points: Points) -> None:
        self._module = module
        self._techniques = techniques
        self._points = points

    @property
    def has_remote_parameters(self) -> bool:
        """Return whether other ranks have parameters that this rank has no part in, so that they complete states."""
        return bool(self._points.add_remote_state)

    def agree_on_buffers(self, group: dist.ProcessGroup | None) -> None:
        """Give all ranks the same buffers. A collective over all processes.

        Args:
            group: The ranks with the same parameters as this one, of which the first one's buffers count; None: all.
        """
        broadcast_weights(self._module, buffers_only=True, group=group)
        for agree_on_buffers in self._points.agree_on_buffers:
            agree_on_buffers()

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of the module with the tensors in it that this rank writes into a checkpoint."""
        metadata = getattr(state, "_metadata", None)
        for state_to_write in self._points.state_to_write:
            state = state_to_write(state)
        return with_metadata(state, metadata)

    def others_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has besides the module's and the optimizers' states, as this rank writes it.

        A collective where ranks have other parameters.
        """
        for others_to_write in self._points.others_to_write:
            checkpoint = others_to_write(checkpoint)
        return checkpoint

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add to a state dict that was read what only other ranks have, on the meta device."""
        for add_remote_state in self._points.add_remote_state:
            add_remote_state(state)

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state, by the names of parameters, with that which only other ranks have. A collective.

        Args:
            state: The state of the parameters that this rank has.
        """
        for whole_optimizer_state in self._points.whole_optimizer_state:
            state = whole_optimizer_state(state)
        return state

    def collect_parts(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return dictionaries of values by parameters' names: ``own``, and those of ranks that have other parameters.

        A collective if there are any.

        Args:
            own: Values of parameters that this rank has a part in, by name; they can be pickled.

        Returns:
            The dictionaries in the order of the model, the same on all ranks. A parameter that several ranks share may
            be in several.
        """
        parts = [own]
        for collect_parts in self._points.collect_parts:
            parts = collect_parts(parts)
        return parts

    def own(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint keeps of the techniques for this rank, by the names of their classes."""
        return {type(technique).__name__: state for technique in self._techniques if (state := technique.state())}

    def load_own(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Take up what :meth:`own` returned when the checkpoint was saved, by as many ranks."""
        for technique in self._techniques:
            if (state := states.get(type(technique).__name__)) is not None:
                technique.load_state(state)
