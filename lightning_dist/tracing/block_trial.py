"""Compare the results of a distributed block with those of the original one on random inputs.

The results are the outputs, the gradients, and the buffers that a run changes. Both blocks run in evaluation mode, and
in training mode as well if the original block computes something else then. Numbers that they draw are constants (see
:mod:`.fixed_draws`), because a part of the input would have other numbers than the whole.
"""

from __future__ import annotations

import copy
import io
import math
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist import _compat
from lightning_dist._compat import own_buffers, own_parameters
from lightning_dist.model.configurations import configured_values
from lightning_dist.model.fixed_draws import fixed_draws
from lightning_dist.model.tensor_state import is_uninitialized
from lightning_dist.tracing.step_graph import tensors_in
from lightning_dist.tracing.step_graph.dataflow import Call, is_learned
from lightning_dist.tracing.users_hooks import unchanged_by_hooks

__all__ = ["BlockTrial", "copy_of", "kind_of_block", "kind_of_module"]

TOLERANCE = 1e-4
"""The largest relative difference that passes. Rounding (of layers that compute in float32) causes much smaller ones,
and a wrong distribution causes much larger ones."""


class BlockTrial:
    """Compare a distributed copy of a block with the original block, with random weights and inputs in float64.

    Args:
        block: The block, on any device (also the meta device). The trial works on copies of it.
        call: A recorded call of the block on fake tensors; the random inputs have their shapes.
        device: Device to compute on.
        used: Indices of the returned tensors that the model uses, which are compared; empty: all are compared. The
            others may differ, such as unused attention scores of a rank's own heads.
        keeps_hooks: Whether the forward hooks of users run in the trial, because they may change the results.
    """

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        device: torch.device,
        used: Collection[int] = (),
        keeps_hooks: bool = True,
    ) -> None:
        self._used = used
        self._keeps_hooks = keeps_hooks
        self._device = device
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._are_learned = [is_learned(tensor) for tensor in tensors_in((call.args, call.kwargs))]
        self._is_training = {name for name, module in block.named_modules() if module.training}
        self._expected: list[dict[str, Tensor]] = []
        self._differs_in_training = False
        self._error = self._prepare(block, call)
        found = torch.tensor([float(bool(self._error)), float(self._differs_in_training)], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        failed, self._differs_in_training = map(bool, found.tolist())
        del self._expected[1 + self._differs_in_training :]
        if failed and not self._error:
            self._error = "it could not be run on another rank"

    def _prepare(self, block: nn.Module, call: Call) -> str:
        """Copy the block, compute the results of the whole block, and return an error that occurred; empty: none."""
        try:
            self._block = copy_of(block)
            self._fill(self._block)
            self._args, self._kwargs = self._real(call.args), self._real(call.kwargs)
        except Exception as error:  # Not every module can be copied.
            text = str(error).strip().split("\n")[0]
            return f"{type(error).__name__}: {text}"
        for module in self._block.modules():
            _compat.use_eager_experts(module)
            if not self._keeps_hooks:
                _compat.remove_foreign_hooks(module)
        whole = copy_of(self._block)  # Running a block may leave tensors on it that cannot be copied later.
        for is_training in (False, True) if self._is_training else (False,):
            results, raised = self._results(
                whole, dict(whole.named_parameters()), lambda gradient: gradient, is_training
            )
            if raised:
                return f"in training mode, {raised}" if is_training else raised
            self._expected.append(results)
        self._differs_in_training = len(self._expected) > 1 and _largest_difference(*self._expected) > 0
        return ""

    @property
    def error(self) -> str:
        """Return the reason why the block cannot be tried; empty: it can."""
        return self._error

    @property
    def expected(self) -> Mapping[str, Tensor]:
        """Return the original block's results in evaluation mode: outputs and gradients by name."""
        return self._expected[0]

    def copy_of_block(self) -> nn.Module:
        """Return a copy of the block with the weights of the trial, which the caller may distribute."""
        return copy_of(self._block)

    def compare(self, block: nn.Module, params: Mapping[str, nn.Parameter], also_in_training: bool = False) -> str:
        """Run a distributed block, and compare it with the original one. This is a collective over all processes.

        Args:
            block: A distributed copy of the block, from :meth:`copy_of_block`.
            params: Its parameters, by their names in the original block.
            also_in_training: Whether to run it in training mode although the original block computes the same then.

        Returns:
            A description of the difference, or the error that ``block`` raises; empty: the results are the same.
        """
        trains = self._differs_in_training or (also_in_training and bool(self._is_training))
        for is_training in (False, True) if trains else (False,):
            mode = "in training mode, " if is_training else ""
            actual, raised = self._results(block, params, self.whole_gradient, is_training)
            expected = self._expected[is_training and self._differs_in_training]
            if not raised:
                raised = _differing_buffers(actual, expected)
            worst = torch.tensor(math.inf if raised else _largest_difference(actual, expected), device=self._device)
            # The maximum is over all processes, because all must come to the same plan.
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if raised:
                return mode + raised
            if worst > TOLERANCE:
                return f"{mode}its results differ by {float(worst):.1g} of their size"
        return ""

    def _fill(self, block: nn.Module) -> None:
        new: dict[int, nn.Parameter] = {}
        for module in block.modules():
            for key, param in own_parameters(module).items():
                if param is not None and id(param) not in new:
                    scale = 1 / math.sqrt(param.size(-1)) if param.ndim > 1 else 1.0
                    new[id(param)] = nn.Parameter(scale * self._draw(param.shape))
                if param is not None:
                    own_parameters(module)[key] = new[id(param)]
            for key, buffer in own_buffers(module).items():
                if buffer is not None and buffer.is_floating_point():
                    real = torch.ones(buffer.shape, device=self._device) if is_uninitialized(buffer) else buffer
                    own_buffers(module)[key] = real.to(self._device, torch.float64)

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.float64)

    def _real(self, value: Any) -> Any:
        """Replace fake tensors in ``value`` by random ones, and caches, which hold fake tensors, by None."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return self._draw(value.shape)
            # An integer tensor may be a mask, in which 1 may mean kept or hidden, so each row gets both values. It may
            # also be indices, for which 0 and 1 are in range.
            drawn = torch.randint(2, value.shape, generator=self._generator, device=self._device)
            if value.ndim and value.size(-1) > 1:
                drawn[..., 0], drawn[..., 1] = 0, 1
            return drawn.to(value.dtype)
        if isinstance(value, Mapping):
            return {key: self._real(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._real(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return None if "Cache" in type(value).__name__ else value

    def _results(
        self,
        block: nn.Module,
        params: Mapping[str, nn.Parameter],
        whole_gradient: Callable[[Tensor], Tensor],
        is_training: bool,
    ) -> tuple[dict[str, Tensor], str]:
        """Run ``block`` forward and backward.

        Args:
            block: A copy of the block, distributed or not.
            params: The parameters of ``block`` by name.
            whole_gradient: Function that returns the whole gradient of a parameter, given what this rank has of it.
            is_training: Whether the modules that train in the model are in training mode.

        Returns:
            The outputs, the gradients of a randomly weighted sum of the outputs with respect to the inputs and
            ``params``, and the buffers that the run has changed, by name; and an empty text. If the block raises an
            error: an empty mapping, and the error.
        """
        for name, module in block.named_modules():
            module.training = is_training and name in self._is_training
        before = {name: buffer.clone() for name, buffer in block.named_buffers()}
        for param in params.values():
            param.grad = None
        args, kwargs = copy.deepcopy((self._args, self._kwargs))
        inputs = [
            tensor.requires_grad_()
            for tensor, is_learned in zip(tensors_in((args, kwargs)), self._are_learned, strict=True)
            if is_learned and tensor.is_floating_point()
        ]
        try:
            with torch.enable_grad(), fixed_draws(), unchanged_by_hooks(block):
                returned = enumerate(tensors_in(_listed(block(*args, **kwargs))))
                of_use = [out for index, out in returned if not self._used or index in self._used]
                outputs = [out for out in of_use if out.is_floating_point()]
                generator = torch.Generator(self._device).manual_seed(1)
                total = sum(
                    (out * torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float64)).sum()
                    for out in outputs
                )
                cast(Tensor, total).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # The user's code may raise anything on shapes that it does not expect.
            text = str(error).strip().split("\n")[0]
            return {}, f"it raises {type(error).__name__}: {text}"
        results = {f"output {index}": out.detach() for index, out in enumerate(outputs)}
        results |= {f"input {index}": t.grad for index, t in enumerate(inputs) if t.grad is not None}
        for name, param in params.items():
            grad = param.grad
            if grad is not None:
                results[name] = whole_gradient(grad)
        for name, buffer in block.named_buffers():
            if name in before and not torch.equal(buffer, before[name]):
                results[f"{_BUFFER}{name}"] = buffer.detach().double()
        return results, ""

    def whole_gradient(self, gradient: Tensor) -> Tensor:
        """Return the whole gradient of a parameter, given what this rank has of it. This may be a collective."""
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


_BUFFER = "buffer "


def _differing_buffers(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return a sentence about the first buffer that two runs have left with other values; empty: there is none."""
    for name in sorted(actual.keys() | expected.keys()):
        if not name.startswith(_BUFFER):
            continue
        values = [results.get(name) for results in (actual, expected)]
        if None not in values:
            first, second = cast(list[Tensor], values)
            size = max(float(second.norm()), 1e-30)
            if first.shape == second.shape and float((first - second).norm()) <= TOLERANCE * size:
                continue
        return f"it changes the buffer {name.removeprefix(_BUFFER)!r} to other values than those of the whole input"
    return ""


def _largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of ``actual`` from ``expected``; infinity if their names differ.

    The difference of a tensor is relative to its norm, or to 1% of the largest norm if that is greater.
    """
    if actual.keys() != expected.keys():
        return math.inf
    floor = 1e-2 * max(float(tensor.norm()) for tensor in expected.values())
    worst = 0.0
    for name, tensor in expected.items():
        if actual[name].shape != tensor.shape:
            return math.inf
        difference = float((actual[name] - tensor).norm()) / max(float(tensor.norm()), floor, 1e-300)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _listed(value: Any) -> Any:
    """Return the values of ``value`` as a list if it is a mapping, as model outputs of Hugging Face are."""
    return list(value.values()) if isinstance(value, Mapping) else value


def kind_of_block(block: nn.Module, name: str, call: Call, used: Collection[int]) -> object:
    """Return a key that is equal for blocks that one trial serves: those of equal kinds, inputs and used outputs.

    Args:
        block: A block of the model, with whole parameters.
        name: Full name of the block.
        call: The recorded call of ``block``, with its arguments and output.
        used: Indices of the returned tensors that the model uses.
    """
    return kind_of_module(block, name), _shapes(call), tuple(sorted(used))


def kind_of_module(module: nn.Module, name: str) -> object:
    """Return a key that is equal for modules of the same classes, shapes and settings.

    The settings are the attributes that are integers, booleans, strings or None, also those of configurations. Of an
    integer that may be the module's own index, because its full name has the same number or the one before, only this
    is compared. Other numbers are left out, because many modules have a rate of their own.

    Args:
        module: A module of the model, with whole parameters.
        name: Its full name.
    """
    numbers = {int(part) for part in name.split(".") if part.isdecimal()}
    own = numbers | {number + 1 for number in numbers}

    def setting(value: Any) -> object:
        return "its index" if type(value) is int and value in own else value

    shapes = tuple((key, tuple(param.shape)) for key, param in module.named_parameters())
    settings = tuple(
        (
            inner,
            type(part),
            tuple(
                (key, type(value), setting(value))
                for key, value in sorted({**vars(part), **dict(configured_values(part))}.items(), key=itemgetter(0))
                if isinstance(value, int | str | None)
            ),
        )
        for inner, part in module.named_modules()
    )
    return type(module), shapes, settings


def _shapes(call: Call) -> object:
    # Shapes are compared as text, because a symbolic size, which depends on values, can be neither compared nor hashed.
    return tuple((str(tuple(tensor.shape)), tensor.dtype) for tensor in tensors_in((call.args, call.kwargs)))


def copy_of(module: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """Return a deep copy of ``module``, which shares what Python cannot copy with it, such as locks and open files.

    Args:
        module: The module that is tried.
        shared: What else the copy shares with it, such as parameters.
    """
    values = (value for part in module.modules() for value in vars(part).values())
    uncopyable = [value for value in values if isinstance(value, _UNCOPYABLE)]
    return copy.deepcopy(module, {id(value): value for value in [*uncopyable, *shared]})


_UNCOPYABLE = (type(threading.Lock()), type(threading.RLock()), io.IOBase, types.ModuleType)
