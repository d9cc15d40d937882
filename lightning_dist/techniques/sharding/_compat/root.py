"""Control what FSDP2 does around a whole step: its root module, the end of a backward, and accumulation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist._compat import tree_leaves
from lightning_dist.techniques.sharding._compat.group import ShardedGroup, fsdp_state

__all__ = [
    "accumulating", "flush_gradients", "gather_before_views", "initialize_root",
    "reduce_gradients", "reset_after_error",
]  # fmt: skip


def initialize_root(root: nn.Module) -> None:
    """Make ``root`` the FSDP root, before any module runs.

    FSDP2 would otherwise take the module that runs first for the root, and raise an error when the real root runs.
    """
    fsdp_state(root)._lazy_init()


def gather_before_views(module: nn.Module) -> None:
    """Gather the parameters of ``module`` before its backward, even if a step changes its output, a view, in place.

    FSDP2 registers its pre-backward hook on the module's output. If the output is a view, FSDP2 warns, because autograd
    drops the hook when the view is changed in place. A hook on the view's base, as registered here, stays.

    Replaced by: an FSDP2 that registers its hook on the base.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            base = tensor._base if isinstance(tensor, torch.Tensor) and tensor.requires_grad else None
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(before_backward)

    def before_backward(gradients: Any) -> None:
        fsdp_state(module)._pre_backward(cast(torch.Tensor, None))

    module.register_forward_hook(hook)


def flush_gradients(root: nn.Module) -> None:
    """Reduce the gradients that a backward left unreduced, by FSDP2's callback for the end of a backward.

    FSDP2 itself queues the callback only if the backward goes through the output of one of its modules.
    """
    with torch.no_grad():
        fsdp_state(root)._root_post_backward_final_callback()


@contextmanager
def accumulating(root: nn.Module, groups: Sequence[ShardedGroup]) -> Iterator[None]:
    """Keep parameters gathered and gradients unreduced in this context, whatever forwards and backwards run.

    Replaced by: ``set_reshard_after_backward`` and similar methods, once they work on a root without parameters and
    can be undone.
    """
    before = [(g._group.reshard_after_backward, g._group.reduce_grads, g._group.all_reduce_grads) for g in groups]
    for group in groups:
        group._group.reshard_after_backward = group._group.reduce_grads = group._group.all_reduce_grads = False
    fsdp_root = cast(FSDPModule, root)
    fsdp_root.set_is_last_backward(False)
    try:
        with ExitStack() as kept:
            for group in groups:
                kept.enter_context(group.kept_after_forward())
            yield
    finally:
        fsdp_root.set_is_last_backward(True)
        for group, (reshard, reduce, all_reduce) in zip(groups, before, strict=True):
            group._group.reshard_after_backward = reshard
            group._group.reduce_grads = reduce
            group._group.all_reduce_grads = all_reduce


def reduce_gradients(root: nn.Module, groups: Sequence[ShardedGroup]) -> None:
    """Reduce the gradients that backwards inside :func:`accumulating` have left."""
    for group in reversed(groups):
        group._reduce()
    fsdp_state(root)._root_post_backward_final_callback()


def reset_after_error(root: nn.Module) -> None:
    """Reset FSDP2's state after a failed step; torch can from 2.12 on."""
    if hasattr(root, "reset_iter_state"):
        cast(FSDPModule, root).reset_iter_state()
