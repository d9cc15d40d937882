"""Overlap the exchanges of sequence parallelism with the matrix products beside them (asynchronous tensor parallelism).

A column-wise layer multiplies each rank's tokens while those of the next rank arrive, and a row-wise layer sends the
products of each rank's tokens while it computes the next ones. The kernels are torch's, in ``torch.ops.symm_mem``: they
copy between devices through symmetric memory, without NCCL (Wang et al., 2024,
https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487).

A module such as attention uses the shape of its input before its first layer is called. It is given a
:class:`TokensToGather`, which has the shape of the whole input, and is gathered by the first layer that multiplies it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dist._compat import without_memory
from lightning_dist.mesh import autograd_collectives
from lightning_dist.mesh.split_tensor import SplitTensor
from lightning_dist.mesh.traffic import count_gather, count_sent

__all__ = ["TokensToGather", "gather_and_multiply", "is_plain_linear", "multiply_and_scatter"]

DIM = -2
"""Dimension of the tokens in hidden states."""


class TokensToGather(SplitTensor):
    """Represent hidden states of which this rank has some tokens, until a layer gathers all of them.

    Any other function gathers them as well, with the same gradients. All ranks do so at the same time, because they run
    the same code on the same batch.

    Args:
        local: This rank's tokens, of shape ``(..., tokens / ranks, features)``.
        group: Process group of the ranks, in the order of their tokens.
    """

    group: dist.ProcessGroup
    _gathered: dict[bool, Tensor]
    what = "hidden states that are split along the sequence"
    remedy = "set async_tensor_parallel=False"
    on_parts = ()

    @staticmethod
    def __new__(cls, local: Tensor, group: dist.ProcessGroup) -> TokensToGather:
        """Wrap ``local``."""
        shape = list(local.shape)
        shape[DIM] *= group.size()
        wrapper = without_memory(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        wrapper.local, wrapper.group, wrapper._gathered = local, group, {}
        return wrapper

    def __init__(self, local: Tensor, group: dist.ProcessGroup) -> None:
        """Do nothing, because ``__new__`` has already set all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without the values, because showing them would be a collective."""
        return f"TokensToGather(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def is_gathered(self) -> bool:
        """Return whether the tokens were gathered, with gradients enabled or not as now."""
        return torch.is_grad_enabled() in self._gathered

    def set_gathered(self, whole: Tensor) -> None:
        """Keep ``whole``, the gathered tokens, which a layer has computed."""
        self._gathered[torch.is_grad_enabled()] = whole

    def gathered(self) -> Tensor:
        """Gather the tokens of all ranks, or return those that were gathered before."""
        if not self.is_gathered:
            self.set_gathered(autograd_collectives.gather_to(self.local, self.group, DIM))
        return self._gathered[torch.is_grad_enabled()]

    def whole(self, function: str) -> Tensor:
        """Return the gathered tokens; ranks need not be compared, because they run the same code."""
        return self.gathered()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the gathered tokens, unless it reads no elements."""
        if func is Tensor.register_hook:  # It expects the gradient of all tokens.
            return args[0].gathered().register_hook(*args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def detached(self) -> TokensToGather:
        """Return the tensor without its history."""
        return TokensToGather(self.local.detach(), self.group)


def is_plain_linear(layer: nn.Module) -> bool:
    """Return whether ``layer`` is a linear layer whose forward is torch's own, so that it may be replaced."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def gather_and_multiply(shard: Tensor, layer: nn.Linear, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather the tokens of all ranks, and apply a column-wise layer to them.

    Args:
        shard: This rank's tokens, of shape ``(..., tokens / ranks, features)``.
        layer: The layer, which holds this rank's output features.
        group: Process group of the ranks, which must have symmetric memory.

    Returns:
        The output for all tokens, of shape ``(..., tokens, own features)``, and the gathered input.
    """
    shard, weight = _cast(shard), _cast(layer.weight)
    output, gathered = _GatherAndMultiply.apply(shard, weight, group)  # type: ignore[no-untyped-call]
    return output if layer.bias is None else output + _cast(layer.bias), gathered


def multiply_and_scatter(given: Tensor, layer: nn.Linear, group: dist.ProcessGroup) -> Tensor:
    """Apply a row-wise layer without its bias, sum its output over the ranks, and return this rank's tokens of the sum.

    Args:
        given: This rank's features of all tokens, of shape ``(..., tokens, own features)``.
        layer: The layer, which holds this rank's input features.
        group: Process group of the ranks, which must have symmetric memory.

    Returns:
        The output for this rank's tokens, of shape ``(..., tokens / ranks, features)``.
    """
    result: Tensor = _MultiplyAndScatter.apply(_cast(given), _cast(layer.weight), group)  # type: ignore[no-untyped-call]
    return result


def _cast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the arguments of a linear layer; the kernels are no functions that autocast knows."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device_type))
    return tensor


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        output, gathered = _gathered_product(shard, weight.t(), group)
        ctx.group = group
        ctx.save_for_backward(gathered, weight)
        ctx.set_materialize_grads(False)
        return output, gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor | None, gathered_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        shard_grad = weight_grad = None
        if output_grad is not None and ctx.needs_input_grad[1]:
            weight_grad = _flat(output_grad).t() @ _flat(gathered)
        if ctx.needs_input_grad[0]:
            # Other layers that were given the gathered input contribute to its gradient, which is summed once.
            if gathered_grad is None and output_grad is not None:
                shard_grad = _scattered_product(output_grad, weight, ctx.group)
            elif gathered_grad is not None:
                whole = gathered_grad if output_grad is None else gathered_grad + output_grad @ weight
                shard_grad = autograd_collectives.part_of_sum(whole, ctx.group, DIM)
        return shard_grad, weight_grad, None


class _MultiplyAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(given, weight)
        return _scattered_product(given, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        given_grad, gathered_grad = _gathered_product(output_grad, weight, ctx.group)
        weight_grad = _flat(gathered_grad).t() @ _flat(given) if ctx.needs_input_grad[1] else None
        return given_grad if ctx.needs_input_grad[0] else None, weight_grad, None


def _gathered_product(shard: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    count_gather(shard, group)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        shard.contiguous(), [matrix], shard.ndim - 2, group.group_name
    )
    return product, gathered


def _scattered_product(given: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        given.contiguous(), matrix, "sum", given.ndim - 2, group.group_name
    )
    count_sent(result.nbytes * (group.size() - 1), group)
    return result


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.size(-1))
