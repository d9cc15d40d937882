"""Find the modules of a model that can compute tile by tile, from one step on fake tensors.

An MLP is a module inside of a block with several layers and one tensor among its arguments, which is not around
attention, and which computes more features than its input has. A head is the layer whose output ``F.cross_entropy`` is
given. Whether a module computes token by token is tried on random inputs, unless it is a linear layer.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist.mesh.consensus import check_agreement
from lightning_dist.model.experts import find_experts, without_dispatch
from lightning_dist.model.reruns import StateOfForward
from lightning_dist.model.units import Unit
from lightning_dist.techniques.options import FirstStep
from lightning_dist.techniques.tiling.plan import TilingError, TilingPlan
from lightning_dist.techniques.tiling.tiles import TOKENS, tiled
from lightning_dist.tracing.block_trial import BlockTrial, kind_of_block
from lightning_dist.tracing.planning import OncePerKind, first_that_fits
from lightning_dist.tracing.step_graph import Dataflow, record_step, tensors_in
from lightning_dist.tracing.step_graph.dataflow import sources
from lightning_dist.tracing.users_hooks import hooked_inside, hooked_modules

__all__ = ["find_tiling_plan"]

_ATTENTION = {functional.scaled_dot_product_attention, functional.multi_head_attention_forward}


def find_tiling_plan(
    root: nn.Module,
    units: Sequence[Unit],
    mlp: int | None,
    loss: int | None,
    first: FirstStep,
    device: torch.device,
) -> TilingPlan:
    """Find the modules of ``root`` that compute tile by tile. This is a collective over all processes.

    Args:
        root: The model, whose modules are not changed yet.
        units: All units of the model.
        mlp: Number of tokens of a sequence that an MLP of a block computes at a time; None: all.
        loss: Number of tokens of a sequence for which logits and loss are computed at a time; None: all.
        first: The step to run on fake tensors.
        device: This rank's device.

    Raises:
        TilingError: If there are no such modules.
        OtherRankError: If ranks have found different plans.
    """
    if first.run is None:
        asked = _asked(mlp, "tiled_mlp") or _asked(loss, "tiled_loss")
        raise TilingError(f"{asked} needs a step to find what it applies to: {first.why_not}.")
    blocks = {name for unit in units if unit.kind == "block" for name in unit.names}
    with without_dispatch(root):
        flow, why_not = record_step(lambda: _Flow(frozenset(blocks), root, lambda *_: True), root, first.run, device)
    finder = _Finder(root, flow, device, why_not)
    plan = TilingPlan(() if mlp is None else finder.mlps(mlp), () if loss is None else finder.heads(loss))
    gc.collect()  # The trials hold copies of modules, which are in reference cycles with their hooks.
    check_agreement("The plan of tiling", str(plan))
    return plan


def _asked(size: int | None, argument: str) -> str:
    return "" if size is None else f"{argument}={size}"


class _Flow(Dataflow):
    """Record the data flow of a step, the modules around attention, and the layers that cross_entropy is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.around_attention: set[str] = set()
        self.given_to_loss: list[str] = []

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        super().on_function(function, args, kwargs, out)
        if function in _ATTENTION:
            self.around_attention |= set(self.running)
        if function is functional.cross_entropy:
            # A set has another order on each rank.
            self.given_to_loss += sorted(sources(args[0] if args else kwargs["input"]))


class _Finder:
    def __init__(self, root: nn.Module, flow: _Flow, device: torch.device, why_not: str) -> None:
        self._root = root
        self._flow = flow
        self._device = device
        self._why_not = why_not
        self._calls = flow.first_calls()
        self._answers = OncePerKind[str]()
        self._hooked = hooked_modules(root, flow)

    def mlps(self, size: int) -> tuple[str, ...]:
        """Return the names of the MLPs inside of blocks.

        Raises:
            TilingError: If there are none.
        """
        found: list[str] = []
        reasons: dict[str, str] = {}
        for name in sorted(self._calls, key=lambda name: name.count(".")):  # Outer modules come first.
            is_inside = any(name.startswith(f"{block}.") for block in self._flow.blocks)
            if not is_inside or any(name.startswith(f"{other}.") for other in found):
                continue
            why_not = self._why_no_mlp(name)
            if why_not:
                reasons[name] = why_not
            else:
                found.append(name)
        if not found:
            tried = next((f" {name} {why_not}." for name, why_not in reasons.items() if why_not != _NO_MLP), "")
            if self._why_not and not tried:
                raise TilingError(
                    f"tiled_mlp={size} needs a step on fake tensors, to find the modules that compute several layers"
                    f" token by token, and it could not be run: {self._why_not}. Change the step, or leave it out."
                )
            if not self._flow.blocks:
                raise TilingError(
                    f"tiled_mlp={size}: {type(self._root).__name__} has no blocks, which are modules of one class that"
                    " a list repeats with parameters of the same shapes. Name their classes by units=[...], or leave"
                    " tiled_mlp out."
                )
            raise TilingError(
                f"tiled_mlp={size}: {type(self._root).__name__} has no module in its blocks that computes several"
                f" layers token by token.{tried} Put these layers into a module of their own, or leave tiled_mlp out."
            )
        return tuple(sorted(found))

    def _why_no_mlp(self, name: str) -> str:
        module, call = self._root.get_submodule(name), self._calls[name]
        tensors = list(tensors_in((call.args, call.kwargs)))
        if len(tensors) != 1 or not isinstance(call.output, Tensor) or name in self._flow.around_attention:
            return _NO_MLP
        (given,) = tensors
        if not given.is_floating_point() or given.ndim < 2 or given.shape[:-1] != call.output.shape[:-1]:
            return _NO_MLP
        inner = [other.output for key, other in self._calls.items() if key.startswith(f"{name}.")]
        widest = max((out.shape[-1] for out in inner if isinstance(out, Tensor) and out.ndim), default=0)
        num_layers = sum(param.ndim > 1 for param in module.parameters())
        if num_layers < 2 or widest <= given.shape[-1]:
            return _NO_MLP
        if hooked := hooked_inside(name, self._hooked, itself=False):
            return f"has a hook inside, on {hooked}, which would be called for each tile"
        if functions := self._flow.uses_of_leaks(name):
            return f"computes a value that it does not return, but the step uses ({functions}), once for each tile"
        if find_experts(module):
            return "has experts, whose router counts the tokens of a whole batch"
        return self._tried(name)

    def _tried(self, name: str) -> str:
        """Return why a module does not compute the same tile by tile; empty: it does."""
        module, call = self._root.get_submodule(name), self._calls[name]
        (given,) = tensors_in((call.args, call.kwargs))
        if given.size(TOKENS) < 2:
            return "was given a single token"
        if self._flow.runs_again(name):
            return "runs more than once in a step"

        def why_not() -> str:
            trial = BlockTrial(module, call, self._device)
            if trial.error:
                return f"could not be tried: {trial.error}"

            def attempt(size: int) -> tuple[int, str]:
                copied = trial.copy_of_block()
                copied.forward = tiled(copied, size, StateOfForward(copied).begin)
                return size, trial.compare(copied, dict(copied.named_parameters()))

            return first_that_fits([-(-given.size(TOKENS) // 2)], attempt)[1]

        return self._answers.of(kind_of_block(module, name, call, ()), why_not)

    def heads(self, size: int) -> tuple[str, ...]:
        """Return the names of the modules that compute logits.

        Raises:
            TilingError: If there are none.
        """
        found: list[str] = []
        reasons: list[str] = []
        for name in sorted(set(map(self._last_layer, self._flow.given_to_loss))):
            call = self._calls.get(name)
            if call is None or self._is_in_block(name):
                continue
            tensors = list(tensors_in((call.args, call.kwargs)))
            if len(tensors) != 1 or tensors[0].ndim < 2 or tensors[0].shape[:-1] != call.output.shape[:-1]:
                reasons.append(f"{name} does not compute token by token")
                continue
            head = self._root.get_submodule(name)
            why_not = "" if type(head) is nn.Linear else self._tried(name)
            if name in self._hooked:
                why_not = "has a hook, which needs all logits"
            if why_not:
                reasons.append(f"{name} {why_not}")
            else:
                found.append(name)
        if not found:
            why = f": a step could not be run on fake tensors: {self._why_not}" if self._why_not else (
                f": {'; '.join(reasons)}." if reasons else ": F.cross_entropy is not given the output of a layer."
            )  # fmt: skip
            raise TilingError(
                f"tiled_loss={size} computes the logits and F.cross_entropy of some tokens at a time, and no layer of"
                f" {type(self._root).__name__} was found that computes logits for it{why} Leave tiled_loss out."
            )
        return tuple(found)

    def _last_layer(self, name: str) -> str:
        """Return the layer that has run last inside of the module ``name``, outside of blocks; else ``name``."""
        inner = [call.name for call in self._flow.calls if call.name.startswith(f"{name}.")]
        layers = [inside for inside in inner if inside in self._flow.called and not self._is_in_block(inside)]
        return layers[-1] if layers else name

    def _is_in_block(self, name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in self._flow.blocks)


_NO_MLP = "is no MLP"
