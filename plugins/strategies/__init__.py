"""Provide the strategies, and register them under the names that ``Trainer(strategy=...)`` takes."""

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.parallelize import register_options
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies import other_names, resume_path
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions
from lightning_dist.plugins.strategies.context_parallel import ContextParallelStrategy
from lightning_dist.plugins.strategies.data_parallel import DataParallelStrategy
from lightning_dist.plugins.strategies.elastic_run import RUNNING_REPLICA
from lightning_dist.plugins.strategies.full_shard import FullShardStrategy
from lightning_dist.plugins.strategies.gpus import hint_about_devices
from lightning_dist.plugins.strategies.gradients import gradient_norms
from lightning_dist.plugins.strategies.hybrid_shard import HybridShardStrategy
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.plugins.strategies.nd_parallel import NDParallelStrategy
from lightning_dist.plugins.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_dist.plugins.strategies.tensor_parallel import TensorParallelStrategy
from lightning_dist.techniques.options import TechniqueOptions

__all__ = [
    "CheckpointOptions",
    "ContextParallelStrategy",
    "DataParallelStrategy",
    "FullShardStrategy",
    "HybridShardStrategy",
    "MeshStrategy",
    "NDParallelStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "register",
    "register_strategy",
    "register_technique",
]

TECHNIQUES = "lightning_dist.techniques"
"""The group of entry points by which an installed package adds techniques; each names a class of options."""


def register() -> None:
    """Register the strategies with Lightning, and install the changes to Lightning that they need.

    Calling this again is safe.
    """
    for strategy in (
        DataParallelStrategy,
        FullShardStrategy,
        HybridShardStrategy,
        TensorParallelStrategy,
        PipelineParallelStrategy,
        ContextParallelStrategy,
        NDParallelStrategy,
    ):
        register_strategy(strategy)
    for entry in entry_points(group=TECHNIQUES):
        try:
            register_technique(entry.load())
        except Exception as error:  # Without the technique, every other training still works.
            warnings.warn(
                f"The technique {entry.name!r} ({entry.value}) of an installed package is left out:"
                f" {type(error).__name__}: {error}",
                stacklevel=2,
            )
    _compat.intercept_checkpoint_paths(MeshStrategy, _resolve_ckpt_path, _resume, _restore_when_sharded)
    _compat.read_checkpoint_directories()
    _compat.compute_gradient_norms_of_shards(gradient_norms)
    _compat.explain_strategy_errors(_hint)


def register_strategy(strategy: type[MeshStrategy]) -> None:
    """Register a strategy with Lightning under its ``strategy_name``. Calling this again is safe."""
    name = strategy.strategy_name
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, strategy, description=(strategy.__doc__ or "").partition("\n")[0])


def register_technique(options: type[TechniqueOptions], *, outside_of: type[TechniqueOptions] | None = None) -> None:
    """Add a technique, so that strategies have the arguments in its options, in Python, YAML and the command line.

    An installed package does so without a call, by an entry point in the group ``lightning_dist.techniques``.

    Args:
        options: The class of its options, which builds the technique. Registering it again changes nothing.
        outside_of: The class of options in :data:`lightning_dist.parallelize.OPTIONS` before whose technique it is
            built; None: it is outside of all others.

    Raises:
        ValueError: If another technique or a strategy has an argument of the same name.
    """
    for name in sorted(MeshStrategy.written_names().intersection(options.names())):
        raise ValueError(
            f"{options.__name__} has an argument {name!r}, and so have strategies themselves. Rename it in"
            f" {options.__name__}."
        )
    register_options(options, outside_of=outside_of)
    MeshStrategy.show_arguments()


def _hint(arguments: Mapping[str, Any], error: Exception) -> str:
    name = arguments.get("strategy")
    about_devices = hint_about_devices(arguments.get("devices"), error)
    if about_devices or not isinstance(name, str):
        return about_devices
    known = {one: StrategyRegistry[one]["strategy"] for one in StrategyRegistry.available_strategies()}
    own = [one for one, strategy in known.items() if issubclass(strategy, MeshStrategy)]
    return other_names.hint(name, [] if name in known else own)


def _resolve_ckpt_path(trainer: Trainer, asked: Any, found: Callable[[], Any]) -> Any:
    assert isinstance(trainer.strategy, MeshStrategy)
    path = resume_path.resolve_ckpt_path(trainer, asked, found)
    trainer.strategy.resumes_from = path
    return path


def _resume(trainer: Trainer, path: Any, load: Callable[[Any], None]) -> None:
    assert isinstance(trainer.strategy, MeshStrategy)
    if trainer.strategy.elastic.joins_others:  # Their state is newer than that of any checkpoint.
        load(RUNNING_REPLICA)
    else:
        resume_path.resume(trainer, path, load)


def _restore_when_sharded(trainer: Trainer, restore: Callable[[], None]) -> None:
    assert isinstance(trainer.strategy, MeshStrategy)
    trainer.strategy.restore_when_sharded(restore)
