"""Compute norms of gradients over all ranks where Lightning and torch compute them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import grads
from torch.nn.utils import clip_grad

__all__ = ["compute_gradient_norms_of_shards", "total_norms"]


def compute_gradient_norms_of_shards(norms: Callable[..., dict[str, Any]]) -> None:
    """Make Lightning's ``grad_norm`` accept sharded modules, on which its ``torch.tensor(norms)`` does not work.

    The code of the function is replaced, because users may have imported the function before this package. This could
    be replaced by ``torch.stack`` in Lightning's function.

    Args:
        norms: Function with the arguments of ``grad_norm`` that is called instead.
    """
    vars(grads)["norms_of_shards"] = norms  # The replaced code finds names in the module of Lightning's function.

    def grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
        return norms_of_shards(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821

    grads.grad_norm.__code__ = grad_norm.__code__


@contextmanager
def total_norms(
    total_norm: Callable[[Sequence[torch.Tensor], float], torch.Tensor | None],
) -> Generator[None, None, None]:
    """Make torch's ``clip_grad_norm_`` and ``get_total_norm`` use ``total_norm`` in this context.

    Lightning's gradient clipping calls them, and so may users' own. This could be replaced by a hook of the strategy
    for the norm, such as Fabric's ``clip_gradients_norm``.

    Args:
        total_norm: Function that returns the norm of all ranks' gradients, given this rank's gradients and the order of
            the norm; it returns None if torch's own function computes the right value.
    """
    own = clip_grad._get_total_norm

    def of_all(
        tensors: Iterable[torch.Tensor] | torch.Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = total_norm(gradients, float(norm_type))
        if norm is None:
            whole: torch.Tensor = own(gradients, norm_type, error_if_nonfinite, foreach)
            return whole
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(norm)}: they cannot be clipped. Set"
                " error_if_nonfinite=False to continue."
            )
        return norm

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = of_all
    try:
        yield
    finally:
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = own
