"""Keep the forms of a parameter alike: the one that the optimizer sees, and the one that a step computes with.

A step may change either of them. Tensor hooks are passed on by :func:`lightning_dist._compat.share_hooks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SameRequiresGrad", "put_into_memory"]


class SameRequiresGrad:
    """Keep ``requires_grad`` of two forms of a parameter equal, whichever of them is set.

    The forms are passed to the methods, because loading weights may replace either of them.
    """

    __slots__ = ("_common",)

    def __init__(self) -> None:
        self._common: bool | None = None
        """The last value that both forms had; None: they were never compared."""

    def copy_to(self, form: Tensor, parameter: Tensor) -> None:
        """Copy the value from the parameter to its other form, or back if it was set on the other form.

        Args:
            form: The form that a step computes with.
            parameter: The form that the optimizer sees.
        """
        self.take_from(form, parameter)
        if form.requires_grad != parameter.requires_grad:
            form.requires_grad_(parameter.requires_grad)
        self._common = parameter.requires_grad

    def take_from(self, form: Tensor, parameter: Tensor) -> None:
        """Copy the value from the other form to the parameter, if it was set on the other form alone.

        Args:
            form: The form that a step computes with.
            parameter: The form that the optimizer sees.
        """
        before = self._common
        if before is not None and form.requires_grad != before and parameter.requires_grad == before:
            self._common = form.requires_grad
            parameter.requires_grad_(self._common)


def put_into_memory(form: Tensor, memory: Tensor) -> bool:
    """Let a form of a parameter use its memory again, with the values that were assigned through ``.data``.

    The version of the memory stays as it is, because a graph may have been computed with these values.

    Args:
        form: The form that a step computes with.
        memory: The tensor whose memory the form has, unless ``form.data = ...`` has replaced it.

    Returns:
        Whether the memory of the form was replaced.
    """
    if form.data_ptr() == memory.data_ptr():
        return False
    with torch.inference_mode(False):
        memory.data.copy_(form.detach())
        form.data = memory.detach()
    return True
