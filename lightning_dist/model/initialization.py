"""Give all ranks equal initial weights: those of rank 0, or those that its constructor would have given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import _compat
from lightning_dist._compat import own_buffers, reset_function
from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.model.deferred_init import is_deferred, operations_of, values_of
from lightning_dist.model.tensor_state import is_uninitialized

__all__ = [
    "agree_on_operations",
    "agreed_seed",
    "broadcast_tensors",
    "broadcast_weights",
    "materialize",
    "materialize_attributes",
]

IsDue = Callable[[torch.Tensor], bool]


def broadcast_weights(module: nn.Module, buffers_only: bool = False, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite the parameters and buffers of ``module`` with those of the first rank.

    This is a collective over ``group``.

    Args:
        module: Module whose tensors are on the device on which the group communicates.
        buffers_only: Whether to overwrite only the buffers.
        group: Process group of ranks that have the same module; None: all processes.
    """
    broadcast_tensors(list(module.buffers() if buffers_only else _tensors(module)), group)


def broadcast_tensors(values: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Overwrite ``values`` with those of rank ``source``. This is a collective over ``group``.

    Args:
        values: Tensors, of the same number and shapes on all ranks; those on the meta device are skipped.
        group: Process group of the ranks; None: all processes.
        source: Rank in ``group`` that sends its tensors.
    """
    tensors = [tensor.detach() for tensor in values if not is_uninitialized(tensor)]
    sent = [tensor.contiguous() for tensor in tensors]
    for work in [dist.broadcast(tensor, group=group, group_src=source, async_op=True) for tensor in sent]:
        work.wait()
    for tensor, received in zip(tensors, sent, strict=True):
        if not tensor.is_contiguous() and not torch.equal(tensor, received):
            tensor.copy_(received)


def agreed_seed() -> int:
    """Return torch's initial seed of rank 0 on every rank. This is a collective over all processes."""
    return broadcast_object(torch.initial_seed())


def agree_on_operations(module: nn.Module) -> None:
    """Let all ranks initialise the deferred tensors of ``module`` with the random numbers of rank 0.

    This is a collective over all processes.

    Raises:
        RuntimeError: If this rank's constructor has run other operations on tensors than that of rank 0.
        OtherRankError: If that of another rank has.
    """
    operations = operations_of([*_tensors(module), *(tensor for _, _, tensor in _attributes(module))])
    texts = [str(operation) for operation in operations]
    texts_of_first, contents_of_first = broadcast_object((texts, [op.contents for op in operations]))
    with raise_on_all_ranks("comparing how ranks initialise the model"):
        for own, of_first in zip_longest(texts, texts_of_first):
            if own != of_first:
                raise RuntimeError(
                    f"{type(module).__name__} is not initialised on all ranks alike. Rank 0: {of_first}; this rank:"
                    f" {own}. Do sizes or constants in configure_model depend on the rank, or on numbers of random or"
                    " numpy? Seed these with seed_everything."
                )
    for operation, received in zip(operations, contents_of_first, strict=True):
        for tensor, of_rank_0 in zip(operation.contents, received, strict=True):
            tensor.copy_(of_rank_0)


def materialize(
    modules: Sequence[nn.Module], root: nn.Module, device: torch.device, leave: Collection[torch.Tensor] = ()
) -> None:
    """Allocate the meta tensors of ``modules`` and initialise them.

    Parameters keep their identity, so that ties and references stay valid. Deferred tensors (see
    :mod:`lightning_dist.model.deferred_init`) get the values that their constructor would have given them. Other
    tensors have been created on the meta device by the user's own code: a module that directly owns one is initialised
    by its ``reset_parameters()``, else ``_reset_parameters()``, else by the ``_init_weights(module)`` of the innermost
    Hugging Face model around it; children come before parents. Values are drawn from torch's current random state.

    Args:
        modules: Modules to initialise, together with all modules inside them.
        root: Model that contains ``modules`` and gives them their names.
        device: Device of the new tensors.
        leave: Tensors that stay on the meta device.

    Raises:
        TypeError: If an owner has none of these methods, so that its tensors would stay uninitialised.
    """
    left = {id(tensor) for tensor in leave}

    def is_due(tensor: torch.Tensor) -> bool:
        return is_uninitialized(tensor) and id(tensor) not in left

    inside = [module for top in modules for module in _children_first(top)]
    owners = [owner for owner in inside if any(map(is_due, _own_tensors(owner)))]
    _run_constructors(owners, device, is_due)
    _reset([owner for owner in owners if any(map(is_due, _own_tensors(owner)))], root, device, is_due)


def _run_constructors(owners: Sequence[nn.Module], device: torch.device, is_due: IsDue) -> None:
    """Give deferred tensors of ``owners`` their values."""
    deferred = {
        id(tensor): tensor
        for owner in owners
        for tensor in _own_tensors(owner)
        if is_due(tensor) and is_deferred(tensor)
    }
    values = dict(zip(deferred, values_of(list(deferred.values()), device), strict=True))
    for owner in owners:
        _swap(owner, {param: values[id(param)] for param in owner.parameters(recurse=False) if id(param) in values})
        for key, buffer in list(owner.named_buffers(recurse=False)):
            own_buffers(owner)[key] = values.get(id(buffer), buffer)


def _reset(owners: Sequence[nn.Module], root: nn.Module, device: torch.device, is_due: IsDue) -> None:
    """Initialise the other tensors of ``owners``, which also resets the deferred ones that they own."""
    names = {id(module): name for name, module in root.named_modules()}
    for owner in owners:
        due = filter(is_due, owner.parameters(recurse=False))
        _swap(owner, {param: torch.empty_like(param, device=device) for param in due})
        for key, buffer in list(owner.named_buffers(recurse=False)):
            if is_due(buffer):
                own_buffers(owner)[key] = torch.empty_like(buffer, device=device)
    hugging_face = [module for module in root.modules() if hasattr(module, "_init_weights")]
    for owner in owners:
        reset = reset_function(owner)
        around = [model for model in hugging_face if any(sub is owner for sub in model.modules())]
        with torch.no_grad():
            if reset is not None:
                reset()
            elif around:
                around[-1]._init_weights(owner)  # type: ignore[operator]
            else:
                raise TypeError(
                    f"{type(owner).__name__} ({names.get(id(owner)) or 'the root module'}) has tensors on the meta"
                    " device that its constructor gives no values, and it has no reset_parameters(): create it in"
                    " configure_model and initialise its tensors there, or give it that method, setting every parameter"
                    " and buffer that it owns directly."
                )


def _swap(owner: nn.Module, values: dict[nn.Parameter, torch.Tensor]) -> None:
    """Put values into those parameters of ``owner`` that have none. They keep their identity."""
    with _compat.without_weak_references(owner):
        for param, value in values.items():
            if is_uninitialized(param):
                torch.utils.swap_tensors(param, nn.Parameter(value, param.requires_grad))  # type: ignore[no-untyped-call]


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def materialize_attributes(root: nn.Module, device: torch.device) -> None:
    """Give values to deferred tensors that are plain attributes of modules, such as the states of metrics.

    Args:
        root: Model whose parameters and buffers have been initialised, except those of other ranks.
        device: Device of the new tensors.

    Raises:
        TypeError: If an attribute is on the meta device, and nothing has given it values; the text names both.
    """
    for container, key, tensor in _attributes(root):
        if is_deferred(tensor):
            (value,) = values_of([tensor], device)
            container[key] = value.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and is_uninitialized(value):
                raise TypeError(
                    f"{type(module).__name__} ({name or 'the root module'}) has the attribute {key!r} on the meta"
                    " device, which is neither a parameter nor a buffer, and its constructor gives it no values:"
                    " initialise it there."
                )


def _attributes(root: nn.Module) -> list[tuple[Any, Any, torch.Tensor]]:
    """Return the meta tensors that are attributes, or in lists or dictionaries that are, with their places."""
    registered = {id(tensor) for tensor in _tensors(root)}
    containers = [vars(module) for module in root.modules()]
    containers += [value for held in containers for value in held.values() if type(value) in (dict, list)]
    return [
        (container, key, item)
        for container in containers
        for key, item in (list(enumerate(container)) if isinstance(container, list) else list(container.items()))
        if isinstance(item, torch.Tensor) and is_uninitialized(item) and id(item) not in registered
    ]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
