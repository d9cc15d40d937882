"""Average the gradients of replicas that may leave and join the run while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist._compat import local_of
from lightning_dist.mesh.membership import BehindError, Membership
from lightning_dist.parameters.gradient_buckets import as_dtensor, in_buckets
from lightning_dist.techniques.protocol import Parallel, Rows, Technique

__all__ = ["ElasticReplicas"]


class ElasticReplicas(Technique):
    """Average gradients over the replicas that take part in a step, when the backward on each of them has ended.

    The gradients of a replica stay as they are until all remaining ones have agreed on the means. If a replica is lost
    meanwhile, the others reduce their gradients again, so that no step is lost, and nothing must be undone in the loops
    of Lightning. Torchft's examples drop the step instead.

    Args:
        membership: This process's part in the run.
        reduce_dtype: The dtype that gradients are reduced in; None: that of each parameter.
        keeps_batch: Whether replicas accumulate more batches while others are away; the table at the start says so.
    """

    def __init__(
        self, membership: Membership, reduce_dtype: torch.dtype | None = None, keeps_batch: bool = False
    ) -> None:
        self._keeps_batch = keeps_batch
        self._membership = membership
        self._reduce_dtype = reduce_dtype
        self._has_shared = self._trains = False
        self._lost_s_before, self._measured_at_s = 0.0, time.perf_counter()

    def attach(self, parallel: Parallel) -> None:
        """Keep the parallel module, whose gradients are averaged."""
        self._parallel = parallel

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Find out which replicas take part in a step, and give all the same weights before the first one."""
        self._trains = True
        if not begins_accumulation:
            return
        self._membership.begin_step()
        if not self._has_shared:
            self._has_shared = True
            if self._membership.received is None:  # All replicas begin together.
                self._share_weights()
                self._membership.begin_step()
                self._membership.share_notes()
                self._membership.begin_step()

    @torch.no_grad()
    def _share_weights(self) -> None:
        own = [local_of(param.detach()) for param in self._params()]
        own += [buffer for buffer in self._parallel.module.buffers() if buffer.numel() and not buffer.is_meta]
        for tensor, shared in zip(own, self._membership.share(own), strict=True):
            tensor.copy_(shared)

    def after_step(self, backward_follows: bool) -> None:
        """Refuse a training step without a loss, for which this replica would not reduce gradients with the others.

        Raises:
            RuntimeError: If the training step has returned None.
        """
        has_trained, self._trains = self._trains, False
        if has_trained and not backward_follows:
            raise RuntimeError(
                "training_step has returned no loss. With elastic, each replica must train on each batch: return a loss"
                " that is multiplied by 0 instead."
            )

    def _params(self) -> Iterator[nn.Parameter]:
        for group in self._parallel.groups:
            yield from group.params

    @torch.no_grad()
    def after_backward(self, reduces: bool) -> None:
        """Replace the gradients by their means over the replicas that take part. This is a collective.

        They stay as they are if the others have counted the step without this replica, which then takes over their
        weights.
        """
        if not reduces:
            return
        buckets = list(in_buckets(list(self._params()), self._reduce_dtype))
        try:
            *means, are_used = self._membership.average(partial(self._local_gradients, buckets))
        except BehindError:
            return
        is_used = iter(are_used.tolist())
        for bucket, mean in zip(buckets, means, strict=True):
            parts = torch.split(mean, [local_of(param).numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                if next(is_used):
                    _set_gradient(param, part)

    def _local_gradients(self, buckets: Sequence[Sequence[nn.Parameter]]) -> list[Tensor]:
        """Return the gradients of each bucket as one tensor, and a tensor that says which of them exist."""
        device = self._membership.device
        flat = [torch.cat([_local_gradient(param, self._reduce_dtype) for param in bucket]) for bucket in buckets]
        exist = [float(param.grad is not None) for bucket in buckets for param in bucket]
        return [*flat, torch.tensor(exist, device=device)]

    def table_rows(self) -> Rows:
        """Return a row that says which replica this is."""
        options = self._membership.options
        batch = "stays the same, by more accumulated batches," if self._keeps_batch else "is smaller"
        yield (
            "elastic",
            f"replica {options.index} of {options.largest}; trains on with at least {options.smallest}; gradients are"
            f" averaged over replicas after the backward; the global batch {batch} while a replica is away",
        )

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return the number of replicas that take part, and what those that have left have cost since the last call."""
        lost_s, now_s = self._membership.lost_s - self._lost_s_before, time.perf_counter()
        elapsed_s = now_s - self._measured_at_s
        self._lost_s_before, self._measured_at_s = self._membership.lost_s, now_s
        return {
            "elastic/replicas": len(self._membership.members),
            "elastic/lost_ms_per_step": lost_s / num_steps * 1000,
            "elastic/effective_time_ratio": 1 - min(lost_s / elapsed_s, 1.0),
        }


def _local_gradient(param: nn.Parameter, dtype: torch.dtype | None) -> Tensor:
    """Return this rank's gradient of ``param`` as a tensor of one dimension; zeros if there is none."""
    local = local_of(param.detach() if param.grad is None else param.grad.detach())
    if local.layout is not torch.strided:
        local = local.to_dense()
    flat = local.reshape(-1) if dtype is None or local.is_complex() else local.reshape(-1).to(dtype)
    return torch.zeros_like(flat) if param.grad is None else flat


def _set_gradient(param: nn.Parameter, mean: Tensor) -> None:
    """Set the gradient of ``param`` to ``mean``, which has one dimension, in place if there is a gradient."""
    local = local_of(param.detach())
    mean = mean.view(local.shape)
    if param.grad is not None and param.grad.layout is torch.strided:
        local_of(param.grad.detach()).copy_(mean)
        return
    gradient = mean.to(param.dtype)
    if isinstance(param, DTensor):
        gradient = as_dtensor(gradient, param.device_mesh, param.placements, param)
    param.grad = gradient
