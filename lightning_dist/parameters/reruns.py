"""Find tensors that a step has put in the place of parameters for one forward, which a rerun would not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_dist.model.reruns import held_parameters
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.on_use import GatheredOnUse

__all__ = ["OtherParameters"]


class OtherParameters:
    """Find tensors that a step has put in the place of parameters of ``module``, as torch.func.functional_call does.

    They are there for one forward only, so that a rerun in the backward would compute with others.

    Args:
        root: The user's module.
        module: A module in it, whose submodules count as well.
        groups: Function that returns the groups that manage the parameters.
        is_form: Function that returns whether a technique has put a tensor, which a module holds under a name, in the
            place of a parameter.
    """

    def __init__(
        self,
        root: nn.Module,
        module: nn.Module,
        groups: Callable[[], Sequence[ParameterGroup]],
        is_form: Callable[[nn.Module, str, Tensor], bool],
    ) -> None:
        self._module, self._groups, self._is_form = module, groups, is_form
        names: dict[int, set[str]] = {}
        for name, param in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), set()).add(name)
        self._names = {place: names.get(id(param), set()) for place, param in held_parameters(module)}
        """The full names of the parameter in each place, of which it has several if it is tied."""
        self._known: dict[tuple[nn.Module, str], weakref.ref[Tensor]] = {}
        """The parameter, or its gathered form, that was last found in each place."""

    def are_there(self) -> bool:
        """Return whether there are any now."""
        return any(self._is_other(place, param) for place, param in held_parameters(self._module))

    def _is_other(self, place: tuple[nn.Module, str], held: Tensor) -> bool:
        known = self._known.get(place)
        if known is not None and known() is held:
            return False
        if isinstance(held, GatheredOnUse) or self._is_form(*place, held):
            return False
        if not isinstance(held, nn.Parameter):
            return True
        if self._name_of(held) not in self._names.get(place, ()):
            return True
        self._known[place] = weakref.ref(held)
        return False

    def _name_of(self, held: Tensor) -> str:
        """Return the full name of a parameter, or of a gathered form of one; empty: it is of no group."""
        for group in self._groups():
            for name, gathered, param in group.copies():
                if held is gathered or held is param:
                    return name
            for name, param in zip(group.names, group.params, strict=True):
                if held is param:
                    return name
        return ""
