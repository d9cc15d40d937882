"""Run a model on its ``example_input_array`` for Lightning's summary, even if ranks have different layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lightning_dist.parallel_module import parallelized
from lightning_dist.tracing.step_graph import run_on_fakes

__all__ = ["run_example"]


def run_example(module: LightningModule, run: Callable[[], None]) -> None:
    """Call ``run``, on fake tensors if ``module`` has parameters that only other ranks have.

    No rank has the whole model in that case, and the summary needs only sizes.

    Args:
        module: The user's module.
        run: Function that runs the module on its ``example_input_array``.
    """
    parallel = parallelized(module)
    if parallel is None or not parallel.states.has_remote_parameters:
        run()
        return
    with parallel.original():
        why_not = run_on_fakes(module, lambda fake: run(), module.device, _NoObserver())
    if why_not:
        rank_zero_warn(f"The model could not be run on its example_input_array for the summary: {why_not}")


class _NoObserver:
    """Ignore everything that a run on fake tensors reports."""

    def __init__(self) -> None:
        self.functions = BaseTorchFunctionMode()

    def on_input(self, tensor: Tensor) -> None:
        """Ignore a tensor of the batch."""

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ignore a call."""

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Ignore an output."""

    def on_next(self, name: str) -> None:
        """Ignore an item that the step takes from an iterator."""

    def on_end(self, result: Any) -> None:
        """Ignore the end."""
