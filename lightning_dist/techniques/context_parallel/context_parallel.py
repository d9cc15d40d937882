"""Run the technique of context parallelism: blocks compute on parts of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.mesh.split_tensor import whole_values
from lightning_dist.mesh.traffic import Traffic
from lightning_dist.model.around_forward import enter_around_forward
from lightning_dist.model.randomness import RankRng
from lightning_dist.model.units import Unit
from lightning_dist.techniques.context_parallel.after_blocks import gather_before, run_on_tokens
from lightning_dist.techniques.context_parallel.plan import ContextPlan
from lightning_dist.techniques.context_parallel.split_blocks import SplitBlocks
from lightning_dist.techniques.context_parallel.split_evaluation import SplitEvaluation
from lightning_dist.techniques.protocol import Parallel, Rows, Technique

__all__ = ["ContextParallel"]


class ContextParallel(Technique):
    """Let the ranks of ``group`` compute the blocks of a model on parts of the sequence of the batch that they share.

    Args:
        plan: The plan from :func:`~lightning_dist.techniques.context_parallel.planner.find_context_plan`.
        group: Process group of the ranks of ``cp``. Parameters must be averaged over it as over ranks with their own
            batches.
        device_type: Type of this rank's device.
        splits_evaluations: Whether validation, test and predict steps run on parts of the sequence as well.
    """

    def __init__(
        self, plan: ContextPlan, group: dist.ProcessGroup, device_type: str, splits_evaluations: bool = False
    ) -> None:
        self.plan = plan
        self._evaluation = SplitEvaluation(plan, group) if splits_evaluations else None
        self._group = group
        self._device = torch.device(device_type)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks over which a sequence is split."""
        return self._group.size()

    @property
    def splits_evaluations(self) -> bool:
        """Return whether validation, test and predict steps run on parts of the sequence as well."""
        return self._evaluation is not None

    def attach(self, parallel: Parallel) -> None:
        """Add hooks to the blocks that this rank has, outside of the hooks of inner techniques."""
        self._module, self._units = parallel.module, parallel.units
        module = parallel.module
        self._traffic = Traffic(self._group, lambda: module.training)  # What an evaluation sends is left out.
        present = [unit for unit in parallel.units if unit.kind == "block"]
        own = {name: block for unit in present for name, block in zip(unit.names, unit.modules, strict=True)}
        random = RankRng(self._device, self._group.rank()) if any(self.plan.draws) else None
        self._blocks = SplitBlocks(own, self.plan, self._group, random, self._evaluation)

    def prepare_unit(self, unit: Unit) -> None:
        """Replace attention while a block's forward runs, also if the user's own code recomputes it in a backward."""
        for block in unit.modules if unit.kind == "block" else ():
            enter_around_forward(block, self.around_rerun(unit, block))

    def finish(self) -> None:
        """Let norms and heads after the blocks compute on this rank's tokens."""
        after = [self._module.get_submodule(name) for name in self.plan.after]
        inside = {part for module in after for part in module.modules()}
        run_on_tokens(after)
        gather_before(
            module for unit in self._units if unit.kind != "block" and unit.has_forward for module in unit.modules
            if module not in inside
        )  # fmt: skip

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Return a function that remembers which tokens a forward has, and replaces attention in it and its reruns."""
        return lambda: self._blocks.around_forward(block)

    def before_step(self) -> None:
        """Reset the state that an error in the last step may have left behind."""
        self._blocks.forget()
        self._splits_evaluation(not self._module.training)

    def finish_output(self, output: Any) -> Any:
        """Check that each chain of blocks has run to its end, and gather the split tensors in ``output``."""
        self._blocks.check_ended()
        self._splits_evaluation(False)
        return whole_values(output) if self.plan.after or self._evaluation is not None else output

    def after_error(self) -> None:
        """Reset the state that a failed step has left behind."""
        self._blocks.forget()
        self._splits_evaluation(False)

    def _splits_evaluation(self, is_running: bool) -> None:
        if self._evaluation is not None:
            self._evaluation.is_running = is_running

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let each rank run the blocks on whole sequences in this context, because it may run the model alone."""
        was_evaluating = self._evaluation is not None and self._evaluation.is_running
        self._blocks.is_disabled = True
        self._splits_evaluation(False)
        try:
            yield
        finally:
            self._blocks.is_disabled = False
            self._splits_evaluation(was_evaluating)

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank sends in a step to the ranks that it splits the sequence with."""
        return {"comm/cp_mib_per_step": self._traffic.take() / num_steps / 2**20}

    def table_rows(self) -> Rows:
        """Return a row of the start-up table that shows how the sequence is split."""
        num_blocks = len(self.plan.blocks)
        how = {"ulysses": "heads are exchanged for tokens (Ulysses)", "all_gather": "keys and values are gathered"}
        yield (
            "sequence",
            f"{num_blocks} block{'s' if num_blocks > 1 else ''} run on 1/{self._group.size()} of the tokens; for"
            f" attention, {how[self.plan.attention]}",
        )
        if self.plan.after:
            yield "", f"{', '.join(self.plan.after)} run on them as well, and cross_entropy of their result"
        evaluated = "whole sequences on each rank" if self._evaluation is None else "parts of the sequence as well"
        yield "", f"evaluations run on {evaluated}"
