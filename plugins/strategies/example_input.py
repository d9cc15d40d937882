"""Run a model that is split into stages on its ``example_input_array``, for the sizes in Lightning's summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lightning_dist.parallel_module import parallelized
from lightning_dist.pipeline import Pipeline
from lightning_dist.step_graph import run_on_fakes

__all__ = ["run_example"]


def run_example(module: LightningModule, run: Callable[[], None]) -> None:
    """Call ``run``, on fake tensors if ``module`` is split into stages.

    No rank has the whole model in that case, and the summary needs only sizes.

    Args:
        module: The user's module.
        run: Function that runs the module on its ``example_input_array``.
    """
    parallel = parallelized(module)
    pipeline = None if parallel is None else parallel.get(Pipeline)
    if pipeline is None:
        run()
        return
    with pipeline.original_module.again():
        why_not = run_on_fakes(module, lambda fake: run(), module.device, _NoObserver())
    if why_not:
        rank_zero_warn(f"The model could not be run on its example_input_array for the summary: {why_not}")


class _NoObserver:
    """Ignore everything that a run on fakes reports."""

    def __init__(self) -> None:
        self.functions = BaseTorchFunctionMode()

    def on_input(self, tensor: Tensor) -> None:
        """Ignore a tensor of the batch."""

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ignore a call."""

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Ignore an output."""

    def on_end(self, result: Any) -> None:
        """Ignore the end."""
