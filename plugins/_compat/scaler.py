"""Scale losses for float16 training in which each rank has only its shards of the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """Skip an optimizer step on all ranks if any rank has found an overflow, so that all ranks keep the same scale.

    torch's ``ShardedGradScaler`` for FSDP1 does not accept DTensors, and hangs if a rank has no gradients. This could
    be replaced by a ``GradScaler`` of torch that agrees between ranks.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide gradients by the scale, in place. This is a collective over all processes.

        Returns:
            A mapping of the device to 1.0 if any rank has an infinite or NaN gradient, and otherwise to 0.0.

        Raises:
            ValueError: If a gradient is in float16 and ``allow_fp16`` is False.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                    if grad.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Gradients in float16 cannot be unscaled: keep parameters in float32.")
                    by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in by_kind.items():  # Offloaded gradients are on another device than the scale.
            found = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
