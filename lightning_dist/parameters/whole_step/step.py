"""Step an optimizer on whole parameters, each on the rank that owns it.

In a step, the owner of a parameter gathers its shards and those of its gradient, lets the optimizer's own code update
the whole parameter, and scatters the result. The states of the parameter stay with the owner, so that they take as much
memory as they do on shards. A parameter that all ranks have whole is updated on all of them.

An optimizer whose update of a parameter depends on others runs on one rank, which gathers all parameters. If it
evaluates the loss several times in a step, as LBFGS does, the other ranks take part in each evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_dist._compat import (
    backend_of,
    default_group,
    local_of,
    mark_stepped,
    new_group_of,
    tree_map,
    without_step_hooks,
)
from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.accumulated_gradients import UnreducedGradient
from lightning_dist.parameters.whole_step.owners import Owners, Parts, exchange, group_of_shards
from lightning_dist.parameters.whole_step.trial import Finding, Scope

__all__ = ["WholeStep"]

_DONE, _EVALUATE, _FAILED = range(3)
"""Messages of the rank that runs the optimizer: its step has ended, it evaluates the loss, or it has failed."""


class WholeStep:
    """Replace ``optimizer.step`` by one that updates whole parameters on the ranks that own them.

    Hooks and closures see the optimizer with the parameters of the run, as before. Creating an instance is a collective
    over the ranks that together have the parameters.

    Args:
        optimizer: The optimizer, whose parameters may be sharded.
        finding: What a trial has found, the same on all ranks.
    """

    def __init__(self, optimizer: Optimizer, finding: Finding) -> None:
        self._optimizer = optimizer
        self._finding = finding
        self._nested = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        self._parts: dict[Tensor, Parts] = {}
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        self._used: list[Tensor] | None = None
        """The parameters with gradients in the last step; None: there was none."""
        self._owners: Owners | None = None
        params = self._params()
        self._group = group_of_shards(params)
        self._device = local_of(params[0]).device if params else torch.device("cpu")
        self._rank = 0
        if self._group is not None:
            self._rank = self._group.rank()
            self._owners = Owners(self._group, has_one=finding.scope is Scope.MODEL)
            self._update_parts()
            self._keep_own_states()
        self._originals = {name: getattr(optimizer, name) for name in ("step", *self._modes())}
        optimizer.step = self._replacement()  # type: ignore[method-assign]  # Schedulers need a method.
        for name in self._modes():
            setattr(optimizer, name, MethodType(wraps(self._originals[name])(self._mode(name)), optimizer))

    def _modes(self) -> list[str]:
        """Return the names of methods besides the step that change parameters, as those of schedule-free training."""
        if self._group is None:
            return []
        return [name for name in ("train", "eval") if callable(getattr(type(self._optimizer), name, None))]

    def remove(self) -> None:
        """Give the optimizer its own step back."""
        for name, original in self._originals.items():
            setattr(self._optimizer, name, original)

    def restore(self) -> None:
        """Do nothing, because a step that fails restores the optimizer itself."""

    def _params(self) -> list[Tensor]:
        """Return the optimizer's parameters of which this rank has a part."""
        params = (param for group in self._optimizer.param_groups for param in group["params"])
        return [param for param in params if not is_remote(param)]

    def _update_parts(self) -> None:
        """Choose owners for parameters that the optimizer has got since the last step. This may be a collective."""
        assert self._owners is not None
        new = [param for param in self._params() if param not in self._parts]
        if new:
            self._parts |= dict(zip(new, self._owners.of(new), strict=True))

    def _is_own(self, param: Tensor) -> bool:
        return self._group is None or self._parts[param].is_owned_by(self._rank)

    @torch.no_grad()
    def _keep_own_states(self) -> None:
        """Make the states whole that the optimizer has created with its parameters. This may be a collective."""
        for optimizer in (self._optimizer, *self._nested):
            for param in self._params():
                if param in optimizer.state:
                    whole = tree_map(_whole, optimizer.state[param])
                    del optimizer.state[param]
                    if self._is_own(param):
                        optimizer.state[param] = whole

    # The step

    def _replacement(self) -> MethodType:
        original = self._originals["step"]
        run = Optimizer.profile_hook_step(self._run)  # It calls the hooks of the optimizer's step.

        @wraps(original)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return run(optimizer, closure, **kwargs)

        return MethodType(step, self._optimizer)

    def _run(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if self._group is None:
            return self._call(kwargs, closure and _MeanLoss(closure))
        self._update_parts()
        if self._finding.uses_loss:
            return self._run_evaluating(closure and _MeanLoss(closure), kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = self._with_gradient()
        params = list(self._parts) if self._finding.scope is Scope.MODEL else with_gradient
        self._gather(params, with_gradient)
        error: BaseException | None = None
        own = [param for param in params if self._is_own(param)]
        self._agree_on_options(with_gradient)
        try:
            if own:
                with self._swapped(own):
                    self._call(kwargs, (lambda: loss) if closure is not None else None)
            else:
                mark_stepped(self._optimizer)
        except Exception as raised:
            error = raised
        self._scatter(params, error)
        return loss

    def _agree_on_options(self, with_gradient: list[Tensor]) -> None:
        """Take the options of parameter groups from ranks that have stepped them, if other parameters are used now.

        Optimizers count steps there, and groups of which a rank steps nothing are left out. This may be a collective.
        """
        if self._used is not None and [*map(id, self._used)] != [*map(id, with_gradient)]:
            own = {param for param in self._used if self._is_own(param)}
            groups = self._optimizer.param_groups
            options = [
                {key: value for key, value in group.items() if key != "params"} if own & {*group["params"]} else None
                for group in groups
            ]
            assert self._group is not None
            of_ranks = zip(*gather_objects(options, self._group), strict=True)
            for group, known in zip(groups, of_ranks, strict=True):
                group.update(next((given for given in known if given is not None), {}))
        self._used = with_gradient

    def _call(self, kwargs: dict[str, Any], closure: Callable[[], Any] | None) -> Any:
        """Call the step of the optimizer without hooks, which have been called before or will be called later."""
        arguments = {**kwargs, "closure": closure} if closure is not None else kwargs
        with without_step_hooks(self._optimizer):
            return self._originals["step"](**arguments)

    def _run_evaluating(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step on the first rank, while the other ranks take part whenever it evaluates the loss."""
        params = list(self._parts)
        self._gather(params, self._with_gradient())

        def evaluate() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self._gather(params, self._with_gradient())
            return loss

        if self._rank:
            mark_stepped(self._optimizer)
            loss, told = None, self._tell()
            while told == _EVALUATE:
                self._scatter(params)
                loss = evaluate()
                told = self._tell()
            if told == _FAILED:
                raise OtherRankError(f"{type(self._optimizer).__name__}.step failed on the rank that runs it.")
            self._scatter(params)
            return loss
        swapped = self._swapped(params)

        def evaluate_with_others() -> Any:
            nonlocal swapped
            swapped.__exit__(None, None, None)
            try:
                self._tell(_EVALUATE)
                self._scatter(params)
                return evaluate()
            finally:
                swapped = self._swapped(params)
                swapped.__enter__()

        told = _FAILED
        swapped.__enter__()
        try:
            loss = self._call(kwargs, evaluate_with_others if closure is not None else None)
            told = _DONE
        finally:
            swapped.__exit__(None, None, None)
            self._tell(told)
        self._scatter(params)
        return loss

    def _tell(self, what: int = _DONE) -> int:
        """Broadcast a message of the first rank, and return it on all ranks. This is a collective."""
        said = torch.tensor([what], device=self._device)
        dist.broadcast(said, group=self._group, group_src=0)
        return int(said.item())

    def _mode(self, name: str) -> Callable[..., Any]:
        """Return a method that runs the optimizer's method ``name`` on whole parameters. Calling it is a collective."""

        def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._update_parts()
            params = list(self._parts)
            self._gather(params, [])
            own = [param for param in params if self._is_own(param)]
            with self._swapped(own, leaves_out_groups=False):
                result = self._originals[name](*args, **kwargs)
            self._scatter(params)
            return result

        return run

    def _with_gradient(self) -> list[Tensor]:
        """Return the parameters that have a gradient on any rank. This is a collective."""
        for param in self._parts:
            if isinstance(param.grad, UnreducedGradient):
                param.grad.refuse("optimizer.step()")
        has = torch.tensor([param.grad is not None for param in self._parts], dtype=torch.int32, device=self._device)
        dist.all_reduce(has, dist.ReduceOp.MAX, self._group)
        return [param for param, used in zip(self._parts, has.tolist(), strict=True) if used]

    @torch.no_grad()
    def _gather(self, params: Sequence[Tensor], with_gradient: Sequence[Tensor]) -> None:
        """Gather ``params`` and their gradients on the owners. This is a collective."""
        assert self._group is not None
        assert self._owners is not None
        size, have = self._group.size(), set(with_gradient)
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        received: list[list[Tensor]] = [[] for _ in range(size)]
        with torch.DisableTorchFunction():  # An active mode may show whole tensors.
            for param in params:
                parts, local = self._parts[param], local_of(param.detach())
                gradient = _local_gradient(param, local) if param in have else None
                if parts.owner is None:
                    self._put(param, local, gradient)
                    continue
                pairs = [(local, param)] if gradient is None else [(local, param), (gradient, param)]
                boxes = self._owners.in_part(param)
                for tensor, _ in pairs:
                    sent[parts.owner] += [tensor[boxes[index]] for index in parts.sent[self._rank]]
                if parts.owner == self._rank:
                    wholes = [local.new_empty(param.shape) for _ in pairs]
                    self._put(param, *wholes, *[None] * (2 - len(wholes)))
                    for whole in wholes:
                        for rank, indices in enumerate(parts.sent):
                            received[rank] += [whole[parts.boxes[rank][index].in_whole] for index in indices]
            exchange(sent, received, self._device, self._group)

    @torch.no_grad()
    def _put(self, param: Tensor, whole: Tensor, gradient: Tensor | None) -> None:
        """Give the parameter that stands for ``param`` in the optimizer's code its values."""
        if param not in self._stand_ins:
            self._stand_ins[param] = nn.Parameter(whole.new_empty(0), requires_grad=False)
            marks = {name: value for name, value in vars(param).items() if not name.startswith("_")}
            vars(self._stand_ins[param]).update(marks)
        stand_in = self._stand_ins[param]
        stand_in.grad = None
        stand_in.data = whole
        if stand_in.requires_grad != param.requires_grad:
            stand_in.requires_grad_(param.requires_grad)
        stand_in.grad = gradient

    @torch.no_grad()
    def _scatter(self, params: Sequence[Tensor], error: BaseException | None = None) -> None:
        """Copy the parameters of the owners into the shards. This is a collective.

        Args:
            params: The parameters, which were gathered before.
            error: What this rank raises afterwards; the other ranks then raise an error that names it.
        """
        assert self._group is not None
        assert self._owners is not None
        size = self._group.size()
        failed = torch.tensor([error is not None], dtype=torch.uint8, device=self._device)
        others_failed = [torch.zeros_like(failed) for _ in range(size)]
        sent, received = [[failed] for _ in range(size)], [[flag] for flag in others_failed]
        with torch.DisableTorchFunction():  # An active mode may show whole tensors.
            for param in params:
                parts, local = self._parts[param], local_of(param.detach())
                if parts.owner is None:
                    if self._stand_ins[param].data_ptr() != local.data_ptr():  # The optimizer has assigned new data.
                        local.copy_(self._stand_ins[param])
                    self._put(param, local.new_empty(0), None)
                    continue
                received[parts.owner] += [local[box] for box in self._owners.in_part(param)]
                if parts.owner == self._rank:
                    whole = self._stand_ins[param].detach()
                    for rank, boxes in enumerate(parts.boxes):
                        sent[rank] += [whole[box.in_whole] for box in boxes]
            exchange(sent, received, self._device, self._group)
            for param in params:
                if self._parts[param].owner == self._rank:
                    self._put(param, self._stand_ins[param].new_empty(0), None)
        if error is not None:
            raise error
        for rank, flag in enumerate(others_failed):
            if flag.item():
                where = dist.get_global_rank(self._group, rank)
                raise OtherRankError(f"{type(self._optimizer).__name__}.step failed on rank {where}.")

    @contextmanager
    def _swapped(self, own: Sequence[Tensor], leaves_out_groups: bool = True) -> Iterator[None]:
        """Let the optimizer have whole parameters in this context, in place of those of the run.

        Args:
            own: The parameters of the run that this rank owns and has gathered; the optimizer has no others.
            leaves_out_groups: Whether parameter groups of which this rank owns nothing are left out.
        """
        optimizers = (self._optimizer, *self._nested)
        stand_ins = {param: self._stand_ins[param] for param in own}
        lists = {id(params): params for params in self._lists()}
        before = {key: list(params) for key, params in lists.items()}
        tables = {id(one.param_groups): one.param_groups for one in optimizers}
        groups = {key: list(table) for key, table in tables.items()}
        for params in lists.values():
            params[:] = [stand_ins[param] for param in params if param in stand_ins]
        for table in tables.values() if leaves_out_groups else ():
            table[:] = [group for group in table if group["params"]]
        for optimizer in optimizers:
            _rename(optimizer.state, stand_ins)
        try:
            yield
        finally:
            for optimizer in optimizers:
                _rename(optimizer.state, {stand_in: param for param, stand_in in stand_ins.items()})
            for key, table in tables.items():
                table[:] = groups[key]
            for key, params in lists.items():
                params[:] = before[key]

    def _lists(self) -> Iterator[list[Any]]:
        """Yield the lists of parameters that the optimizer's code may use."""
        ours = set(self._parts)
        for optimizer in (self._optimizer, *self._nested):
            for group in optimizer.param_groups:
                yield group["params"]
            for value in vars(optimizer).values():
                if isinstance(value, list) and value and all(isinstance(x, Tensor) and x in ours for x in value):
                    yield value

    # States and texts

    def state_to_write(self, state: dict[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return an optimizer's state with the states of all owners. This is a collective over all processes.

        Args:
            state: The state by the full names of parameters, from :func:`lightning_dist.checkpoint.state.by_name`.
            names: The full names of the parameters.

        Returns:
            The state, in which each tensor is on one rank, as a DTensor that only this rank has, and on the meta device
            on the others.
        """
        if self._group is None and not any(map(is_remote, names)):
            return state
        params = self._params() if self._group is None else self._parts
        own = {names[param] for param in params if self._is_own(param)}
        states = {name: value for name, value in state["state"].items() if name in own and value}
        options = [
            {key: value for key, value in group.items() if key != "params"} if own & set(group["params"]) else None
            for group in state["param_groups"]
        ]
        outlines = gather_objects((tree_map(_outline, states), options))
        rank = dist.get_rank()
        merged: dict[Any, Any] = {}
        for writer, (of_rank, _) in enumerate(outlines):
            for name, value in of_rank.items():
                if name not in merged:
                    merged[name] = tree_map(_written, states[name]) if writer == rank else tree_map(_on_meta, value)
        order = [name for group in state["param_groups"] for name in group["params"]]
        others = {name: value for name, value in state["state"].items() if name not in set(order)}
        groups = []
        for index, group in enumerate(state["param_groups"]):
            known = next((of_group for _, given in outlines if (of_group := given[index]) is not None), {})
            groups.append({**group, **known})
        return {**state, "state": {name: merged[name] for name in order if name in merged} | others,
                "param_groups": groups}  # fmt: skip

    def own_states(self, states: Mapping[str, Any], params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the whole states of the parameters that this rank owns, from a checkpoint. This is a collective.

        Args:
            states: The states by the full names of the parameters, the same on all ranks with the same parameters.
            params: The parameters by their full names.
        """
        result = {}
        for name in states:
            param = params.get(name)
            if param is None or param not in self._parts:
                if param is None or self._group is None:
                    result[name] = states[name]
                continue
            is_own = self._is_own(param)
            whole = tree_map(_whole if is_own else _gathered, states[name])
            if is_own:
                result[name] = whole
        return result

    def describe(self) -> str:
        """Return a text about the step for the table at the start of a run."""
        if self._group is None:
            return f"whole, as nothing is sharded; the loss is averaged over the ranks ({self._finding.reason})"
        size = self._group.size()
        if self._finding.scope is Scope.MODEL:
            where = f"whole, all on one of {size} ranks, which has all states"
        else:
            where = f"whole, each parameter on one of {size} ranks, which has its states"
        return f"{where} ({self._finding.reason}); a rank sends up to {self.bytes_per_step / 2**20:,.2f} MiB per step"

    @property
    def bytes_per_step(self) -> int:
        """Return the largest number of bytes that a rank sends to owners, and as an owner, in a step."""
        if self._group is None:
            return 0
        sums = [0] * self._group.size()
        for param, parts in self._parts.items():
            for rank in range(len(sums)) if param.requires_grad else ():
                to_owner, as_owner = parts.num_elements_moved(rank)
                sums[rank] += (2 * to_owner + as_owner) * param.element_size()
        return max(sums)


class _MeanLoss:
    """Evaluate the loss, and return its mean over all ranks, on which an optimizer may base decisions.

    Args:
        closure: Function that evaluates the loss of this rank's part of the batch, or returns None.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure

    def __call__(self) -> Any:
        """Return the mean. This is a collective over all processes."""
        loss = self._closure()
        if not isinstance(loss, Tensor) or not dist.is_initialized():
            return loss
        mean = local_of(loss.detach()).clone()
        dist.all_reduce(mean)
        return mean.div_(dist.get_world_size())


def _local_gradient(param: Tensor, local: Tensor) -> Tensor:
    if param.grad is None:  # Only other ranks have used the parameter.
        return torch.zeros_like(local)
    gradient = local_of(param.grad.detach())
    return gradient if gradient.dtype is local.dtype else gradient.to(local.dtype)


def _rename(state: Any, names: Mapping[Any, Any]) -> None:
    """Move the states of tensors to other tensors, and forget empty ones, which looking a state up may create."""
    for before, after in names.items():
        if before in state and (value := state.pop(before)):
            state[after] = value


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.clone() if whole.data_ptr() == value.to_local().data_ptr() else whole


def _gathered(value: Any) -> None:
    """Take part in gathering a tensor that another rank keeps."""
    if isinstance(value, DTensor):
        value.full_tensor()


class _Outline:
    """Hold the shape and dtype of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _outline(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Outline(value.shape, value.dtype) if value.ndim else local_of(value.detach()).cpu()


def _on_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Outline) else value


_alone: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()
"""Meshes of this rank alone by the type of their device, for each default process group that was created."""


def _written(value: Any) -> Any:
    """Return a tensor in the form in which this rank alone writes it into a checkpoint."""
    if not isinstance(value, Tensor):
        return value
    local = local_of(value.detach())
    if not local.ndim:
        return local.cpu()
    meshes = _alone.setdefault(default_group(), {})
    if local.device.type not in meshes:
        group = new_group_of([dist.get_rank()], backend_of(), "states of this rank")
        meshes[local.device.type] = DeviceMesh.from_group(group, local.device.type)
    return DTensor.from_local(local, meshes[local.device.type], [Replicate()], run_check=False)
