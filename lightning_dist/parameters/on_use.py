"""Gather a sharded parameter where a step uses it outside of its unit's forward.

A step may call a block's layers one by one, add the norm of all weights to the loss, or update a momentum encoder in
place. The parameters of a unit are sharded while its forward does not run. During a step, the modules hold a stand-in
for each of them: an operation on the stand-in gathers the whole parameter, through which gradients flow, and an
in-place change of the stand-in changes the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from lightning_dist._compat import make_parameter, tree_leaves, tree_map, without_memory

__all__ = [
    "GatheredOnUse",
    "call_after_writes",
    "call_before_writes",
    "is_in_place",
    "prepare_write",
    "whole_for_step",
    "write_whole",
]


def whole_for_step(
    param: Tensor,
    data_parallel_axes: Collection[str],
    dtype: torch.dtype | None = None,
    split_axis: str | None = None,
    on_gradient: Callable[[], None] | None = None,
) -> Tensor:
    """Gather ``param`` so that its gradient is the mean of the data-parallel ranks' gradients.

    This is a collective over the mesh of ``param``.

    Args:
        param: The sharded parameter, a DTensor whose mesh has named axes.
        data_parallel_axes: Names of the axes of its mesh whose ranks have different parts of a batch.
        dtype: Dtype of the result; None: that of ``param``.
        split_axis: Name of a mesh axis along which the parameter stays split, each rank keeping its own part; None: the
            parameter is gathered over all axes.
        on_gradient: Function that is called when a backward computes the gradient; None: nothing is called.
    """
    sharded = cast(DTensor, param)
    mesh = sharded.device_mesh
    names = mesh.mesh_dim_names or ()
    gradient: list[Placement] = [Partial() if name in data_parallel_axes else Replicate() for name in names]
    wanted: list[Placement] = [Replicate()] * mesh.ndim
    if split_axis is not None:
        axis = names.index(split_axis)
        wanted[axis] = gradient[axis] = sharded.placements[axis]
    num_parts = 1
    for axis, placement in enumerate(gradient):
        num_parts *= mesh.size(axis) if placement.is_partial() else 1
    whole = sharded.redistribute(placements=wanted).to_local(grad_placements=gradient)
    if num_parts > 1 or on_gradient is not None:
        whole = _DivideGradient.apply(whole, num_parts, on_gradient)  # type: ignore[no-untyped-call]
    return whole if dtype is None else whole.to(dtype)


class _DivideGradient(torch.autograd.Function):
    """Return the input, and divide its gradient by the number of data-parallel ranks.

    ``Partial`` gradients are summed over these ranks, whereas the gradient of the mean of their losses is needed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int, on_gradient: Callable[[], None] | None) -> Tensor:
        ctx.number = number
        ctx.on_gradient = on_gradient
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.on_gradient is not None:
            ctx.on_gradient()
        return grads[0] / ctx.number, None, None


class GatheredOnUse(torch.Tensor):
    """Stand in for a sharded parameter during a step, and gather the parameter when it is used.

    Args:
        sharded: The sharded parameter, a DTensor, into which in-place changes are written.
        gather: Function that gathers a DTensor with the layout of ``sharded`` into a whole tensor.
        is_parameter: Whether ``isinstance(self, nn.Parameter)`` is true.
    """

    _sharded: DTensor
    _gather: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(cls, sharded: Tensor, gather: Callable[[Tensor], Tensor], is_parameter: bool = True) -> GatheredOnUse:
        """Create a tensor of the same shape without memory."""
        self = without_memory(
            cls,
            sharded.shape,
            strides=sharded.stride(),
            dtype=sharded.dtype,
            device=sharded.device,
            requires_grad=sharded.requires_grad,
        )
        self._sharded = cast(DTensor, sharded)
        self._gather = gather
        make_parameter(self, is_parameter)
        return self

    def part(self, axis: str) -> Tensor:
        """Gather the parameter over all axes of its mesh but one. This is a collective over these axes.

        Args:
            axis: Name of the mesh axis along which each rank keeps its own part.
        """
        with torch.DisableTorchFunctionSubclass():
            return cast(Callable[..., Tensor], self._gather)(self._sharded, split_axis=axis)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the shards if it does not read elements, and otherwise on the gathered parameter."""
        kwargs = kwargs or {}
        name, of = func.__name__, args[0] if args else None
        prop = getattr(getattr(func, "__self__", None), "__name__", "")
        if not isinstance(of, GatheredOnUse) or kwargs.get("out") is not None:
            changed = _changed(name, of, kwargs)
            return _write(func, args, kwargs, changed) if changed else _on_whole(func, args, kwargs)
        if name == "__hash__":
            return id(of)
        if name in ("detach", "detach_") or (name == "__get__" and prop == "data"):
            with torch.no_grad():
                return GatheredOnUse(of._sharded.detach(), of._gather, is_parameter=False)
        if name == "__set__" and prop == "data":
            return write_whole(of._sharded, _whole(args[1], detached=True))
        if (name in ("__get__", "__set__") and prop not in _VALUES) or name in _ABOUT_SHARDS:
            with torch.DisableTorchFunctionSubclass():
                return func(of._sharded, *args[1:], **kwargs)
        if is_in_place(name):
            if torch.is_grad_enabled() and of._sharded.requires_grad:
                raise RuntimeError(
                    f"{name} changes a parameter that requires a gradient, in place: do it inside torch.no_grad()."
                )
            whole = _whole(of, detached=True)
            func(whole, *tree_map(lambda leaf: _whole(leaf, detached=True), tuple(args[1:])), **kwargs)
            write_whole(of._sharded, whole)
            return of
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse an operation that bypassed ``__torch_function__``, because the stand-in has no memory."""
        raise NotImplementedError(
            f"{func} was called on a sharded parameter in a way that cannot gather it. Read the parameter inside"
            " `with lightning_dist.full_parameters(module):`, outside of the step."
        )


_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Names of the properties of a tensor that read its elements."""

_ABOUT_SHARDS = frozenset(
    {
        "__len__",
        "dim",
        "element_size",
        "get_device",
        "has_names",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "stride",
    }
)
"""Names of methods that read no elements, or that must act on the sharded parameter, which the optimizer updates."""


def is_in_place(name: str) -> bool:
    """Return whether a torch function of this name changes its first argument in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _changed(name: str, first: Any, kwargs: dict[str, Any]) -> list[GatheredOnUse]:
    """Return the stand-ins that a function changes although its first argument is not a stand-in.

    They may be given as ``out=``, in a list (``torch._foreach_mul_``), or by keyword (functions of ``torch.nn.init``).

    Args:
        name: Name of the torch function.
        first: Its first positional argument; None: it has none.
        kwargs: The keyword arguments of the torch function.
    """
    targets = [kwargs.get("out")]
    if is_in_place(name):
        targets += [kwargs.get("tensor") if first is None else first]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, GatheredOnUse)]


def _write(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], changed: Sequence[GatheredOnUse]) -> Any:
    """Run ``func`` on gathered tensors, and write those that it changes into the shards. This is a collective."""
    for target in changed:
        if torch.is_grad_enabled() and target._sharded.requires_grad:
            raise RuntimeError(
                f"{func.__name__} changes a parameter that requires a gradient, in place: do it inside torch.no_grad()."
            )
    wholes = {id(target): _whole(target, detached=True) for target in changed}
    gathered = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (tuple(args), kwargs))
    result = _on_whole(func, *gathered)
    for target in changed:
        write_whole(target._sharded, wholes[id(target)])
    returned = {id(wholes[id(target)]): target for target in changed}
    return tree_map(lambda leaf: returned.get(id(leaf), leaf), result)


def _on_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.autograd.grad:
        raise NotImplementedError(
            "torch.autograd.grad was asked for gradients with respect to sharded parameters, which are gathered only"
            " where they are used. Use a strategy that does not shard them, such as hybrid_shard with dp_shard_size=1."
        )
    first = args[0] if args else None
    args, kwargs = tree_map(_whole, (tuple(args), kwargs))
    result = func(*args, **kwargs)
    if isinstance(first, GatheredOnUse) and not (torch.is_grad_enabled() and first._sharded.requires_grad):
        return _as_views(result, first._sharded, args[0])
    return result


class _View(torch.Tensor):
    """Represent a view of a gathered parameter, or of a part of it, whose in-place changes also change the shards."""

    _sharded: DTensor
    _memory: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and write its in-place changes into the shards."""
        kwargs = kwargs or {}
        name = func.__name__
        targets = [kwargs.get("out")]
        if is_in_place(name):
            targets += [args[0] if args else tuple(kwargs.values())]
        with torch.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            for target in tree_leaves(targets):
                if isinstance(target, cls):
                    write_whole(target._sharded, target._memory)
            first = args[0] if args else None
            if isinstance(first, cls) and result is not first:
                return _as_views(result, first._sharded, first._memory)
        return result


def _as_views(result: Any, sharded: DTensor, whole: Tensor) -> Any:
    """Make tensors in ``result`` that share the memory of ``whole`` write in-place changes into the shards."""

    def as_view(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor is whole or type(tensor) is not Tensor:
            return tensor
        if tensor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return tensor
        view = tensor.as_subclass(_View)
        view._sharded, view._memory = sharded, whole
        return view

    return tree_map(as_view, result)


def _whole(value: Any, detached: bool = False) -> Any:
    if isinstance(value, GatheredOnUse):
        with torch.DisableTorchFunctionSubclass():
            # In-place changes are computed in the dtype that the parameter is stored in, not in the one of the forward.
            return value._sharded.full_tensor().detach().clone() if detached else value._gather(value._sharded)
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


@torch.no_grad()
def write_whole(sharded: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole``, which is the same on all ranks, into its shard, without communication."""
    prepare_write()
    value = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
    shard = sharded.to_local()
    if value.dtype == shard.dtype:
        shard.copy_(value)
    else:  # Elements that have not changed keep their precision.
        shard.copy_(torch.where(shard.to(value.dtype) == value, shard, value))
    _call(_after_writes)


def prepare_write() -> None:
    """Call what must happen before this rank's shard changes; code that writes into a shard calls this first."""
    _call(_before_writes)


_Methods = list[weakref.WeakMethod[Callable[[], None]]]

_before_writes: _Methods = []
"""Methods that are called before a step or a hook writes into a shard."""

_after_writes: _Methods = []
"""Methods that are called after a step has written into a shard."""


def call_before_writes(method: Callable[[], None]) -> None:
    """Call a method each time before a step writes into a shard, as long as its object exists.

    Args:
        method: Bound method without arguments.
    """
    _before_writes.append(weakref.WeakMethod(method))


def call_after_writes(method: Callable[[], None]) -> None:
    """Call a method each time after a step has written into a shard, as long as its object exists.

    Args:
        method: Bound method without arguments.
    """
    _after_writes.append(weakref.WeakMethod(method))


def _call(methods: _Methods) -> None:
    for reference in list(methods):
        method = reference()
        if method is None:
            methods.remove(reference)
        else:
            method()
