"""Give all ranks equal initial weights: those of rank 0, or weights drawn from a common seed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist._compat import own_buffers, reset_function
from lightning_dist.tensor_state import is_uninitialized

__all__ = ["agreed_seed", "broadcast_tensors", "broadcast_weights", "materialize", "refuse_meta_attributes"]


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
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


def materialize(
    modules: Sequence[nn.Module], root: nn.Module, device: torch.device, leave: Collection[torch.Tensor] = ()
) -> None:
    """Allocate the meta tensors of ``modules`` and initialise them with ``reset_parameters`` of the owning modules.

    Parameters keep their identity, so that ties and references stay valid. A module that directly owns a meta parameter
    or buffer is initialised by its ``reset_parameters()``, else ``_reset_parameters()``, else by the
    ``_init_weights(module)`` of the innermost Hugging Face model around it; children come before parents. Values are
    drawn from torch's current random state.

    Args:
        modules: Modules to initialise, together with all modules inside them.
        root: Model that contains ``modules`` and gives them their names.
        device: Device of the new tensors.
        leave: Tensors that stay on the meta device.

    Raises:
        TypeError: If an owner has none of these methods, so that its tensors would stay uninitialised.
    """
    names = {id(module): name for name, module in root.named_modules()}
    left = {id(tensor) for tensor in leave}

    def is_due(tensor: torch.Tensor) -> bool:
        return is_uninitialized(tensor) and id(tensor) not in left

    owners = [
        module
        for top in modules
        for module in _children_first(top)
        if any(map(is_due, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    ]
    for owner in owners:
        for param in owner.parameters(recurse=False):
            if is_due(param):
                real = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]
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
                    f"{type(owner).__name__} ({names.get(id(owner)) or 'the root module'}) was created on the meta"
                    " device and has no reset_parameters(): give it that method, setting every parameter and buffer"
                    " that it owns directly, or create it in __init__, and not in configure_model nor under"
                    " trainer.init_module(empty_init=True)."
                )


def refuse_meta_attributes(root: nn.Module) -> None:
    """Raise an error if a module has a plain attribute on the meta device, such as a metric's state.

    Such tensors are neither parameters nor buffers, so that nothing would ever give them values.

    Raises:
        TypeError: If a module has such an attribute; the text names both.
    """
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and is_uninitialized(value):
                raise TypeError(
                    f"{type(module).__name__} ({name or 'the root module'}) was created on the meta device, and its"
                    f" attribute {key!r} is neither a parameter nor a buffer. Create it in __init__ instead of"
                    " configure_model, as metrics should be."
                )


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
