"""Let hooks that run outside of steps use sharded parameters and gradients as if they were whole tensors.

In these hooks, parameters and gradients are DTensors. torch runs most functions on DTensors, but it refuses to mix them
with plain tensors such as buffers, and has no sharding rule for some functions. It also silently changes nothing if
code changes a view of a part (``weight.data[0].zero_()``) or assigns to ``weight.data``, both of which work in one
process. Inside :class:`ShardsInHooks` such a function is given whole tensors, and its changes are written into the
shards. So is a function that draws random numbers: on the CPU, all ranks would draw the same numbers for their parts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dist import _compat
from lightning_dist.checkpoint.state import shard_like
from lightning_dist.model.random_functions import (
    CHANGES_AT_RANDOM,
    FILLS_AT_RANDOM,
    IS_LIKE,
    RETURNS_RANDOM,
    without_values,
)
from lightning_dist.parameters.on_use import is_in_place, write_whole
from lightning_dist.parameters.scalar_reads import arrive_at_place
from lightning_dist.techniques.replicas import bit_sums, differ

__all__ = ["ShardsInHooks"]

_UNABLE = ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered", "Sharding propagation")
"""Parts of the errors that torch raises, before it computes anything, for functions that it cannot run on DTensors."""

_VIEWS = frozenset(
    {
        "__getitem__", "chunk", "diagonal", "flatten", "hsplit", "movedim", "narrow", "permute", "reshape", "select",
        "split", "split_with_sizes", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind", "unflatten",
        "unsqueeze", "view", "view_as", "vsplit",
    }
)  # fmt: skip
"""Names of the functions whose results are views of their first argument."""

_Part = tuple[Tensor, Callable[[Tensor], Tensor]]
"""A tensor, and the function that returns a part of the tensor, given the whole tensor."""

_TENSOR: Any = Tensor  # Its attributes are descriptors on the class, which torch's stubs do not declare.
_DATA_GET, _DATA_SET = _TENSOR.data.__get__, _TENSOR.data.__set__
_GRAD_SET = _TENSOR.grad.__set__


class ShardsInHooks(TorchFunctionMode):
    """Let hooks use shards as whole tensors. All ranks must run the same code, which may run collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.before_change: Callable[[], None] = lambda: None
        """Function that is called before a hook changes a tensor in place."""
        self._what = "a hook"
        self._is_on = False
        self._parts = WeakTensorKeyDictionary()  # It maps a copy of a part of a tensor to its _Part.
        # The two dictionaries have, by the address of a parameter's memory, the tensors that share it, such as
        # param.data. Those that the running hook has created have strong references until the hook ends, because torch
        # cannot convert a module whose parameters have weak references.
        self._aliases: dict[int, list[weakref.ref[DTensor]]] = {}
        self._new_aliases: dict[int, list[DTensor]] = {}

    @contextmanager
    def hook_context(self, what: str) -> Iterator[None]:
        """Show shards as whole tensors in this context. A nested context has no effect.

        Args:
            what: Description, for error texts, of the code that runs.
        """
        if self._is_on:
            yield
            return
        self._what, self._is_on = what, True
        try:
            with self:
                yield
        finally:
            self._is_on = False
            for memory, aliases in self._new_aliases.items():
                alive = [other for other in self._aliases.get(memory, ()) if other() is not None]
                self._aliases[memory] = [*alive, *map(weakref.ref, aliases)]
            self._new_aliases.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the conversion in this context, for example for the update within an overridden ``optimizer_step``."""
        if not self._is_on:
            yield
            return
        self._is_on = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DATA_SET or is_in_place(getattr(func, "__name__", "")) or kwargs.get("out") is not None:
            self.before_change()
        if func == _DATA_SET:
            return self._set_data(*args)
        if func == _GRAD_SET:
            return self._set_gradient(*args)
        name = getattr(func, "__name__", "")
        if is_in_place(name):
            return self._in_place(func, name, args, kwargs)
        if name in RETURNS_RANDOM and (shards := _shards((args, kwargs))):
            return self._drawn(func, name, shards, args, kwargs)
        if name == "__deepcopy__" and isinstance(args[0], DTensor):
            return _deep_copy(*args)
        if name == "new_empty" and args and isinstance(args[0], DTensor):
            # Functions of torch.nn.init change its shape in place, which torch cannot do with shards.
            return func(args[0].to_local(), *args[1:], **kwargs)
        out = kwargs.get("out")
        if isinstance(out, Tensor) and not isinstance(out, DTensor) and _shards(args):
            result = func(*self._whole(args), **kwargs)
        else:
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if not _is_unable(error):
                    raise
                result = func(*self._whole(args), **self._whole(kwargs))
        source = args[0] if args else None
        if name in _VIEWS:
            self._remember_parts(func, args, kwargs, result)
            if isinstance(source, nn.Parameter) and isinstance(result, DTensor):
                self._new_aliases.setdefault(result.to_local().data_ptr(), [])
        elif (func == _DATA_GET or name == "detach") and isinstance(result, DTensor):
            memory = result.to_local().data_ptr()
            if isinstance(source, nn.Parameter) or memory in self._aliases or memory in self._new_aliases:
                self._new_aliases.setdefault(memory, []).append(result)
        return result

    def _take_aliases(self, memory: int) -> list[DTensor]:
        """Return the recorded tensors that share the memory at this address, and remove them from the records."""
        older = [alias for reference in self._aliases.pop(memory, ()) if (alias := reference()) is not None]
        return older + self._new_aliases.pop(memory, [])

    def _whole(self, value: Any) -> Any:
        """Return ``value`` with whole tensors in place of shards. This is a collective over the meshes of these."""
        shards = _shards(value)
        if not shards:
            return value
        arrive_at_place(f"{self._what} needs whole tensors", shards[0])
        return _compat.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, value)

    def _in_place(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and isinstance(kwargs.get("tensor"), Tensor):  # Functions of torch.nn.init pass it by keyword.
            args, kwargs = (kwargs["tensor"],), {key: value for key, value in kwargs.items() if key != "tensor"}
        if not args:
            return func(*args, **kwargs)
        target, *others = args
        if isinstance(target, list | tuple):
            return self._one_by_one(func, args, kwargs)
        is_part = isinstance(target, Tensor) and target in self._parts
        if not is_part and not isinstance(target, DTensor):
            return func(target, *self._whole(others), **self._whole(kwargs))
        fills, changes = name in FILLS_AT_RANDOM, name in CHANGES_AT_RANDOM
        if not is_part and not fills and not changes and name != "__setitem__":
            try:  # For a single element, which __setitem__ sets, DTensor would change a copy.
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not _is_unable(error):
                    raise
        others, kwargs = self._whole(others), self._whole(kwargs)
        # Functions of torch.nn.init, which are written in Python, disable gradients themselves.
        with torch.no_grad() if fills and isinstance(func, FunctionType) else nullcontext():
            self._change(target, lambda whole: func(whole, *others, **kwargs), fills or changes, fills)
        return target

    def _drawn(self, func: Any, name: str, shards: list[DTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a random function of sharded tensors, which is the same on all ranks.

        Results in the shape of the first tensor are sharded like it. This is a collective over its mesh.
        """
        source = shards[0]
        if kwargs.get("inplace"):
            rest = {key: value for key, value in kwargs.items() if key != "input"}
            self._change(source, lambda whole: func(whole, *args[1:], **rest), is_random=True)
            return source
        if name in IS_LIKE:
            arrive_at_place(f"{self._what} draws random numbers", source)
            args = (without_values(source, source.device), *args[1:])
            kwargs = {key: value for key, value in kwargs.items() if key != "input"}

        def sharded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = self._agreed(source, leaf)
            return leaf if leaf.requires_grad else shard_like(leaf, source)

        return _compat.tree_map(sharded, func(*self._whole(args), **self._whole(kwargs)))

    def _one_by_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of lists, such as ``torch._foreach_add_``, once for each index of the lists.

        If all of the tensors are sharded, or none is, torch can run it on the lists at once, and does so.
        """
        tensors = [leaf for leaf in _compat.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        num_shards = len(_shards(tensors))
        if not any(tensor in self._parts for tensor in tensors) and num_shards in (0, len(tensors)):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not _is_unable(error):
                    raise
        length = len(args[0])

        def at(place: int, arg: Any) -> Any:
            return [arg[place]] if isinstance(arg, list | tuple) and len(arg) == length else arg

        for place in range(length):
            (target,), *others = (at(place, arg) for arg in args)
            own = {key: at(place, arg) for key, arg in kwargs.items()}
            single = lambda tensor, *rest, **named: func([tensor], *rest, **named)  # noqa: E731
            self._in_place(single, "", (target, *others), own)
        return None

    def _change(
        self, target: Tensor, change: Callable[[Tensor], Any], is_random: bool = False, fills: bool = False
    ) -> Tensor:
        """Call ``change`` on the whole of ``target``, and write the result into the shards. This is a collective.

        Args:
            target: A sharded tensor, or a copy of a part of one.
            change: Function that changes the whole tensor in place.
            is_random: Whether ``change`` draws random numbers. If ranks draw other ones, those of the first rank count.
            fills: Whether ``change`` does not read the tensor.

        Returns:
            The whole ``target`` after the change.
        """
        part: _Part | None = self._parts.get(target)  # type: ignore[no-untyped-call]
        if part is None:
            assert isinstance(target, DTensor)
            if torch.is_grad_enabled() and target.requires_grad:
                raise RuntimeError(
                    f"{self._what} changes a tensor that requires a gradient, in place: do it inside torch.no_grad()."
                )
            arrive_at_place(f"{self._what} changes a sharded tensor", target)
            with torch.no_grad():
                if fills:
                    whole = without_values(target, target.device)
                else:
                    whole = cast(DTensor, target.detach()).full_tensor().clone()
                change(whole)
                return self._write(target, whole, is_random)
        base, make = part
        whole = make(self._change(base, lambda whole: change(make(whole)), is_random))
        with torch.no_grad():
            if isinstance(target, DTensor):
                write_whole(target, whole)
            else:
                target.copy_(whole)
        return whole

    def _write(self, target: DTensor, whole: Tensor, is_random: bool) -> Tensor:
        if target.shape != whole.shape:
            raise RuntimeError(
                f"{self._what} writes a tensor of shape {[*whole.shape]} into one of shape {[*target.shape]}."
            )
        if is_random:
            whole = self._agreed(target, whole)
        else:
            self._check_alike(target, whole)
        write_whole(target, whole)
        return whole

    def _agreed(self, target: DTensor, drawn: Tensor) -> Tensor:
        """Return ``drawn``, or that of the first rank if the ranks of ``target`` have drawn different numbers.

        This is a collective over the mesh of ``target``.
        """
        if drawn.requires_grad:  # The numbers are part of a graph.
            self._check_alike(target, drawn)
        elif self._differs(target, drawn):
            drawn = drawn.contiguous()
            for group in _groups_of(target):
                dist.broadcast(drawn, group=group, group_src=0)
        return drawn

    def _differs(self, target: DTensor, whole: Tensor) -> bool:
        arrive_at_place(f"{self._what} changes a sharded tensor", target)
        return bool(differ(bit_sums(whole.detach())[None], _groups_of(target)).any())

    def _check_alike(self, target: DTensor, whole: Tensor) -> None:
        if self._differs(target, whole):
            raise RuntimeError(
                f"{self._what} writes values into a sharded tensor that are not the same on all ranks: each rank has"
                " computed them from its own part of the batch, or has drawn other random numbers. Average them over"
                " the ranks by self.all_gather(x).mean(0), or send those of the first rank to all by"
                " self.trainer.strategy.broadcast(x)."
            )

    def _remember_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record results that are copies of a part of a sharded tensor, but would be views of it in one process."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or (source not in self._parts and not isinstance(source, DTensor)):
            return
        if func == Tensor.__getitem__ and not _is_basic(args[1]):
            return
        rest = args[1:]
        is_part = source in self._parts
        if isinstance(result, Tensor):
            if is_part or not _is_spread_like(result, source):
                self._parts[result] = (source, lambda whole: func(whole, *rest, **kwargs))
            return
        for place, part in enumerate(result):
            if is_part or not _is_spread_like(part, source):
                self._parts[part] = (source, lambda whole, place=place: func(whole, *rest, **kwargs)[place])

    @torch.no_grad()
    def _set_data(self, target: Tensor, value: Tensor) -> None:
        """Assign ``value`` to ``target.data``; DTensor by itself ignores such an assignment.

        Raises:
            RuntimeError: If the shapes differ, or if ``value`` is not a shard and is not the same on all ranks.
        """
        if not isinstance(target, DTensor):
            _DATA_SET(target, self._whole(value))
            return
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
            target.device_mesh,
            target.placements,
        ):
            if value.shape != target.shape:
                raise RuntimeError(f"{self._what} assigns a tensor of another shape to .data of a sharded tensor.")
            local = value.to_local()
        else:
            whole = self._whole(value)
            if whole.shape != target.shape:
                raise RuntimeError(f"{self._what} assigns a tensor of another shape to .data of a sharded tensor.")
            self._check_alike(target, whole)
            local = shard_like(whole, target).to_local()
        if not isinstance(target, nn.Parameter):
            _compat.replace_local(target, local)
            return
        # Gathering reads the parameter's own memory, so the new values are written there. Tensors that were taken from
        # param.data before share this memory, but must keep their values, so they get copies.
        memory = target.to_local()
        for alias in self._take_aliases(memory.data_ptr()):
            if alias is not target and alias.to_local().data_ptr() == memory.data_ptr():
                _compat.replace_local(alias, alias.to_local().clone())
        memory.copy_(local)

    def _set_gradient(self, target: Tensor, value: Tensor | None) -> None:
        if isinstance(target, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            self._check_alike(target, value)
            value = shard_like(value, target)
        elif isinstance(value, DTensor) and not isinstance(target, DTensor):
            value = self._whole(value)
        _GRAD_SET(target, value)


def _shards(value: Any) -> list[DTensor]:
    return [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, DTensor)]


def _groups_of(tensor: DTensor) -> list[dist.ProcessGroup]:
    mesh = tensor.device_mesh
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _deep_copy(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """Return a copy of a shard with its gradient, which ``Tensor.__deepcopy__`` cannot copy inside of a mode."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
        if tensor.is_leaf and tensor.grad is not None:
            gradient = tensor.grad  # One that is accumulated, and not reduced yet, says itself what its copy is.
            is_reduced = isinstance(gradient, DTensor)
            memo[id(tensor)].grad = gradient.detach().clone() if is_reduced else copy.deepcopy(gradient)
    result: DTensor = memo[id(tensor)]
    return result


def _is_unable(error: RuntimeError) -> bool:
    return any(text in str(error) for text in _UNABLE)


def _is_basic(index: Any) -> bool:
    """Return whether ``tensor[index]`` is a view of ``tensor``."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


def _is_spread_like(part: Tensor, source: Tensor) -> bool:
    """Return whether the shards of ``part`` are views of those of ``source``, rather than copies."""
    if not isinstance(part, DTensor) or not isinstance(source, DTensor):
        return False
    pairs = zip(part.placements, source.placements, strict=True)
    return all(one.is_replicate() == other.is_replicate() for one, other in pairs)
