"""Run sequence parallelism: split hidden states between layers along the sequence, so that each rank has some tokens.

This follows Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198. Norms, dropouts and residual sums are computed
on each rank's own tokens. Attention and feed-forward layers are given all tokens (an all-gather) and return some of
them (a reduce-scatter, in place of an all-reduce). Tokens lie along the second-to-last dimension. If the number of
tokens does not divide by the number of ranks, hidden states are not split in that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh import autograd_collectives
from lightning_dist.model.randomness import RankRng
from lightning_dist.techniques.tensor_parallel.async_matmul import DIM, TokensToGather
from lightning_dist.techniques.tensor_parallel.plan import Entry, PlanError, SplitSequence

__all__ = ["SequenceParallel"]


class SequenceParallel:
    """Split hidden states along the sequence as ``plan`` says, by hooks on the model's modules.

    Args:
        root: The model, to whose modules the hooks are added.
        plan: Description of where hidden states are split, with full names of modules in ``root``.
        entries: The entries of the tensor-parallel plan, by full module name.
        group: Process group of the ranks of ``tp``.
        random: Object that lets ranks draw different random numbers while tokens are split; None: the model draws no
            random numbers.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: SplitSequence,
        entries: Mapping[str, Entry],
        group: dist.ProcessGroup,
        random: RankRng | None,
    ) -> None:
        self._group = group
        self._random = random
        self._chain_of: dict[nn.Module, int] = {}
        self._chains = plan.chains
        self._is_active = [False] * len(plan.chains)
        self._layers = {root.get_submodule(name) for name in plan.layers}
        self._gathered: list[Tensor] = []
        self.is_disabled = False
        self.gathers_in_layers = False
        """Whether the first layer that uses the tokens gathers them, and not the module around it."""
        self._in_regions = in_regions = {
            root.get_submodule(name) for region in plan.regions for name in _inside(root, region)
        }
        own_tokens: set[tuple[nn.Module, str]] = set()
        for index, chain in enumerate(plan.chains):
            for name in chain:
                for inside in _inside(root, name):
                    module = root.get_submodule(inside)
                    self._chain_of[module] = index
                    entry = entries.get(inside)
                    is_split = entry is not None and entry.is_split
                    for key, _ in module.named_parameters(recurse=False):
                        is_own_bias = entry is not None and entry.style == "rowwise" and key == "bias"
                        if is_own_bias or (not is_split and module not in in_regions):
                            own_tokens.add((module, key))
            first, last = root.get_submodule(chain[0]), root.get_submodule(chain[-1])
            self._add_first_hook(first, index, plan.streams[chain[0]])
            self._add_last_hook(last, index)
            for before, name in pairwise(chain):
                self._add_use_hook(root.get_submodule(name), plan.streams[name], before)
        self.own_tokens = own_tokens
        for name, keys in plan.regions.items():
            self._add_region_hooks(root.get_submodule(name), keys)

    def _add_first_hook(self, block: nn.Module, index: int, key: int | str) -> None:
        def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.is_disabled:
                return None
            length = (args[key] if isinstance(key, int) else kwargs[key]).size(DIM)
            # An evaluation keeps no activations, and may use hidden states that the traced step did not use.
            is_evaluated = not module.training and not torch.is_grad_enabled()
            self._is_active[index] = length % self._group.size() == 0 and not is_evaluated
            if not self._is_active[index]:
                return None
            if self._random is not None and module.training:
                # If the first block was recomputed and the last one was not, leave() was never called.
                self._random.forget()
                self._random.enter()
            return _replaced(args, kwargs, key, lambda tensor: autograd_collectives.split(tensor, self._group, DIM))

        # This hook must run before the hooks that call sees_own_tokens.
        block.register_forward_pre_hook(split, with_kwargs=True, prepend=True)

    def _add_use_hook(self, block: nn.Module, key: int | str, before: str) -> None:
        """Raise in the backward if the hidden states that ``block`` is given have been used elsewhere as well.

        If they are used only once, their gradient is the tensor that the backward of ``block`` has computed, and not a
        sum in other memory.

        Args:
            block: A block of a chain other than the first.
            key: Position or keyword of the hidden states among the arguments of ``block``.
            before: The name of the block that returns the hidden states.
        """

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[key] if isinstance(key, int) else kwargs[key]
            if not self.is_active_in(module) or not hidden.requires_grad:
                return None
            computed: list[Tensor] = []
            own = hidden.view_as(hidden)
            own.register_hook(computed.append)
            hidden.register_hook(lambda gradient: check(gradient, computed))
            return _replaced(args, kwargs, key, lambda tensor: own)

        def check(gradient: Tensor, computed: list[Tensor]) -> None:
            is_only_use = bool(computed) and gradient.data_ptr() == computed[-1].data_ptr()
            computed.clear()
            if not is_only_use:
                raise PlanError(
                    f"The step uses the hidden states that {before} returns in another place than the next block, which"
                    " the step by which the plan was found did not: each rank has only some of their tokens. Use"
                    " sequence_parallel=False."
                )

        block.register_forward_pre_hook(watch, with_kwargs=True, prepend=True)

    def _add_last_hook(self, block: nn.Module, index: int) -> None:
        def gather(module: nn.Module, args: Any, output: Any) -> Any:
            if self.is_disabled or not self._is_active[index]:
                return None
            if self._random is not None:
                self._random.leave()
            self._is_active[index] = False
            if isinstance(output, Tensor):
                return autograd_collectives.gather(output, self._group, DIM)
            first, *others = output
            return autograd_collectives.gather(first, self._group, DIM), *others

        block.register_forward_hook(gather)

    def _add_region_hooks(self, region: nn.Module, keys: tuple[int | str, ...]) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.is_active_in(module):
                return None
            gathered: dict[int, Tensor] = {}

            def gather(tensor: Tensor) -> Tensor:
                if id(tensor) not in gathered:
                    is_later = self.gathers_in_layers
                    gathered[id(tensor)] = (
                        TokensToGather(tensor, self._group)
                        if is_later
                        else autograd_collectives.gather_to(tensor, self._group, DIM)
                    )
                return gathered[id(tensor)]

            for key in keys:
                args, kwargs = _replaced(args, kwargs, key, gather)
            self._gathered += gathered.values()
            return args, kwargs

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._gathered.clear()

        # torch.compile gains nothing by tracing into the hooks, since collectives break the graph.
        disable = cast(Callable[[Any], Any], torch.compiler.disable)
        region.register_forward_pre_hook(disable(enter), with_kwargs=True)
        region.register_forward_hook(disable(leave), always_call=True)

    def is_active_in(self, module: nn.Module) -> bool:
        """Return whether ``module`` is in a block whose hidden states are currently split."""
        index = self._chain_of.get(module)
        return not self.is_disabled and index is not None and self._is_active[index]

    def sees_own_tokens(self, owner: nn.Module, key: str) -> bool:
        """Return whether a parameter is now applied to this rank's tokens only, so that its gradient must be summed.

        Args:
            owner: The module that holds the parameter.
            key: Name of the parameter in ``owner``.
        """
        return (owner, key) in self.own_tokens and self.is_active_in(owner)

    def splits_tokens_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is now given only this rank's tokens."""
        return self.may_split_tokens_of(module) and self.is_active_in(module)

    def may_split_tokens_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is given only this rank's tokens whenever hidden states are split."""
        return module not in self._in_regions and module in self._chain_of

    def has_gathered(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was gathered for the running region, whose gather also sums its gradient."""
        return any(tensor is gathered for gathered in self._gathered)

    def gathers(self, layer: nn.Module) -> bool:
        """Return whether ``layer`` is now given only this rank's tokens, and must gather all of them."""
        return layer in self._layers and self.is_active_in(layer)

    def exchanges_in(self, layer: nn.Module, style: str) -> bool:
        """Return whether a layer of ``style`` gathers or scatters tokens whenever hidden states are split."""
        if style == "rowwise":
            return layer in self._chain_of
        return style in ("colwise", "packed_colwise") and (layer in self._layers or layer in self._in_regions)

    @property
    def activity(self) -> tuple[bool, ...]:
        """Return for each chain whether its hidden states are currently split."""
        return tuple(self._is_active)

    @contextmanager
    def with_activity(self, activity: tuple[bool, ...]) -> Iterator[None]:
        """Set :attr:`activity` to an earlier value in this context, in which a backward recomputes a block.

        Args:
            activity: The value of :attr:`activity` when the block ran for the first time.
        """
        now = self.activity
        self._is_active[:] = activity
        try:
            yield
        finally:
            self._is_active[:] = now

    def check_ended(self) -> None:
        """Check that every chain of blocks whose hidden states were split has run to its last block.

        Raises:
            PlanError: If a step has left a chain before its end.
        """
        for chain, is_active in zip(self._chains, self._is_active, strict=True):
            if is_active:
                raise PlanError(
                    f"The step has split hidden states along the sequence at {chain[0]}, and has not run {chain[-1]},"
                    " where they are gathered: it takes another path than the step by which the plan was found. Use"
                    " sequence_parallel=False."
                )

    def forget(self) -> None:
        """Reset the state that a failed step left behind."""
        self._gathered.clear()
        self._is_active[:] = [False] * len(self._is_active)


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, change: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(key, int):
        return (*args[:key], change(args[key]), *args[key + 1 :]), kwargs
    return args, {**kwargs, key: change(kwargs[key])}


def _inside(root: nn.Module, name: str) -> list[str]:
    """Return the full names of the module ``name`` and of all its submodules."""
    return [".".join(filter(None, (name, inner))) for inner, _ in root.get_submodule(name).named_modules()]
