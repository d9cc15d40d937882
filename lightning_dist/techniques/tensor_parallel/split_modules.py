"""Prepare the modules of a plan: say which part of their parameters a rank has, and exchange what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist._compat import own_parameters
from lightning_dist.model.configurations import with_attribute
from lightning_dist.model.layers import CONVOLUTIONS, convolution, linear_layer
from lightning_dist.model.randomness import RankRng
from lightning_dist.techniques.tensor_parallel.attention_heads import attend, parameters_of_heads, why_whole
from lightning_dist.techniques.tensor_parallel.heads import add_head_hooks
from lightning_dist.techniques.tensor_parallel.layers import unsupported_options
from lightning_dist.techniques.tensor_parallel.own_width import read_own_width
from lightning_dist.techniques.tensor_parallel.placements import Placements
from lightning_dist.techniques.tensor_parallel.plan import Plan, PlanError
from lightning_dist.techniques.tensor_parallel.sequence import SequenceParallel
from lightning_dist.techniques.tensor_parallel.split_layers import AfterForward, BeforeForward, SplitLayers

__all__ = ["FormsInForward", "SplitModules"]


class FormsInForward(Protocol):
    """Put this rank's parts of parameters into modules for the time of their forwards."""

    is_whole: bool
    """Whether modules hold whole parameters now, so that they run as in one process."""

    def enter_forward(self, module: nn.Module) -> None:
        """Let ``module`` hold this rank's parts of its parameters."""

    def leave_forward(self, module: nn.Module) -> None:
        """Undo :meth:`enter_forward`."""


class SplitModules:
    """Prepare the modules of a model as a plan says, by hooks and changed attributes.

    Args:
        root: The model with whole parameters.
        plan: The plan of the model.
        placements: Object that is told how parameters are split.
        group: Process group of the ranks of ``tp``.
        sequence: Object that knows where hidden states are split along the sequence; None: they are not split.
        random: Object that lets ranks draw different random numbers; None: the model draws no random numbers.
        forms: Object that puts this rank's parts of parameters into modules.
        overlaps: Whether layers exchange tokens while they multiply.

    Raises:
        PlanError: If a module cannot be split as the plan says; or if ``overlaps`` is set, and no layer of the plan
            exchanges tokens.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        placements: Placements,
        group: dist.ProcessGroup,
        sequence: SequenceParallel | None,
        random: RankRng | None,
        forms: FormsInForward,
        overlaps: bool,
    ) -> None:
        self._root = root
        self._plan = plan
        self._placements = placements
        self._group = group
        self._random = random
        self._forms = forms
        self._attributes: list[tuple[nn.Module, str, Any, Any]] = []
        """The changed attributes of modules: module, name, old value and new value."""
        self.partial_gradients: set[tuple[nn.Module, str]] = set()
        """The replicated parameters of which each rank computes a summand of the gradient, by module and name."""
        self.num_overlapped = 0
        """Number of layers that exchange tokens while they multiply."""
        self.layers = SplitLayers(group, sequence, random)
        for name, entry in plan.entries.items():
            self._prepare(name, root.get_submodule(name), entry.style, entry.num_packed)
        if overlaps:
            self._overlap()
        for name, heads in plan.heads.items():
            add_head_hooks(root.get_submodule(name), heads, group, lambda: forms.is_whole)
        for name, arguments in plan.widths.items():
            read_own_width(root.get_submodule(name), arguments, group.size(), lambda: forms.is_whole)
        for name, sizes in plan.sizes.items():
            for key, size in sizes.items():
                self._change(root.get_submodule(name), key, size)

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Give the modules their original attributes in this context."""
        for module, name, as_it_was, _ in reversed(self._attributes):
            setattr(module, name, as_it_was)
        try:
            yield
        finally:
            for module, name, _, as_it_is in self._attributes:
                setattr(module, name, as_it_is)

    def _prepare(self, name: str, module: nn.Module, style: str, num_packed: int) -> None:
        if style in ("replicate", "experts"):  # Another technique distributes experts.
            return
        if style == "replicated_with_grad_allreduce":
            self.partial_gradients |= {(module, key) for key, _ in module.named_parameters(recurse=False)}
            return
        if style == "embedding_rowwise":
            if not isinstance(module, nn.Embedding):
                raise PlanError(f"plan: {name} is a {type(module).__name__}, and {style} splits nn.Embedding only.")
            if why_not := unsupported_options(module):
                raise PlanError(f"plan: {name} has {why_not}, which {style} cannot honour: use replicate.")
            self._placements.split_layer(name, module, "weight", 0)
            if module.padding_idx is not None:  # It becomes an index into this rank's rows, or None on other ranks.
                num_own = module.num_embeddings // self._group.size()
                own = module.padding_idx - self._group.rank() * num_own
                self._change(module, "padding_idx", own if 0 <= own < num_own else None)
            self.add_hooks(module, *self.layers.around(style))
            return
        if style == "attention_heads":
            self._split_heads(name, module)
            return
        layer = linear_layer(module) or convolution(module)
        if layer is None:
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and own_parameters(module).get("weight") is None:
                raise PlanError(
                    f"plan: the weight of {name} is computed (by weight_norm, spectral_norm or a parametrization), and"
                    f" {style} splits stored ones only: use replicate."
                )
            raise PlanError(
                f"plan: {name} is a {type(module).__name__}, and {style} splits linear layers and convolutions without"
                " groups only."
            )
        if style == "rowwise":
            self._placements.split_layer(name, module, "weight", layer.in_dim)
        else:
            has_heads = style != "colwise_gather_output"
            self._placements.split_layer(name, module, "weight", layer.out_dim, num_packed, has_heads)
            if module.bias is not None:
                self._placements.split_layer(name, module, "bias", 0, num_packed, has_heads)
            if layer.out_size is not None:
                self._change(module, layer.out_size, layer.out_features // self._group.size())
        around = self.layers.around(style, name in self._plan.split_logits)
        if not self._plan.gathers_output_of(name):
            self.add_hooks(module, *around)
            return
        before, after = around
        forward = module.forward

        def gathered(*args: Any, **kwargs: Any) -> Any:
            given, others = _input_first(args, kwargs)
            return after(module, forward(*before(module, given), **others))

        self._replace_forward(module, gathered, [module])

    def _split_heads(self, name: str, module: nn.Module) -> None:
        """Split a module of ``nn.MultiheadAttention`` by its heads."""
        if why_not := why_whole(module, self._group.size()):
            raise PlanError(f"plan: {name} {why_not}: use replicate.")
        attention = cast(nn.MultiheadAttention, module)
        for owner, key, dim, num_packed in parameters_of_heads(attention):
            owner_name = name if owner is module else f"{name}.out_proj"
            self._placements.split_layer(owner_name, owner, key, dim, num_packed, has_heads=False)
        self._replace_forward(
            module, partial(attend, attention, self._group, self._random), [module, attention.out_proj]
        )

    def _overlap(self) -> None:
        styles = {name: entry.style for name, entry in self._plan.entries.items()}
        self.num_overlapped = sum(
            [self.layers.overlap(self._root.get_submodule(name), style) for name, style in styles.items()]
        )
        if not self.num_overlapped:
            why = (
                "hidden states are not split along the sequence"
                if self._plan.sequence is None
                else ("no layer that exchanges tokens is a plain nn.Linear")
            )
            raise PlanError(
                f"async_tensor_parallel=True: {why}, so that there is nothing to overlap. Leave it out; the table of"
                " the start says why a model is split as it is."
            )

    def _change(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module, such as a number of heads, to its value for this rank's part.

        An attribute of the module's configuration, such as ``config.num_heads``, is changed for this module only.

        Raises:
            PlanError: If the configuration cannot have another value for one module.
        """
        name, _, key = name.partition(".")
        before = getattr(module, name)
        if key:
            try:
                value = with_attribute(before, key, value)
            except TypeError as error:
                raise PlanError(f"plan: {error}") from error
        self._attributes.append((module, name, before, value))
        setattr(module, name, value)

    def add_hooks(
        self,
        module: nn.Module,
        before: BeforeForward = lambda module, args: None,
        after: AfterForward = lambda module, output: None,
    ) -> None:
        """Let a module hold this rank's parts of its parameters in its forward.

        Args:
            module: The module that holds parts of its parameters.
            before: Function to call before the forward.
            after: Function to call after the forward.
        """

        def pre_hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if self._forms.is_whole:
                return None
            self._forms.enter_forward(module)
            given, others = _input_first(args, kwargs)
            changed = before(module, given)
            return None if changed is None else (changed, others)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._forms.is_whole:
                return None
            result = after(module, output)
            self._forms.leave_forward(module)
            return result

        # torch.compile gains nothing by tracing into the hooks, since collectives break the graph.
        disable = cast(Callable[[Any], Any], torch.compiler.disable)
        module.register_forward_pre_hook(disable(pre_hook), with_kwargs=True)
        module.register_forward_hook(disable(hook), always_call=True)

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any], owners: Sequence[nn.Module]) -> None:
        """Let a module whose input and output are whole run ``forward``, so that hooks on it see nothing else.

        Args:
            module: The module whose forward is replaced on the instance.
            forward: Function that takes the arguments of the module's own forward.
            owners: The modules that hold this rank's parts of their parameters meanwhile.
        """
        of_whole = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._forms.is_whole:
                return of_whole(*args, **kwargs)
            for owner in owners:
                self._forms.enter_forward(owner)
            try:
                return forward(*args, **kwargs)
            finally:
                for owner in owners:
                    self._forms.leave_forward(owner)

        module.forward = cast(Callable[[Any], Any], torch.compiler.disable)(run)


def _input_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer with its input as the first one, and the keyword arguments besides it.

    Only transposed convolutions have arguments besides their input.
    """
    if args or not kwargs:
        return args, kwargs
    name = "input" if "input" in kwargs else next(iter(kwargs))
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
