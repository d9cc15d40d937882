"""Apply a tensor-parallel plan: make parameters DTensors over ``tp``, and add the exchanges between the split parts.

In its own forward, a split module holds this rank's parts of its parameters as plain tensors, so that the model's code
runs as on one device with fewer heads or features. Everywhere else in a step, the module's parameters are whole, for
penalties on weights and for functions that are given a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist import _compat
from lightning_dist.mesh import autograd_collectives
from lightning_dist.mesh.split_tensor import whole_values
from lightning_dist.mesh.traffic import Traffic
from lightning_dist.model.around_forward import enter_around_forward
from lightning_dist.model.randomness import RankRng
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.model.units import Unit
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.local_parts import LocalParts
from lightning_dist.parameters.on_use import GatheredOnUse
from lightning_dist.techniques.protocol import ParameterForms, ParameterRules, Rows, TokenSplits
from lightning_dist.techniques.tensor_parallel.hooked import LateHooks
from lightning_dist.techniques.tensor_parallel.placements import Placements
from lightning_dist.techniques.tensor_parallel.plan import Plan, PlanError
from lightning_dist.techniques.tensor_parallel.sequence import SequenceParallel
from lightning_dist.techniques.tensor_parallel.split_modules import SplitModules
from lightning_dist.techniques.tensor_parallel.table import rows_of

__all__ = ["TensorParallel"]


class TensorParallel(ParameterRules, ParameterForms, TokenSplits):
    """Split a model's modules over ``mesh`` as ``plan`` says.

    Args:
        root: The model with whole parameters. Its modules get hooks, and attributes such as numbers of heads are
            changed in place.
        plan: The plan by which modules are split, from
            :func:`~lightning_dist.techniques.tensor_parallel.planner.make_plan`.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        overlaps: Whether layers exchange tokens while they multiply (asynchronous tensor parallelism).

    Raises:
        PlanError: If a module cannot be split as the plan says, or its features do not divide by the number of ranks;
            or if ``overlaps`` is set, and no layer of the plan exchanges tokens.
    """

    def __init__(
        self, root: nn.Module, plan: Plan, mesh: DeviceMesh, num_shards: int = 1, overlaps: bool = False
    ) -> None:
        _compat.accept_sequential_redistribution()
        self._root = root
        self._mesh = mesh
        self._group = mesh.get_group()
        self._traffic = Traffic(self._group, lambda: root.training)  # What an evaluation sends is left out.
        self._placements = Placements(root, mesh, num_shards)
        self._parts = LocalParts()
        # In the following attributes, a pair of a module and a name identifies a parameter that the module holds.
        # _whole: The gathered parameters, which are DTensors over tp alone.
        # _own_keys: The names of the parameters that a module holds in another form in its own forward than elsewhere.
        # _in_forward, _outside_forward: Both forms of these parameters.
        # _installed: The tensors that use_local has put into modules.
        # _in_use: The modules into which use_local has put tensors.
        # _made_local: The values of _requires_grad when use_local was last called for a group.
        self._whole: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._own_keys = self._placements.split_names
        self._in_forward: dict[tuple[nn.Module, str], Tensor] = {}
        self._outside_forward: dict[tuple[nn.Module, str], Tensor] = {}
        self._installed: dict[tuple[nn.Module, str], Tensor] = {}
        self._in_use: set[nn.Module] = set()
        self._made_local: dict[ParameterGroup, tuple[bool, ...]] = {}
        self.is_whole = False
        """Whether modules hold whole parameters now, so that they run as in one process."""
        random = RankRng(torch.device(mesh.device_type), self._group.rank()) if plan.draws_random else None
        self.plan = plan
        self.sequence: SequenceParallel | None = None
        if plan.sequence is not None:
            self.sequence = SequenceParallel(root, plan.sequence, plan.entries, self._group, random)
        self._modules = SplitModules(root, plan, self._placements, self._group, self.sequence, random, self, overlaps)
        self._late_hooks = LateHooks(root, plan.with_parts)
        split_layers = set(self._own_keys)
        for name, dim in plan.parameters.items():
            owner, _, key = name.rpartition(".")
            self._placements.split_parameter(name, root.get_submodule(owner), key, dim)
        own_tokens = set() if self.sequence is None else self.sequence.own_tokens
        for module, key in self._modules.partial_gradients | own_tokens:
            self._own_keys[module].add(key)
        for module in root.modules():
            if module in self._own_keys and module not in split_layers:
                self._modules.add_hooks(module)

    def prepare_unit(self, unit: Unit) -> None:
        """Split the parameters of ``unit``, and let its blocks use this rank's parts when they are recomputed too."""
        if unit.kind in _WHOLE_UNITS:
            return
        split = self.split(unit.params.values(), unit.owners)
        unit.params = {name: split[param] for name, param in unit.params.items()}
        for block in unit.modules if unit.kind == "block" else ():
            enter_around_forward(block, self.around_rerun(unit, block))

    def split(self, params: Iterable[nn.Parameter], owners: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """Replace ``params`` by DTensors over ``tp`` in the modules that hold them.

        Args:
            params: The whole parameters, which are the same on all ranks.
            owners: The modules that hold the parameters.

        Returns:
            The new parameter for each old one.
        """
        return self._placements.split(params, owners)

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Let the modules of a gathered group compute with this rank's parts in their own forwards."""
        if group.unit.kind in _WHOLE_UNITS or (not running and self._is_local(group)):
            return
        self.use_local(group.owners, running)
        self._made_local[group] = _requires_grad(group)

    def _is_local(self, group: ParameterGroup) -> bool:
        """Return whether the owners hold this rank's parts, and these were made with the current ``requires_grad``."""
        # A backward may have gathered the group again, which puts the gathered DTensors back into the owners.
        params = (param for owner in group.owners for param in _compat.own_parameters(owner).values())
        is_replaced = any(isinstance(param, DTensor) for param in params)
        return not is_replaced and self._made_local.get(group) == _requires_grad(group)

    def on_free(self, group: ParameterGroup) -> None:
        """Let the modules of a group hold whole parameters again."""
        self._use_whole(group.owners)

    def use_local(self, owners: Iterable[nn.Module], running: Collection[nn.Module] = ()) -> None:
        """Let ``owners``, whose parameters are gathered, compute with this rank's parts in their own forwards.

        Args:
            owners: Modules that hold parameters of a gathered group.
            running: The modules among ``owners`` whose forward has begun.
        """
        if self.is_whole:
            return
        holders: list[tuple[nn.Module, str, nn.Parameter]] = []
        for owner in owners:
            self._check_replaced(owner)
            self._in_use.add(owner)
            for key, param in _compat.own_parameters(owner).items():
                if isinstance(param, DTensor):
                    self._whole[owner, key] = cast(nn.Parameter, param)
                    self._parts.follow_memory(cast(nn.Parameter, param))
                if (owner, key) in self._whole and self.is_form_of_parameter(owner, key, param):
                    holders.append((owner, key, self._whole[owner, key]))
        # The parts are made with gradients enabled, because the next call may need gradients even if this one does not.
        with torch.inference_mode(False), torch.enable_grad():
            parts: dict[int, Tensor] = {id(whole): self._parts.part_of(whole) for _, _, whole in holders}
            partial_grads = {id(whole) for owner, key, whole in holders if self._has_partial_grad(owner, key)}
            partial_grads &= {key for key, part in parts.items() if part.requires_grad}
            if partial_grads:
                ids = [key for key in parts if key in partial_grads]
                parts.update(
                    zip(ids, autograd_collectives.copy_all_to([parts[key] for key in ids], self._group), strict=True)
                )
            for owner, key, whole in holders:
                own = self._placements.slice_functions.get((owner, key))
                part = parts[id(whole)] if own is None else own(parts[id(whole)])
                if key in self._own_keys.get(owner, ()):
                    self._in_forward[owner, key] = part
                    self._outside_forward[owner, key] = self._parts.gathered_on_use(whole)
                    part = part if owner in running else self._outside_forward[owner, key]
                elif not isinstance(cast(DTensor, whole).placements[0], Replicate):
                    # The parameter is tied, and the traced step did not use it here.
                    part = self._parts.gathered_on_use(whole)
                self._installed[owner, key] = part
                _compat.put_parameter(owner, key, part)

    def _swap(self, module: nn.Module, values: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Put ``values`` into ``module`` in place of the parameters whose form is different in its own forward."""
        if module in self._in_use:
            for key in self._own_keys.get(module, ()):
                if (module, key) in values:
                    _compat.put_parameter(module, key, values[module, key])

    def enter_forward(self, module: nn.Module) -> None:
        """Let ``module`` compute with this rank's parts of its parameters.

        If the module runs outside of its unit's forward, its sharded parts are gathered, which is a collective over the
        other axes of the mesh.
        """
        self._check_replaced(module)
        self._swap(module, self._in_forward)
        held: dict[str, Tensor] = {}
        for key in sorted(self._own_keys[module]):  # All ranks reduce gradients in the same order.
            param = _compat.own_parameters(module).get(key)
            if isinstance(param, GatheredOnUse):
                held[key] = param
                part = param.part("tp")
                if self._has_partial_grad(module, key):
                    part = autograd_collectives.copy_to(part, self._group)
                own = self._placements.slice_functions.get((module, key))
                _compat.put_parameter(module, key, part if own is None else own(part))
            elif _is_scalar(param) and self._has_partial_grad(module, key):
                held[key] = param
                self._installed[module, key] = autograd_collectives.copy_to(param, self._group)
                _compat.put_parameter(module, key, self._installed[module, key])
        module.__dict__["_tensor_parallel_held"] = held

    def _check_replaced(self, module: nn.Module) -> None:
        """Check that ``module`` holds its own parameters before it runs, if each rank computes with a part of them.

        Raises:
            PlanError: If the step has put another tensor in the place of a parameter.
        """
        for key in sorted(self._own_keys.get(module, ())):
            held = _compat.own_parameters(module).get(key)
            if _is_scalar(held) or self.is_form_of_parameter(module, key, held):
                continue
            name = next(name for name, found in self._root.named_modules() if found is module)
            raise PlanError(
                f"The step has replaced {name}.{key} by a tensor of its own, as torch.func.functional_call does:"
                f" each rank computes with a part of it only. Leave the layer whole, by plan={{{name!r}:"
                " 'replicate'}, or use a strategy without tensor parallelism."
            )

    def is_form_of_parameter(self, module: nn.Module, key: str, held: Tensor | None) -> bool:
        """Return whether ``held`` is a parameter of ``module``, or a tensor that this object has put in its place.

        Args:
            module: The module that holds the parameter.
            key: The parameter's name in ``module``.
            held: The tensor that ``module`` holds under that name.
        """
        # A layer that is tied to one of another stage may have parameters that only that stage has.
        if held is None or isinstance(held, DTensor | GatheredOnUse) or is_remote(held):
            return True
        known = (module, key)
        if known not in self._installed:
            return False
        return any(
            held is form
            for form in (self._installed[known], self._in_forward.get(known), self._outside_forward.get(known))
        )

    def copies(self) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Yield, for each gathered parameter, its full name, this rank's part of it, and the parameter itself."""
        modules = {module: name for name, module in self._root.named_modules()}
        names = {whole: f"{modules[owner]}.{key}".lstrip(".") for (owner, key), whole in self._whole.items()}
        for part, whole in self._parts.copies():
            yield names[whole], part, whole

    def gradients_left(self) -> list[str]:
        """Return the names of the parameters that did not get the gradient of their part on this rank."""
        left = self._parts.gradients_left()
        return [name for name, _, whole in self.copies() if whole in left] if left else []

    def leave_forward(self, module: nn.Module) -> None:
        """Undo :meth:`enter_forward`."""
        for key, held in module.__dict__.pop("_tensor_parallel_held", {}).items():
            _compat.put_parameter(module, key, held)
        self._swap(module, self._outside_forward)

    def write_back_data(self, param: nn.Parameter) -> bool:
        """Write the new values of this rank's part into ``param``, if the step has replaced the part through ``.data``.

        Returns:
            Whether the part was replaced.
        """
        return self._parts.write_back_data(param)

    def _has_partial_grad(self, owner: nn.Module, key: str) -> bool:
        """Return whether each rank computes a parameter's gradient from its own features, heads or tokens only."""
        if (owner, key) in self._modules.partial_gradients or (owner, key) in self._placements.slice_functions:
            return True
        return self.sequence is not None and self.sequence.sees_own_tokens(owner, key)

    def _use_whole(self, owners: Iterable[nn.Module]) -> None:
        """Undo :meth:`use_local`, so that ``owners`` hold whole parameters from now on."""
        for owner in owners if not self.is_whole else ():
            for key in _compat.own_parameters(owner) if owner in self._in_use else ():
                if (owner, key) in self._whole:
                    self._parts.take_requires_grad(self._whole[owner, key])
            self._swap(owner, self._outside_forward)
            self._in_use.discard(owner)

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Return a function to call when a forward of ``block`` begins, which returns a function that makes contexts.

        A context is entered for that forward and for each recomputation of it. In the context, the block holds this
        rank's parts, and hidden states are split along the sequence as they were when the forward began.

        Args:
            unit: A unit of the kind ``block``.
            block: A module of the unit.
        """
        owners = [owner for owner in self._root.modules() if owner in unit.owners]
        return partial(self._begin_forward, owners, [block])

    def _begin_forward(
        self, owners: Sequence[nn.Module], running: Collection[nn.Module]
    ) -> Callable[[], AbstractContextManager[None]]:
        activity = () if self.sequence is None else self.sequence.activity

        @contextmanager
        def entered() -> Iterator[None]:
            is_again = not self._in_use.issuperset(owners)
            with nullcontext() if self.sequence is None else self.sequence.with_activity(activity):
                if is_again:
                    self.use_local(owners, running)
                try:
                    yield
                finally:
                    if is_again:
                        self._use_whole(owners)

        return entered

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to the ranks that it splits layers with."""
        return {"comm/tp_mib_per_step": self._traffic.take() / num_steps / 2**20}

    def table_rows(self) -> Rows:
        """Return the rows of the start-up table that show which layers are split, and how."""
        params = [param for param in self._root.parameters() if not is_remote(param)]
        split = sum(param.numel() for param in params if self.splits(param))
        return rows_of(self.plan, split / max(sum(param.numel() for param in params), 1), self._modules.num_overlapped)

    def copied_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules in ``root`` that every rank computes whole."""
        return self.plan.copied_modules(root)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks over which layers are split."""
        return self._group.size()

    def splits(self, param: Tensor) -> bool:
        """Return whether each rank of ``tp`` has only a part of ``param``, a parameter of the model."""
        if not isinstance(param, DTensor) or "tp" not in (names := param.device_mesh.mesh_dim_names or ()):
            return False
        return not isinstance(param.placements[names.index("tp")], Replicate)

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension along which FSDP2 must shard a split parameter; None leaves the choice to FSDP2."""
        placement = cast(DTensor, param).placements[0]
        return 1 - cast(int, placement.dim) if _compat.num_packed(placement) else None  # type: ignore[attr-defined]

    def splits_tokens_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is now given only this rank's tokens of hidden states that are split."""
        return self.sequence is not None and self.sequence.splits_tokens_of(module)

    def may_split_tokens_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is given only some tokens in steps whose sequences are split over ``tp``."""
        return self.sequence is not None and self.sequence.may_split_tokens_of(module)

    def before_step(self) -> None:
        """Reset the state that an error in the last step may have left behind, and look for new hooks.

        Raises:
            PlanError: If a user has put a hook on a module that sees only this rank's features.
        """
        self._modules.layers.reset()
        self._late_hooks.check()

    def finish_output(self, output: Any) -> Any:
        """Gather the logits in ``output`` that are still split along the vocabulary, and look for new hooks.

        This is a collective over ``tp`` if there are any such logits.

        Raises:
            PlanError: If the step has put a hook on a module that sees only this rank's part.
        """
        self._late_hooks.check()
        if self.sequence is not None:
            self.sequence.check_ended()
        return whole_values(output)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank all of the gathered parameters in this context, so that it may run the model alone.

        This is a collective over ``tp``.
        """
        full: dict[int, nn.Parameter] = {}
        for owner in self._root.modules():
            for key, param in _compat.own_parameters(owner).items():
                whole = param if isinstance(param, DTensor) else self._whole.get((owner, key))
                if isinstance(whole, DTensor):
                    self._whole[owner, key] = whole
                    if id(whole) not in full:  # Tied parameters stay tied.
                        full[id(whole)] = nn.Parameter(whole.full_tensor(), param.requires_grad)
                    _compat.put_parameter(owner, key, full[id(whole)])
        with self._modules.as_whole():
            self._set_whole(True)
            try:
                yield
            finally:
                self._set_whole(False)

    def _set_whole(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        if self.sequence is not None:
            self.sequence.is_disabled = is_whole


_WHOLE_UNITS = ("scalars", "experts")
"""Kinds of units whose parameters other techniques distribute."""


def _is_scalar(param: Tensor | None) -> TypeGuard[nn.Parameter]:
    """Return whether ``param`` is a parameter without dimensions, which is whole on every rank."""
    return isinstance(param, nn.Parameter) and not param.ndim


def _requires_grad(group: ParameterGroup) -> tuple[bool, ...]:
    return tuple(param.requires_grad for param in group.params)
