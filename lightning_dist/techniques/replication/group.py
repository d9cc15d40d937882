"""Manage the parameters of a unit that no rank shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist._compat import own_parameters, put_parameter
from lightning_dist.model.units import Unit
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.on_use import GatheredOnUse, whole_for_step
from lightning_dist.techniques.protocol import ParameterForms, Technique, bound

__all__ = ["ReplicatedGroup"]


class ReplicatedGroup(ParameterGroup):
    """Manage parameters that no rank shards: plain ones, or parts of layers and experts that are split over an axis.

    Steps and optimizers use the same plain parameters. Parameters of split layers are DTensors over ``tp``, and those
    of experts over ``ep`` or ``tp`` or both. When they are gathered, the technique that has split them replaces them by
    this rank's parts, in the same memory. In a step, outside of their unit's forward, the modules hold stand-ins that
    are gathered over these axes where they are used.

    Args:
        unit: The unit of the parameters.
        mesh: The mesh whose ranks have parts of the batch.
        techniques: All techniques, from the outside in.
        on_gradient: Function that is called with a parameter when a backward is about to add a gradient to it that was
            computed through a stand-in.
    """

    def __init__(
        self,
        unit: Unit,
        mesh: DeviceMesh,
        techniques: Sequence[Technique],
        on_gradient: Callable[[nn.Parameter], None],
    ) -> None:
        self._params = dict(unit.params)
        self._mesh = mesh
        self._write_back_data = bound(techniques, ParameterForms.write_back_data)
        self._is_form = bound(techniques, ParameterForms.is_form_of_parameter)
        self._on_gradient = on_gradient
        split = {id(param) for param in self._params.values() if isinstance(param, DTensor)}
        self._places = [
            (owner, key, param)
            for owner in unit.owners
            for key, param in own_parameters(owner).items()
            if param is not None and id(param) in split
        ]
        self._is_gathered = self._gives_whole = not self._places
        self._is_kept = self._has_stand_ins = False
        self._stand_ins: dict[nn.Parameter, Tensor] = {}
        for owner in {owner for owner, _, _ in self._places}:
            owner.register_state_dict_post_hook(partial(self._put_into_state_dict))  # type: ignore[no-untyped-call]

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters."""
        return list(self._params.values())

    @property
    def names(self) -> list[str]:
        """Return the full names of the parameters."""
        return list(self._params)

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh whose ranks have parts of the batch."""
        return self._mesh

    @property
    def is_gathered(self) -> bool:
        """Return whether the modules hold the tensors that they compute with; always True for plain parameters."""
        return self._is_gathered

    @property
    def needs_gather(self) -> bool:
        """Return whether the modules hold DTensors outside of steps, with which they cannot compute."""
        return bool(self._places)

    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` is one of the parameters."""
        return any(own is param for own in self._params.values())

    def gather(self) -> None:
        """Put the DTensors into the modules, where other techniques replace them. Nothing is communicated."""
        if self._is_gathered:
            return
        for owner, key, param in self._places:
            if self._holds_own(owner, key, param):
                put_parameter(owner, key, param)
        self._is_gathered = True

    def _holds_own(self, owner: nn.Module, key: str, param: nn.Parameter) -> bool:
        """Return whether ``owner`` holds ``param`` or a form of it, and not a tensor that functional_call put there."""
        held = own_parameters(owner).get(key)
        is_own = held is None or held is param or held is self._stand_ins.get(param)
        return is_own or any(is_form(owner, key, held) for is_form in self._is_form)

    def free(self) -> None:
        """Put the DTensors, or their stand-ins, back into the modules."""
        self.write_back()
        is_in_step = self._has_stand_ins and self._is_gathered
        for owner, key, param in self._places:
            if not is_in_step or self._holds_own(owner, key, param):
                put_parameter(owner, key, self._stand_ins[param] if self._has_stand_ins else param)
        self._is_gathered = not self._places

    def after_forward(self) -> None:
        """Free the parameters after a forward of the unit, unless :meth:`kept_after_forward` is active."""
        if not self._is_kept:
            self.free()

    @contextmanager
    def kept_after_forward(self) -> Iterator[None]:
        """Keep parameters gathered after forwards in this context."""
        before, self._is_kept = self._is_kept, True
        try:
            yield
        finally:
            self._is_kept = before

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Let the modules hold stand-ins in this context while the parameters are free."""
        for param in {param for _, _, param in self._places} - self._stand_ins.keys():
            on_gradient = partial(self._on_gradient, param)
            # The ranks of tp have the same part of the batch, and those of ep, which have different experts, do not.
            gather = partial(whole_for_step, data_parallel_axes=("ep",), on_gradient=on_gradient)
            self._stand_ins[param] = GatheredOnUse(param, gather)
        before, self._has_stand_ins = self._has_stand_ins, True
        if not self._is_gathered:
            self.free()
        try:
            yield
        finally:
            self._has_stand_ins = before
            if not self._is_gathered:
                self.free()

    def write_back(self) -> None:
        """Write values that a step has assigned by ``param.data = ...`` into the parameters' memory.

        All other changes are made in that memory already.
        """
        for _, _, param in self._places if self._is_gathered else ():
            for write_back_data in self._write_back_data:
                write_back_data(param)

    @contextmanager
    def whole_state_dict(self) -> Iterator[None]:
        """Let ``state_dict()`` return the tensors that the modules hold in this context."""
        before, self._gives_whole = self._gives_whole, True
        try:
            yield
        finally:
            self._gives_whole = before

    def _put_into_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        """Put the DTensors into a module's state dict even while the module holds this rank's parts of them."""
        for owner, key, param in self._places if not self._gives_whole else ():
            name = prefix + key
            if owner is module and name in state_dict:
                state_dict[name] = param if isinstance(state_dict[name], nn.Parameter) else param.detach()

    def copy_requires_grad(self) -> None:
        """Do nothing, because techniques copy ``requires_grad`` to what modules compute with after each gather."""
