"""Every private name of torch that the engine uses, each with what would replace it. Checked with torch 2.13."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer, swa_utils
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

__all__ = [
    "GROUPED_MM",
    "ROUTE",
    "AllGather",
    "ReduceScatter",
    "accept_sequential_redistribution",
    "call",
    "call_forward_hooks",
    "call_gradient_hooks",
    "call_post_accumulate_hooks",
    "is_in_backward",
    "leave_out_hooks",
    "local_of",
    "move_hooks",
    "move_without_meta_tensors",
    "num_collectives",
    "num_packed",
    "on_equal",
    "on_scalar_read",
    "overwrite",
    "packed_shard",
    "prepend_step_post_hook",
    "process_groups",
    "put_parameter",
    "recorded_collectives",
    "replace_local",
    "route_calls",
    "share_hooks",
    "without_forward_hooks",
    "without_torch_functions",
]


def put_parameter(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let ``module`` hold ``tensor``, which need not be a parameter; recurrent layers keep a list of their own.

    Replaced by: a public way to swap the tensors that a module computes with, as ``functional_call`` does in private.
    """
    module._parameters[key] = tensor  # type: ignore[assignment]
    names = vars(module).get("_flat_weights_names", ())
    if key in names:
        vars(module)["_flat_weights"][names.index(key)] = tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, without a node of autograd; replaced by: such an accessor of DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def overwrite(memory: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``memory``, unseen by autograd: what was computed has used them, and not what was there.

    Replaced by: a public way not to count a write.
    """
    with torch.autograd._unsafe_preserve_version_counter(memory):
        memory.copy_(values)


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Let ``tensor`` be of another local tensor from now on; replaced by a setter of ``data`` that DTensor heeds."""
    tensor._local_tensor = local


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` have the tensor hooks of ``source``, also those that come and go later."""
    if source._backward_hooks and target._backward_hooks is not source._backward_hooks:
        if target._backward_hooks:
            source._backward_hooks.update(target._backward_hooks)
        target._backward_hooks = source._backward_hooks


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` have the hooks of ``source``; handles that were given out for them go on working.

    Replaced by: a public way to list a tensor's hooks.
    """
    share_hooks(source, target)
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks:
        target._post_accumulate_grad_hooks = hooks


def call_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call the post-accumulate-grad hooks of ``param``, whose gradient autograd has not set itself."""
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Call the tensor hooks of ``param``, whose gradient autograd does not compute itself; return what they make of it.

    Replaced by: as for :func:`move_hooks`.
    """
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


@contextmanager
def without_forward_hooks(modules: Iterable[nn.Module], origins: tuple[str, ...]) -> Iterator[None]:
    """Inside, calls of ``modules`` do not come by the forward hooks that Python modules of ``origins`` have put there.

    A call with hooks takes as long as a small layer. The others stay in their order; hooks may come and go meanwhile.
    Replaced by: a way to disable a hook.

    Args:
        modules: Whose hooks.
        origins: How the names of the Python modules begin.
    """
    before: list[tuple[dict[int, Any], dict[int, Any], set[int]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            taken = {number for number, hook in hooks.items() if _origin(hook).startswith(origins)}
            if taken:
                before.append((hooks, dict(hooks), taken))
                for number in taken:
                    del hooks[number]
    try:
        yield
    finally:
        for hooks, were, taken in before:
            now = dict(hooks)
            hooks.clear()
            hooks.update({number: hook for number, hook in were.items() if number in now or number in taken})
            hooks.update(now)


_OURS = ("torch.distributed", "lightning_dist")


def leave_out_hooks(module: nn.Module) -> None:
    """Give ``module`` dictionaries of hooks without those of torch.distributed and of this package, in new ones."""
    for key in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict((number, hook) for number, hook in hooks if not _origin(hook).startswith(_OURS))


def _origin(hook: Any) -> str:
    """The Python module that a hook is written in; empty if it does not say."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


ROUTE = "_compiled_call_impl"
"""The attribute of a module that :func:`route_calls` sets."""


def route_calls(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let ``function`` be called in the place of ``module``, hooks and all; :func:`call` calls the module itself.

    It is what ``nn.Module.compile`` uses. Replaced by: a hook that can give a module's output without running it.
    """
    setattr(module, ROUTE, function)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose calls are routed elsewhere."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Call the forward hooks that users and libraries have put on ``module``, for what they do besides.

    They are given a copy of ``output``, which is what they have made of it where the module ran. Those of
    torch.distributed and of this package are left out. Replaced by: as for :func:`route_calls`.
    """
    hooks = [(key, hook) for key, hook in module._forward_hooks.items() if not _origin(hook).startswith(_OURS)]
    if hooks:
        output = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    for key, hook in hooks:
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if result is None else result


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operation behind ``torch.nn.functional.grouped_mm``; its rule for fakes takes bfloat16 alone (torch 2.13)."""


def without_torch_functions() -> AbstractContextManager[None]:
    """Inside, tensors' ``__torch_function__`` is not called; torch's guide to extending it names this private class."""
    return torch._C.DisableTorchFunctionSubclass()


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread; replaced by a public question to it."""
    return bool(torch._C._current_graph_task_id() != -1)


def packed_shard(dim: int, num_packed: int) -> Placement:
    """A part of each of ``num_packed`` equal parts along ``dim``; replaced by a public placement that can say so."""
    return _StridedShard(dim, split_factor=num_packed)


def num_packed(placement: Placement) -> int:
    """Of how many parts a :func:`packed_shard` is; 0 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def accept_sequential_redistribution() -> None:
    """Keep torch from warning, on each rank, that a norm over two axes of a mesh takes two all-reduces.

    Replaced by: a public way to flatten axes, which it asks for.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def prepend_step_post_hook(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """As ``register_step_post_hook``, before the hooks that are there; replaced by its ``prepend``, once it has one."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def on_scalar_read(function: Callable[[DTensor], int | float | bool | complex]) -> None:
    """Let ``function`` make the number that ``item()``, ``float()``, a comparison or a format reads from a DTensor.

    torch gives this rank's part of a sum or a norm that is still to be reduced, without a word, and refuses to format
    one. Replaced by: an ``item()`` of DTensor that reduces.
    """

    def read(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> int | float | bool | complex:
        return function(args[0])

    def format_whole(self: DTensor, specification: str) -> str:
        if self.ndim == 0 and not self.is_meta:
            return format(self.item(), specification)
        return object.__format__(self, specification)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = read
    DTensor.__format__ = format_whole  # type: ignore[method-assign, assignment]


def on_equal(function: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Let ``function`` answer ``torch.equal`` of tensors of which at least one is a DTensor.

    torch shards the second as the first is, which fails where it has fewer dimensions. Replaced by: a ``torch.equal``
    that says False of DTensors of other shapes.
    """

    def equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        return function(args[0], args[1])

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this rank is in; torch tells only of the default one."""
    return list(dist.distributed_c10d._world.pg_map)


def num_collectives(group: dist.ProcessGroup) -> int:
    """How many collectives of ``group`` this rank has entered; RuntimeError for a backend that does not count."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # the stub leaves it out
    return number


def recorded_collectives() -> list[dict[str, Any]]:
    """What the flight recorder has; CUDA builds have a second one, for NCCL. Only its pickled dump is documented."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries


def move_without_meta_tensors(root: nn.Module) -> None:
    """Let ``root.to``, ``cpu`` and the like leave tensors on the meta device alone, which have no values to move.

    Replaced by: an argument of ``nn.Module._apply`` for it.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own: Callable[..., nn.Module] = type(root)._apply
        return own(root, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    vars(root)["_apply"] = apply


@contextmanager
def averages_grouped_by_dtype(device: torch.device) -> Iterator[None]:
    """Let torch's AveragedModel take all tensors inside for ones on ``device``, and group them by their dtype alone.

    It groups them in C++, where tensors of other ranks are on the meta device, so that ranks would differ in the order.
    Replaced by: a group function that modes see.
    """
    own = swa_utils._group_tensors_by_device_and_dtype

    def group(lists: list[list[torch.Tensor]], with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = {}
        for index, first in enumerate(lists[0]):
            columns, indices = groups.setdefault((device, first.dtype), ([[] for _ in lists], []))
            for column, tensors in zip(columns, lists, strict=True):
                column.append(tensors[index])
            indices.append(index)
        return groups

    swa_utils._group_tensors_by_device_and_dtype = group  # type: ignore[assignment]
    try:
        yield
    finally:
        swa_utils._group_tensors_by_device_and_dtype = own
