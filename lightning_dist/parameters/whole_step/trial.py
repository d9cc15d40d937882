"""Try an optimizer on small tensors, to find out on which parts of the parameters it computes what one process does.

An update on shards equals that of the whole parameters if every element is updated by itself, as in Adam. An update may
also depend on the whole parameter (a norm, statistics of rows, a factorization), or on several parameters (the norm of
all gradients, a line search). What an optimizer does cannot be read from its class, so its own code steps here on
copies of some parameters: whole, each by itself, and cut as the shards of the run are.

The copies have the dtype float64, the number of dimensions of the parameters, and sizes above the limits from which
optimizers commonly factorize. The gradients of the steps have different scales for each row and each step, are
orthogonal to the parameters in some steps, and change suddenly, so that clipping and projections take effect.
"""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dist._compat import local_of, tree_map, without_step_hooks
from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.model.tensor_state import is_remote

__all__ = ["Finding", "Scope", "probe", "try_optimizer"]

NUM_STEPS = 12
"""Number of steps of a trial, in which periods of a few steps (Lookahead, preconditioners) take effect."""

_MAX_SIZE = 144
"""The largest size of a dimension in a trial. Optimizers commonly factorize from 128 on."""

_MAX_NUMEL = 2 * _MAX_SIZE**2
_SCALES = (1.0, 1.0, 1e-3, 1.0, 30.0, 1.0, 1e3, 1.0, 1e-2, 1.0, 3.0, 1.0)
"""Factors of the gradients in the steps of a trial."""

_TOLERANCE = 1e-9
"""The largest difference between equal results, relative to the largest change of the parameter."""


class Scope(IntEnum):
    """Say on what the update of an element of a parameter depends."""

    ELEMENT = 0
    """The update depends on this element alone."""

    PARAMETER = 1
    """The update depends on the whole parameter."""

    MODEL = 2
    """The update depends on several parameters, on the loss, or on more than one evaluation of the loss."""


@dataclass(frozen=True)
class Finding:
    """Hold what a trial has found.

    Args:
        scope: What an update depends on.
        reason: A clause that says why, for the table at the start of a run.
        uses_loss: Whether the step evaluates the loss more than once, or depends on its value.
    """

    scope: Scope
    reason: str
    uses_loss: bool = False


def try_optimizer(optimizer: Optimizer) -> Finding:
    """Try ``optimizer``, which is not changed, without communication.

    Args:
        optimizer: An optimizer of parameters, which may be sharded.
    """
    with unchanged_random_numbers(), torch.enable_grad():
        return _Trial(optimizer).run()


@dataclass(frozen=True)
class _Result:
    """Hold the parameters after the steps of a trial, the gradients of each step, and calls of the closure in it."""

    params: list[Tensor]
    gradients: list[list[Tensor]]
    num_calls: list[int]


class _Trial:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._chosen = _chosen(optimizer)
        generator = torch.Generator().manual_seed(0)
        params = [param for group in self._chosen for param in group]
        self._starts = [_start(param, generator) for param in params]
        self._noise = [
            [
                torch.randn(start.shape, generator=generator, dtype=torch.float64).to(start)
                * _row_scales(start, generator)
                for start in self._starts
            ]
            for _ in range(NUM_STEPS)
        ]

    def run(self) -> Finding:
        if not self._starts:
            return Finding(Scope.ELEMENT, "it has no parameters here")
        try:
            whole = self._steps(self._starts, None)
        except Exception as error:
            return Finding(Scope.MODEL, f"a trial of it fails on whole tensors ({_text(error)})")
        if any(calls > 1 for calls in whole.num_calls):
            return Finding(Scope.MODEL, "it evaluates the loss several times in a step", uses_loss=True)
        if not any(map(_has_changed, whole.params, self._starts)):
            return Finding(Scope.MODEL, "it left the parameters of a trial as they were")
        if not self._is_same(whole, lambda: self._steps(self._starts, whole, loss=0.25)):
            return Finding(Scope.MODEL, "its results depend on the value of the loss", uses_loss=True)
        if not self._is_same(whole, lambda: self._apart(whole)):
            return Finding(Scope.MODEL, "its result for a parameter depends on others")
        if not self._is_same(whole, lambda: self._on_shards(whole)):
            return Finding(Scope.PARAMETER, "its result for an element depends on the whole parameter")
        return Finding(Scope.ELEMENT, "its result for an element depends on no other element")

    def _is_same(self, whole: _Result, run: Callable[[], _Result]) -> bool:
        try:
            other = run()
        except Exception:
            return False
        return all(map(_are_same, other.params, whole.params, self._starts))

    def _apart(self, whole: _Result) -> _Result:
        """Step each parameter by an optimizer of its own."""
        params = []
        for index, start in enumerate(self._starts):
            alone: list[Tensor | None] = [None] * len(self._starts)
            alone[index] = start
            params += self._steps(alone, whole).params
        return _Result(params, whole.gradients, whole.num_calls)

    def _on_shards(self, whole: _Result) -> _Result:
        """Step the shards of all parameters by as many optimizers as there are shards, and put them together."""
        originals = [param for group in self._chosen for param in group]
        cuts = [_Cut(original, start) for original, start in zip(originals, self._starts, strict=True)]
        num_parts = max(cut.num_parts for cut in cuts)
        parts: list[list[Tensor]] = [[] for _ in cuts]
        for rank in range(num_parts):
            starts = [cut.part(start, rank) for cut, start in zip(cuts, self._starts, strict=True)]
            gradients = [
                [cut.part(gradient, rank) for cut, gradient in zip(cuts, of_step, strict=True)]
                for of_step in whole.gradients
            ]
            result = self._steps(starts, _Result([], gradients, whole.num_calls))
            for found, param in zip(parts, result.params, strict=True):
                found.append(param)
        return _Result(
            [cut.joined(found) for cut, found in zip(cuts, parts, strict=True)], whole.gradients, whole.num_calls
        )

    def _steps(self, starts: Sequence[Tensor | None], recorded: _Result | None, loss: float = 1.0) -> _Result:
        """Let a copy of the optimizer make all steps from ``starts``, of which None leaves a parameter out.

        Args:
            starts: The parameters at the beginning; they are not changed.
            recorded: The result whose gradients the steps get again; None: the steps get new ones.
            loss: Factor by which the value of the loss is multiplied.
        """
        random.seed(0)
        torch.manual_seed(0)
        params = [None if start is None else nn.Parameter(start.clone()) for start in starts]
        left = iter(params)
        stand_ins = [
            {original: param for original in group if (param := next(left)) is not None} for group in self._chosen
        ]
        copied = probe(self._optimizer, stand_ins, with_empty_groups=False)
        if callable(train := getattr(copied, "train", None)):  # Optimizers of schedule-free training begin with it.
            train()
        gradients: list[list[Tensor]] = []
        num_calls = []
        for step in range(NUM_STEPS):
            calls = 0

            def closure(step: int = step) -> Tensor:
                nonlocal calls
                calls += 1
                present = {index: param for index, param in enumerate(params) if param is not None}
                if recorded is None:
                    own = [self._gradient(step, index, param) for index, param in present.items()]
                else:
                    own = [recorded.gradients[step][index] for index in present]
                if calls == 1:
                    gradients.append(own)
                for param, gradient in zip(present.values(), own, strict=True):
                    param.grad = gradient.clone()
                return torch.tensor(loss * (2.0 - 0.1 * step), dtype=torch.float64)

            with without_step_hooks(copied):
                type(copied).step(copied, cast(Any, closure))
            num_calls.append(calls)
        return _Result([param.detach() for param in params if param is not None], gradients, num_calls)

    @torch.no_grad()
    def _gradient(self, step: int, index: int, param: Tensor) -> Tensor:
        gradient = _SCALES[step % len(_SCALES)] * self._noise[step][index] + 0.1 * param.detach()
        if step in (3, 7) and param.ndim:  # Some optimizers project only orthogonal gradients.
            rows, weights = gradient.reshape(param.shape[0], -1), param.detach().reshape(param.shape[0], -1)
            overlap = (rows * weights).sum(1, keepdim=True) / (weights * weights).sum(1, keepdim=True)
            gradient = (rows - overlap * weights).reshape(param.shape)
        return gradient


def probe(
    optimizer: Optimizer, stand_ins: Sequence[Mapping[Tensor, Tensor]], with_empty_groups: bool = True
) -> Optimizer:
    """Return a copy of ``optimizer`` for other parameters, without hooks, and with no states but those of its creation.

    Args:
        optimizer: The optimizer, which is not changed.
        stand_ins: For each parameter group, the parameters of the copy by those of ``optimizer``.
        with_empty_groups: Whether the copy has groups without parameters as well.
    """
    memo: dict[int, Any] = {}
    nothing = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for group, own in zip(optimizer.param_groups, stand_ins, strict=True):
        memo |= {id(param): own.get(param, nothing) for param in group["params"]}
        memo[id(group["params"])] = list(own.values())
    copied = _copy(optimizer, memo)
    for group in copied.param_groups:
        group |= {option: False for option in ("fused", "capturable", "foreach") if option in group}
        _set_rate(group)
    if not with_empty_groups:
        copied.param_groups[:] = [group for group in copied.param_groups if group["params"]]
    for own in stand_ins:
        for original, stand_in in own.items():
            if state := optimizer.state.get(original):
                copied.state[stand_in] = _small_state(state, original, stand_in)
    return copied


def _set_rate(group: dict[str, Any]) -> None:
    """Give a group a learning rate with which its parameters change; that of a warm-up may be zero."""
    rate = group.get("lr")
    number = float(rate) if isinstance(rate, int | float | Tensor) else None
    if number is not None and number < 1e-4:
        first = group.get("initial_lr")
        first = float(first) if isinstance(first, int | float | Tensor) else 0.0
        number = first if first >= 1e-4 else 1e-2
        group["lr"] = torch.full_like(rate, number) if isinstance(rate, Tensor) else number


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy of ``optimizer`` with all its attributes, which ``copy.deepcopy`` leaves out."""
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    memo[id(optimizer.state)] = defaultdict(dict)
    attributes = vars(optimizer)
    for value in attributes.values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copy(value, memo)
    for name, value in attributes.items():
        if name == "step":  # A scheduler counts the calls of its own step.
            continue
        is_of_hooks = isinstance(value, OrderedDict) and all(map(callable, value.values()))
        vars(copied)[name] = OrderedDict() if is_of_hooks else _copied(value, memo)
    return copied


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, torch.Generator):
        generator = torch.Generator(value.device)
        generator.set_state(value.get_state())
        return generator
    with suppress(Exception):  # What cannot be copied, such as a process group, is shared.
        return copy.deepcopy(value, memo)
    return value


def _small_state(state: Any, original: Tensor, small: Tensor) -> Any:
    """Return a state that an optimizer has made in ``__init__``, for a parameter of another shape."""

    def shrunk(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.copy(value)
        if value.shape != original.shape or not value.ndim:
            return local_of(value.detach()).clone()
        first = local_of(value.detach()).flatten()[:1]
        dtype = small.dtype if value.is_floating_point() else value.dtype
        return torch.full(small.shape, first.item() if first.numel() else 0.0, dtype=dtype)

    return tree_map(shrunk, dict(state))


def _chosen(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return the parameters that a trial has copies of, for each group: the largest ones of each kind.

    Parameters are of one kind if they have as many dimensions, are sharded along the same ones, and are in groups whose
    options differ in numbers only, as learning rates of layers do.
    """
    kinds: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        options = tuple(
            (key, _without_number(value)) for key, value in group.items() if key not in ("params", "param_names")
        )
        for param in group["params"]:
            if param.is_floating_point() or param.is_complex():
                kinds[param.ndim, param.is_complex(), _sharded_dims(param), options].append((index, param))
    chosen: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for params in kinds.values():
        largest = sorted(params, key=lambda pair: -pair[1].numel())
        for index, param in largest[: 2 if largest[0][1].ndim <= 2 else 1]:
            chosen[index].append(param)
    return chosen


def _without_number(value: Any) -> str:
    """Return what distinguishes the value of an option from others of the same kind."""
    return "number" if isinstance(value, float | Tensor) else repr(value)[:100]


def _sharded_dims(param: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the dimensions along which ``param`` is sharded, each with its number of shards."""
    if not isinstance(param, DTensor) or is_remote(param):
        return ()
    parts: dict[int, int] = {}
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        dim = getattr(placement, "dim", None)  # Shard and its variants have a dim.
        if dim is not None and size > 1:
            parts[dim] = parts.get(dim, 1) * size
    return tuple(sorted(parts.items()))


class _Cut:
    """Cut a parameter of a trial as the shards of the run are, into two parts along each sharded dimension.

    If a rank of the run has an empty shard, there is an empty part as well.

    Args:
        original: The parameter of the run.
        start: The parameter of the trial.
    """

    def __init__(self, original: Tensor, start: Tensor) -> None:
        dims = _sharded_dims(original)
        self._boxes = [()] if not start.ndim else [tuple(slice(None) for _ in start.shape)]
        for dim, number in dims:
            size = start.shape[dim]
            middle = -(-size // 2)
            boxes = []
            for box in self._boxes:
                for piece in (slice(0, middle), slice(middle, size)):
                    boxes.append((*box[:dim], piece, *box[dim + 1 :]))
            chunk = -(-original.shape[dim] // number)
            if chunk * (number - 1) >= original.shape[dim]:
                boxes.append((*boxes[0][:dim], slice(size, size), *boxes[0][dim + 1 :]))
            self._boxes = boxes
        self._shape = start.shape

    @property
    def num_parts(self) -> int:
        """Return the number of parts."""
        return len(self._boxes)

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a copy of a part. If another parameter has more parts, the parts of this one are taken again."""
        return tensor.detach()[self._boxes[rank % self.num_parts]].clone()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor that the parts make up."""
        whole = parts[0].new_full(self._shape, math.nan)
        for box, part in zip(self._boxes, parts, strict=False):
            whole[box] = part
        return whole


def _start(param: Tensor, generator: torch.Generator) -> Tensor:
    shape = [min(size, _MAX_SIZE) for size in param.shape]
    for dim in reversed(range(len(shape))):
        rest = math.prod(shape)
        if rest > _MAX_NUMEL:
            shape[dim] = max(1, shape[dim] * _MAX_NUMEL // rest)
    dtype = torch.complex128 if param.is_complex() else torch.float64
    device = torch.device("cpu") if param.is_meta else local_of(param).device
    start = torch.randn(shape, generator=generator, dtype=dtype).to(device)
    return start * _row_scales(start, generator)


def _row_scales(start: Tensor, generator: torch.Generator) -> Tensor:
    """Return different factors from 0.1 to 10 for each row, or for each element of a vector."""
    if not start.ndim:
        return torch.ones((), dtype=torch.float64, device=start.device)
    exponents = 2 * torch.rand(start.shape[0], generator=generator, dtype=torch.float64) - 1
    return (10**exponents).view(-1, *[1] * (start.ndim - 1)).to(start.device)


def _has_changed(param: Tensor, start: Tensor) -> bool:
    return not start.numel() or not bool(torch.equal(param, start))


def _are_same(one: Tensor, other: Tensor, start: Tensor) -> bool:
    if not start.numel():
        return True
    if not bool(torch.isfinite(other).all()):  # Nothing can be found out.
        return False
    change, size = (other - start).abs().max(), other.abs().max()
    return bool((one - other).abs().max() <= _TOLERANCE * change + 1e-12 * size)


def _text(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:160]
