"""All-reduce gradients in buckets, while the backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_dist._compat import local_of

__all__ = ["STALE", "Bucket", "as_dtensor", "in_buckets"]

_BUCKET_BYTES = 25 * 2**20
"""The largest size of a bucket, as in DistributedDataParallel."""

_NUM_BUCKETS = 4
"""The number of buckets of a smaller model: with fewer, most of the communication would follow the backward."""

_FIRST_BUCKET_BYTES = 2**20
"""The size of the bucket whose gradients come first: the sooner it is full, the sooner communication begins."""

STALE = 2
"""The state of a bucket that must be reduced again."""


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """Return a DTensor of the shape of ``like`` with the local tensor ``local``."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def in_buckets(params: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters of one dtype, each about as large as a bucket, in the order of ``params``.

    Parameters of integers, such as the weights of a quantized model, have no gradients and are left out.
    """
    params = [param for param in params if param.is_floating_point() or param.is_complex()]
    total = sum(local_of(param).numel() * (reduce_dtype or param.dtype).itemsize for param in params)
    largest = min(max(total // _NUM_BUCKETS, _FIRST_BUCKET_BYTES), _BUCKET_BYTES)
    limit, num_bytes, bucket = _FIRST_BUCKET_BYTES, 0, list[nn.Parameter]()
    for param in params:
        size = local_of(param).numel() * (reduce_dtype or param.dtype).itemsize
        if bucket and (param.dtype != bucket[0].dtype or num_bytes + size > limit):
            yield bucket
            limit, num_bytes, bucket = largest, 0, []
        bucket.append(param)
        num_bytes += size
    if bucket:
        yield bucket


class Bucket:
    """All-reduce the gradients of some parameters as one tensor.

    The tensor is new for each backward, and the parameters' gradients are views of it afterwards: they need not be
    copied back, and a gradient that the user's code keeps stays what it is. It is freed with the gradients.

    Args:
        params: The parameters, of one dtype.
        mesh: The mesh over whose first axis the parameters are replicated.
        dtype: The dtype that gradients are reduced in; None: that of the parameters, as always if they are complex.
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.params = list(params)
        self.has_fired = [False] * len(params)
        """Which parameters have got a gradient in the backward that runs."""
        self.has_accumulated = [False] * len(params)
        """Which parameters have got a gradient that was not reduced, in earlier backwards."""
        self.is_stale = False
        """Whether a gradient came after the all-reduce had begun."""
        self.num_pending = self.num_expected = 0
        self._mesh = mesh
        self._scale = 1.0 / mesh.size()
        self._dtype = params[0].dtype if dtype is None or params[0].is_complex() else dtype
        self._shapes = [local_of(param).shape for param in params]
        self._is_copied = [False] * len(params)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    @property
    def is_launched(self) -> bool:
        """Return whether the all-reduce has begun."""
        return self._work is not None

    @property
    def is_used(self) -> list[bool]:
        """Return, for each parameter, whether it has a gradient to reduce on this rank."""
        marks = zip(self.params, self.has_fired, self.has_accumulated, strict=True)
        # Gradients that were added up may have been cleared since.
        return [fired or (before and param.grad is not None) for param, fired, before in marks]

    @property
    def state(self) -> int:
        """Return 0 if this rank has used no parameter, 1 if it has, and :data:`STALE` if it must reduce them again."""
        return STALE if self.is_stale else int(any(self.is_used))

    def begin(self) -> None:
        """Forget the last backward."""
        self.has_fired = [False] * len(self.params)
        self._is_copied = [False] * len(self.params)
        self.is_stale = False
        self.num_expected = self.num_pending = sum(param.requires_grad for param in self.params)
        self._flat, self._views, self._work = None, [], None

    def keep_unreduced(self) -> None:
        """Note that the gradients of the backward, which has failed, are to be reduced after the next one."""
        marks = zip(self.has_accumulated, self.has_fired, strict=True)
        self.has_accumulated = [before or fired for before, fired in marks]

    @torch.no_grad()
    def copy_in(self, index: int) -> Tensor:
        """Copy the gradient of a parameter, divided by the number of ranks, or zeros where it has none.

        Args:
            index: The index of the parameter in the bucket.

        Returns:
            The tensor of the whole bucket: the gradients, and behind them, for each parameter, on how many ranks it was
            used.
        """
        if self._flat is None:
            sizes = [*(shape.numel() for shape in self._shapes), len(self.params)]
            self._flat = torch.empty(sum(sizes), dtype=self._dtype, device=self.params[0].device)
            parts = torch.split(self._flat, sizes)
            # A user may change a gradient in place, which autograd would refuse for a view that no_grad has made.
            self._views = [part.view(shape).data for part, shape in zip(parts, self._shapes, strict=False)]
        param = self.params[index]
        if param.grad is None:
            self._views[index].zero_()
        else:
            if param.grad.layout != torch.strided:
                param.grad = param.grad.to_dense()
            torch.mul(local_of(param.grad).to(self._dtype), self._scale, out=self._views[index])
        self._is_copied[index] = True
        return self._flat

    def renew(self, index: int) -> None:
        """Note that a gradient has changed that may be copied or reduced already."""
        self._is_copied[index] = False
        self.is_stale |= self.is_launched

    @torch.no_grad()
    def launch(self) -> None:
        """Begin to all-reduce the gradients, after the last all-reduce of the bucket. A collective."""
        if self._work is not None:
            self._work.wait()
            self._is_copied = [False] * len(self.params)
        for index, is_copied in enumerate(self._is_copied):
            if not is_copied:
                self.copy_in(index)
        assert self._flat is not None
        self._flat[-len(self.params) :] = torch.tensor(self.is_used, dtype=self._dtype)
        self._work = dist.all_reduce(self._flat, group=self._mesh.get_group(0), async_op=True)

    @torch.no_grad()
    def hand_out(self) -> list[nn.Parameter]:
        """Wait for the all-reduce, if it has begun, and give the parameters that any rank used the mean gradient.

        Returns:
            The parameters that any rank used.
        """
        if self._work is None:
            return []
        self._work.wait()
        assert self._flat is not None
        is_used = self.is_used
        self.has_accumulated = [False] * len(self.params)
        # On an accelerator, reading the counts waits for it; they are known if this rank has used all.
        counts = self._flat[-len(self.params) :].tolist() if not all(is_used) else [1.0] * len(self.params)
        used: list[nn.Parameter] = []
        for param, view, count in zip(self.params, self._views, counts, strict=True):
            if not count:
                continue
            used.append(param)
            if param.grad is not None and param.grad.requires_grad:  # of create_graph=True
                local_of(param.grad).copy_(view)
                continue
            gradient = view.to(param.dtype)
            if isinstance(param, DTensor):
                gradient = as_dtensor(gradient, param.device_mesh, param.placements, param)
            param.grad = gradient
        self._flat, self._views, self._work = None, [], None
        return used
