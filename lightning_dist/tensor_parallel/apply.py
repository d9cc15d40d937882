"""A plan made true: parameters become DTensors over ``tp``, and modules exchange what the split parts need.

Inside a forward, modules hold plain tensors, this rank's part of each parameter: the model's code runs as on one
device, with fewer heads or features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_dist.tensor_parallel import exchanges
from lightning_dist.tensor_parallel.plan import Entry, PlanError

__all__ = ["TensorParallel"]


@dataclass(frozen=True)
class _Layer:
    """Where the features of a layer are in its parameters.

    Args:
        in_dim: The weight's dimension of the input features.
        out_dim: That of the output features.
        out_size: The attribute that its forward reads the number of output features from, if it does.
    """

    in_dim: int
    out_dim: int
    out_size: str | None = None


def _layer(module: nn.Module) -> _Layer | None:
    """What ``module`` is, if it is a linear layer."""
    if isinstance(module, nn.Linear):
        return _Layer(in_dim=1, out_dim=0)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's, of GPT-2
        return _Layer(in_dim=0, out_dim=1, out_size="nf")
    return None


class TensorParallel:
    """Splits a model's modules over ``mesh`` as ``plan`` says.

    Args:
        root: The model.
        plan: From :func:`~lightning_dist.tensor_parallel.plan.resolve_plan`.
        mesh: One-dimensional, over the ranks of ``tp``.

    Raises:
        PlanError: If a module cannot be split so, or its features do not divide by the number of ranks.
    """

    def __init__(self, root: nn.Module, plan: Mapping[str, Entry], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._placements: dict[nn.Parameter, Placement] = {}
        self._parents = {child: module for module in root.modules() for child in module.children()}
        self._grads_are_partial: set[tuple[nn.Module, str]] = set()
        self._whole: dict[tuple[nn.Module, str], nn.Parameter] = {}  # as gathered: DTensors over tp alone
        self._attributes: list[tuple[nn.Module, str, Any, Any]] = []  # as it was, and as it is
        self._is_whole = False
        self.plan = dict(plan)
        for name, entry in plan.items():
            self._prepare(name, root.get_submodule(name), entry.style)

    def _prepare(self, name: str, module: nn.Module, style: str) -> None:
        if style == "replicate":
            return
        if style == "replicated_with_grad_allreduce":
            self._grads_are_partial |= {(module, key) for key, _ in module.named_parameters(recurse=False)}
            return
        if style == "embedding_rowwise":
            if not isinstance(module, nn.Embedding) or module.max_norm is not None:
                raise PlanError(f"plan: {name} is a {type(module).__name__}, and {style} splits nn.Embedding only.")
            self._place(name, module, "weight", 0)
            if module.padding_idx is not None:  # this rank's, if it has it
                num_own = module.num_embeddings // self._group.size()
                own = module.padding_idx - self._group.rank() * num_own
                self._change(module, "padding_idx", own if 0 <= own < num_own else None)
            self._add_hooks(module, _look_up_own, _sum_own)
            return
        layer = _layer(module)
        if layer is None:
            raise PlanError(f"plan: {name} is a {type(module).__name__}, and {style} splits linear layers only.")
        if style == "rowwise":
            self._place(name, module, "weight", layer.in_dim)
            self._add_hooks(module, _without_bias, _summed)
            return
        self._place(name, module, "weight", layer.out_dim)
        if module.bias is not None:
            self._place(name, module, "bias", 0)
        if layer.out_size is not None:
            self._change(module, layer.out_size, getattr(module, layer.out_size) // self._group.size())
        self._add_hooks(module, _copied, _gathered if style == "colwise_gather_output" else None)

    def _change(self, module: nn.Module, name: str, value: Any) -> None:
        """Let a module's attribute be of this rank's part."""
        self._attributes.append((module, name, getattr(module, name), value))
        setattr(module, name, value)

    def _add_hooks(self, module: nn.Module, before: Any, after: Any) -> None:
        def pre_hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if self._is_whole:
                return None
            given = before(self._group, module, args or tuple(kwargs.values()))  # a layer's only argument is its input
            return (args or tuple(kwargs.values())) if given is None else given, {}

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return None if self._is_whole else after(self._group, module, args, output)

        module.register_forward_pre_hook(pre_hook, with_kwargs=True)
        if after is not None:
            module.register_forward_hook(hook, always_call=True)

    def _place(self, name: str, module: nn.Module, key: str, dim: int) -> None:
        param: nn.Parameter = getattr(module, key)
        size, num_ranks = param.size(dim), self._group.size()
        if size % num_ranks:
            raise PlanError(f"plan: the {size} features of {name}.{key} do not divide by tp_size={num_ranks}.")
        head_dim = getattr(self._parents.get(module), "head_dim", None)
        if isinstance(head_dim, int) and size % head_dim == 0 and size // num_ranks % head_dim:
            raise PlanError(
                f"plan: the {size // head_dim} heads of {name}, of {head_dim} features each, do not divide by"
                f" tp_size={num_ranks}."
            )
        placement = Shard(dim)
        if self._placements.setdefault(param, placement) != placement:
            raise PlanError(f"plan: {name}.{key} is tied to a parameter that is split otherwise.")

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
            dtensor = DTensor.from_local(local, self._mesh, [placement], run_check=False)
            new[param] = nn.Parameter(dtensor, param.requires_grad)
        for owner in owners:
            for key, owned in owner._parameters.items():
                if owned is not None and owned in new:
                    owner._parameters[key] = new[owned]
        return new

    def use_local(self, owners: Iterable[nn.Module]) -> None:
        """Let ``owners`` hold this rank's parts of the parameters that hang on them, which are gathered."""
        parts: dict[int, Tensor] = {}
        for owner in owners if not self._is_whole else ():
            for key, param in owner._parameters.items():
                if isinstance(param, DTensor):
                    self._whole[owner, key] = param
                elif (owner, key) not in self._whole:
                    continue
                whole = cast(DTensor, self._whole[owner, key])
                if id(whole) not in parts:
                    is_partial = (owner, key) in self._grads_are_partial
                    parts[id(whole)] = whole.to_local(grad_placements=[Partial()] if is_partial else None)
                owner._parameters[key] = cast(nn.Parameter, parts[id(whole)])  # in a forward it need not be one

    def use_whole(self, owners: Iterable[nn.Module]) -> None:
        """Undo :meth:`use_local`."""
        for owner in owners if not self._is_whole else ():
            for key in owner._parameters:
                if (owner, key) in self._whole:
                    owner._parameters[key] = self._whole[owner, key]

    @contextmanager
    def switched_off(self, root: nn.Module) -> Iterator[None]:
        """Inside, every rank has the whole of the gathered parameters of ``root``, and may run it alone."""
        full: dict[int, nn.Parameter] = {}
        for owner in root.modules():
            for key, param in owner._parameters.items():
                whole = param if isinstance(param, DTensor) else self._whole.get((owner, key))
                if isinstance(whole, DTensor):
                    self._whole[owner, key] = whole
                    if id(whole) not in full:  # a tied one stays tied
                        full[id(whole)] = nn.Parameter(whole.full_tensor(), param.requires_grad)
                    owner._parameters[key] = full[id(whole)]
        for module, name, as_it_was, _ in self._attributes:
            setattr(module, name, as_it_was)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for module, name, _, as_it_is in self._attributes:
                setattr(module, name, as_it_is)


def _copied(group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return exchanges.copy_to(args[0], group), *args[1:]


def _gathered(group: dist.ProcessGroup, module: nn.Module, args: Any, output: Any) -> Any:
    return exchanges.gather(output, group, -1) if isinstance(output, Tensor) else output


def _without_bias(group: dist.ProcessGroup, module: nn.Module, args: Any) -> None:
    """Keep the bias aside: every rank would add it."""
    bias = module._parameters.get("bias")
    module.__dict__["_tensor_parallel_bias"] = bias
    if bias is not None:
        module._parameters["bias"] = (
            None if isinstance(module, nn.Linear) else cast(nn.Parameter, torch.zeros_like(bias))
        )


def _summed(group: dist.ProcessGroup, module: nn.Module, args: Any, output: Any) -> Any:
    bias = module.__dict__.pop("_tensor_parallel_bias", None)
    if bias is not None:
        module._parameters["bias"] = bias
    if not isinstance(output, Tensor):  # the forward has raised
        return output
    output = exchanges.sum_from(output, group)
    return output if bias is None else output + bias


def _look_up_own(group: dist.ProcessGroup, module: nn.Embedding, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """The indices of this rank's part of the vocabulary; those of others become its first."""
    (indices,) = args
    num_own = module.weight.size(0)
    own = indices - group.rank() * num_own
    is_others = (own < 0) | (own >= num_own)
    module.__dict__["_is_others"] = is_others
    return (own.masked_fill(is_others, 0),)


def _sum_own(group: dist.ProcessGroup, module: nn.Module, args: Any, output: Any) -> Any:
    is_others = module.__dict__.pop("_is_others", None)
    if is_others is None or not isinstance(output, Tensor):
        return output
    return exchanges.sum_from(output.masked_fill(is_others.unsqueeze(-1), 0.0), group)
