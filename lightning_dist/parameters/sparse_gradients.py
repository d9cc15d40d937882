"""Give an optimizer for sparse gradients the rows of embeddings that any rank has used.

Gradients are averaged over the ranks as dense tensors. In one process, a sparse gradient has the rows that the batch
has looked up, also those whose gradient is zero, and the optimizer updates these rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist._compat import prepend_step_post_hook

__all__ = ["SparseStep"]


class SparseStep:
    """Make the gradients of embeddings sparse in each step of ``optimizer``. A step is a collective over all processes.

    Args:
        optimizer: The optimizer, which takes sparse gradients.
        module: The module, all of whose parameters every rank has.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        params = {param for group in optimizer.param_groups for param in group["params"]}
        self._used: dict[Tensor, Tensor] = {}
        self._dense: list[tuple[Tensor, Tensor]] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            prepend_step_post_hook(optimizer, self._after),
        ]
        for part in module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.weight in params:
                self._used[part.weight] = torch.zeros(len(part.weight), dtype=torch.int32, device=part.weight.device)
                self._handles.append(part.register_forward_pre_hook(partial(_record, self._used[part.weight])))

    def remove(self) -> None:
        """Remove the hooks from the optimizer and the embeddings."""
        for handle in self._handles:
            handle.remove()

    def restore(self) -> None:
        """Put the dense gradients back."""
        for param, gradient in self._dense:
            param.grad = gradient
        self._dense = []

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._make_sparse()
            return None

        def closure_then_sparse() -> Any:
            output = closure()
            self._make_sparse()
            return output

        return (args[0], *args[2:]), {**kwargs, "closure": closure_then_sparse}

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.restore()

    @torch.no_grad()
    def _make_sparse(self) -> None:
        for param, used in self._used.items():
            if dist.is_initialized():
                dist.all_reduce(used, dist.ReduceOp.MAX)
            if param.grad is not None:
                # Code that uses the weight outside of its embedding gives gradients to other rows.
                rows = (used.bool() | param.grad.ne(0).flatten(1).any(1)).nonzero().flatten()
                self._dense.append((param, param.grad))
                param.grad = torch.sparse_coo_tensor(
                    rows[None], param.grad[rows], param.shape, is_coalesced=True, check_invariants=False
                )
            used.zero_()


def _record(used: Tensor, embedding: nn.Module, args: tuple[Any, ...]) -> None:
    """Mark the rows that a forward looks up."""
    if not torch.is_grad_enabled() or not args:
        return
    with torch.no_grad():
        indices = args[0].flatten()
        if embedding.padding_idx is not None:
            indices = indices[indices != embedding.padding_idx]
        used[indices] = 1
