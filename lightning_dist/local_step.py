"""Optimizer steps on what a rank has: its shards as plain tensors, and no parameters of other stages.

An elementwise optimizer does to a shard what it does to the whole parameter: DTensor has nothing to decide, but takes
its time with every operation on every parameter. Here the optimizer sees the shards' own memory while it updates;
before and after, everybody sees DTensors. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat

__all__ = ["LocalStep"]

ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""torch's optimizers whose update of an element depends on no other element. Not their subclasses, which may differ."""


_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # of a state: one number a parameter, never sharded


class LocalStep:
    """Let ``optimizer`` update this rank's parameters alone, as plain tensors where it is one of :data:`ELEMENTWISE`.

    Args:
        optimizer: Of sharded parameters. Its parameter groups and states hold DTensors but during the update itself:
            closures and hooks see nothing else.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []  # whose params are plain tensors now, and theirs
        self._shards: list[tuple[DTensor, Tensor, dict[str, DTensor]]] = []  # param, its shard, its state as it was
        self._handles: list[RemovableHandle] = []
        self._unwraps = type(optimizer) in ELEMENTWISE
        self._has_others = any(param.is_meta for group in optimizer.param_groups for param in group["params"])
        if self._unwraps or self._has_others:
            self._handles = [
                optimizer.register_step_pre_hook(self._before),
                _compat.prepend_step_post_hook(optimizer, self._after),
            ]

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def restore(self) -> None:
        """Put DTensors back; nothing to do after a step that succeeded."""
        state = self._optimizer.state
        for group, params in self._groups:
            group["params"] = params
        for param, shard, before in self._shards:
            shard.grad = None
            if shard in state:
                values = state.pop(shard).items()
                state[param] = {key: _wrap(key, value, param, before.get(key)) for key, value in values}
        self._groups, self._shards = [], []

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._has_others and not isinstance(optimizer.state, _OwnStates):  # a new one after a checkpoint was loaded
            optimizer.state = _OwnStates(dict, optimizer.state)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._unwrap_all()
            return None

        def closure_then_unwrap() -> Any:
            output = closure()
            self._unwrap_all()
            return output

        return (args[0], *args[2:]), {**kwargs, "closure": closure_then_unwrap}

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.restore()

    @torch.no_grad()
    def _unwrap_all(self) -> None:
        if self._groups:
            return  # a step that calls the one of its base class has two closures
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            params = group["params"]
            self._groups.append((group, params))
            own = [param for param in params if not param.is_meta]  # else it is on another stage of a pipeline
            group["params"] = [_unwrap(param) for param in own] if self._unwraps else own
            for param, shard in zip(own, group["params"], strict=True):
                if shard is param:
                    continue
                shard.grad = _unwrap(param.grad)
                values = state.pop(param, {})
                self._shards.append((param, shard, {k: v for k, v in values.items() if isinstance(v, DTensor)}))
                if values:
                    state[shard] = {key: _unwrap(value) for key, value in values.items()}


class _OwnStates(defaultdict[Any, Any]):
    """The states of this rank's parameters; those of other stages are said to be elsewhere."""

    def __missing__(self, param: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a mode may let it look like one that is here
            if isinstance(param, Tensor) and param.is_meta:
                return _StateOfOtherStage()
        return super().__missing__(param)


class _StateOfOtherStage(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"optimizer.state has no {key!r} of a parameter of another stage: each rank has the states of its own"
            " stages only. Ask `param in optimizer.state` first."
        )


def _unwrap(value: Any) -> Any:
    # Without gradients: the shard's own memory, not a node of autograd's graph.
    return value.to_local() if isinstance(value, DTensor) else value


def _wrap(key: str, value: Any, param: DTensor, before: DTensor | None) -> Any:
    """``value``, of the state of a shard of ``param``, as a DTensor: the one that it was ``before``, if it was one."""
    if before is not None and before.to_local() is value:
        return before
    if not isinstance(value, Tensor) or key in _COUNTERS:
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
