"""All-reduce gradients in buckets while the backward is still running."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist._compat import local_of
from lightning_dist.parameters.gradient_buckets import as_dtensor
from lightning_dist.parameters.gradient_observer import GradientObserver
from lightning_dist.parameters.gradient_reducer import GradientReducer, LocalGradient, Reduction

__all__ = ["Bucket"]


class Bucket:
    """All-reduce the gradients of some parameters as one tensor.

    A new tensor is allocated in each backward, and the parameters' gradients are views of it afterwards. They need not
    be copied back, a gradient that the user's code keeps is not overwritten, and the tensor is freed with them.

    Args:
        params: The parameters, of one dtype.
        mesh: The mesh over whose first axis the parameters are replicated.
        dtype: The dtype that gradients are reduced in; None: that of the parameters. Complex gradients are always
            reduced in the dtype of the parameters.
        names: Full names of the parameters.
        reducer: Object that averages the gradients in place of an all-reduce; None: there is none.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        names: Sequence[str],
        reducer: GradientReducer | None = None,
    ) -> None:
        self.params = list(params)
        self.has_gradient = [False] * len(params)
        """For each parameter, whether it has got a gradient in the current backward."""
        self.has_accumulated = [False] * len(params)
        """For each parameter, whether it has got a gradient in earlier backwards that was not reduced yet."""
        self.is_stale = False
        """Whether a gradient came after the all-reduce had begun."""
        self.num_pending = self.num_expected = 0
        self.num_bytes_sent = 0
        """Number of bytes that this rank has sent in all-reduces, by the formula of a ring."""
        self._mesh = mesh
        self._names = list(names)
        self._reducer = reducer
        self._scale = 1.0 if reducer is not None else 1.0 / mesh.size()
        self._dtype = params[0].dtype if dtype is None or params[0].is_complex() else dtype
        self._shapes = [local_of(param).shape for param in params]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._is_copied = [False] * len(params)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._work: dist.Work | Reduction | None = None

    @property
    def is_launched(self) -> bool:
        """Return whether the all-reduce has begun."""
        return self._work is not None

    @property
    def is_used(self) -> list[bool]:
        """Return, for each parameter, whether it has a gradient to reduce on this rank."""
        marks = zip(self.params, self.has_gradient, self.has_accumulated, strict=True)
        # Gradients that were added up may have been cleared since.
        return [has or (before and param.grad is not None) for param, has, before in marks]

    def begin(self) -> None:
        """Discard the state of the last backward."""
        self.has_gradient = [False] * len(self.params)
        self._is_copied = [False] * len(self.params)
        self.is_stale = False
        self.num_expected = self.num_pending = sum(param.requires_grad for param in self.params)
        self._flat, self._views, self._work = None, [], None

    def keep_unreduced(self) -> None:
        """Record that the gradients of a failed backward are still to be reduced, after the next backward."""
        marks = zip(self.has_accumulated, self.has_gradient, strict=True)
        self.has_accumulated = [before or has for before, has in marks]

    def copy_in(self, index: int) -> None:
        """Copy a parameter's gradient, divided by the number of ranks, into the bucket; zeros if there is none.

        If there is a reducer, the gradient is not divided.

        This runs once for each parameter in each backward, and is therefore kept short.

        Args:
            index: The index of the parameter in the bucket.
        """
        if self._flat is None:
            self._allocate()
        param = self.params[index]
        gradient = param.grad
        if gradient is None:
            self._views[index].zero_()
        else:
            if gradient.layout is not torch.strided:
                gradient = param.grad = gradient.to_dense()
            gradient = local_of(gradient)
            if gradient.requires_grad:  # The backward runs with create_graph=True.
                gradient = gradient.detach()
            if gradient.dtype is not self._dtype:
                gradient = gradient.to(self._dtype)
            torch.mul(gradient, self._scale, out=self._views[index])
        self._is_copied[index] = True

    @torch.no_grad()
    def _allocate(self) -> None:
        """Allocate the bucket's tensor, which has the elements of all gradients one after another."""
        self._flat = torch.empty(sum(self._sizes), dtype=self._dtype, device=self.params[0].device)
        parts = torch.split(self._flat, self._sizes)
        # A user may change a gradient in place, which autograd would refuse for a view that no_grad has made.
        self._views = [part.view(shape).data for part, shape in zip(parts, self._shapes, strict=True)]

    def mark_changed(self, index: int) -> None:
        """Record that a gradient has changed after it may have been copied or reduced.

        Args:
            index: The index of the parameter in the bucket.
        """
        self._is_copied[index] = False
        self.is_stale |= self.is_launched

    @torch.no_grad()
    def launch(self, observer: GradientObserver | None) -> None:
        """Begin to all-reduce the gradients, once the bucket's previous all-reduce has ended. This is a collective.

        Args:
            observer: Object that looks at the gradients before; None: nothing does.
        """
        if self._work is not None:
            self._work.wait()
            if self._reducer is not None:
                self._reducer.forget(self._names)
            self._is_copied = [False] * len(self.params)
        for index, is_copied in enumerate(self._is_copied):
            if not is_copied:
                self.copy_in(index)
        assert self._flat is not None
        gradients: list[LocalGradient] = []
        if self._reducer is not None or observer is not None:
            gradients = [LocalGradient(*pair) for pair in zip(self._names, self._views, strict=True)]
        if observer is not None:
            observer.observe(gradients, 1 / self._scale)
        if self._reducer is not None:
            self._work = self._reducer.reduce(self._flat, gradients)
        else:
            self.num_bytes_sent += 2 * self._flat.nbytes * (self._mesh.size() - 1) // self._mesh.size()
            self._work = dist.all_reduce(self._flat, group=self._mesh.get_group(0), async_op=True)

    def _discard(self, indices: Iterable[int]) -> None:
        """Tell the reducer that the means of parameters that no rank has used are not used.

        The gradient of an earlier backward, which such a parameter keeps, was reduced with the others. It must not be
        applied again.
        """
        if self._reducer is None:
            return
        unused = []
        for index in indices:
            kept = self.params[index].grad
            value = self._views[index]
            unused.append(LocalGradient(self._names[index], value if kept is None else value - local_of(kept)))
        self._reducer.discard(unused)

    @torch.no_grad()
    def set_gradients(self, is_used: Sequence[bool]) -> list[nn.Parameter]:
        """Wait for the all-reduce, if it has begun, and set the mean gradient of each parameter that any rank used.

        Args:
            is_used: For each parameter, whether any rank has used it.

        Returns:
            The parameters that any rank used.
        """
        if self._work is None:
            return []
        self._work.wait()
        self.has_accumulated = [False] * len(self.params)
        self._discard(index for index, used in enumerate(is_used) if not used)
        found: list[nn.Parameter] = []
        for param, view, used in zip(self.params, self._views, is_used, strict=True):
            if not used:
                continue
            found.append(param)
            if param.grad is not None and param.grad.requires_grad:  # The backward ran with create_graph=True.
                local_of(param.grad).copy_(view)
                continue
            gradient = view.to(param.dtype)
            if isinstance(param, DTensor):
                gradient = as_dtensor(gradient, param.device_mesh, param.placements, param)
            param.grad = gradient
        self._flat, self._views, self._work = None, [], None
        return found
