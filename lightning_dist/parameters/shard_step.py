"""Run optimizer steps on a rank's own shards as plain tensors, and without the parameters of other stages.

An elementwise optimizer computes the same for a shard as for the whole parameter, so that DTensor dispatch has no
effect but its overhead in every operation on every parameter. During its update, the optimizer is therefore given the
shards' own memory as plain tensors; before and after it, all code sees DTensors. The results are the same, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.accumulated_gradients import UnreducedGradient

__all__ = ["LocalStep", "OwnStates", "StateOfOtherStage"]

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
"""torch's optimizers whose update of an element depends on no other element. Subclasses are not among them: they may
update differently."""


_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of an optimizer state whose value is one number for each parameter, which is never sharded."""


class LocalStep:
    """Make ``optimizer`` update only this rank's parameters, as plain tensors if it is elementwise.

    Args:
        optimizer: Optimizer of sharded parameters. Its parameter groups and states hold DTensors except during the
            update itself; closures and other hooks see only DTensors.
        is_elementwise: Whether the update of an element depends on no other element; None: whether the class of the
            optimizer is in :data:`ELEMENTWISE`.
    """

    def __init__(self, optimizer: Optimizer, is_elementwise: bool | None = None) -> None:
        self._optimizer = optimizer
        # These are the optimizer's groups whose params are replaced now, each with its original list of params.
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        # These are the parameters that are replaced now, each with its shard and the DTensors in its state.
        self._shards: list[tuple[DTensor, Tensor, dict[str, Any]]] = []
        self._handles: list[RemovableHandle] = []
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if is_elementwise is None:
            is_elementwise = type(optimizer) in ELEMENTWISE
        self._unwraps = is_elementwise and any(isinstance(param, DTensor) for param in params)
        self._has_others = any(is_remote(param) for param in params)
        if self._unwraps or self._has_others:
            self._handles = [
                optimizer.register_step_pre_hook(self._before),
                _compat.prepend_step_post_hook(optimizer, self._after),
                optimizer.register_load_state_dict_post_hook(self._explain_look_ups),
            ]
            self._explain_look_ups(optimizer)

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the DTensors back into the optimizer; a step that succeeded has already done so."""
        state = self._optimizer.state
        for group, params in self._groups:
            group["params"] = params
        for param, shard, before in self._shards:
            shard.grad = None
            if shard in state:
                values = state.pop(shard).items()
                state[param] = {key: _wrap(key, value, param, before.get(key)) for key, value in values}
        self._groups, self._shards = [], []

    def _explain_look_ups(self, optimizer: Optimizer) -> None:
        """Let look-ups of states of other stages raise an explanation, also after the optimizer has got new states."""
        if self._has_others and not isinstance(optimizer.state, OwnStates):
            optimizer.state = OwnStates(dict, optimizer.state)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._explain_look_ups(optimizer)
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
            return  # If step() calls that of its base class, the closure is wrapped twice.
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            params = group["params"]
            self._groups.append((group, params))
            own = [param for param in params if not is_remote(param)]
            group["params"] = [_unwrap(param) for param in own] if self._unwraps else own
            for param, shard in zip(own, group["params"], strict=True):
                if shard is param:
                    continue
                if isinstance(param.grad, UnreducedGradient):
                    param.grad.refuse("optimizer.step()")
                shard.grad = _unwrap(param.grad)
                values = {key: _shard(value, param) for key, value in state.pop(param, {}).items()}
                self._shards.append((param, shard, values))
                if values:
                    state[shard] = {key: _compat.tree_map(_unwrap, value) for key, value in values.items()}


class OwnStates(defaultdict[Any, Any]):
    """Hold the states of this rank's parameters, and explain look-ups in a state that is on another stage.

    In hooks, ``before_look_up`` may add the states of other stages, as tensors without values, which are not saved.
    """

    before_look_up: Callable[[OwnStates], None] | None = None
    """Function that is called with this dictionary before something is looked up in it; None: nothing is called."""

    def _prepare(self) -> None:
        if self.before_look_up is not None:
            self.before_look_up(self)

    def __getitem__(self, param: Any) -> Any:
        self._prepare()
        return super().__getitem__(param)

    def __contains__(self, param: object) -> bool:
        self._prepare()
        return super().__contains__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        """Return the state of ``param``, or ``default``."""
        self._prepare()
        return super().get(param, default)

    def items(self) -> Any:
        """Return the parameters with their states."""
        self._prepare()
        return super().items()

    def values(self) -> Any:
        """Return the states."""
        self._prepare()
        return super().values()

    def __missing__(self, param: Any) -> Any:
        # An active function mode may present a parameter of another stage as one of this rank.
        with torch.DisableTorchFunction():
            if isinstance(param, Tensor) and is_remote(param):
                return self.setdefault(param, StateOfOtherStage())
        return super().__missing__(param)


class StateOfOtherStage(dict[str, Any]):
    """Explain look-ups outside of hooks in the state of a parameter of another stage."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"optimizer.state has no {key!r} of a parameter of another stage: each rank has the states of its own"
            " stages only. Look it up in a hook that runs between steps, such as on_train_batch_end."
        )


def _shard(value: Any, param: DTensor) -> Any:
    """Return a value of a parameter's state; a whole tensor, which code outside of steps has put there, is sharded."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0 or value.shape != param.shape:
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)


def _unwrap(value: Any) -> Any:
    # The callers run under no_grad, so to_local returns the shard's own memory without a node in autograd's graph.
    return value.to_local() if isinstance(value, DTensor) else value


def _wrap(key: str, value: Any, param: DTensor, before: Any) -> Any:
    """Return a value of the state of a shard of ``param``, in which DTensors replace the tensors of the shard's shape.

    Args:
        key: Name of the value in the state; nothing is replaced if it is one of :data:`_COUNTERS`.
        value: The value, which may be a container of tensors. Tensors of other shapes are the same on all ranks.
        param: The sharded parameter, whose mesh, placements and shape the result gets.
        before: The value that the state had before the step. It is returned if it is a DTensor whose local tensor is
            ``value``.
    """
    if isinstance(before, DTensor) and before.to_local() is value:
        return before
    if key in _COUNTERS:
        return value
    shape = _compat.local_of(param).shape

    def wrapped(leaf: Any) -> Any:
        return _compat.dtensor_like(leaf, param) if isinstance(leaf, Tensor) and leaf.shape == shape else leaf

    return wrapped(value) if isinstance(value, Tensor) else _compat.tree_map(wrapped, value)
