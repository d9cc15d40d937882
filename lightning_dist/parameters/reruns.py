"""Find parameters with which a rerun in the backward would compute something else than the forward has."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from lightning_dist._compat import local_of, version_of
from lightning_dist.model.reruns import held_parameters
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.on_use import GatheredOnUse

__all__ = ["OtherParameters", "UnchangedParameters"]


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


class UnchangedParameters:
    """Raise an error if a parameter of ``module`` has changed between a forward and a rerun of it.

    What a forward changes itself, such as weights that it normalizes, is changed in the rerun once more, and is no
    error. Changes through ``.data`` are not found where parameters are not sharded.

    Args:
        root: The user's module.
        module: A module in it, whose submodules count as well.
        groups: Function that returns the groups that manage the parameters.
        argument: The argument for which the module runs again, such as ``"activation_checkpointing"``.
    """

    def __init__(
        self, root: nn.Module, module: nn.Module, groups: Callable[[], Sequence[ParameterGroup]], argument: str
    ) -> None:
        inside = {id(param) for _, param in held_parameters(module)}
        self._names = {name for name, param in root.named_parameters() if id(param) in inside}
        self._groups, self._argument, self._module = groups, argument, module
        self._own: Counter[str] = Counter()
        """How often forwards and reruns of the module itself have changed each parameter."""
        self._forms: list[tuple[str, Tensor, Tensor | None]] = []
        """The parameters by name, each with its gathered form, once all of them have been gathered."""

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for a forward, the others for its reruns.

        A context of a rerun raises a RuntimeError if a parameter has changed since the forward.
        """
        found: dict[str, int] = {}

        @contextmanager
        def context() -> Iterator[None]:
            before = dict(self._versions())
            for name, version in found.items():
                if before[name] - self._own[name] != version:
                    raise RuntimeError(
                        f"{self._argument}: the parameter {name!r} has changed between a forward of"
                        f" {type(self._module).__name__} and its backward, which would repeat the forward with the new"
                        f" values. Change it after the backward, or leave {self._argument} out."
                    )
            yield
            for name, version in self._versions():
                self._own[name] += version - before[name]
                if name not in found:
                    found[name] = version - self._own[name]

        return context

    def _versions(self) -> Iterator[tuple[str, int]]:
        if not self._forms:
            groups = [group for group in self._groups() if not self._names.isdisjoint(group.names)]
            held = [(name, param) for group in groups for name, param in zip(group.names, group.params, strict=True)]
            gathered = {name: whole for group in groups for name, whole, _ in group.copies()}
            forms: list[tuple[str, Tensor, Tensor | None]] = [
                (name, param, gathered.get(name)) for name, param in held if name in self._names
            ]
            if not all(group.is_gathered for group in groups if group.is_sharded):
                return ((name, _version(param) + _version(whole)) for name, param, whole in forms)
            self._forms = forms
        return ((name, _version(param) + _version(whole)) for name, param, whole in self._forms)


def _version(param: Tensor | None) -> int:
    if param is None:
        return 0
    values = local_of(param)
    return 0 if values.is_inference() else version_of(values)
