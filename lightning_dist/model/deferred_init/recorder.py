"""Record what a constructor does to tensors, without its noticing that they are deferred."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dist._compat import (
    DispatchMode,
    named_arguments,
    tree_leaves,
    tree_map,
    tree_map_only,
    written_arguments,
)
from lightning_dist.model.deferred_init.operations import (
    ALLOCATIONS,
    NUMBERS,
    Operation,
    View,
    find_record,
    generator_of,
    needed,
    operations_of,
    record_of,
    replay,
)

__all__ = ["deferred_init"]

_ATEN = torch.ops.aten
_META = torch.device("meta")

_TENSOR: Any = Tensor  # The attributes of the class are descriptors, which torch's type stubs do not declare.
_DEVICE_GET, _IS_META_GET = _TENSOR.device.__get__, _TENSOR.is_meta.__get__
_IS_ON_GET = {_TENSOR.is_cpu.__get__: "cpu", _TENSOR.is_cuda.__get__: "cuda"}
_MOVES = frozenset({Tensor.cpu, Tensor.cuda, Tensor.to})


@contextmanager
def deferred_init(device: torch.device) -> Iterator[None]:
    """Create tensors on the meta device that would be created on ``device``, and record what gives them values.

    Tensors that the code in this context creates on another device, or from data, are created as usual.

    Args:
        device: Default device in this context.
    """
    if _Recorder.is_active:
        yield
        return
    _Recorder.is_active = True
    try:
        with device, _Disguise(device), _Recorder(device):
            yield
    finally:
        _Recorder.is_active = False


class _Disguise(TorchFunctionMode):
    """Let deferred tensors report the device on which they would be, and stay deferred when they are moved there.

    torch and Hugging Face leave out the initialisation of tensors that report the meta device.

    Args:
        device: Device on which tensors would be without this mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and find_record(args[0]) is not None:
            if func == _DEVICE_GET:
                return self._device
            if func == _IS_META_GET:
                return False
            if func in _IS_ON_GET:
                return self._device.type == _IS_ON_GET[func]
            if func is Tensor.numpy:
                return args[0].to(self._device, copy=True).numpy(*args[1:], **kwargs)
            if func in _MOVES:
                return self._move(func, args[0], args[1:], kwargs)
            if func is Tensor.__deepcopy__:  # torch would copy the storage, without an operation.
                return _copy(*args)
        return func(*args, **kwargs)

    def _move(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        if func is not Tensor.to and self._device.type == func.__name__:
            func, args, kwargs = Tensor.to, (), {}

        def target(leaf: Any) -> Any:
            is_device = isinstance(leaf, int | str | torch.device) and not isinstance(leaf, bool)
            return _META if is_device and _is_same(torch.device(leaf), self._device) else leaf

        args, kwargs = tree_map(target, (args, kwargs))
        moved: Tensor = func(tensor, *args, **kwargs)
        return moved


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Create tensors on the meta device, and record the operations on them.

    Args:
        device: Device on which the operations would run without this mode.
    """

    is_active = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if find_record(tensor) is not None]
        creates = not tensors and self._creates_here(func, args, kwargs)
        if not deferred and not creates:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        moves = func.name() == "aten::_to_copy" and kwargs.get("device") not in (None, _META)
        if moves or torch.Tag.data_dependent_output in func.tags or any(find_record(t) is None for t in written):
            return self._evaluate(func, args, kwargs)
        generator = kwargs.get("generator")
        without_generator = {**kwargs, "generator": None} if generator is not None else kwargs
        operation = self._operation(func, args, without_generator, written)
        meta_args, meta_kwargs = tree_map_only(Tensor, _on_meta, (args, without_generator))
        if creates or kwargs.get("device") is not None:
            meta_kwargs = {**meta_kwargs, "device": _META}
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # The shape of the result depends on values.
            if written:
                raise
            return self._evaluate(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(operation, generator)
        self._record(operation, tensors, result)
        for tensor in written:  # An `out=` tensor may have been resized.
            record_of(tensor).num_bytes = max(record_of(tensor).num_bytes, tensor.untyped_storage().nbytes())
        return result

    def _creates_here(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func is _ATEN.scalar_tensor.default and kwargs.get("device") == _META:
            return True  # It is the value of an assignment like `weight[0] = 1.0`.
        if func.overloadpacket in ALLOCATIONS and 0 in args[0]:
            return False  # torch.load makes such tensors, and puts real storages into them.
        has_device = "device" in named_arguments(func, args, kwargs)
        return has_device and _is_same(kwargs.get("device") or torch.device("cpu"), self._device)

    def _operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Operation:
        def kept(tensor: Tensor) -> Any:
            return tensor.detach().clone() if find_record(tensor) is None else View.of(tensor)

        args, kwargs = tree_map_only(Tensor, kept, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = self._device
        records = [record_of(tensor) for tensor in written]
        return Operation(next(NUMBERS), func, args, kwargs, self._device, torch.get_default_dtype(), records)

    def _draw(self, operation: Operation, generator: torch.Generator | None) -> None:
        """Draw the operation's random numbers into scratch memory."""
        operation.state = (generator or generator_of(self._device)).get_state()
        read = [(record, operation.number) for record in operation.reads() if record not in operation.written]
        operation.run(replay(needed(read), self._device), generator)

    def _record(self, operation: Operation, used: list[Tensor], result: Any) -> None:
        known = {id(tensor.untyped_storage()) for tensor in used}
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known
            operation.results.append(View.of(leaf) if is_new else None)
        if operation.function.overloadpacket in ALLOCATIONS:
            return
        read = [record for record in operation.reads() if record not in operation.written]
        operation.is_void = not all(record.operations for record in read) or any(t.is_meta for t in operation.constants)
        created = [view.record for view in operation.results if view is not None]
        for record in dict.fromkeys([*operation.written, *created]):
            record.operations.append(operation)

    def _evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose result the constructor needs now, as in ``torch.linspace(...).tolist()``."""
        real = replay(
            operations_of([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]), self._device
        )

        def value(tensor: Tensor) -> Tensor:
            return tensor if find_record(tensor) is None else View.of(tensor).show(real)

        args, kwargs = tree_map_only(Tensor, value, (args, kwargs))
        return func(*args, **kwargs)


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    copied = memo[id(tensor)] if id(tensor) in memo else tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a deferred tensor itself, and a meta tensor like any other one."""
    if find_record(tensor) is not None:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_same(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index is None or other.index is None or device.index == other.index)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments of an operation that it changes."""
    return [leaf for leaf in tree_leaves(written_arguments(func, args, kwargs)) if isinstance(leaf, Tensor)]
