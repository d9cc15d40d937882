"""Find what a step changes in modules of parts after it has called the parts.

A stage of a pipeline ends before the code that does so, unless it is the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dist._compat import hooks_around_forward, own_buffers, version_of
from lightning_dist.tracing.step_graph.contents import items_of, packages_of

__all__ = ["ChangesAfterParts", "Undone"]

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_ABSENT: list[Any] = [object()]

_Place = tuple[str, str]
"""The full name of a module, and the name of an attribute or of a buffer of it."""


_Held = Mapping[_Place, Any]


class Undone(NamedTuple):
    """Name what a step sets before or while it calls a part, and has undone at its end.

    Args:
        attributes: Module and name of attributes.
        buffers: Module and name of buffers in whose places the step puts other tensors.
        hooks: Full names of the modules whose forward hooks differ.
    """

    attributes: tuple[_Place, ...] = ()
    buffers: tuple[_Place, ...] = ()
    hooks: tuple[str, ...] = ()

    def __or__(self, other: Undone) -> Undone:
        """Return what either of them names."""
        return Undone(
            tuple(dict.fromkeys((*self.attributes, *other.attributes))),
            tuple(dict.fromkeys((*self.buffers, *other.buffers))),
            tuple(dict.fromkeys((*self.hooks, *other.hooks))),
        )


class _State(NamedTuple):
    attributes: dict[_Place, list[Any]]
    buffers: dict[_Place, tuple[Tensor, int]]
    hooks: dict[str, list[dict[Any, Any]]]


class ChangesAfterParts:
    """Compare what the modules of parts hold before the step, when a part returns, and at the end of the step.

    Args:
        root: The user's module.
        parts: Full names of the parts.
    """

    def __init__(self, root: nn.Module, parts: Collection[str]) -> None:
        self._packages = packages_of(root)
        self._modules = {
            part: [(f"{part}.{inner}".strip("."), module) for inner, module in root.get_submodule(part).named_modules()]
            for part in parts
        }
        self._before: dict[str, _State] = {}
        self._returned: dict[str, _State] = {}
        self._latest = ""
        self.undone = Undone()
        self.left: dict[str, str] = {}
        """For each part, the full name of an attribute or a buffer in it that has another value afterwards."""

    def begin(self) -> None:
        """Record what modules hold before the step."""
        self._before = {part: self._state(part) for part in self._modules}

    def before_part(self) -> None:
        """Record what the modules of the part that has returned last hold when the step calls the next one."""
        if self._latest:
            self._returned[self._latest] = self._state(self._latest)

    def on_return(self, part: str) -> None:
        """Record what the modules of a part hold when it has returned."""
        self._returned[part] = self._state(part)
        self._latest = part

    def end(self) -> None:
        """Compare these with what the modules hold at the end of the step."""
        for part, returned in self._returned.items():
            before, now = self._before[part], self._state(part)
            attributes = list(self._differing(part, returned.attributes, before.attributes, now.attributes))
            buffers = list(self._differing(part, returned.buffers, before.buffers, now.buffers))
            hooks = [name for name, held in now.hooks.items() if held != returned.hooks.get(name)]
            self.undone |= Undone(tuple(attributes), tuple(buffers), tuple(hooks))

    def _differing(self, part: str, returned: _Held, before: _Held, now: _Held) -> Iterator[_Place]:
        """Yield places that are now as before the step, and were not in between; note those that are different now."""
        for place in dict.fromkeys((*returned, *now)):
            value, in_between, earlier = (held.get(place, _ABSENT) for held in (now, returned, before))
            if _is_same(value, in_between):
                continue
            if _is_same(value, earlier):
                yield place
            else:
                self.left.setdefault(part, ".".join(place).lstrip("."))

    def _state(self, part: str) -> _State:
        modules = self._modules[part]
        return _State(
            {
                (name, key): [value, *(items_of(value, self._packages) or ())]
                for name, module in modules
                for key, value in vars(module).items()
                if key not in _TORCH_ATTRIBUTES
            },
            {
                (name, key): (buffer, version_of(buffer))
                for name, module in modules
                for key, buffer in own_buffers(module).items()
                if buffer is not None
            },
            {name: [dict(hooks) for hooks in hooks_around_forward(module)] for name, module in modules},
        )


def _is_same(content: Any, other: Any) -> bool:
    return len(content) == len(other) and all(
        a is b or (isinstance(a, int) and a == b) or (isinstance(a, tuple) and isinstance(b, tuple) and _is_same(a, b))
        for a, b in zip(content, other, strict=True)
    )
