"""Compute MLPs, logits and the loss of a few tokens at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import ForeignHooks, tree_leaves
from lightning_dist.mesh.split_tensor import whole_values
from lightning_dist.model.reruns import Begin, StateOfForward, together
from lightning_dist.model.units import Unit
from lightning_dist.parameters.reruns import OtherParameters
from lightning_dist.techniques.protocol import Parallel, Rows, Technique, others_of, unchanged_in
from lightning_dist.techniques.tiling.plan import TilingError, TilingPlan
from lightning_dist.techniques.tiling.tiled_logits import Head, TiledLogits
from lightning_dist.techniques.tiling.tiles import TOKENS, inside_of, tiled

__all__ = ["Tiling"]


class Tiling(Technique):
    """Run the modules of a plan tile by tile.

    Args:
        mlp: Number of tokens that MLPs compute at a time; None: all.
        loss: Number of tokens for which logits and the loss are computed at a time; None: all.
        plan: The plan from :func:`~lightning_dist.techniques.tiling.planner.find_tiling_plan`.
    """

    def __init__(self, mlp: int | None, loss: int | None, plan: TilingPlan) -> None:
        self.mlp = mlp
        self.loss = loss
        self.plan = plan
        self._uses: dict[str, bool] = {}
        self._hooked: set[tuple[str, str]] = set()
        self._is_checked = False
        self._num_deferred = 0
        self._num_steps = 0

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, and the object that knows its parameters."""
        self._module, self._parallel = parallel.module, parallel

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Let the units of heads stay gathered for the whole step, because logits are computed after their forwards."""
        for unit in units:
            is_around_head = any(
                head == name or head.startswith(f"{name}.") for head in self.plan.heads for name in unit.names
            )
            if unit.kind == "large" and is_around_head:
                unit.kind = "outer"
        return units

    def prepare_unit(self, unit: Unit) -> None:
        """Replace the forwards of the MLPs in the unit's blocks."""
        if self.mlp is None or unit.kind != "block":
            return
        names = {id(self._module.get_submodule(name)) for name in self.plan.mlps}
        for block in unit.modules:
            for module in block.modules():
                if id(module) in names:
                    module.forward = tiled(
                        module, self.mlp, self._begin(module, "tiled_mlp"), self._must_mlp_be_whole(module)
                    )

    def _begin(self, module: nn.Module, argument: str) -> Begin:
        """Return the function that lets ``module`` have the same state in reruns as in their forward."""
        return together([unchanged_in(module, self._parallel, argument).begin, StateOfForward(module).begin])

    def _must_mlp_be_whole(self, module: nn.Module) -> Callable[[], bool]:
        """Return a function that looks for hooks inside of ``module``, which would be called for each tile."""
        hooks = ForeignHooks(dict(inside_of(module)))
        effect = f"{type(module).__name__}, which computes all tokens at once from now on, so that the hook sees them"
        others = others_of(module, self._parallel)
        return partial(self._must_be_whole, others, hooks, f"tiled_mlp={self.mlp}", f"in a {effect}")

    def _must_be_whole(self, others: OtherParameters, hooks: ForeignHooks, argument: str, effect: str) -> bool:
        """Return whether hooks must see all tokens, or the step computes with other tensors than the parameters."""
        return self._has_hooks(hooks, argument, effect) or others.are_there()

    def _has_hooks(self, hooks: ForeignHooks, argument: str, effect: str) -> bool:
        found = hooks.find()
        if found and (argument, found) not in self._hooked:
            self._hooked.add((argument, found))
            warnings.warn(
                f"{argument}: a hook was registered on {found} {effect}. Remove the hook to save memory.",
                stacklevel=2,
            )
        return bool(found)

    def finish(self) -> None:
        """Let heads return logits that are computed later. The hooks of the sharding run before, on plain tensors."""
        for name in self.plan.heads if self.loss is not None else ():
            head = self._module.get_submodule(name)
            effect = "whose logits are computed whole from now on, so that the hook sees them"
            others, hooks = others_of(head, self._parallel), ForeignHooks({name: head})
            must_be_whole = partial(self._must_be_whole, others, hooks, f"tiled_loss={self.loss}", effect)
            _defer(head, self.loss or 1, self._begin(head, "tiled_loss"), must_be_whole, self._on_defer)

    def _on_use(self, step: int, function: str, is_tiled: bool) -> None:
        if step != self._num_steps:
            raise TilingError(
                f"tiled_loss={self.loss}: {function} needs logits after the step that made them, whose values are"
                " computed only where the step uses them. Keep what you need of them, such as logits.argmax(-1), or"
                " return them from the step, or leave tiled_loss out."
            )
        is_new = function not in self._uses
        self._uses[function] = is_tiled
        if is_new and not is_tiled and self._module.training and torch.is_grad_enabled():
            warnings.warn(
                f"tiled_loss={self.loss}: {function} needs all logits at once, so that they are computed whole"
                " for it. Only F.cross_entropy and argmax work tile by tile.",
                stacklevel=2,
            )

    def _on_defer(self) -> Callable[[str, bool], None]:
        """Return the function to call when the logits that are deferred now are used."""
        self._num_deferred += 1
        return partial(self._on_use, self._num_steps)

    def finish_output(self, output: Any) -> Any:
        """Compute the logits that a step returns."""
        return whole_values(output) if self.plan.heads else output

    def after_step(self, backward_follows: bool) -> None:
        """Check after the first training step that the loss was computed tile by tile.

        Raises:
            TilingError: If it was not, although a head has computed logits.
        """
        self._num_steps += 1
        is_training = backward_follows or self._module.training  # A pipeline has run the backward within the step.
        if not is_training or self._is_checked or not self._num_deferred:
            return
        self._is_checked = True
        if not self._uses.get("cross_entropy"):
            others = ", ".join(self._uses) or "nothing"
            raise TilingError(
                f"tiled_loss={self.loss} has no effect: the logits of {', '.join(self.plan.heads)} were used by"
                f" {others}, and not by F.cross_entropy with the numbers of classes as targets. Leave it out."
            )

    def table_rows(self) -> Rows:
        """Return the rows of the start-up table that say what is computed tile by tile."""
        if self.mlp is not None:
            number = len(self.plan.mlps)
            yield "tiled", f"{number} MLP{'s' if number > 1 else ''} compute {self.mlp} tokens at a time"
        if self.loss is not None:
            label = "" if self.mlp is not None else "tiled"
            yield label, f"logits of {', '.join(self.plan.heads)} and their loss, {self.loss} tokens at a time"


def _defer(
    head: nn.Module,
    size: int,
    begin: Begin,
    must_be_whole: Callable[[], bool],
    on_defer: Callable[[], Callable[[str, bool], None]],
) -> None:
    """Let ``head`` return logits that are computed where they are used.

    Args:
        head: A module that computes token by token, with one tensor among its arguments.
        size: Number of tokens of a tile.
        begin: Function that lets ``head`` have the same state in the backward.
        must_be_whole: Function that returns whether a call of ``head`` must compute all logits at once: a user's hook
            sees them, or the head has other tensors than its parameters for this call only.
        on_defer: Function that is called when logits are deferred. It returns the function that
            :class:`~lightning_dist.techniques.tiling.tiled_logits.Head` calls when they are used.
    """
    forward = head.forward
    pending: list[Tensor] = []

    def placeholder(*args: Any, **kwargs: Any) -> Tensor:
        pending.clear()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(given) != 1 or given[0].ndim < 2 or given[0].size(TOKENS) <= size or must_be_whole():
            result: Tensor = forward(*args, **kwargs)
            return result
        # Hooks of the sharding, which wait for the gradient of the output, get a tensor that has one.
        hidden = given[0].view_as(given[0])
        if torch.is_grad_enabled() and not hidden.requires_grad:  # The layers before the head may be frozen.
            hidden = hidden.detach().requires_grad_()
        pending.append(hidden)
        return pending[0]

    def wrap(module: nn.Module, args: Any, output: Any) -> TiledLogits | None:
        if not pending:
            return None
        if output is not pending[0]:
            raise RuntimeError(
                f"tiled_loss={size}: a forward hook of {type(module).__name__} has replaced its result before the loss"
                " could be computed tile by tile. Leave the hook or tiled_loss out."
            )
        hidden = pending.pop()
        with torch.no_grad():
            some = forward(hidden.narrow(TOKENS, 0, 1))
        return TiledLogits(Head(hidden, forward, some.size(-1), size, begin, on_defer()), some.dtype)

    head.forward = placeholder
    head.register_forward_hook(wrap)
