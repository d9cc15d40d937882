"""Define the technique of expert parallelism: each rank of ``ep`` has a part of the experts of every mixture.

Outside of its own forward, a module of experts looks as in one process: its parameters have their whole shapes, and
``num_experts`` counts all of them. Inside, it holds this rank's experts as plain tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist import _compat
from lightning_dist.expert_parallel.dispatch import compute_dense, compute_routed
from lightning_dist.expert_parallel.find import ExpertPlan, Form
from lightning_dist.gather_on_use import GatheredOnUse, whole_for_step
from lightning_dist.gradient_norms import total_norm_of
from lightning_dist.local_parts import LocalParts
from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.technique import Parallel, Rows, Technique
from lightning_dist.traffic import Traffic
from lightning_dist.units import Unit

__all__ = ["ExpertParallel"]


@dataclass
class _Experts:
    """Hold the state of a module whose experts are distributed."""

    name: str
    module: nn.Module
    form: Form
    num_experts: int
    forward: Callable[..., Any]
    """The module's own forward."""
    gathered: dict[str, DTensor] = field(default_factory=dict)
    """The parameters with which the module computes, without FSDP2's sharding, by name."""
    stand_ins: dict[str, Tensor] = field(default_factory=dict)
    """What the module holds in place of ``gathered`` outside of its forward."""
    whole: dict[str, nn.Parameter] = field(default_factory=dict)
    """The parameters of all experts, if every rank holds them now; empty: it does not."""
    num_tokens: list[int] = field(default_factory=list)
    """The number of this rank's tokens that each expert has got in training steps since the last log."""


class ExpertParallel(Technique):
    """Distribute the experts of mixtures over ranks that have different parts of the batch.

    The experts of a module become a unit of their own, whose parameters are DTensors over ``ep``. The sharding
    technique shards them further over the ranks that have the same experts. The gradient of an expert is the sum over
    the tokens of all ranks, divided by the number of data-parallel ranks, as that of any other parameter.

    All ranks of ``ep`` must run the same modules of experts in the same order. A rank that raises an error elsewhere
    leaves the others in an all-to-all, until its process ends or the watchdog ends them.

    Args:
        root: The model; its modules of experts get other parameters and forwards.
        plan: The plan from :func:`~lightning_dist.expert_parallel.find.find_expert_plan`.
        sharding_mesh: The mesh that FSDP2 works on for experts.
        mesh: The mesh ``(ep,)``, or ``(ep, tp)``, over whose second axis experts are replicated.
    """

    def __init__(self, root: nn.Module, plan: ExpertPlan, sharding_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
        _compat.group_by_mesh()
        _compat.accept_sequential_redistribution()
        self.plan = plan
        self._root = root
        self._sharding_mesh = sharding_mesh
        self._mesh = mesh
        self._group = mesh.get_group("ep")
        self._placements: list[Placement] = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
        self._names = {root.get_submodule(name): name for name in plan.forms}
        self._experts: dict[nn.Module, _Experts] = {}
        # The gradient of an expert is a sum over the tokens of all ranks of ep, which FSDP2 does not average over.
        self._parts = LocalParts(divisor=self._group.size())
        self._traffic = Traffic(self._group, lambda: root.training)  # What an evaluation sends is left out.

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks over which experts are distributed."""
        return self._group.size()

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Make the experts of each module a unit of their own, before the unit that they were in."""
        selected: list[Unit] = []
        for unit in units:
            rest = unit
            for module in sorted(unit.owners & self._names.keys(), key=self._names.__getitem__):
                name, own = self._names[module], set(map(id, module.parameters(recurse=False)))
                params = {key: param for key, param in unit.params.items() if id(param) in own}
                selected.append(Unit("experts", [name], [module], params, {module}, self._sharding_mesh))
                others = {key: param for key, param in rest.params.items() if key not in params}
                rest = replace(rest, params=others, owners=rest.owners - {module})
            if rest.params:
                selected.append(rest)
        return selected

    def attach(self, parallel: Parallel) -> None:
        """Keep the object that knows whether ranks run steps together."""
        self._parallel = parallel

    def prepare_unit(self, unit: Unit) -> None:
        """Keep this rank's experts of a module, and let its forward send tokens to their experts."""
        if unit.kind != "experts":
            return
        (module,) = unit.modules
        new = {param: self._distribute(param) for param in unit.params.values()}
        unit.params = {name: new[param] for name, param in unit.params.items()}
        for key, param in list(_compat.own_parameters(module).items()):
            if param is not None:
                _compat.put_parameter(module, key, new[param])
        name, number = self._names[module], cast(int, module.num_experts)
        experts = _Experts(name, module, self.plan.forms[name], number, module.forward)
        self._experts[module] = experts
        self._wrap(experts)

    def _distribute(self, param: nn.Parameter) -> nn.Parameter:
        local = param.detach().chunk(self._group.size())[self._group.rank()].clone()
        dtensor = DTensor.from_local(
            local, self._mesh, self._placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        distributed = nn.Parameter(dtensor, param.requires_grad)
        _compat.move_hooks(param, distributed)
        return distributed

    def _wrap(self, experts: _Experts) -> None:
        names = list(inspect.signature(experts.forward).parameters)

        # torch.compile gains nothing by tracing into the exchanges, since collectives break the graph.
        @cast(Callable[[Any], Any], torch.compiler.disable)
        @wraps(experts.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
            return self._run(experts, given)

        experts.module.forward = forward

    def _run(self, experts: _Experts, given: Sequence[Tensor]) -> Tensor:
        """Run the forward of a module of experts. This is a collective over ``ep`` unless each rank has all experts."""
        if experts.whole:
            with self._holding(experts, experts.whole, experts.num_experts):
                return cast(Tensor, experts.forward(*given))
        hidden = given[0]
        if hidden.ndim != 2:
            raise ValueError(
                f"{experts.name} was given tokens of shape {tuple(hidden.shape)}: experts that are distributed over"
                " ep_size ranks take tokens of shape (tokens, features). Flatten them before, or use ep_size=1."
            )
        own = self._own_parts(experts)
        number = experts.num_experts // self._group.size()

        def compute(*args: Tensor) -> Tensor:
            with self._holding(experts, own, number):
                return cast(Tensor, experts.forward(*args))

        params = list(own.values())
        # Context parallelism takes a torch.arange of its number of tokens for their positions, but here are others.
        with torch.DisableTorchFunction():
            if experts.form == "dense":
                routed = compute_dense(hidden, compute, params, experts.num_experts, self._group)
            else:
                hidden, index, weights = given
                routed = compute_routed(hidden, index, weights, compute, params, experts.num_experts, self._group)
        if self._root.training and not _compat.is_in_backward():
            before = experts.num_tokens or [0] * experts.num_experts
            experts.num_tokens = [a + b for a, b in zip(before, routed.num_tokens, strict=True)]
        return routed.output

    def _gathered(self, experts: _Experts, key: str) -> DTensor:
        """Return a parameter of a module without FSDP2's sharding, which the module or its stand-in holds now.

        Raises:
            RuntimeError: If the step has put another tensor in the place of the parameter.
        """
        held = _compat.own_parameters(experts.module)[key]
        if held is not None and held is experts.stand_ins.get(key):
            return experts.gathered[key]
        if not isinstance(held, DTensor):
            raise RuntimeError(
                f"The step has replaced {experts.name}.{key} by a tensor of its own, as torch.func.functional_call"
                " does: each rank computes with a part of the experts only. Use ep_size=1."
            )
        return held

    def _own_parts(self, experts: _Experts) -> dict[str, Tensor]:
        """Return this rank's experts of a module as plain tensors, by the names of the parameters."""
        own: dict[str, Tensor] = {}
        # The parts are made with gradients enabled, because the next call may need gradients even if this one does not.
        with torch.inference_mode(False), torch.enable_grad():
            for key, held in _compat.own_parameters(experts.module).items():
                if held is not None:
                    gathered = cast(nn.Parameter, self._gathered(experts, key))
                    self._parts.follow_memory(gathered)
                    own[key] = self._parts.part_of(gathered)
        return own

    @contextmanager
    def _holding(self, experts: _Experts, tensors: dict[str, Any], num_experts: int) -> Iterator[None]:
        """Let a module hold ``tensors`` as its parameters in this context, and as many experts."""
        params = _compat.own_parameters(experts.module)
        before = dict(params)
        for key, tensor in tensors.items():
            _compat.put_parameter(experts.module, key, tensor)
        experts.module.num_experts = num_experts  # type: ignore[assignment]
        try:
            yield
        finally:
            experts.module.num_experts = experts.num_experts  # type: ignore[assignment]
            for key, tensor in before.items():
                _compat.put_parameter(experts.module, key, cast(Tensor, tensor))

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension along which FSDP2 shards experts: not that of the experts, if another one divides."""
        if not isinstance(param, DTensor) or param.device_mesh != self._mesh:
            return None
        size = self._sharding_mesh.size(self._sharding_mesh.ndim - 1)
        return next((dim for dim in range(1, param.ndim) if param.size(dim) % size == 0), 0)

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Let modules of experts hold stand-ins for all experts outside of their own forwards.

        The stand-ins are gathered over ``ep`` where they are used, for example in a penalty on all weights.
        """
        if group.unit.kind != "experts":
            return
        (module,) = group.unit.modules
        experts = self._experts[module]
        for key, held in _compat.own_parameters(module).items():
            if isinstance(held, DTensor) and held is not experts.gathered.get(key):
                experts.gathered[key] = held
                gather = partial(whole_for_step, data_parallel_axes=("ep",))
                experts.stand_ins[key] = GatheredOnUse(held, gather)
            if isinstance(held, DTensor):
                _compat.put_parameter(module, key, experts.stand_ins[key])

    def is_form_of_parameter(self, module: nn.Module, name: str, held: Tensor | None) -> bool:
        """Return whether ``held`` is a stand-in for the experts of ``module``."""
        experts = self._experts.get(module)
        return experts is not None and held is not None and held is experts.stand_ins.get(name)

    @contextmanager
    def while_gathered(self) -> Iterator[None]:
        """Gather all experts on every rank in this context. This is a collective over ``ep``."""
        with ExitStack() as stack:
            for experts in self._experts.values():
                stack.enter_context(self._with_all(experts))
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank all experts in this context, so that it may run the model alone.

        This is a collective over ``ep``.
        """
        with ExitStack() as stack:
            for experts in self._experts.values():
                stack.enter_context(self._with_all(experts))
                for key, param in experts.whole.items():
                    _compat.put_parameter(experts.module, key, param)
            yield

    @contextmanager
    def _with_all(self, experts: _Experts) -> Iterator[None]:
        before, experts.whole = experts.whole, experts.whole or self._all_of(experts)
        try:
            yield
        finally:
            experts.whole = before

    @torch.no_grad()
    def _all_of(self, experts: _Experts) -> dict[str, nn.Parameter]:
        """Gather the parameters of all experts of a module. This is a collective over ``ep``."""
        whole: dict[str, nn.Parameter] = {}
        with torch.inference_mode(False):
            for key, held in _compat.own_parameters(experts.module).items():
                if type(held) is nn.Parameter:  # Another technique has gathered it already.
                    whole[key] = held
                elif held is not None:
                    whole[key] = nn.Parameter(self._gathered(experts, key).full_tensor(), held.requires_grad)
        return whole

    def total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        """Return the norm of the gradients of experts and of other parameters, which are on different meshes.

        This is a collective over both meshes.
        """
        return total_norm_of(gradients, order)

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to experts, and how unequally its tokens use them.

        The latter is the largest number of this rank's tokens that an expert of a layer got, divided by the mean over
        the layer's experts, and averaged over layers: 1 if all experts get equally many.
        """
        counts = [experts.num_tokens for experts in self._experts.values() if sum(experts.num_tokens)]
        for experts in self._experts.values():
            experts.num_tokens = []
        loads = [max(numbers) * len(numbers) / sum(numbers) for numbers in counts]
        return {
            "comm/ep_mib_per_step": self._traffic.take() / num_steps / 2**20,
            "experts/max_over_mean": sum(loads) / max(len(loads), 1),
        }

    def table_rows(self) -> Rows:
        """Return rows of the start-up table that show which experts are distributed, and why others are not."""
        ranks, sharded = self._group.size(), self._sharding_mesh.size(self._sharding_mesh.ndim - 1)
        numbers = sorted({experts.num_experts for experts in self._experts.values()})
        held = " or ".join(f"{number // ranks} of {number}" for number in numbers)
        num_layers = len(self._experts)
        where = f", each sharded over {sharded} ranks" if sharded > 1 else ""
        yield "experts", f"{held} on each of {ranks} ranks (ep), in {num_layers} layers{where}"
        for name, reason in self.plan.left.items():
            yield "", f"{name} has all experts on each rank: {reason}"
