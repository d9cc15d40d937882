"""A plan made true: parameters become DTensors over ``tp``, and modules exchange what the split parts need.

Inside its own forward, a split module holds plain tensors, this rank's part of each parameter: the model's code runs as
on one device, with fewer heads or features. Anywhere else in a step, a parameter is the whole one, for penalties on
weights and for functions that are given a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist import _compat
from lightning_dist.gather_on_use import GatheredOnUse
from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.randomness import RankRng
from lightning_dist.technique import Rows, Technique
from lightning_dist.tensor_parallel import exchanges
from lightning_dist.tensor_parallel.heads import add_head_hooks
from lightning_dist.tensor_parallel.layers import linear_layer, num_heads, shared_heads, why_not_split
from lightning_dist.tensor_parallel.plan import Plan, PlanError
from lightning_dist.tensor_parallel.sequence import SequenceParallel
from lightning_dist.tensor_parallel.split_logits import SplitLogits, whole_logits
from lightning_dist.tensor_parallel.table import rows_of
from lightning_dist.units import Unit

__all__ = ["TensorParallel"]


class TensorParallel(Technique):
    """Split a model's modules over ``mesh`` as ``plan`` says.

    Args:
        root: The model.
        plan: From :func:`~lightning_dist.tensor_parallel.planner.make_plan`.
        mesh: One-dimensional, over the ranks of ``tp``.
        num_shards: Over how many ranks FSDP2 shards what a rank then has.

    Raises:
        PlanError: If a module cannot be split so, or its features do not divide by the number of ranks.
    """

    def __init__(self, root: nn.Module, plan: Plan, mesh: DeviceMesh, num_shards: int = 1) -> None:
        _compat.accept_sequential_redistribution()
        self._root = root
        self._mesh = mesh
        self._group = mesh.get_group()
        self._num_shards = num_shards
        self._placements: dict[nn.Parameter, Placement] = {}
        self._own: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {}  # what is used of a replicated one
        self._parents = {child: module for module in root.modules() for child in module.children()}
        self._grads_are_partial: set[tuple[nn.Module, str]] = set()
        self._whole: dict[tuple[nn.Module, str], nn.Parameter] = {}  # as gathered: DTensors over tp alone
        self._local: dict[nn.Parameter, nn.Parameter] = {}  # of each of those, this rank's part, in the same memory
        self._stand_ins: dict[nn.Parameter, Tensor] = {}  # of each of those that are split, what gathers it on use
        self._own_keys: dict[nn.Module, set[str]] = defaultdict(set)  # what modules have otherwise in their forward
        self._in_forward: dict[tuple[nn.Module, str], Tensor] = {}  # and what they have there
        self._elsewhere: dict[tuple[nn.Module, str], Tensor] = {}  # and what they have elsewhere
        self._put: dict[tuple[nn.Module, str], Tensor] = {}  # what use_local has put there
        self._in_use: set[nn.Module] = set()  # owners of what use_local has replaced
        self._attributes: list[tuple[nn.Module, str, Any, Any]] = []  # as it was, and as it is
        self._made_local: dict[ParameterGroup, tuple[bool, ...]] = {}  # as _requires_grad was when parts were made
        self._is_whole = False
        self._entered: tuple[Tensor, Tensor, bool] | None = None
        self._random = RankRng(torch.device(mesh.device_type), self._group.rank()) if plan.draws_random else None
        self.plan = plan
        self.sequence: SequenceParallel | None = None
        if plan.sequence is not None:
            self.sequence = SequenceParallel(root, plan.sequence, plan.entries, self._group, self._random)
        for name, entry in plan.entries.items():
            self._prepare(name, root.get_submodule(name), entry.style, entry.num_packed)
        for name, heads in plan.heads.items():
            add_head_hooks(root.get_submodule(name), heads, self._group, lambda: self._is_whole)
        for name, sizes in plan.sizes.items():
            for key, size in sizes.items():
                self._change(root.get_submodule(name), key, size)
        split_layers = set(self._own_keys)
        for name, dim in plan.parameters.items():
            owner, _, key = name.rpartition(".")
            self._place_along(name, root.get_submodule(owner), key, dim)
        for module, key in self._grads_are_partial | (set() if self.sequence is None else self.sequence.own_tokens):
            self._own_keys[module].add(key)
        for module in root.modules():
            if module in self._own_keys and module not in split_layers:
                self._add_hooks(module, lambda module, args: None, lambda module, output: None)

    def _prepare(self, name: str, module: nn.Module, style: str, num_packed: int) -> None:
        if style == "replicate":
            return
        if style == "replicated_with_grad_allreduce":
            self._grads_are_partial |= {(module, key) for key, _ in module.named_parameters(recurse=False)}
            return
        if style == "embedding_rowwise":
            if not isinstance(module, nn.Embedding):
                raise PlanError(f"plan: {name} is a {type(module).__name__}, and {style} splits nn.Embedding only.")
            if why_not := why_not_split(module):
                raise PlanError(f"plan: {name} has {why_not}, which {style} cannot honour: use replicate.")
            self._place(name, module, "weight", 0)
            if module.padding_idx is not None:  # this rank's, if it has it
                num_own = module.num_embeddings // self._group.size()
                own = module.padding_idx - self._group.rank() * num_own
                self._change(module, "padding_idx", own if 0 <= own < num_own else None)
            self._add_hooks(module, self._look_up_own, self._sum_own)
            return
        layer = linear_layer(module)
        if layer is None:
            if isinstance(module, nn.Linear):
                raise PlanError(
                    f"plan: the weight of {name} is computed (by weight_norm, spectral_norm or a parametrization), and"
                    f" {style} splits stored ones only: use replicate."
                )
            raise PlanError(f"plan: {name} is a {type(module).__name__}, and {style} splits linear layers only.")
        if style == "rowwise":
            self._place(name, module, "weight", layer.in_dim)
            self._add_hooks(module, self._without_bias, self._summed)
            return
        self._place(name, module, "weight", layer.out_dim, num_packed)
        if module.bias is not None:
            self._place(name, module, "bias", 0, num_packed)
        if layer.out_size is not None:
            self._change(module, layer.out_size, layer.out_features // self._group.size())
        self._add_hooks(module, self._enter, self._gathered if style == "colwise_gather_output" else self._apart)

    def _change(self, module: nn.Module, name: str, value: Any) -> None:
        """Let a module's attribute be of this rank's part."""
        self._attributes.append((module, name, getattr(module, name), value))
        setattr(module, name, value)

    def _add_hooks(self, module: nn.Module, before: Any, after: Any) -> None:
        def pre_hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if self._is_whole:
                return None
            self._enter_forward(module)
            given = before(module, args or tuple(kwargs.values()))  # a layer's only argument is its input
            return None if given is None else (given, {})

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._is_whole:
                return None
            result = after(module, output)
            self._leave_forward(module)
            return result

        # torch.compile would trace into them, and is no faster for it: collectives end a graph.
        disable = cast(Callable[[Any], Any], torch.compiler.disable)
        module.register_forward_pre_hook(disable(pre_hook), with_kwargs=True)
        module.register_forward_hook(disable(hook), always_call=True)

    def _place(self, name: str, module: nn.Module, key: str, dim: int, num_packed: int = 1) -> None:
        param: nn.Parameter = getattr(module, key)
        size, num_ranks = param.size(dim), self._group.size()
        heads = num_heads(self._parents.get(module), size) if num_packed == 1 else None
        shared = shared_heads(self._root, name, num_ranks) if num_packed == 1 else None
        placement: Placement
        if shared is not None:
            placement, rows, rank = Replicate(), size // shared, self._group.rank()
            self._own[module, key] = partial(_rows, dim=dim, start=rank * shared // num_ranks * rows, length=rows)
        elif size % (num_packed * num_ranks):
            packed = f" in {num_packed} parts" if num_packed > 1 else ""
            raise PlanError(f"plan: the {size} features{packed} of {name}.{key} do not divide by tp_size={num_ranks}.")
        elif heads is not None and heads % num_ranks:
            raise PlanError(
                f"plan: the {heads} heads of {name}, of {size // heads} features each, do not divide by"
                f" tp_size={num_ranks}."
            )
        elif num_packed == 1:
            placement = Shard(dim)
        elif param.ndim == 1:  # small, and FSDP2 can only shard it along the same dimension
            placement = Replicate()
            self._own[module, key] = partial(self._own_of_packed, dim=dim, num_packed=num_packed)
        elif param.size(1 - dim) % self._num_shards:
            raise PlanError(
                f"plan: {name} is packed_colwise, so that its other dimension is sharded, and the"
                f" {param.size(1 - dim)} features of that do not divide by dp_shard_size={self._num_shards}."
            )
        else:
            placement = _compat.packed_shard(dim, num_packed)
        self._own_keys[module].add(key)
        if self._placements.setdefault(param, placement) != placement:
            raise PlanError(f"plan: {name}.{key} is tied to a parameter that is split otherwise.")

    def _place_along(self, name: str, owner: nn.Module, key: str, dim: int) -> None:
        param: nn.Parameter = getattr(owner, key)
        if param.size(dim) % self._group.size():
            raise PlanError(
                f"plan: the {param.size(dim)} elements of {name} along dimension {dim} do not divide by"
                f" tp_size={self._group.size()}."
            )
        if self._placements.setdefault(param, Shard(dim)) != Shard(dim):
            raise PlanError(f"plan: {name} is tied to a parameter that is split otherwise.")
        self._own_keys[owner].add(key)

    def _own_of_packed(self, tensor: Tensor, dim: int, num_packed: int) -> Tensor:
        ranks = self._group.size()
        shape = (*tensor.shape[:dim], num_packed, ranks, tensor.size(dim) // num_packed // ranks)
        parts = tensor.reshape(*shape, *tensor.shape[dim + 1 :]).select(dim + 1, self._group.rank())
        return parts.flatten(dim, dim + 1).contiguous()

    def prepare_unit(self, unit: Unit) -> None:
        """Split the parameters of ``unit``, and let blocks compute with this rank's parts also where they run again."""
        if unit.kind == "scalars":
            return
        split = self.split(unit.params.values(), unit.owners)
        unit.params = {name: split[param] for name, param in unit.params.items()}
        for block in unit.modules if unit.kind == "block" else ():
            _enter_around(block, self.around_rerun(unit, block))

    def split(self, params: Iterable[nn.Parameter], owners: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """Replace ``params``, in the modules that own them, by DTensors over ``tp``; returns old to new.

        Args:
            params: Whole, the same on all ranks.
            owners: The modules that they hang on.
        """
        new: dict[nn.Parameter, nn.Parameter] = {}
        for param in params:
            placement = self._placements.pop(param, Replicate())
            local = param.detach()
            if isinstance(placement, Shard):
                local = local.chunk(self._group.size(), placement.dim)[self._group.rank()].clone().contiguous()
            elif num_packed := _compat.num_packed(placement):
                local = self._own_of_packed(local, cast(int, placement.dim), num_packed)  # type: ignore[attr-defined]
            dtensor = DTensor.from_local(
                local, self._mesh, [placement], run_check=False, shape=param.shape, stride=param.stride()
            )
            new[param] = nn.Parameter(dtensor, param.requires_grad)
            _compat.move_hooks(param, new[param])
        for owner in owners:
            for key, owned in list(owner._parameters.items()):
                if owned is not None and owned in new:
                    _compat.put_parameter(owner, key, new[owned])
        return new

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Let the modules of a gathered group compute with this rank's parts in their own forwards."""
        if group.unit.kind == "scalars" or (not running and self._is_local(group)):
            return
        self.use_local(group.owners, running)
        self._made_local[group] = _requires_grad(group)

    def _is_local(self, group: ParameterGroup) -> bool:
        """Return whether the owners hold what was made of the gathered parameters, with gradients as wanted now."""
        # A backward may have gathered the group again.
        params = (param for owner in group.owners for param in owner._parameters.values())
        is_replaced = any(isinstance(param, DTensor) for param in params)
        return not is_replaced and self._made_local.get(group) == _requires_grad(group)

    def on_free(self, group: ParameterGroup) -> None:
        """Let the modules of a group hold whole parameters again."""
        self._use_whole(group.owners)

    def use_local(self, owners: Iterable[nn.Module], running: Collection[nn.Module] = ()) -> None:
        """Let ``owners``, whose parameters are gathered, compute with this rank's parts in their own forwards.

        Args:
            owners: Modules that hold parameters.
            running: Those of them whose forward has begun.
        """
        if self._is_whole:
            return
        holders: list[tuple[nn.Module, str, nn.Parameter]] = []
        for owner in owners:
            self._check_replaced(owner)
            self._in_use.add(owner)
            for key, param in owner._parameters.items():
                if isinstance(param, DTensor):
                    self._whole[owner, key] = cast(nn.Parameter, param)
                if (owner, key) in self._whole and self.is_form_of_parameter(owner, key, param):
                    holders.append((owner, key, self._whole[owner, key]))
        # With gradients in any case: what is called without them may be called with them next.
        with torch.inference_mode(False), torch.enable_grad():
            parts: dict[int, Tensor] = {id(whole): self._local_of(whole) for _, _, whole in holders}
            partial_grads = {id(whole) for owner, key, whole in holders if self._has_partial_grad(owner, key)}
            partial_grads &= {key for key, part in parts.items() if part.requires_grad}
            if partial_grads:
                ids = [key for key in parts if key in partial_grads]
                parts.update(zip(ids, exchanges.copy_all_to([parts[key] for key in ids], self._group), strict=True))
            for owner, key, whole in holders:
                own = self._own.get((owner, key))
                part = parts[id(whole)] if own is None else own(parts[id(whole)])
                if key in self._own_keys.get(owner, ()):
                    self._in_forward[owner, key] = part
                    self._elsewhere[owner, key] = self._whole_on_use(whole)
                    part = part if owner in running else self._elsewhere[owner, key]
                elif not isinstance(cast(DTensor, whole).placements[0], Replicate):
                    part = self._whole_on_use(whole)  # it is tied, and the step that was seen did not use it here
                self._put[owner, key] = part
                _compat.put_parameter(owner, key, part)

    def _swap(self, module: nn.Module, values: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Let ``module`` hold its ``values`` of what it has otherwise in its own forward than elsewhere."""
        if module in self._in_use:
            for key in self._own_keys.get(module, ()):
                if (module, key) in values:
                    _compat.put_parameter(module, key, values[module, key])

    def _enter_forward(self, module: nn.Module) -> None:
        """Let ``module`` compute with this rank's parts; gathered if it runs and its block does not."""
        self._check_replaced(module)
        if module in self._in_use:
            self._swap(module, self._in_forward)
            return
        held: dict[str, Tensor] = {}
        for key in self._own_keys[module]:
            stand_in = module._parameters.get(key)
            if isinstance(stand_in, GatheredOnUse):
                held[key] = stand_in
                part = stand_in.part("tp")
                if self._has_partial_grad(module, key):
                    part = exchanges.copy_to(part, self._group)
                own = self._own.get((module, key))
                _compat.put_parameter(module, key, part if own is None else own(part))
        module.__dict__["_tensor_parallel_held"] = held

    def _check_replaced(self, module: nn.Module) -> None:
        """See to it that a module which begins to run holds its own parameters, if ranks compute with parts of them.

        Raises:
            PlanError: If the step has put other tensors there.
        """
        for key in sorted(self._own_keys.get(module, ())):
            if self.is_form_of_parameter(module, key, module._parameters.get(key)):
                continue
            name = next(name for name, found in self._root.named_modules() if found is module)
            raise PlanError(
                f"The step has replaced {name}.{key} by a tensor of its own, as torch.func.functional_call does:"
                f" each rank computes with a part of it only. Leave the layer whole, by plan={{{name!r}:"
                " 'replicate'}, or use a strategy without tensor parallelism."
            )

    def is_form_of_parameter(self, module: nn.Module, key: str, held: Tensor | None) -> bool:
        """Return whether what ``module`` holds as ``key`` is its parameter, or what this object has put for it."""
        if held is None or isinstance(held, DTensor | GatheredOnUse):
            return True
        known = (module, key)
        if known not in self._put:
            return isinstance(held, nn.Parameter)
        return any(held is form for form in (self._put[known], self._in_forward.get(known), self._elsewhere.get(known)))

    def gradients_left(self) -> list[str]:
        """Return the names of parameters whose parts have a gradient that no backward has handed on."""
        left = {id(local) for local in self._local.values() if local.grad is not None}
        return [name for name, param in self._root.named_parameters() if id(param) in left] if left else []

    def _leave_forward(self, module: nn.Module) -> None:
        """Undo :meth:`_enter_forward`."""
        for key, held in module.__dict__.pop("_tensor_parallel_held", {}).items():
            _compat.put_parameter(module, key, held)
        self._swap(module, self._elsewhere)

    def _whole_on_use(self, whole: nn.Parameter) -> Tensor:
        """Return what has all elements of a gathered parameter, with gradients that are the same on all ranks."""
        placement = cast(DTensor, whole).placements[0]
        if isinstance(placement, Replicate):
            return self._local[whole]
        if whole not in self._stand_ins:
            self._stand_ins[whole] = GatheredOnUse(whole, _gather)
        return self._stand_ins[whole]

    def take_replaced(self, param: nn.Parameter) -> bool:
        """Write into ``param`` what replaced this rank's part of it through ``param.data``, if anything did."""
        local, memory = self._local.get(param), cast(DTensor, param.detach()).to_local()
        if local is None or local.data_ptr() == memory.data_ptr():
            return False
        _compat.overwrite(memory, local.detach())
        local.data = memory
        return True

    def _local_of(self, whole: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of a gathered parameter, a leaf of autograd's graph that hands on its gradients.

        Autograd then sees no DTensor, of which it could ask what DTensors cannot answer (its anomaly mode does).
        """
        local = self._local.get(whole)
        if local is None:
            local = nn.Parameter(cast(DTensor, whole).to_local().detach())
            local.register_post_accumulate_grad_hook(partial(_hand_on_gradient, whole))  # type: ignore[no-untyped-call]
            self._local[whole] = local
        if local.requires_grad != whole.requires_grad:
            local.requires_grad_(whole.requires_grad)
        return local

    def _has_partial_grad(self, owner: nn.Module, key: str) -> bool:
        """Whether ranks compute a replicated parameter's gradient from features, or tokens, of their own."""
        if (owner, key) in self._grads_are_partial or (owner, key) in self._own:
            return True
        return self.sequence is not None and self.sequence.sees_own_tokens(owner, key)

    def _use_whole(self, owners: Iterable[nn.Module]) -> None:
        """Undo :meth:`use_local`: from now on, ``owners`` hold whole parameters."""
        for owner in owners if not self._is_whole else ():
            self._swap(owner, self._elsewhere)
            self._in_use.discard(owner)

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Let ``block`` hold this rank's parts, and split hidden states as when its forward began, if it runs again."""
        owners = [owner for owner in self._root.modules() if owner in unit.owners]
        return partial(self._begin_forward, owners, [block])

    def _begin_forward(
        self, owners: Sequence[nn.Module], running: Collection[nn.Module]
    ) -> Callable[[], AbstractContextManager[None]]:
        activity = () if self.sequence is None else self.sequence.activity

        @contextmanager
        def entered() -> Iterator[None]:
            is_again = not self._in_use.issuperset(owners)
            with nullcontext() if self.sequence is None else self.sequence.as_it_was(activity):
                if is_again:
                    self.use_local(owners, running)
                try:
                    yield
                finally:
                    if is_again:
                        self._use_whole(owners)

        return entered

    def table_rows(self) -> Rows:
        """Return rows that tell which layers are split in which way."""
        params = [param for param in self._root.parameters() if not param.is_meta]
        split = sum(param.numel() for param in params if self.splits(param))
        return rows_of(self.plan, split / max(sum(param.numel() for param in params), 1))

    def splits(self, param: Tensor) -> bool:
        """Return whether each rank has a part of ``param``, a parameter of the model."""
        if not isinstance(param, DTensor) or "tp" not in (names := param.device_mesh.mesh_dim_names or ()):
            return False
        return not isinstance(param.placements[names.index("tp")], Replicate)

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension that FSDP2 must shard a split parameter along; None: its own choice."""
        placement = cast(DTensor, param).placements[0]
        return 1 - cast(int, placement.dim) if _compat.num_packed(placement) else None  # type: ignore[attr-defined]

    def before_step(self) -> None:
        """Forget what an error has left of the last step."""
        self._entered = None
        if self._random is not None:
            self._random.forget()
        if self.sequence is not None:
            self.sequence.forget()

    def finish_output(self, output: Any) -> Any:
        """Gather logits that are still split over the vocabulary. A collective over ``tp`` where there are any."""
        return whole_logits(output)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every rank has the whole of the gathered parameters, and may run the model alone."""
        full: dict[int, nn.Parameter] = {}
        for owner in self._root.modules():
            for key, param in owner._parameters.items():
                whole = param if isinstance(param, DTensor) else self._whole.get((owner, key))
                if isinstance(whole, DTensor):
                    self._whole[owner, key] = whole
                    if id(whole) not in full:  # a tied one stays tied
                        full[id(whole)] = nn.Parameter(whole.full_tensor(), param.requires_grad)
                    _compat.put_parameter(owner, key, full[id(whole)])
        for module, name, as_it_was, _ in self._attributes:
            setattr(module, name, as_it_was)
        self._set_whole(True)
        try:
            yield
        finally:
            self._set_whole(False)
            for module, name, _, as_it_is in self._attributes:
                setattr(module, name, as_it_is)

    def _set_whole(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        if self.sequence is not None:
            self.sequence.is_off = is_whole

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Enter a split part; layers that are given the same tensor, as query, key and value, share the exchange."""
        given = args[0]
        if self.sequence is not None and self.sequence.has_gathered(given):
            return args
        if self._entered is None or self._entered[0] is not given or self._entered[2] != torch.is_grad_enabled():
            if self.sequence is not None and self.sequence.gathers(module):
                entered = exchanges.gather_to(given, self._group, -2)
            else:
                entered = exchanges.copy_to(given, self._group)
            self._entered = given, entered, torch.is_grad_enabled()
        return self._entered[1], *args[1:]

    def _apart(self, module: nn.Module, output: Any) -> Any:
        """From here to the next ``rowwise`` layer, ranks have features of their own, and draw numbers of their own."""
        if self._random is not None and module.training and not self._tokens_are_split(module):
            self._random.enter()
        return output

    def _tokens_are_split(self, module: nn.Module) -> bool:
        return self.sequence is not None and self.sequence.is_active_in(module)

    def _gathered(self, module: nn.Module, output: Any) -> Any:
        self._entered = None
        if not isinstance(output, Tensor):
            return output
        if self.plan.splits_logits:
            return SplitLogits(output, self._group)
        return exchanges.gather(output, self._group, -1)

    def _without_bias(self, module: nn.Module, args: Any) -> None:
        """Keep the bias aside: every rank would add it."""
        bias = module._parameters.get("bias")
        module.__dict__["_tensor_parallel_bias"] = bias
        if bias is not None:
            module._parameters["bias"] = (
                None if isinstance(module, nn.Linear) else cast(nn.Parameter, torch.zeros_like(bias))
            )

    def _summed(self, module: nn.Module, output: Any) -> Any:
        self._entered = None
        bias = module.__dict__.pop("_tensor_parallel_bias", None)
        if bias is not None:
            module._parameters["bias"] = bias
        if not isinstance(output, Tensor):  # the forward has raised, or need not be run again to its end
            if self._random is not None and not self._tokens_are_split(module):
                self._random.leave()
            return output
        if self._tokens_are_split(module):
            output = exchanges.scatter_from(output, self._group, -2)
        else:
            if self._random is not None:
                self._random.leave()
            output = exchanges.sum_from(output, self._group)
        return output if bias is None else output + bias

    def _look_up_own(self, module: nn.Embedding, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return indices into this rank's part of the vocabulary; indices of other parts become its first."""
        (indices,) = args
        num_own = module.weight.size(0)
        num_all = num_own * self._group.size()
        is_index = (indices >= 0) & (indices < num_all)
        if indices.device.type != "cpu":
            torch._assert_async(is_index.all())
        elif not is_index.all():
            raise IndexError(f"Index {int(indices[~is_index][0])} is out of range: the embedding has {num_all} rows.")
        own = indices - self._group.rank() * num_own
        is_others = (own < 0) | (own >= num_own)
        module.__dict__["_is_others"] = is_others
        return (own.masked_fill(is_others, 0),)

    def _sum_own(self, module: nn.Module, output: Any) -> Any:
        is_others = module.__dict__.pop("_is_others", None)
        if is_others is None or not isinstance(output, Tensor):
            return output
        return exchanges.sum_from(output.masked_fill(is_others.unsqueeze(-1), 0.0), self._group)


def _requires_grad(group: ParameterGroup) -> tuple[bool, ...]:
    return tuple(param.requires_grad for param in group.params)


def _enter_around(block: nn.Module, begin: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
    """Enter a context around each forward of ``block``, also where the user's own code runs it again in a backward.

    Args:
        block: A block, whose forward is replaced.
        begin: See :meth:`~lightning_dist.technique.Technique.around_rerun`.
    """
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with begin()():
            return forward(*args, **kwargs)

    block.forward = run


@torch.no_grad()
def _hand_on_gradient(whole: nn.Parameter, local: Tensor) -> None:
    """Give ``whole`` the gradient that a backward has added to this rank's part of it."""
    plain, local.grad = cast(Tensor, local.grad).detach(), None
    if plain.is_sparse:  # FSDP2 reduces dense gradients only
        plain = plain.to_dense()
    dtensor = cast(DTensor, whole)
    gradient: Tensor = DTensor.from_local(
        plain, dtensor.device_mesh, dtensor.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    gradient = _compat.call_gradient_hooks(whole, gradient)
    whole.grad = gradient if whole.grad is None else whole.grad + gradient


def _gather(split: Tensor) -> Tensor:
    """Gather a parameter, or its values, over ``tp``, for all ranks to go on with alike. A collective."""
    replicated = [Replicate()]
    return cast(DTensor, split).redistribute(placements=replicated).to_local(grad_placements=replicated)


def _rows(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    return tensor.narrow(dim, start, length)
