"""Let code outside of steps, such as callbacks and hooks, work on the weights and gradients of all stages.

Every rank runs such code, and in one process the code would see the whole model. In a pipeline, each rank has the
parameters of its own stages; those of other stages have only names and shapes, on the meta device. Under
:class:`AllStages`, each torch function runs on the ranks that hold its tensors, so that tensors computed from a stage's
parameters have values on the ranks of that stage, and only shapes on the others. Values are sent to other ranks when
code reads them (``float``, ``if``, printing) or combines them with a tensor of another stage. A total norm over
``self.parameters()``, or an average of one network's weights in another network, is therefore the same as in one
process, and only scalars are sent as long as code reads only scalars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dist import _compat
from lightning_dist.mesh.collectives import group_on_host
from lightning_dist.mesh.consensus import timed_barrier
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.random_functions import (
    CHANGES_AT_RANDOM,
    FILLS_AT_RANDOM,
    IS_LIKE,
    RETURNS_RANDOM,
    without_values,
)
from lightning_dist.model.randomness import digest_of_states
from lightning_dist.parameters.scalar_reads import place_in_users_code
from lightning_dist.parameters.shard_step import OwnStates, StateOfOtherStage
from lightning_dist.techniques.pipeline.failures import Failure, raise_together
from lightning_dist.techniques.pipeline.holders import (
    are_parts_in_use,
    has_holders,
    holders_of,
    is_part,
    mark,
    mark_part,
)
from lightning_dist.techniques.pipeline.remote_value import (
    RemoteParameter,
    RemoteShards,
    conversions_seen_by,
    stand_in,
)

__all__ = ["AllStages"]

_READS = frozenset(
    {
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__",
        "__repr__", "allclose", "argwhere", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy",
        "tensor", "tolist", "unique",
    }
)  # fmt: skip
"""Functions whose result, or its shape, depends on values, so that every rank must have the values."""

_TENSOR: Any = Tensor  # The attributes of the class are descriptors, which torch's type stubs do not declare.
_GRAD_GET, _GRAD_SET = _TENSOR.grad.__get__, _TENSOR.grad.__set__
_DATA_SET = _TENSOR.data.__set__
_DEVICE_GET, _IS_META_GET = _TENSOR.device.__get__, _TENSOR.is_meta.__get__
_LOCAL_GETTERS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("requires_grad", "is_leaf", "shape", "dtype", "ndim", "grad_fn", "layout", _compat.BASE)
)
"""Getters of attributes that every rank knows without communication."""

_BARRIER_TIMEOUT_S = 30.0
"""Seconds to wait for the other ranks to reach the same code before a value is sent."""

_NUM_CHECKED_CALLS = 16
"""Number of reads (or changes) of parameters in each hook for which it is checked that all ranks run the same code.

Of later reads, the first one at each place in the code is checked. This suffices, because code that runs on rank 0
alone fails at its first read.
"""


class AllStages(TorchFunctionMode):
    """Let code outside of steps work on the parameters of all stages. All ranks of the pipeline must run the same code.

    Args:
        root: The user's module, in which the parameters of other ranks' stages are on the meta device.
        holders: For parameters and buffers, by full name, the indices along ``pp`` of the ranks that have their values.
            Every rank has the parameters and buffers that are not named.
        group: Process group of the pipeline's ranks.
        device: The device of this rank's tensors.
    """

    def __init__(
        self, root: nn.Module, holders: Mapping[str, frozenset[int]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__()
        self._root = root
        self._holders = holders
        self._group = group
        self._on_host = group_on_host(group, "errors in hooks")
        self._rank = dist.get_rank(group)
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._sharded = self._sharded_on_any_stage()
        self._is_on = self._is_entered = self._is_marked = False
        self._what = "a hook"
        self._num_reads: Counter[str] = Counter()
        self._num_changes: Counter[str] = Counter()
        self._known_places: set[tuple[str, str]] = set()
        self._have_gradients: dict[int, bool] | None = None
        self._has_drawn = False
        self._shown_states: list[OwnStates] = []

    @contextmanager
    def hook_context(self, what: str) -> Iterator[None]:
        """Let code in this context work on the parameters of all stages; a nested context has no effect.

        Args:
            what: The name of the hook that runs, for errors.
        """
        if self._is_on:
            yield
            return
        if self._is_entered:  # A manual step has called a backward or an optimizer, which runs the hook.
            self.forget_gradients()
            with self._switched(on=True):
                yield
            return
        if not self._is_marked:
            self.mark(self._root)
            self._is_marked = True
        self._what, self._have_gradients, self._is_on, self._is_entered = what, None, True, True
        self._has_drawn = False
        try:
            with self, conversions_seen_by(self), _compat.averages_grouped_by_dtype(self._device):
                yield
        finally:
            self._is_on = self._is_entered = False
            for states in self._shown_states:  # Other code, such as the optimizer's, expects those of this rank only.
                for param in [param for param in states if not self._is_here(param)]:
                    del states[param]
            self._shown_states.clear()

    def _sharded_on_any_stage(self) -> frozenset[str]:
        """Return the names of the parameters that are DTensors where they have values. This is a collective."""
        own = [name for name, param in self._root.named_parameters() if isinstance(param, DTensor)]
        return frozenset(name for of_rank in gather_objects(own, self._on_host) for name in of_rank)

    def converted(self, tensor: DTensor, convert: Callable[[], Tensor], is_part: bool) -> Tensor:
        """Return what a method of DTensor makes of a tensor, which the ranks of other stages do not have.

        Args:
            tensor: The tensor that is converted.
            convert: Function that returns the result.
            is_part: Whether the result is this rank's part.
        """
        holders = holders_of(tensor) if self._is_on else None
        if holders is None:
            return convert()
        with self.switched_off():
            result = convert()
        return mark_part(result) if is_part else mark(result, holders)

    def show_states(self, optimizer: Optimizer, states: OwnStates) -> None:
        """Add the states of other stages to ``states`` as tensors without values, so that hooks see those of all.

        The first call in a hook is a collective over the pipeline; later calls do nothing.

        Args:
            optimizer: The optimizer that has the states.
            states: Its states, by parameter.
        """
        if not self._is_on or any(shown is states for shown in self._shown_states):
            return
        self._shown_states.append(states)
        with self.switched_off(), torch.no_grad():
            names = {id(param): name for name, param in self._root.named_parameters()}
            params = [param for group in optimizer.param_groups for param in group["params"]]
            kept = {id(param): states.pop(param) for param in params if param in states}
            own = {
                names[id(param)]: {key: _description(value) for key, value in kept[id(param)].items()}
                for param in params
                if id(param) in kept and self._is_here(param) and id(param) in names
            }
            self._wait_for_all()
            described = reversed(gather_objects(own, self._on_host))
            of_all = {name: state for of_rank in described for name, state in of_rank.items()}
            for param in params:
                holders = holders_of(param)
                state = kept.get(id(param))
                found = of_all.get(names.get(id(param), ""))
                if not self._is_here(param):
                    state = None if found is None else StateOfOtherStage() if state is None else state
                    _follow(state, found, self._what)
                if state is None:
                    continue
                states[param] = state
                for value in state.values():
                    if holders is not None and isinstance(value, Tensor) and not has_holders(value):
                        mark(value, holders)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Disable the mode in this context, for code of the strategy that a hook calls."""
        with self._switched(on=False):
            yield

    @contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        before, self._is_on = self._is_on, on
        try:
            yield
        finally:
            self._is_on = before

    @property
    def is_on(self) -> bool:
        """Return whether code of the user runs, which works on the parameters of all stages."""
        return self._is_on

    def mark(self, module: nn.Module, prefix: str = "") -> None:
        """Record the holders of the tensors in ``module``, which may be others than before, such as gathered ones.

        Args:
            module: The user's module or a module in it.
            prefix: The full name of ``module``.
        """
        for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
            if name in self._holders and not has_holders(tensor):
                mark(tensor, self._holders[name])
                if name in self._sharded and not self._is_here(tensor):
                    tensor.__class__ = RemoteParameter

    def source_of(self, leaf: Any) -> int | None:
        """Return the rank from which :meth:`broadcast_missing` sends ``leaf``; None if all ranks have its values."""
        return min(holders_of(leaf) or ()) if has_holders(leaf) else None

    def forget_gradients(self) -> None:
        """Ask the other ranks again for the gradients that they have, because a backward may have changed that."""
        self._have_gradients = None

    def broadcast_missing(self, value: Any) -> Any:
        """Return ``value`` with each tensor that some ranks lack replaced by one that has its values on all ranks.

        This is a collective over the pipeline if ``value`` contains such a tensor.

        Args:
            value: A tensor, or a container of tensors.

        Raises:
            OtherRankError: If another rank does not run the same code.
        """
        leaves, structure = _compat.tree_flatten(value)
        places = [place for place, leaf in enumerate(leaves) if has_holders(leaf)]
        if not places:
            return value
        self._wait_for_all()
        # Tensors of the same stages and dtype are sent in one message.
        batches: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
        for place in places:
            holders = tuple(sorted(holders_of(leaves[place]) or ()))
            batches.setdefault((holders, leaves[place].dtype), []).append(place)
        # A hook's self.log calls this while the mode is active, which would take these operations for the hook's.
        with self.switched_off(), torch.no_grad():
            for (holders, dtype), members in sorted(batches.items(), key=str):
                tensors = [leaves[place] for place in members]
                is_here = self._rank in holders
                # All holders gather sharded tensors, not only the source, because gathering is a collective over the
                # mesh of the tensor.
                own = [_gathered(tensor.detach()).to(self._device) for tensor in tensors] if is_here else []
                size = sum(tensor.numel() for tensor in tensors)
                sent = torch.empty(size, dtype=dtype, device=self._device)
                if own:
                    torch.cat([tensor.reshape(-1) for tensor in own], out=sent)
                dist.broadcast(sent, group=self._group, group_src=holders[0])
                parts = torch.split(sent, [tensor.numel() for tensor in tensors])
                for place, tensor, part in zip(members, tensors, parts, strict=True):
                    leaves[place] = part.view(tensor.shape)
        return _compat.tree_unflatten(leaves, structure)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or func in _LOCAL_GETTERS:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in _compat.tree_flatten((args, kwargs))[0] if has_holders(leaf)]
        if not tensors:
            return self._of_parts(func, args, kwargs) if are_parts_in_use() else func(*args, **kwargs)
        if func == _DEVICE_GET:
            return self._device
        if func == _IS_META_GET:
            return False
        if func == _GRAD_GET:
            return self._gradient(args[0])
        name = getattr(func, "__name__", "")
        if func == _GRAD_SET:
            self._set_gradient(*args)
            return None
        if name in _OBJECT_METHODS and func != _DATA_SET:
            return func(*args, **kwargs)
        if func == _DATA_SET:
            with torch.no_grad():
                self._in_place(_DATA_SET, args[0], (args[1],), {})
            return None
        if name == "equal":
            return self._equal(func, *args, **kwargs)
        if name in _READS or (name == "__getitem__" and any(t.dtype == torch.bool for t in tensors)):
            args, kwargs = self.broadcast_missing((args, kwargs))
            return func(*args, **kwargs)
        if name.lstrip("_").startswith("foreach_"):  # These take lists of tensors.
            return self._one_by_one(func, args, kwargs)
        # Functions of torch.nn.init may be given their tensor by keyword.
        if _is_in_place(name) and not args and isinstance(kwargs.get("tensor"), Tensor):
            args, kwargs = (kwargs["tensor"],), {key: value for key, value in kwargs.items() if key != "tensor"}
        if _is_in_place(name) and isinstance(args[0], Tensor):
            return self._in_place(func, args[0], args[1:], kwargs)
        return self._compute(func, types, args, kwargs, tensors)

    def _compute(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the result of ``func`` on the ranks that have all of ``tensors``, and its outline on others."""
        name = getattr(func, "__name__", "")
        common = frozenset.intersection(*(holders_of(tensor) or frozenset() for tensor in tensors))
        out = kwargs.get("out")
        if isinstance(out, Tensor) and common and not has_holders(out):  # Every rank writes its own tensor.
            common = frozenset()
        if not common:
            if isinstance(out, Tensor) and has_holders(out):
                inputs = {key: value for key, value in kwargs.items() if key != "out"}
                return self._in_place(_copy, out, (self.__torch_function__(func, types, args, inputs),), {})
            args, kwargs = self.broadcast_missing((args, kwargs))
            return func(*args, **kwargs)
        if name in RETURNS_RANDOM:
            self._before_drawing(kwargs)
        if name in RETURNS_RANDOM and name not in IS_LIKE:  # Every rank draws the numbers, from the same values.
            args, kwargs = self.broadcast_missing((args, kwargs))
            return func(*args, **kwargs)
        if self._rank in common:
            result = func(*args, **kwargs)
        elif name in _MOVES:
            others = (*args[1:], *kwargs.values())
            dtypes = [other.dtype if isinstance(other, Tensor) else other for other in others]
            result = _outline(args[0], next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), None))
        else:
            if name in IS_LIKE:
                func(without_values(args[0], self._device), *args[1:], **kwargs)
            result = func(*_compat.tree_map(_outline, args), **_compat.tree_map(_outline, kwargs))
        is_sharded = any(isinstance(tensor, RemoteShards | RemoteParameter) for tensor in tensors)

        def marked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if self._rank not in common and leaf.is_meta and not isinstance(leaf, RemoteShards):
                leaf = stand_in(leaf, is_sharded, self._what)
            return mark(leaf, common)

        return _compat.tree_map(marked, result)

    def _of_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, and refuse it if it reads values of which other ranks have others, or none."""
        leaves = _compat.tree_leaves((args, kwargs))
        if not any(map(is_part, leaves)):
            return func(*args, **kwargs)
        if func.__name__ in _READS - {"__format__", "__repr__"}:
            self._refuse_together()
        result = func(*args, **kwargs)
        for leaf in _compat.tree_leaves(result):
            if isinstance(leaf, Tensor):
                mark_part(leaf)
        return result

    def _refuse_together(self) -> NoReturn:
        """Refuse to read values from a part, also on the ranks that wait for the whole at the same place in the code.

        Raises:
            RuntimeError: Always.
        """
        error = RuntimeError(
            f"{self._what} calls to_local() of a tensor of one stage, and needs its values. Ranks of other stages have"
            " no part of it, so that the ranks would go on with different values, or wait for each other. Call"
            " full_tensor(), which returns the whole tensor on every rank, or read the value from the tensor itself."
        )
        with suppress(Exception):  # Other ranks may not come here, if the code leaves out what is no DTensor.
            self._wait_for_all(Failure.now(error, self._what))
        raise error

    def _is_here(self, tensor: Tensor) -> bool:
        holders = holders_of(tensor)
        return holders is None or self._rank in holders

    def _in_place(self, func: Any, target: Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an in-place function on the ranks that hold ``target``, and return ``target``.

        If some of these ranks lack the values of other arguments, the values are sent to them, which is a collective
        over the pipeline.

        Args:
            func: The function, whose first argument is ``target``.
            target: The tensor that the function changes.
            others: The further positional arguments of the function.
            kwargs: The keyword arguments of the function.
        """
        holders = holders_of(target)
        is_random = getattr(func, "__name__", "") in FILLS_AT_RANDOM | CHANGES_AT_RANDOM
        values = _compat.tree_flatten((others, kwargs))[0]
        found = [leaf for leaf in values if has_holders(leaf)]
        if any(holders is None or is_random or not holders <= (holders_of(leaf) or frozenset()) for leaf in found):
            others, kwargs = self.broadcast_missing((others, kwargs))
        # Every rank draws random numbers, so that the generators of all ranks stay in the same state.
        if is_random:
            self._before_drawing(kwargs)
        if is_random and not self._is_here(target):
            func(without_values(target, self._device), *others, **kwargs)
        own = [leaf for leaf in values if isinstance(leaf, Tensor) and leaf.ndim and not has_holders(leaf)]
        with self._failing_together() if own else nullcontext():
            if self._is_here(target):
                func(target, *others, **kwargs)
        return target

    def _before_drawing(self, kwargs: Mapping[str, Any]) -> None:
        """Check that all ranks draw the same random numbers.

        The first call in a hook is a collective over the pipeline.

        Args:
            kwargs: The keyword arguments of the function that draws.

        Raises:
            RuntimeError: If the generators of the ranks have different states.
        """
        if self._has_drawn or kwargs.get("generator") is not None:
            return
        self._has_drawn = True
        self._wait_for_all()
        own = digest_of_states(of_torch_only=True)
        digests = torch.tensor([own, -own])
        dist.all_reduce(digests, dist.ReduceOp.MAX, group=self._on_host)
        if int(digests.sum()) != 0:
            raise RuntimeError(
                f"{self._what} draws random numbers, and torch's generators have different states on the ranks of the"
                " pipeline, so that the numbers would not be those of one process. Seed them alike on all ranks, or"
                " pass a generator of your own that has the same seed on all ranks."
            )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error on all ranks if the code in this context raises one on any rank.

        This is a collective over the pipeline. Only the first :data:`_NUM_CHECKED_CALLS` contexts in each hook do this;
        later ones do nothing. An error on some ranks arises, for example, if ranks that have the same shard of a weight
        write different values to it: only the ranks with that weight notice it.

        Raises:
            OtherRankError: If another rank does not run the same code.
        """
        self._num_changes[self._what] += 1
        if self._num_changes[self._what] > _NUM_CHECKED_CALLS:
            yield
            return
        timed_barrier(f"{self._what} changes parameters of a stage", _BARRIER_TIMEOUT_S, self._ranks)
        failure: Failure | None = None
        try:
            yield
        except Exception as error:
            failure = Failure.now(error, self._what)
        raise_together(failure, self._on_host)

    def _one_by_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of tensor lists separately on each item, because the items may be on different stages."""
        length = next(len(arg) for arg in args if isinstance(arg, list | tuple))

        def at(place: int, arg: Any) -> Any:
            return [arg[place]] if isinstance(arg, list | tuple) and len(arg) == length else arg

        results = []
        for place in range(length):
            own_args = [at(place, arg) for arg in args]
            own_kwargs = {key: at(place, arg) for key, arg in kwargs.items()}
            if _is_in_place(func.__name__):
                target, *others = own_args
                self._in_place(lambda t, *rest, **kw: func([t], *rest, **kw), target[0], tuple(others), own_kwargs)
            else:
                results += self.__torch_function__(_Single(func), (), (own_args,), own_kwargs)
        return None if _is_in_place(func.__name__) else tuple(results)

    def _equal(self, func: Any, input: Tensor, other: Tensor) -> bool:
        """Return whether two tensors are equal; compare their sums first, because whole weights are long messages.

        The sums are those of the absolute values. They are compared up to rounding errors, because tensors that are
        sharded or strided differently are summed in another order.
        """
        if input is other:
            return True
        if input.shape != other.shape or input.dtype != other.dtype:
            return False
        sums = self.broadcast_missing((self._sum(input), self._sum(other)))
        is_close = math.isclose(float(sums[0]), float(sums[1]), rel_tol=1e-9)
        return is_close and bool(func(*self.broadcast_missing((input, other))))

    def _sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the absolute values of ``tensor`` in float64, on the ranks that hold the tensor."""
        holders = holders_of(tensor)
        if not self._is_here(tensor):
            total = torch.empty((), dtype=torch.float64, device="meta")
        else:
            values = tensor.detach()
            values = values.abs() if values.is_complex() else values.double().abs()
            total = _gathered(values.sum(dtype=torch.float64))
        return total if holders is None else mark(total, holders)

    def _gradient(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a tensor; on ranks without the tensor, a meta tensor of its shape.

        The first call in a hook is a collective over the pipeline.
        """
        has = self._gradients().get(id(tensor))
        gradient: Tensor | None = _GRAD_GET(tensor)
        if has and not self._is_here(tensor):
            gradient = torch.empty_like(tensor, device="meta", requires_grad=False)
            gradient = stand_in(gradient, isinstance(tensor, RemoteParameter), self._what)
        holders = holders_of(tensor)
        return gradient if gradient is None or holders is None else mark(gradient, holders)

    def _set_gradient(self, tensor: Tensor, gradient: Tensor | None) -> None:
        self._gradients()[id(tensor)] = gradient is not None
        if self._is_here(tensor):
            _GRAD_SET(tensor, gradient)

    def _gradients(self) -> dict[int, bool]:
        """Return, by the id of a parameter, whether it has a gradient on the ranks that hold it.

        The first call in a hook is a collective over the pipeline.
        """
        if self._have_gradients is None:
            params = [param for _, param in self._root.named_parameters()]
            has = [_GRAD_GET(param) is not None for param in params]
            found = torch.tensor(has, dtype=torch.uint8, device=self._device)
            self._wait_for_all()
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
            self._have_gradients = {id(param): bool(has) for param, has in zip(params, found.tolist(), strict=True)}
        return self._have_gradients

    def _wait_for_all(self, failure: Failure | None = None) -> None:
        """Wait until all ranks have reached the same code; most of the later calls in the same hook do not wait.

        Args:
            failure: An error of this rank there, which the other ranks raise too.

        Raises:
            OtherRankError: If another rank does not reach it in time.
        """
        self._num_reads[self._what] += 1
        place = (self._what, place_in_users_code())
        if self._num_reads[self._what] > _NUM_CHECKED_CALLS and place in self._known_places:
            return
        self._known_places.add(place)
        timed_barrier(f"{self._what} reads parameters of another stage", _BARRIER_TIMEOUT_S, self._ranks)
        with self.switched_off():
            raise_together(failure, self._on_host)


class _Described(NamedTuple):
    """Describe a tensor that another stage has."""

    shape: torch.Size
    dtype: torch.dtype
    is_sharded: bool


def _description(value: Any) -> Any:
    return _Described(value.shape, value.dtype, isinstance(value, DTensor)) if isinstance(value, Tensor) else value


def _follow(state: dict[str, Any] | None, described: Mapping[str, Any] | None, hook: str) -> None:
    """Give the state of a parameter of another stage the entries that the owner has, as tensors without values."""
    if state is None or described is None:
        return
    for key in state.keys() - described.keys():
        del state[key]
    for key, value in described.items():
        if not isinstance(value, _Described):
            state[key] = value
            continue
        known = state.get(key)
        if not isinstance(known, Tensor) or (known.shape, known.dtype) != value[:2]:
            outline = torch.empty(value.shape, dtype=value.dtype, device="meta")
            state[key] = stand_in(outline, value.is_sharded, hook)


class _Single:
    """Wrap a function of lists to take single items, under a name that :class:`AllStages` takes for another one."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.__name__ = "of one"

    def __call__(self, args: Sequence[Any], **kwargs: Any) -> Any:
        return self._func(*args, **kwargs)


_OBJECT_METHODS = (
    "__set__", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "squeeze_",
    "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
)  # fmt: skip
"""Functions that change the tensor object, and not its elements."""

_MOVES = ("cpu", "cuda", "to")
"""Methods that copy a tensor to a device, which fail on a tensor without values."""

_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__")


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _OPERATORS


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():  # The functions that fill a tensor with random numbers run without gradients as well.
        target.copy_(source)


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _outline(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of the same shape without values, of ``dtype`` if one is given."""
    if not isinstance(leaf, Tensor) or (leaf.is_meta and dtype is None):
        return leaf
    return torch.empty_like(leaf, device="meta", dtype=dtype)
