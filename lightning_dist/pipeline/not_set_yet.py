"""Attributes that a step reads and that a hook will set: a model is cut before hooks such as ``on_fit_start`` run.

Where cutting a model fails for want of an attribute, it is done once more with something in its place that can be
called, indexed, added to and gone through, and that is nothing. The first real step is followed anew, with what the
hook has set, and is refused if it does not fit the stages then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

from torch import Tensor, nn

__all__ = ["with_attributes_not_set_yet"]

_MOST = 16
"""Attributes of one module that are stood in for."""

Result = TypeVar("Result")


def with_attributes_not_set_yet(root: nn.Module, function: Callable[[], Result]) -> Result:
    """Call ``function``, which runs code of ``root``, again and again until no attribute is missing.

    Args:
        root: The user's module.
        function: Leaves the module as it was.

    Raises:
        AttributeError: If it raises one of another kind, or cannot do with something in the attribute's place.
    """
    attributes_of = {id(module): vars(module) for module in root.modules()}
    missing: set[tuple[int, str]] = set()
    first: AttributeError | None = None
    try:
        while True:
            try:
                return function()
            except Exception as error:
                place = (id(error.obj), str(error.name)) if isinstance(error, AttributeError) else (0, "")
                if place[0] not in attributes_of or place in missing or len(missing) == _MOST:
                    if first is None:
                        raise
                    _explain(first, error)
                first = first or cast(AttributeError, error)
                missing.add(place)
                attributes_of[place[0]][place[1]] = _NotSetYet()
    finally:
        for module, name in missing:
            attributes_of[module].pop(name, None)


def _explain(first: AttributeError, error: Exception) -> NoReturn:
    raise AttributeError(
        f"{first}. A pipeline follows a step before it splits the model, when on_fit_start and later hooks have not run"
        f" yet; without the attribute it could not: {type(error).__name__}: {error} Set the attribute in __init__ or in"
        " setup.",
        name=first.name,
        obj=first.obj,
    ) from error


class _NotSetYet:
    """What a hook will set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that it has not, such as __array__
            raise AttributeError(name)
        return self

    def _self(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _other(self, other: Any) -> Any:
        return other * 1 if isinstance(other, Tensor) else self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: Any) -> bool:
        return False

    __call__ = __getitem__ = __enter__ = _self
    __setitem__ = __delitem__ = __exit__ = _nothing
    __lt__ = __le__ = __gt__ = __ge__ = __contains__
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ior__ = _self
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _other
    __or__ = __and__ = _other
