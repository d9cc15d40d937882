"""Save and load whole state dicts of a sharded module by the calls that users make in one process.

``torch.save(module.state_dict())`` would write one rank's shards, under the shapes of the whole parameters and with a
device mesh that other programs lack. ``torch.save`` therefore refuses the shards of modules that are registered here,
and ``state_dict()`` returns whole tensors inside :func:`~lightning_dist.parallel_module.full_parameters`. In the
other direction, ``load_state_dict`` of a sharded module accepts whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_dist._compat import own_parameters
from lightning_dist.checkpoint.state import shard_like
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.group import ParameterGroup

__all__ = ["install", "register", "whole_state_dicts"]

_meshes: WeakSet[DeviceMesh] = WeakSet()
"""Device meshes over which the parameters of registered modules are sharded."""

_remote: WeakKeyDictionary[nn.Module, set[tuple[torch.Size, torch.dtype]]] = WeakKeyDictionary()
"""Shapes and dtypes of the tensors of registered modules that only other ranks have; they are on the meta device."""

_modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
"""Modules that must not be copied or saved as objects."""


def register(root: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let ``load_state_dict`` of ``root`` accept whole tensors, and refuse to copy or to ``torch.save`` its shards.

    Args:
        root: Module whose parameters are DTensors now.
        units: Modules inside it that are sharded as units.
    """
    for module in root.modules():
        if own_parameters(module):
            module.register_load_state_dict_pre_hook(_distribute)  # type: ignore[no-untyped-call]
    for param in root.parameters():
        if isinstance(param, DTensor):
            _meshes.add(param.device_mesh)
    remote = {(tensor.shape, tensor.dtype) for tensor in (*root.parameters(), *root.buffers()) if is_remote(tensor)}
    if remote:
        _remote[root] = remote
    for module in {root, *units}:
        _modules[module] = None
        vars(module)["__deepcopy__"] = partial(_refuse_copy, type(root).__name__)
    for name, module in root.named_modules():
        if hasattr(type(module), "save_pretrained"):  # Hugging Face's method would gather weights on this rank alone.
            vars(module)["save_pretrained"] = partial(_save_pretrained, module, name)


def _save_pretrained(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(param, DTensor) or is_remote(param) for param in module.parameters()):
        raise TypeError(
            f"{name or type(module).__name__}.save_pretrained was called where each rank has only a shard: enter `with"
            " lightning_dist.full_parameters(module):` on every rank, and call it there on rank 0."
        )
    return type(module).save_pretrained(module, *args, **kwargs)  # type: ignore[attr-defined]


def _distribute(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Replace the whole tensors in ``state_dict``, which ``module`` is about to load, by this rank's shards."""
    for key, param in own_parameters(module).items():
        name = prefix + key
        if param is None or name not in state_dict:
            continue
        # Parameters of other pipeline stages stay on the meta device; their own ranks load them.
        state_dict[name] = param if is_remote(param) else _like(state_dict[name], param)


def _like(value: Any, param: Tensor) -> Any:
    """Return ``value`` as the kind of tensor that ``param`` is, a DTensor or a plain tensor.

    In a step, a module may hold gathered parameters as plain tensors, while its state dict has DTensors. These are then
    gathered, which is a collective.
    """
    if isinstance(value, DTensor) and type(param) is nn.Parameter:
        return value.full_tensor() if value.shape == param.shape else value.to_local()
    return shard_like(value, param)


@contextmanager
def whole_state_dicts(root: nn.Module, groups: Sequence[ParameterGroup]) -> Iterator[None]:
    """Make ``state_dict()`` of ``root`` and its submodules return copies of the whole parameters in this context.

    They are copies because the memory of the gathered parameters is freed at the end. ``load_state_dict`` raises a
    RuntimeError in this context.

    Args:
        root: Module whose parameters are gathered.
        groups: All parameter groups of ``root``, which are gathered.
    """
    copies: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()

    def copy_own(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, param in own_parameters(module).items():
            name = prefix + key
            if param is None or isinstance(state_dict.get(name), nn.Parameter | None):  # keep_vars=True returns it.
                continue
            place = (param.data_ptr(), param.shape, param.stride(), param.dtype)
            copy = copies.get(place)
            if copy is None:  # Tied parameters share one copy.
                copies[place] = copy = state_dict[name].clone()
            state_dict[name] = copy

    def refuse_to_load(*args: Any) -> NoReturn:
        raise RuntimeError(
            f"load_state_dict inside full_parameters({type(root).__name__}) would load into temporary copies, which are"
            " dropped at its end. Call it outside: it accepts whole tensors there, too."
        )

    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group.whole_state_dict())
        for module in root.modules():
            if own_parameters(module):
                for handle in (
                    module.register_state_dict_post_hook(copy_own),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(refuse_to_load),  # type: ignore[no-untyped-call]
                ):
                    stack.callback(handle.remove)
        yield


def install() -> None:
    """Patch ``torch.save`` to refuse shards.

    Also, ``numpy()`` and ``tolist()`` of a DTensor, which torch refuses for all tensor subclasses, return the whole
    tensor if this rank has it, and otherwise raise an error that says what to do instead. Calling this again has no
    effect.

    Replaced by: a hook of torch for what a tensor subclass does when it is saved.
    """
    if hasattr(torch.save, "__wrapped__"):
        return
    own_save = torch.save

    @wraps(own_save)
    def save(obj: object, *args: Any, **kwargs: Any) -> None:
        _refuse_shards(obj)
        own_save(obj, *args, **kwargs)

    torch.save = save
    for reader in ("numpy", "tolist"):
        setattr(DTensor, reader, _reader(getattr(Tensor, reader)))


def _reader(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``own`` if this rank, or an active function mode, has the whole tensor.

    torch does not pass these methods of a DTensor to modes, but this function does.

    Args:
        own: The method of ``torch.Tensor``.
    """

    @wraps(own)
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):  # A mode may put another tensor in the place of a DTensor.
            return own(tensor, *args, **kwargs)
        if has_torch_function((tensor,)):  # Without an active mode, this is False for DTensors.
            return handle_torch_function(read, (tensor,), tensor, *args, **kwargs)
        return own(_whole_local(tensor, own.__name__), *args, **kwargs)

    return read


def _whole_local(tensor: DTensor, reader: str) -> Tensor:
    """Return the local tensor of ``tensor``, which must be the whole tensor.

    Args:
        tensor: The DTensor whose method was called.
        reader: Name of the method that was called, for the error.

    Raises:
        TypeError: If this rank has only a shard.
    """
    if tensor.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in tensor.placements):
        raise TypeError(
            f".{reader}() was called on a tensor of which this rank has only a shard"
            f" ({', '.join(map(str, tensor.placements))} over {tensor.device_mesh.size()} ranks). For weights, enter"
            " `with lightning_dist.full_parameters(module):` on every rank, and read them there, for example for a"
            " histogram. For other tensors, such as gradients, call tensor.full_tensor() on every rank first."
        )
    return tensor.to_local()


INSTEAD = (
    "On every rank, enter `with lightning_dist.full_parameters(module):` and call `module.state_dict()` there: it is"
    " whole, and rank 0 can torch.save it. trainer.save_checkpoint writes shards and everything else that a run needs."
)


def _refuse_shards(obj: object) -> None:
    for name, value in _leaves(obj, ""):
        if isinstance(value, DTensor) and value.device_mesh in _meshes:
            raise TypeError(
                f"torch.save was given {name or 'a tensor'}, of which this rank has only a shard"
                f" ({', '.join(map(str, value.placements))} over {value.device_mesh.size()} ranks): the file would be"
                f" incomplete, and could not be loaded elsewhere. {INSTEAD}"
            )
        if isinstance(value, Tensor) and is_remote(value):
            if any((value.shape, value.dtype) in remote for remote in _remote.values()):
                raise TypeError(
                    f"torch.save was given {name or 'a tensor'}, which is on another rank: this rank has only a shard"
                    f" of the model, and the file would be incomplete. {INSTEAD}"
                )
        elif isinstance(value, nn.Module) and any(part in _modules for part in value.modules()):
            raise TypeError(
                f"torch.save was given {type(value).__name__}, a module that is spread over processes and cannot be"
                f" pickled. {INSTEAD}"
            )


def _leaves(obj: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield from _leaves(value, f"{name}[{index}]")
    else:
        yield name, obj


def _refuse_copy(name: str, memo: object) -> NoReturn:
    raise TypeError(
        f"{name} is spread over processes and cannot be copied: a copy would share its process groups and not its"
        " steps. Copy it before the Trainer runs; or make a new one, and on every rank `with"
        f" lightning_dist.full_parameters(module): new.load_state_dict(module.state_dict())`."
    )
