"""Find the attributes of modules that a step changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_dist._compat import num_forward_hooks
from lightning_dist.tracing.step_graph.contents import items_of, packages_of
from lightning_dist.tracing.step_graph.fake_run import tensors_in

__all__ = ["AttributeChanges"]

_Attribute = tuple[str, str]
"""The full name of a module, and the name of one of its attributes."""

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Names of the attributes that torch itself gives every module, such as its dictionaries of hooks."""

_ABSENT = object()


class AttributeChanges:
    """Find the module attributes that a step assigns, or whose content (see :mod:`.contents`) it changes.

    Args:
        root: The user's module.
        parts: Full names of the parts; attributes of modules inside parts are recorded separately.
    """

    def __init__(self, root: nn.Module, parts: Collection[str]) -> None:
        self._root = root
        self._parts = parts
        self._packages = packages_of(root)
        self._before: dict[_Attribute, list[Any]] = {}
        self._before_in_parts: dict[_Attribute, list[Any]] = {}
        self._watched: dict[_Attribute, tuple[dict[str, Any], list[Any]]] = {}
        self._num_hooks: dict[str, int] = {}
        self._seen: dict[_Attribute, None] = {}
        self.changed: list[_Attribute] = []
        """The attributes outside of parts that the step has changed."""
        self.changed_in_parts: list[_Attribute] = []
        """The attributes in parts that the step has changed, except those that hold tensors."""

    @property
    def restored(self) -> list[_Attribute]:
        """Return the attributes outside of parts that the step has changed, and restored before its end."""
        return [attribute for attribute in self._seen if attribute not in self.changed]

    def begin(self) -> None:
        """Record the attributes before the step."""
        self._before = {(name, key): self._content(value) for name, key, value in self._attributes(in_parts=False)}
        self._before_in_parts = {
            (name, key): self._content(value) for name, key, value in self._attributes(in_parts=True)
        }
        attributes_of = {name: vars(module) for name, module in self._root.named_modules()}
        self._watched = {
            (name, key): (attributes_of[name], content)
            for (name, key), content in self._before.items()
            if not name or key == "training" or items_of(content[0], self._packages) is not None
        }
        self._num_hooks = {name: num_forward_hooks(module) for name, module in self._root.named_modules()}

    def before_part(self) -> None:
        """Record attributes that differ from their values before the step, when the step calls a part.

        A stage may end at this call, so that code of the step that restores an attribute later does not run on it.
        """
        for (name, key), (attributes, before) in self._watched.items():
            if not _is_same(self._content(attributes.get(key, _ABSENT)), before):
                self._seen.setdefault((name, key))

    def end(self) -> list[Tensor]:
        """Record the changes at the end of the step.

        Returns:
            The tensors in attributes of modules outside of parts.
        """
        modules = self._root.named_modules()
        hooked = [name for name, module in modules if num_forward_hooks(module) > self._num_hooks[name]]
        tensors: list[Tensor] = []
        for name, key, value in self._attributes(in_parts=False):
            tensors += tensors_in(value)
            before = self._before.get((name, key))
            # Forward hooks that a step registers on parts remain on every stage, so an attribute that was set to True
            # to say that they are registered must remain on every stage as well.
            is_hook_flag = value is True and any(not name or f"{hook}.".startswith(f"{name}.") for hook in hooked)
            if not is_hook_flag and (before is None or not _is_same(self._content(value), before)):
                self.changed.append((name, key))
        for name, key, value in self._attributes(in_parts=True):
            before = self._before_in_parts.get((name, key))
            # Tensors that a part keeps in an attribute are left as the last microbatch has set them.
            keeps_tensors = any(True for _ in tensors_in(value))
            if not keeps_tensors and (before is None or not _is_same(self._content(value), before)):
                self.changed_in_parts.append((name, key))
        return tensors

    def _attributes(self, in_parts: bool) -> Iterator[tuple[str, str, Any]]:
        """Yield module name, attribute name and value of the attributes of modules inside or outside of parts."""
        for name, module in self._root.named_modules():
            if in_parts == any(name == part or name.startswith(f"{part}.") for part in self._parts):
                for key, value in vars(module).items():
                    if key not in _TORCH_ATTRIBUTES:
                        yield name, key, value

    def _content(self, value: Any) -> list[Any]:
        """Return a list of an attribute's value and, if the value is a container or an object, the items in it."""
        return [value, *(items_of(value, self._packages) or ())]


def _is_same(content: list[Any], other: list[Any]) -> bool:
    return len(content) == len(other) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and a[0] is b[0] and a[1:] and a[1] is b[1])
        for a, b in zip(content, other, strict=True)
    )
