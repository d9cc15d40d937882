"""Wrap every private name of torch that this package uses.

The names were checked with torch 2.13. Those of FSDP2 are in ``lightning_dist.sharding._compat``. "Replaced by" says
which public feature of torch would make a function here unnecessary.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer, swa_utils
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

__all__ = [
    "BATCH_NORM",
    "GROUPED_MM",
    "NORM",
    "ROUTE",
    "AllGather",
    "ReduceScatter",
    "accept_sequential_redistribution",
    "around_backwards",
    "around_grads",
    "around_zero_grad",
    "at_end_of_backward",
    "averages_grouped_by_dtype",
    "call",
    "call_forward_hooks",
    "call_gradient_hooks",
    "call_post_accumulate_hooks",
    "default_group",
    "default_store",
    "give_post_accumulate_hooks",
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
    "take_post_accumulate_hooks",
    "without_torch_functions",
]


BATCH_NORM = _BatchNorm
"""The class of layers that compute with statistics of the batch in training, and need more than one sample.

Replaced by: a public base class. The same holds for :data:`NORM`.
"""

NORM = _NormBase
"""The class of layers whose kernels change running statistics without incrementing the tensors' versions."""


def put_parameter(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let ``module`` hold ``tensor``, which may be any tensor, as its parameter ``key``.

    Recurrent layers also keep their parameters in a list (``_flat_weights``), in which the tensor is replaced as well.

    Replaced by: a public way to swap the tensors that a module computes with, as ``functional_call`` does internally.
    """
    module._parameters[key] = tensor  # type: ignore[assignment]
    names = vars(module).get("_flat_weights_names", ())
    if key in names:
        vars(module)["_flat_weights"][names.index(key)] = tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, without a node in autograd's graph.

    Replaced by: a public accessor of DTensor that does so.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def overwrite(memory: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``memory`` without counting it as an in-place change, which autograd would refuse later.

    Use it only where the graph was computed with ``values``, and not with what is in ``memory`` so far.

    Replaced by: a public way to write without increasing a tensor's version counter.
    """
    with torch.autograd._unsafe_preserve_version_counter(memory):
        memory.copy_(values)


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of ``tensor`` by ``local``.

    Replaced by: an assignment to ``tensor.data``, which DTensor ignores today.
    """
    tensor._local_tensor = local


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let both tensors share one dictionary with the hooks of both, so that hooks added or removed later affect both.

    If ``source`` has no hooks, nothing is changed.
    """
    if source._backward_hooks and target._backward_hooks is not source._backward_hooks:
        if target._backward_hooks:
            source._backward_hooks.update(target._backward_hooks)
        target._backward_hooks = source._backward_hooks


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the tensor hooks and post-accumulate-grad hooks of ``source``. Their handles stay valid.

    Replaced by: a public way to list a tensor's hooks.
    """
    share_hooks(source, target)
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks:
        target._post_accumulate_grad_hooks = hooks


def call_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call the post-accumulate-grad hooks of ``param``, for a gradient that autograd has not set itself."""
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for key in list(hooks):
        if key in hooks:  # A hook may remove other hooks.
            hooks[key](param)


def take_post_accumulate_hooks(param: torch.Tensor, but: int | None) -> dict[int, Any]:
    """Remove the post-accumulate-grad hooks of ``param``, and return them by their keys.

    Replaced by: the same as for :func:`move_hooks`.

    Args:
        param: The parameter.
        but: Key of a hook that is not removed; None: all hooks are removed.
    """
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    if len(hooks) <= (but is not None):
        return {}
    return {key: hooks.pop(key) for key in [*hooks] if key != but}


def give_post_accumulate_hooks(param: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Give ``param`` back the hooks that :func:`take_post_accumulate_hooks` removed."""
    assert param._post_accumulate_grad_hooks is not None
    param._post_accumulate_grad_hooks.update(hooks)


def call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Call the tensor hooks of ``param`` on a gradient that autograd has not computed itself.

    Replaced by: the same as for :func:`move_hooks`.

    Returns:
        The gradient that the last hook returned.
    """
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


_OURS = ("torch.distributed", "lightning_dist")


def leave_out_hooks(module: nn.Module) -> None:
    """Remove the hooks of torch.distributed and of this package from ``module``.

    The dictionaries of hooks are replaced by new ones, so that the caller can put the old ones back later.
    """
    for key in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict((number, hook) for number, hook in hooks if not _origin(hook).startswith(_OURS))


def _origin(hook: Any) -> str:
    """Return the name of the Python module that a hook is defined in; empty if the hook has none."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


ROUTE = "_compiled_call_impl"
"""The attribute of a module that :func:`route_calls` sets."""


def route_calls(module: nn.Module, function: Callable[..., Any]) -> None:
    """Call ``function`` instead of ``module`` and its hooks whenever ``module`` is called.

    :func:`call` still calls the module itself. ``nn.Module.compile`` uses the same attribute.

    Replaced by: a hook that can return a module's output without running the module.
    """
    setattr(module, ROUTE, function)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module itself, with its hooks, although :func:`route_calls` has routed its calls elsewhere."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Call the forward hooks that users and libraries have put on ``module``, for their side effects only.

    The rank on which the module ran has already applied them to ``output``, so they are given a copy here, and the
    result of the last one is ignored. The hooks of torch.distributed and of this package are not called.

    Replaced by: the same as for :func:`route_calls`.
    """
    hooks = [(key, hook) for key, hook in module._forward_hooks.items() if not _origin(hook).startswith(_OURS)]
    if hooks:
        output = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    for key, hook in hooks:
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if result is None else result


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operation behind ``torch.nn.functional.grouped_mm``. On fake tensors it accepts only bfloat16 (torch 2.13)."""


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which no tensor's ``__torch_function__`` is called.

    The class is private, but torch's guide to extending torch names it.
    """
    return torch._C.DisableTorchFunctionSubclass()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward that runs now.

    Replaced by: a public way to queue a function.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextmanager
def around_backwards(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around every ``loss.backward()`` and ``torch.autograd.backward`` that runs in this context.

    Replaced by: hooks of torch.autograd that are called when a backward begins and ends.

    Args:
        context: Function that returns a new context for each backward.
    """
    with _around("backward", context):
        yield


@contextmanager
def around_grads(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around every ``torch.autograd.grad`` that runs in this context.

    Replaced by: the same as for :func:`around_backwards`.

    Args:
        context: Function that returns a new context for each call.
    """
    with _around("grad", context):
        yield


@contextmanager
def _around(name: str, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    original = getattr(torch.autograd, name)

    @wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(torch.autograd, name, within)
    try:
        yield
    finally:
        setattr(torch.autograd, name, original)


@contextmanager
def around_zero_grad(cleared: Callable[[Collection[nn.Parameter], bool], None]) -> Iterator[None]:
    """Call ``cleared`` after every ``zero_grad()`` of an optimizer or a module that runs in this context.

    Replaced by: a hook of torch.optim.Optimizer for its ``zero_grad``.

    Args:
        cleared: Function that is called with the parameters, and with whether their gradients were set to None instead
            of zero.
    """
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    @wraps(of_optimizer)
    def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(self, set_to_none)
        cleared([param for group in self.param_groups for param in group["params"]], set_to_none)

    @wraps(of_module)
    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        of_module(self, set_to_none)
        cleared(list(self.parameters()), set_to_none)

    Optimizer.zero_grad, nn.Module.zero_grad = optimizer_zero_grad, module_zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.zero_grad, nn.Module.zero_grad = of_optimizer, of_module  # type: ignore[method-assign]


def is_in_backward() -> bool:
    """Return whether autograd is running a backward in this thread.

    Replaced by: a public function that says so.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def packed_shard(dim: int, num_packed: int) -> Placement:
    """Return the placement that splits a tensor along ``dim`` into ``num_packed`` equal parts, and shards each of them.

    It is for the weight of a layer that packs several layers, such as those of queries, keys and values. Replaced by: a
    public placement that does so.
    """
    return _StridedShard(dim, split_factor=num_packed)


def num_packed(placement: Placement) -> int:
    """Return the ``num_packed`` of a :func:`packed_shard`; 0 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def accept_sequential_redistribution() -> None:
    """Silence torch's warning, on each rank, that a norm over two mesh axes takes two all-reduces.

    Replaced by: a public way to flatten mesh axes, which the warning asks for.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def prepend_step_post_hook(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """Register a step post-hook that runs before those that are registered already.

    Replaced by: an argument ``prepend`` of ``Optimizer.register_step_post_hook``.
    """
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def on_scalar_read(function: Callable[[DTensor], int | float | bool | complex]) -> None:
    """Let ``function`` compute the number that ``item()``, ``float()``, a comparison or a format reads from a DTensor.

    For a sum or norm that is still to be reduced, torch silently returns this rank's part, and cannot format it.

    Replaced by: an ``item()`` of DTensor that reduces.
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
    """Let ``function`` compute ``torch.equal`` of two tensors of which at least one is a DTensor.

    torch shards the second tensor like the first, which fails if it has fewer dimensions.

    Replaced by: a ``torch.equal`` that returns False for DTensors of different shapes.
    """

    def equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        return function(args[0], args[1])

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def default_group() -> dist.ProcessGroup:
    """Return the process group of all processes."""
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group


def default_store() -> dist.Store:
    """Return the store with which the default process group was created.

    Replaced by: a public accessor of it.
    """
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this rank is in; torch's public functions return only the default one."""
    return list(dist.distributed_c10d._world.pg_map)


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives of ``group`` this rank has entered.

    Raises:
        RuntimeError: If the backend does not count them.
    """
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # the stub leaves it out
    return number


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, and of the additional one for NCCL that CUDA builds have.

    Replaced by: a documented dump as JSON; only the pickled one is documented.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries


def move_without_meta_tensors(root: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Make ``root.to``, ``root.cpu`` and the like skip tensors on the meta device, which have no values to move.

    Replaced by: an argument of ``nn.Module.to`` that does so.

    Args:
        root: The module.
        around: Function that returns the context in which the tensors are moved.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own: Callable[..., nn.Module] = type(root)._apply
        with around():
            return own(root, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    vars(root)["_apply"] = apply


@contextmanager
def averages_grouped_by_dtype(device: torch.device) -> Iterator[None]:
    """Make torch's AveragedModel, in this context, group tensors by dtype only, as if all were on ``device``.

    torch groups them in C++ by device and dtype. As tensors of other ranks are on the meta device, the groups, and with
    them the order of collectives, would differ between ranks.

    Replaced by: a grouping function that torch function modes can intercept.
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
