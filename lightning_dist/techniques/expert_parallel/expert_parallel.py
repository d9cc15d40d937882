"""Define the technique of expert parallelism: each rank of ``ep`` and ``tp`` has a part of the experts of a mixture.

The ranks of ``ep`` have different tokens, which are sent to the ranks of their experts. The ranks of ``tp`` have the
same tokens: each computes its experts' share, and the shares are added up.

Outside of its own forward, a module of experts looks as in one process: its parameters have their whole shapes, and
``num_experts`` counts all of them. Inside, it holds this rank's experts as plain tensors.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist import _compat
from lightning_dist.mesh.autograd_collectives import copy_all_to
from lightning_dist.mesh.traffic import Traffic
from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_norms import total_norm_of
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.local_parts import LocalParts
from lightning_dist.parameters.on_use import GatheredOnUse, whole_for_step
from lightning_dist.techniques.expert_parallel.capacity import LeftOut, compute_within_capacity
from lightning_dist.techniques.expert_parallel.dispatch import (
    Compute,
    Routed,
    compute_dense,
    compute_routed,
    count_tokens,
)
from lightning_dist.techniques.expert_parallel.planner import ExpertPlan, Form
from lightning_dist.techniques.expert_parallel.same_tokens import (
    compute_own_dense,
    compute_own_routed,
    gather_tokens,
    split_tokens,
)
from lightning_dist.techniques.protocol import Parallel, ParameterForms, ParameterRules, Rows, TokenSplits, bound

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
    num_tokens: Tensor | None = None
    """The number of this rank's tokens that each expert has got in training steps since the last log, on the device;
    None: there was no step."""


class ExpertParallel(ParameterRules, ParameterForms):
    """Distribute the experts of mixtures over the ranks of ``ep`` and ``tp``.

    The experts of a module become a unit of their own, whose parameters are DTensors over these axes. The sharding
    technique shards them further over the ranks that have the same experts. The gradient of an expert is the sum over
    the tokens of all ranks, divided by the number of data-parallel ranks, as that of any other parameter.

    All ranks of ``ep`` must run the same modules of experts in the same order. A rank that raises an error elsewhere
    leaves the others in an all-to-all, until its process ends or the watchdog ends them.

    Args:
        root: The model; its modules of experts get other parameters and forwards.
        plan: The plan from :func:`~lightning_dist.techniques.expert_parallel.planner.find_expert_plan`.
        sharding_mesh: The mesh that FSDP2 works on for experts.
        mesh: The mesh ``(ep,)``, ``(ep, tp)`` or ``(tp,)`` over which experts are distributed.
        group: Process group of all ranks of ``mesh``.
        capacity: Largest number of tokens that a rank sends to an expert in a forward of a training step; the others
            are left out. None: all tokens are sent.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: ExpertPlan,
        sharding_mesh: DeviceMesh,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        capacity: int | None = None,
    ) -> None:
        _compat.group_by_mesh()
        _compat.accept_sequential_redistribution()
        self.plan = plan
        self.capacity = capacity
        self._left_out = None if capacity is None else LeftOut(capacity)
        self._root = root
        self._sharding_mesh = sharding_mesh
        self._mesh = mesh
        axes = cast(tuple[str, ...], mesh.mesh_dim_names)
        self._ep = mesh.get_group("ep") if "ep" in axes else None
        self._tp = mesh.get_group("tp") if "tp" in axes else None
        self._names = {root.get_submodule(name): name for name in plan.forms}
        self._experts: dict[nn.Module, _Experts] = {}
        self._params: set[nn.Parameter] = set()
        # The gradient of an expert is a sum over the tokens of all ranks of ep, which FSDP2 does not average over.
        self._parts = LocalParts(divisor=self.num_ranks)
        self._group = group
        groups = set() if self._ep is None else {self._ep, group}  # Over tp alone, tensor parallelism counts.
        self._traffic = [Traffic(each, lambda: root.training) for each in groups]  # Evaluations are left out.

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of ``ep``."""
        return 1 if self._ep is None else self._ep.size()

    def _axes(self, name: str) -> list[str]:
        """Return the axes over which the experts of the module ``name`` are distributed."""
        axes = cast(tuple[str, ...], self._mesh.mesh_dim_names)
        return [axis for axis in axes if axis == "ep" or name in self.plan.over_tp]

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
        """Keep the functions of other techniques that say whether the ranks of ``tp`` have the same tokens."""
        self._splits_tokens_of = bound(parallel.techniques, TokenSplits.splits_tokens_of)
        self._may_split_tokens_of = bound(parallel.techniques, TokenSplits.may_split_tokens_of)

    def prepare_unit(self, unit: Unit) -> None:
        """Keep this rank's experts of a module, and let its forward send tokens to their experts."""
        if unit.kind != "experts":
            return
        (module,) = unit.modules
        name, number = self._names[module], cast(int, module.num_experts)
        new = {param: self._distribute(param, self._axes(name)) for param in unit.params.values()}
        self._params.update(new.values())
        unit.params = {name: new[param] for name, param in unit.params.items()}
        for key, param in list(_compat.own_parameters(module).items()):
            if param is not None:
                _compat.put_parameter(module, key, new[param])
        experts = _Experts(name, module, self.plan.forms[name], number, module.forward)
        self._experts[module] = experts
        self._wrap(experts)

    def _distribute(self, param: nn.Parameter, axes: Sequence[str]) -> nn.Parameter:
        local = param.detach()
        for axis in axes:
            local = local.chunk(self._mesh.get_group(axis).size())[self._mesh.get_local_rank(axis)]
        names = cast(tuple[str, ...], self._mesh.mesh_dim_names)
        placements: list[Placement] = [Shard(0) if name in axes else Replicate() for name in names]
        dtensor = DTensor.from_local(
            local.clone(), self._mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        distributed = nn.Parameter(dtensor, param.requires_grad)
        _compat.move_hooks(param, distributed)
        return distributed

    def _wrap(self, experts: _Experts) -> None:
        names = list(inspect.signature(experts.forward).parameters)[: 1 if experts.form == "dense" else 3]

        # torch.compile gains nothing by tracing into the exchanges, since collectives break the graph.
        @cast(Callable[[Any], Any], torch.compiler.disable)
        @wraps(experts.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            others = [*args[len(names) :], *(value for name, value in given.items() if name not in names)]
            if any(other is not None for other in others):
                raise TypeError(
                    f"{experts.name} is called with more than {', '.join(names)}, which distributed experts are not"
                    " given: leave the others out, or use ep_size=1 and tp_size=1."
                )
            return self._run(experts, [given[name] for name in names])

        experts.module.forward = forward

    def _run(self, experts: _Experts, given: Sequence[Tensor]) -> Tensor:
        """Run the forward of a module of experts. This is a collective unless each rank has all experts."""
        if experts.whole:
            with self._holding(experts, experts.whole, experts.num_experts):
                return cast(Tensor, experts.forward(*given))
        # Context parallelism takes a torch.arange of its number of tokens for their positions, but here are others.
        with torch.DisableTorchFunction():
            shape = given[0].shape
            routed = self._compute(experts, [tensor.flatten(0, -2) for tensor in given])
        if self._root.training and not _compat.is_in_backward():
            before = experts.num_tokens
            experts.num_tokens = routed.num_tokens if before is None else before + routed.num_tokens
            if self._left_out is not None:
                self._left_out.add(routed.num_tokens)
        return routed.output.view(shape)

    def _compute(self, experts: _Experts, given: Sequence[Tensor]) -> Routed:
        """Compute the outputs of experts for the tokens of this rank, together with the other ranks."""
        if any(splits_tokens_of(experts.module) for splits_tokens_of in self._splits_tokens_of):
            return self._compute_together(experts, given, has_own_tokens=True)
        if self._ep is None or not any(may_split(experts.module) for may_split in self._may_split_tokens_of):
            return self._compute_together(experts, given, has_own_tokens=False)
        # Other ranks of ep may have another batch, of which the sequences divide by the number of ranks of tp, so that
        # each of them has its own tokens. All ranks must exchange tokens in the same way.
        groups = experts.num_experts if experts.form == "dense" else 1
        parts = split_tokens(given, groups, experts.num_experts, cast(dist.ProcessGroup, self._tp))
        routed = self._compute_together(experts, parts, has_own_tokens=True)
        return routed._replace(
            output=gather_tokens(routed.output, groups, len(given[0]), cast(dist.ProcessGroup, self._tp))
        )

    def _compute_together(self, experts: _Experts, given: Sequence[Tensor], has_own_tokens: bool) -> Routed:
        """Compute the outputs of experts for ``given``: this rank's tokens, or those that all ranks of ``tp`` have."""
        own = self._own_parts(experts)
        is_over_tp = experts.name in self.plan.over_tp
        if has_own_tokens and not is_over_tp and self._tp is not None:
            own = dict(zip(own, copy_all_to(list(own.values()), self._tp), strict=True))
        params, total = list(own.values()), experts.num_experts
        number = total // math.prod(self._mesh.get_group(axis).size() for axis in self._axes(experts.name))

        def compute(*args: Tensor) -> Tensor:
            with self._holding(experts, own, number):
                return cast(Tensor, experts.forward(*args))

        sent_over = self._group if is_over_tp and has_own_tokens else self._ep
        if is_over_tp and not has_own_tokens:
            compute = partial(self._compute_own, experts, compute, params)
        if experts.form == "dense":
            if sent_over is not None:
                return compute_dense(given[0], compute, params, total, sent_over)
            of_each = torch.full((total,), len(given[0]) // total, device=given[0].device)
            return Routed(compute(given[0]), of_each)
        hidden, index, weights = given
        if sent_over is not None and self._capacity_now is not None:
            return compute_within_capacity(
                hidden, index, weights, compute, params, total, self._capacity_now, sent_over
            )
        if sent_over is not None:
            return compute_routed(hidden, index, weights, compute, params, total, sent_over)
        return Routed(compute(hidden, index, weights), count_tokens(index, total))

    @property
    def _capacity_now(self) -> int | None:
        """Return the capacity in a training step; evaluations leave no token out."""
        return self.capacity if self._root.training else None

    def _compute_own(self, experts: _Experts, compute: Compute, params: Sequence[Tensor], *given: Tensor) -> Tensor:
        """Compute the outputs of the experts that the ranks of ``tp``, which have the same tokens, have together."""
        tp, number = cast(dist.ProcessGroup, self._tp), experts.num_experts // self.num_ranks
        if experts.form == "dense":
            return compute_own_dense(given[0], compute, number, tp)
        hidden, index, weights = given
        capacity = self._capacity_now and self._capacity_now * self.num_ranks
        return compute_own_routed(hidden, index, weights, compute, params, number, capacity, tp)

    def _gathered(self, experts: _Experts, key: str) -> DTensor:
        """Return a parameter of a module without FSDP2's sharding, which the module or its stand-in holds now.

        Raises:
            RuntimeError: If the step has put another tensor in the place of the parameter.
        """
        held = _compat.own_parameters(experts.module)[key]
        if held is not None and held is experts.stand_ins.get(key):
            return experts.gathered[key]
        if not isinstance(held, DTensor):
            advice = "Use ep_size=1" if self._tp is None else "Give these experts the style replicate in a plan"
            raise RuntimeError(
                f"The step has replaced {experts.name}.{key} by a tensor of its own, as torch.func.functional_call"
                f" does, but each rank computes with a part of the experts only. {advice}."
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
        """Return the dimension along which FSDP2 shards ``param``; None if it is not a parameter of experts.

        It is the first dimension of the features that divides by the number of shards, or else that of the experts.
        """
        if param not in self._params:
            return None
        size = self._sharding_mesh.size(self._sharding_mesh.ndim - 1)
        return next((dim for dim in range(1, param.ndim) if param.size(dim) % size == 0), 0)

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Let modules of experts hold stand-ins for all experts outside of their own forwards.

        The stand-ins are gathered where they are used, for example in a penalty on all weights.
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
        """Gather the experts that other ranks of ``ep`` have in this context. This is a collective."""
        with ExitStack() as stack:
            for experts in self._experts.values() if self._ep is not None else ():
                stack.enter_context(self._with_all(experts))
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank all experts in this context, so that it may run the model alone.

        This is a collective over ``ep`` and ``tp``.
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
        """Gather the parameters of all experts of a module. This is a collective over ``ep`` and ``tp``."""
        whole: dict[str, nn.Parameter] = {}
        with torch.inference_mode(False):
            for key, held in _compat.own_parameters(experts.module).items():
                if type(held) is nn.Parameter:  # Another technique has gathered it already.
                    whole[key] = held
                elif held is not None:
                    whole[key] = nn.Parameter(self._gathered(experts, key).full_tensor(), held.requires_grad)
        return whole

    def after_optimizer_step(self) -> None:
        """Warn when tokens are left out for the first time."""
        if self._left_out is not None:
            self._left_out.warn_once()

    def total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        """Return the norm of the gradients of experts and of other parameters, which are on different meshes.

        This is a collective over both meshes.
        """
        return total_norm_of(gradients, order)

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to experts, and how unequally its tokens use them.

        The latter is the largest number of this rank's tokens that were meant for an expert of a layer, divided by the
        mean over the layer's experts, and averaged over layers: 1 if all experts get equally many. With a capacity, the
        fraction of the tokens that were left out is returned as well.
        """
        counts = [experts.num_tokens.tolist() for experts in self._experts.values() if experts.num_tokens is not None]
        for experts in self._experts.values():
            experts.num_tokens = None
        loads = [max(numbers) * len(numbers) / sum(numbers) for numbers in counts if sum(numbers)]
        of_capacity = {} if self._left_out is None else {"experts/left_out": self._left_out.take()}
        sent = sum(traffic.take() for traffic in self._traffic) / num_steps / 2**20
        of_ep = {} if self._ep is None else {"comm/ep_mib_per_step": sent}
        return {**of_ep, **of_capacity, "experts/max_over_mean": sum(loads) / max(len(loads), 1)}

    def table_rows(self) -> Rows:
        """Return rows of the start-up table that show which experts are distributed, and why others are not."""
        sharded = self._sharding_mesh.size(self._sharding_mesh.ndim - 1)
        where = f", each sharded over {sharded} ranks" if sharded > 1 else ""
        layers: Counter[tuple[int, str]] = Counter()
        for experts in self._experts.values():
            layers[experts.num_experts, " x ".join(self._axes(experts.name))] += 1
        for (number, over), num_layers in layers.items():
            ranks = math.prod(self._mesh.get_group(axis).size() for axis in over.split(" x "))
            yield (
                "experts",
                f"{number // ranks} of {number} on each of {ranks} ranks ({over}), in {num_layers} layers{where}",
            )
        if self.capacity is not None:
            yield "", f"an expert computes at most {self.capacity} tokens of a rank in a forward of a training step"
        for name, reason in self.plan.left.items() if self._tp is None else ():  # The plan of tp has these reasons.
            yield "", f"{name} has all experts on each rank: {reason}"
