"""Find the objects in which modules hold their configuration, and see one with another value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from torch import nn

__all__ = ["configured_values", "with_attribute"]

_NAME = re.compile(r"(config|cfg|conf|args|params|options|settings)$")
_NO_CONFIGURATIONS = (nn.Module, type, dict, list, tuple, set, Enum)


def configured_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the configurations that a module holds, such as ``config.num_heads``, and their values.

    A configuration is an object with attributes under a name such as ``config`` or ``args``.
    """
    for key, value in vars(module).items():
        if _NAME.search(key) and hasattr(value, "__dict__") and not isinstance(value, _NO_CONFIGURATIONS):
            yield from ((f"{key}.{name}", found) for name, found in vars(value).items())


def with_attribute(configuration: Any, name: str, value: object) -> Any:
    """Return a view of a configuration, which other modules may share, with another value of an attribute.

    All other attributes are those of the configuration itself, also if they change. Other names of the same attribute,
    such as those that Hugging Face maps to it, keep their value.

    Args:
        configuration: Any object with attributes, such as a dataclass that may be frozen.
        name: The attribute's name.
        value: Its value in the view.

    Raises:
        TypeError: If there can be no view of an object of this class.
    """
    kind: Any = type(configuration)
    try:

        class View(kind):  # type: ignore[misc]
            def __getattribute__(self, key: str) -> Any:
                return value if key == name else super().__getattribute__(key)

        view = View.__new__(View)
        object.__setattr__(view, "__dict__", vars(configuration))
    except Exception as error:  # A class may refuse subclasses and instances in any way.
        raise TypeError(f"A {kind.__name__} cannot be seen with another {name}: {error}") from error
    return view
