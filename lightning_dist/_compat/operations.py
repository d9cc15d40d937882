"""Observe torch's operations, know them by name, and run code on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "GROUPED_MM",
    "KEEPS_OBJECT",
    "READ_NUMBER",
    "USE_COUNT",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "assert_on_device",
    "named_arguments",
    "written_arguments",
]

DispatchMode = TorchDispatchMode
"""The base class of contexts that see every operation. torch's guide to extending torch names it.

Replaced by: a public name of the class.
"""

FakeTensor = fake_tensor.FakeTensor
"""The class of tensors that have no values. Replaced by: a public name of the class."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The context in which tensors have no values. Replaced by: a public name of the class."""

GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operation behind ``torch.nn.functional.grouped_mm``. On fake tensors it accepts only bfloat16 (torch 2.13).

Replaced by: fake tensors that accept what the function accepts.
"""

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operation by which ``item()`` and C++ code read a number from a tensor.

Replaced by: a public name of it.
"""

KEEPS_OBJECT = "_has_compatible_shallow_copy_type"
"""Name of the function by which ``nn.Module.to`` and the like ask whether a gradient stays the same Python object.

Replaced by: ``torch.__future__.set_swap_module_params_on_conversion``, once it is the default.
"""

USE_COUNT = "_use_count"
"""Name of the method by which ``torch.utils.swap_tensors`` asks whether a tensor is in use.

Replaced by: a ``swap_tensors`` that does not ask tensor subclasses.
"""


def named_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call of ``operation`` by name, with the default values of those that are not given.

    Replaced by: a public way to read the schema of an operation.
    """
    defaults = {argument.name: argument.default_value for argument in operation._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Return those arguments of a call of ``operation`` that it changes in place.

    Replaced by: the same as for :func:`named_arguments`.
    """
    if not operation._schema.is_mutable:
        return []
    given = named_arguments(operation, args, kwargs)
    return [
        given[argument.name]
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def assert_on_device(condition: Tensor) -> None:
    """Let the device stop the process if ``condition``, a tensor of one element, is False; the host does not wait.

    Replaced by: a public name of the function.
    """
    torch._assert_async(condition)
