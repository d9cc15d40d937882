"""Run a LightningModule, and make its optimizers, outside of Lightning's loops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.model.tensor_state import is_remote, is_uninitialized

__all__ = [
    "INSTANTIATOR",
    "check_output_of_training_step",
    "log_graph_before_sharding",
    "logging_to",
    "made_optimizers",
    "optimizers_to_device",
    "run_examples_by",
    "set_device_mesh",
]


INSTANTIATOR = "_instantiator"
"""Name of the hyperparameter that LightningCLI adds for ``load_from_checkpoint``.

This could be replaced by a public name, or by hyperparameters of the module alone.
"""


def log_graph_before_sharding(trainer: Trainer, is_sharded: bool) -> Callable[[], None]:
    """Let loggers with ``log_graph=True`` run the module on rank 0 now, before it is sharded.

    Lightning lets them do so after ``setup``, when no rank can run the module alone. If the module is sharded already,
    or has parameters on the meta device, a warning is issued instead. This could be replaced by a hook of the strategy
    around Lightning's call. This is a collective over all processes if a graph is logged.

    Args:
        trainer: The Trainer that is about to run the module.
        is_sharded: Whether the module is sharded already, by an earlier run.

    Returns:
        A function that restores the loggers' own ``log_graph``, which is replaced by one that does nothing until then.
    """
    loggers = [logger for logger in trainer.loggers if getattr(logger, "_log_graph", False)]
    module = trainer.lightning_module
    if loggers and (is_sharded or any(is_uninitialized(param) for param in module.parameters())):
        rank_zero_warn("log_graph=True has no effect: the module is sharded, and no rank can run it alone.")
    elif loggers:
        with raise_on_all_ranks("logging the graph (log_graph=True)"):
            for logger in loggers:
                logger.log_graph(module)
    for logger in loggers:
        vars(logger)["log_graph"] = lambda *args, **kwargs: None

    def undo() -> None:
        for logger in loggers:
            vars(logger).pop("log_graph", None)

    return undo


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh`` as Lightning's own ModelParallelStrategy does.

    This could be replaced by a public setter.
    """
    module._device_mesh = mesh


def run_examples_by(run: Callable[[LightningModule, Callable[[], None]], None]) -> None:
    """Make Lightning's ``ModelSummary`` call ``run`` to run a model on its example; calling this again is safe.

    This could be replaced by a hook of the strategy.

    Args:
        run: Function that is called with the model and a function that runs it on its ``example_input_array``.
    """
    own = ModelSummary._forward_example_input
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def forward(self: ModelSummary) -> None:
        run(self._model, lambda: own(self))

    ModelSummary._forward_example_input = forward  # type: ignore[method-assign]


@contextmanager
def logging_to(
    module: LightningModule, on_log: Callable[..., None] = lambda *args, **kwargs: None
) -> Generator[None, None, None]:
    """Make ``self.log`` call only ``on_log`` in this context, because Lightning's own raises outside of its loops.

    Args:
        module: The module whose ``log`` and ``log_dict`` are replaced.
        on_log: Function with the arguments of ``self.log``; ``self.log_dict`` calls it for each of its values.
    """
    names = ("log", "log_dict")
    own = {name: vars(module)[name] for name in names if name in vars(module)}

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            on_log(name, value, *args, **kwargs)

    vars(module).update(log=on_log, log_dict=log_dict)
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        vars(module).update(own)


def check_output_of_training_step(output: Any) -> None:
    """Check that ``output`` is a valid output of ``training_step``, as Lightning does.

    This could be replaced by a public check.

    Raises:
        MisconfigurationException: If the output is invalid.
    """
    ClosureResult.from_training_step_output(output)


def made_optimizers(module: LightningModule) -> list[torch.optim.Optimizer]:
    """Return new optimizers from ``module.configure_optimizers``."""
    return _init_optimizers_and_lr_schedulers(module)[0]


def optimizers_to_device(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Move the states of ``optimizers`` to ``device``, except those of parameters that other ranks have."""
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if not (isinstance(param, torch.Tensor) and is_remote(param)):
                optimizer.state[param] = move_data_to_device(state, device)
