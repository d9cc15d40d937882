"""Collect from the techniques the states of a distributed module for checkpoints and comparisons of weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist._compat import module_versions
from lightning_dist.checkpoint.snapshot import with_metadata
from lightning_dist.model.initialization import broadcast_weights
from lightning_dist.techniques.protocol import Points, SavedState, Technique

__all__ = ["TechniqueStates"]


class TechniqueStates:
    """Complete the states of a module and its optimizers by those parts that only other ranks have.

    Args:
        module: The user's module with this rank's parameters and buffers.
        techniques: The techniques, from the outside in.
        points: The methods with which ``techniques`` override those of
            :class:`~lightning_dist.techniques.protocol.Technique`.

    Raises:
        TypeError: If a technique has a state, and is no :class:`~lightning_dist.techniques.protocol.SavedState`.
    """

    def __init__(self, module: nn.Module, techniques: Sequence[Technique], points: Points) -> None:
        self._module = module
        for technique in techniques:
            if hasattr(technique, "state") and not isinstance(technique, SavedState):
                raise TypeError(
                    f"{type(technique).__name__} has a state, which would not be saved: derive it from SavedState"
                    " instead of Technique."
                )
        self._with_states = [technique for technique in techniques if isinstance(technique, SavedState)]
        self._points = points

    @property
    def has_remote_parameters(self) -> bool:
        """Return whether other ranks have parameters of which this rank has no part."""
        return bool(self._points.add_remote_state)

    def agree_on_buffers(self, group: dist.ProcessGroup | None) -> None:
        """Give all ranks the same buffers. This is a collective over all processes.

        Args:
            group: Process group of the ranks with the same parameters as this one, which get the buffers of the first
                of them; None: all processes.
        """
        broadcast_weights(self._module, buffers_only=True, group=group)
        for agree_on_buffers in self._points.agree_on_buffers:
            agree_on_buffers()

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` in the form in which this rank writes it (see :meth:`SavedState.state_to_write`)."""
        metadata = module_versions(state)
        for state_to_write in self._points.state_to_write:
            state = state_to_write(state)
        return with_metadata(state, metadata)

    def hook_state_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's entries other than states of the module and optimizers, as this rank writes them.

        This is a collective if ranks have different parameters.
        """
        for hook_state_to_write in self._points.hook_state_to_write:
            checkpoint = hook_state_to_write(checkpoint)
        return checkpoint

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the tensors that only other ranks have, on the meta device, to a state dict that was read."""
        for add_remote_state in self._points.add_remote_state:
            add_remote_state(state)

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state, by parameter name, as this rank writes it, with the states of other ranks.

        This is a collective if ranks have different parameters.

        Args:
            state: The optimizer's state for the parameters that this rank has.
        """
        for whole_optimizer_state in self._points.whole_optimizer_state:
            state = whole_optimizer_state(state)
        return state

    def collect_parts(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return dictionaries of values by parameter name: ``own``, and those of ranks that have other parameters.

        This is a collective if there are such ranks.

        Args:
            own: Values by the names of the parameters of which this rank has a part; they must be picklable.

        Returns:
            The dictionaries in the order of the model, the same on all ranks. A parameter that several ranks share may
            be in several.
        """
        parts = [own]
        for collect_parts in self._points.collect_parts:
            parts = collect_parts(parts)
        return parts

    def of_techniques(self) -> dict[str, dict[str, Any]]:
        """Return the states of the techniques for a checkpoint, by the names of their classes. This is a collective."""
        return {type(technique).__name__: state for technique in self._with_states if (state := technique.state())}

    def template(self, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor to read a tensor into that :meth:`of_techniques` has saved; None leaves it out.

        Args:
            path: Keys that lead to the tensor: the name of the technique's class, and those in its state.
            shape: Shape of the whole tensor.
            dtype: Dtype of the tensor.
        """
        technique = next((own for own in self._with_states if type(own).__name__ == path[0]), None)
        return None if technique is None else technique.state_template(path[1:], shape, dtype)

    def load_techniques(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the states that :meth:`of_techniques` returned, in a run with any layout."""
        names = {type(technique).__name__ for technique in self._with_states}
        for name in sorted(states.keys() - names):
            warnings.warn(
                f"The checkpoint has the state of {name} ({', '.join(map(str, states[name]))}), which this run does not"
                " use: it is dropped.",
                stacklevel=2,
            )
        for technique in self._with_states:
            if (state := states.get(type(technique).__name__)) is not None:
                technique.load_state(state)
