"""Choose for each optimizer whether it steps on shards or on whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer, SparseAdam

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.parameters.shard_step import ELEMENTWISE, LocalStep
from lightning_dist.parameters.sparse_gradients import SparseStep
from lightning_dist.parameters.whole_step import Finding, Scope, WholeStep, try_optimizer

__all__ = ["OptimizerStep", "OptimizerSteps", "check_optimizer_step"]

OptimizerStep = Literal["auto", "shards", "whole", "dtensors"]
"""On what optimizers step: ``"shards"``, each rank on its shards, as plain tensors; ``"whole"``, on whole parameters,
each on the rank that owns it; ``"dtensors"``, on the sharded parameters themselves; or ``"auto"``, on shards if a trial
on small tensors shows that this computes the same, and else on whole parameters."""


def check_optimizer_step(value: OptimizerStep) -> OptimizerStep:
    """Return ``value``, the argument ``optimizer_step``.

    Raises:
        ValueError: If it has none of its values.
    """
    if value not in get_args(OptimizerStep):
        raise ValueError(
            f"optimizer_step={value!r} must be 'auto' (on shards where a trial shows that this computes the same),"
            " 'shards', 'whole' or 'dtensors' (for optimizers that were written for DTensors)."
        )
    return value


class OptimizerSteps:
    """Change how the optimizers of a run step. Creating an instance is a collective over all processes.

    Args:
        optimizers: The optimizers, in the order in which ``configure_optimizers`` returned them.
        module: The module whose parameters they optimize.
        where: Tensors on which the optimizers step (see :data:`OptimizerStep`).
        layout: The sizes of the mesh's axes.
        hindrances: The settings in use with which an optimizer cannot step on whole parameters.
        sync: Method by which replicas that train on their own are synchronized; None: they average gradients.

    Raises:
        MisconfigurationException: If an optimizer has to step on whole parameters, or evaluates the loss in its step,
            and a setting or the layout prevents it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        module: nn.Module,
        where: OptimizerStep,
        layout: ParallelLayout,
        hindrances: Sequence[str],
        sync: object | None,
    ) -> None:
        self._module = module
        self._where = where
        self._layout = layout
        self._sync = sync
        self._hindrances = hindrances
        self._steps: list[LocalStep | SparseStep | WholeStep] = []
        self._rows: list[str] = []
        self._whole: dict[Optimizer, WholeStep] = {}
        try:
            for optimizer in optimizers:
                self._add(optimizer)
        except BaseException:
            self.remove()
            raise

    def _add(self, optimizer: Optimizer) -> None:
        name, layout = type(optimizer).__name__, self._layout
        is_sharded = layout.world_size > layout.pp * layout.dp_replicate
        if not any(group["params"] for group in optimizer.param_groups):
            self._steps.append(LocalStep(optimizer))
            return
        if isinstance(optimizer, SparseAdam):
            if layout.world_size > layout.dp_replicate:
                raise MisconfigurationException(
                    f"SparseAdam takes sparse gradients, and the parameters of {layout} have dense ones; use Adam, or a"
                    " strategy that shards nothing, such as data_parallel."
                )
            self._steps.append(SparseStep(optimizer, self._module))
            self._rows.append(f"{name}: on every rank, for the rows of embeddings that any rank has used")
            return
        if self._where == "shards" or (self._where == "auto" and type(optimizer) in ELEMENTWISE):
            self._steps.append(LocalStep(optimizer, is_elementwise=True))
            self._rows.append(f"{name}: {'on shards' if is_sharded else 'on every rank'}")
            return
        if self._where == "dtensors":
            self._steps.append(LocalStep(optimizer, is_elementwise=False))
            self._rows.append(f"{name}: {'on DTensors' if is_sharded else 'on every rank'}")
            return
        finding = _agreed(try_optimizer(optimizer))
        if self._where == "whole":
            finding = replace(finding, scope=max(finding.scope, Scope.PARAMETER), reason="optimizer_step='whole'")
        if finding.scope is Scope.MODEL and layout.pp > 1:
            raise MisconfigurationException(
                f"{name} with pp_size={layout.pp}: {finding.reason}, and no rank of a pipeline has all parameters. Use"
                " an optimizer that updates each parameter by itself, such as AdamW, or a strategy without stages."
            )
        if finding.uses_loss and self._sync is not None:
            raise MisconfigurationException(
                f"{name} with sync={type(self._sync).__name__}(...): {finding.reason}, and replicas that train on their"
                " own do not evaluate it together. Leave sync out, or use an optimizer whose step does not depend on"
                " the loss, such as AdamW."
            )
        is_whole = finding.scope is not Scope.ELEMENT if is_sharded else finding.uses_loss and layout.world_size > 1
        if not is_whole:
            self._steps.append(LocalStep(optimizer, is_elementwise=is_sharded))
            self._rows.append(f"{name}: {f'on shards ({finding.reason})' if is_sharded else 'on every rank'}")
            return
        if is_sharded and self._hindrances:
            raise MisconfigurationException(
                f"{name} with {self._hindrances[0]}: the optimizer has to step on whole parameters, because"
                f" {finding.reason}, and this setting needs steps on shards. Leave it out, or use an elementwise"
                " optimizer such as AdamW."
            )
        step = WholeStep(optimizer, finding)
        self._steps.append(step)
        self._whole[optimizer] = step
        self._rows.append(f"{name}: {step.describe()}")

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return the rows for the table at the start of a run."""
        return [("optimizer" if not index else "", text) for index, text in enumerate(self._rows)]

    def whole(self, optimizer: Optimizer) -> WholeStep | None:
        """Return the object that steps ``optimizer`` on whole parameters; None: it steps in another way."""
        return self._whole.get(optimizer)

    def restore(self) -> None:
        """Put the parameters back into optimizers after a step, which may have failed."""
        for step in self._steps:
            step.restore()

    def remove(self) -> None:
        """Give the optimizers their own steps back. Their states stay with the owners."""
        for step in self._steps:
            step.remove()
        self._steps = []


def _agreed(finding: Finding) -> Finding:
    """Return what the trials of all ranks have found together. This is a collective over all processes."""
    if not dist.is_initialized():
        return finding
    found = gather_objects(finding)
    widest = max(found, key=lambda one: one.scope)
    return replace(widest, uses_loss=any(one.uses_loss for one in found))
