"""Define the ways of training that are compared, as named functions that train until ``end_step`` returns False."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.gpt.model import GPT, GPTModule
from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    Float8Precision,
    FullShardStrategy,
    HybridShardStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.techniques.compression import COMPRESSORS, DiLoCo, PowerSGD, SyncMethod
from tests.bench import handwritten, handwritten_cp, handwritten_ep, handwritten_pp, handwritten_tp
from tests.bench.harness import EndStep
from tests.bench.mixture import with_mixtures
from tests.bench.workload import Workload

__all__ = [
    "SIDES",
    "SLOW_LINK_SIDES",
    "STRATEGIES",
    "make_loader",
    "make_module",
    "make_trainer",
    "missing_package",
    "startup_seconds",
]


class UnloggedGPT(GPTModule):
    """Log nothing, like the hand-written loops, because a logged mean over the ranks takes an additional collective."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy, in nats per byte."""
        return self._loss(batch)


class MixtureGPT(UnloggedGPT):
    """Have a mixture of experts in each block."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with_mixtures(self.model)


class SelfShardingGPT(UnloggedGPT):
    """Shard this module as Lightning's documentation of 2D parallelism shows, without the tensor parallelism."""

    def configure_model(self) -> None:
        """Shard each block, then the remaining parameters of the model."""
        dp_mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=dp_mesh)
        fully_shard(self.model, mesh=dp_mesh)


def _pipeline(schedule: str) -> Strategy:
    return PipelineParallelStrategy(
        handwritten_pp.PP_SIZE, num_microbatches=handwritten_pp.NUM_MICROBATCHES, schedule=schedule
    )


def _model_parallel() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)


STRATEGIES: dict[str, tuple[Callable[[], Strategy], type[GPTModule]]] = {
    "data_parallel": (DataParallelStrategy, UnloggedGPT),
    "full_shard": (FullShardStrategy, UnloggedGPT),
    "full_shard_offload": (partial(FullShardStrategy, offload="both"), UnloggedGPT),
    **{f"full_shard_zero_{stage}": (partial(FullShardStrategy, zero_stage=stage), UnloggedGPT) for stage in (1, 2, 3)},
    "hybrid_2x1": (partial(HybridShardStrategy, 2, 1), UnloggedGPT),
    "hybrid_1x2": (partial(HybridShardStrategy, 1, 2), UnloggedGPT),
    "hybrid_2x2": (partial(HybridShardStrategy, 2, 2), UnloggedGPT),
    "tensor_parallel": (partial(TensorParallelStrategy, 2), UnloggedGPT),
    "tensor_parallel_4": (partial(TensorParallelStrategy, 4), UnloggedGPT),
    "context_parallel": (partial(ContextParallelStrategy, 2), UnloggedGPT),
    "context_parallel_all_gather": (partial(ContextParallelStrategy, 2, attention="all_gather"), UnloggedGPT),
    "expert_parallel": (partial(FullShardStrategy, ep_size=2), MixtureGPT),
    "full_shard_mixture": (FullShardStrategy, MixtureGPT),
    "pipeline_1f1b": (partial(_pipeline, "1f1b"), UnloggedGPT),
    "pipeline_gpipe": (partial(_pipeline, "gpipe"), UnloggedGPT),
    "model_parallel": (_model_parallel, SelfShardingGPT),
    "ddp": (DDPStrategy, UnloggedGPT),
}
"""Strategies of this project and of Lightning, each with the module that it trains, by name.

The sizes in a name are the number of replicas x the number of ranks that share a replica; for ``tensor_parallel``, the
number of ranks that split a layer (2 without a number). The name of a ``pipeline`` ends with its schedule.
"""


def with_trainer(name: str, workload: Workload, end_step: EndStep, precision: str = "32-true") -> None:
    """Train by Lightning's Trainer and the strategy ``STRATEGIES[name]``."""
    strategy, cls = STRATEGIES[name]
    with_strategy(strategy, cls, workload, end_step, precision)


def with_strategy(
    strategy: Callable[[], Strategy],
    cls: type[GPTModule],
    workload: Workload,
    end_step: EndStep,
    precision: Any = "32-true",
) -> None:
    """Train a module of the class ``cls`` by Lightning's Trainer, ``strategy`` and ``precision``."""

    class EndOfStep(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
            trainer.should_stop = not end_step(outputs["loss"])

    trainer = make_trainer(strategy(), workload, EndOfStep(), precision=precision)
    trainer.fit(make_module(cls, workload), make_loader(trainer, workload))


def deepspeed_zero(stage: int, workload: Workload, end_step: EndStep) -> None:
    """Train by DeepSpeed's ZeRO of a stage (1, 2 or 3) in a loop like that in its documentation.

    Lightning's ``deepspeed_stage_3`` cannot be used, because it refuses to run without a CUDA device.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.manual_seed(workload.seed)
    model = GPT(**workload.model)
    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    config = {
        "train_micro_batch_size_per_gpu": workload.global_batch_size // int(os.environ["WORLD_SIZE"]),
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    with redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    for inputs, targets in workload.batches():
        loss = functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        if not end_step(loss.detach()):
            engine.destroy()
            return


def _in_bfloat16(strategy: Callable[[], Strategy], workload: Workload, end_step: EndStep) -> None:
    with_strategy(strategy, UnloggedGPT, workload, end_step, "bf16-mixed")


def _in_float8(recipe: Any, strategy: Callable[[], Strategy], workload: Workload, end_step: EndStep) -> None:
    with_strategy(strategy, UnloggedGPT, workload, end_step, Float8Precision(recipe))


SIDES: dict[str, Callable[[Workload, EndStep], None]] = {
    **{name: partial(with_trainer, name) for name in STRATEGIES},
    "by_hand": handwritten.train,
    "by_hand_two_shot": partial(handwritten.train, two_shot=True),
    "by_hand_two_shot_offload": partial(handwritten.train, two_shot=True, offloads=True),
    "by_hand_ddp": handwritten.train_ddp,
    "by_hand_2x1": partial(handwritten.train, dp_replicate_size=2, two_shot=True),
    "by_hand_2x2": partial(handwritten.train, dp_replicate_size=2, two_shot=True),
    "by_hand_tp": handwritten_tp.train,
    "by_hand_cp": handwritten_cp.train,
    "by_hand_ep": handwritten_ep.train,
    "by_hand_1f1b": partial(handwritten_pp.train, schedule_class=Schedule1F1B),
    "by_hand_gpipe": partial(handwritten_pp.train, schedule_class=ScheduleGPipe),
    **{f"deepspeed_{stage}": partial(deepspeed_zero, stage) for stage in (1, 2, 3)},
    "full_shard_bf16": partial(with_trainer, "full_shard", precision="bf16-mixed"),
    "by_hand_bf16": partial(handwritten.train, two_shot=True, in_bfloat16=True),
    "by_hand_bf16_one_shot": partial(handwritten.train, in_bfloat16=True),
    **{
        f"full_shard_bf16_{name}": partial(_in_bfloat16, partial(FullShardStrategy, **options))
        for name, options in {
            "compiled": {"compile": True},
            "checkpointing": {"activation_checkpointing": "full"},
            "selective": {"activation_checkpointing": "selective"},
            "tiled": {"activation_checkpointing": "full", "tiled_mlp": 512, "tiled_loss": 512},
            "offload_optimizer": {"offload": "optimizer"},
            "offload_params": {"offload": "params"},
            "step_in_backward": {"step_in_backward": True},
        }.items()
    },
    **{f"full_shard_{recipe}": partial(_in_float8, recipe, FullShardStrategy) for recipe in ("tensorwise", "rowwise")},
    **{
        f"full_shard_{recipe}_compiled": partial(_in_float8, recipe, partial(FullShardStrategy, compile=True))
        for recipe in ("tensorwise", "rowwise")
    },
}
"""All ways of training, by name. ``tensorwise`` and ``rowwise`` are the recipes of float8."""


def _compressed(compression: Any, workload: Workload, end_step: EndStep) -> None:
    strategy = partial(HybridShardStrategy, int(os.environ["WORLD_SIZE"]) // 2, 2, compression=compression)
    with_strategy(strategy, UnloggedGPT, workload, end_step)


def _seldom_synchronized(sync: SyncMethod, workload: Workload, end_step: EndStep) -> None:
    strategy = partial(HybridShardStrategy, int(os.environ["WORLD_SIZE"]) // 2, 2, sync=sync)
    with_strategy(strategy, UnloggedGPT, workload, end_step)


def _replicated(compression: Any, workload: Workload, end_step: EndStep) -> None:
    with_strategy(partial(DataParallelStrategy, compression=compression), UnloggedGPT, workload, end_step)


SLOW_LINK_SIDES: dict[str, Callable[[Workload, EndStep], None]] = {
    "by_hand_ddp": handwritten.train_ddp,
    "by_hand_ddp_powersgd": partial(handwritten.train_ddp, powersgd_rank=4),
    "by_hand_full_shard": handwritten.train,
    "by_hand_hsdp": partial(handwritten.train, dp_replicate_size=2),
    **{name: partial(_compressed, name) for name in ("none", *COMPRESSORS)},
    "powersgd16": partial(_compressed, PowerSGD(16)),
    "diloco": partial(_seldom_synchronized, DiLoCo(50)),
    "diloco_int8": partial(_seldom_synchronized, DiLoCo(50, compression="int8")),
    "data_parallel": partial(_replicated, None),
    "data_parallel_powersgd": partial(_replicated, "powersgd"),
}
"""Ways of training on nodes with slow links.

They are by hand, by ``hybrid_shard`` with the compressor of the name, or by ``data_parallel``.
"""


def missing_package(name: str) -> str | None:
    """Return the package that the side called ``name`` needs and that is not installed, or None."""
    return "deepspeed" if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None else None


def startup_seconds(name: str, workload: Workload) -> float:
    """Measure the seconds from the construction of the Trainer to its first training step."""
    begun: list[float] = []

    class FirstStep(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> int:
            begun.append(time.perf_counter())
            trainer.should_stop = True
            return -1  # Lightning skips the rest of the epoch, including this step.

    strategy, cls = STRATEGIES[name]
    module, loader = make_module(cls, workload), workload.loader()
    start = time.perf_counter()
    make_trainer(strategy(), workload, FirstStep()).fit(module, loader)
    return begun[0] - start


def make_module(cls: type[GPTModule], workload: Workload) -> GPTModule:
    """Make the module with weights that are drawn from the workload's seed."""
    torch.manual_seed(workload.seed)
    return cls(**workload.model)


def make_loader(trainer: Trainer, workload: Workload) -> DataLoader[Any]:
    """Make the loader of the part of the batches that this rank has under the Trainer's strategy."""
    if isinstance(trainer.strategy, MeshStrategy):  # Ranks that split layers between them get the same part.
        return workload.loader(**trainer.strategy.distributed_sampler_kwargs)
    return workload.loader()


def make_trainer(
    strategy: Strategy,
    workload: Workload,
    callback: Callback,
    max_steps: int | None = None,
    precision: Any = "32-true",
) -> Trainer:
    """Make a Trainer with the strategy and ``callback``, and without logger, checkpoints and progress bar.

    ``precision`` is a value of the Trainer's argument, or a plugin.
    """
    plugin = isinstance(precision, Precision)
    return Trainer(
        accelerator="gpu" if workload.device == "cuda" else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision=None if plugin else precision,
        plugins=[precision] if plugin else None,
        max_steps=max_steps or workload.num_steps,
        use_distributed_sampler=False,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
