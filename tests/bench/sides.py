"""The ways of training that are compared, each as a function that trains until ``end_step`` says it is enough."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from examples.gpt.model import GPT, GPTModule
from lightning_dist import FullShardStrategy, HybridShardStrategy
from tests.bench import handwritten
from tests.bench.harness import EndStep
from tests.bench.workload import Workload

__all__ = ["by_hand", "ddp", "deepspeed_zero_3", "full_shard", "hybrid_shard", "model_parallel", "trainer"]

by_hand = handwritten.train


def full_shard(workload: Workload, end_step: EndStep) -> None:
    """This project's ``full_shard``."""
    _fit(_build(workload), FullShardStrategy(), workload, _EndStep(end_step))


def hybrid_shard(workload: Workload, end_step: EndStep, dp_replicate_size: int, dp_shard_size: int) -> None:
    """This project's ``hybrid_shard``."""
    strategy = HybridShardStrategy(dp_replicate_size=dp_replicate_size, dp_shard_size=dp_shard_size)
    _fit(_build(workload), strategy, workload, _EndStep(end_step))


def ddp(workload: Workload, end_step: EndStep) -> None:
    """Lightning's ``ddp``: every rank holds the whole model."""
    _fit(_build(workload), "ddp", workload, _EndStep(end_step))


def model_parallel(workload: Workload, end_step: EndStep) -> None:
    """Lightning's ``ModelParallelStrategy``, the module sharding itself."""
    strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    _fit(_build(workload, SelfShardingGPT), strategy, workload, _EndStep(end_step))


class SelfShardingGPT(GPTModule):
    """What Lightning's documentation of 2D parallelism has its user write, without the tensor parallelism."""

    def configure_model(self) -> None:
        """Shard the blocks, then what is left."""
        dp_mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=dp_mesh)
        fully_shard(self.model, mesh=dp_mesh)


def deepspeed_zero_3(workload: Workload, end_step: EndStep) -> None:
    """DeepSpeed's ZeRO-3 in a loop as its documentation shows.

    Not Lightning's ``deepspeed_stage_3``, which refuses to run without a CUDA device.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.manual_seed(workload.seed)
    model = GPT(**workload.model)
    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    config = {
        "train_micro_batch_size_per_gpu": workload.global_batch_size // int(os.environ["WORLD_SIZE"]),
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    while True:
        for inputs, targets in workload.loader():
            loss = functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            if not end_step(loss.detach()):
                engine.destroy()
                return


def trainer(strategy: Strategy | str, workload: Workload, callback: Callback) -> Trainer:
    """A Trainer on all ranks that only trains."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=workload.num_steps,
        use_distributed_sampler=False,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _build(workload: Workload, cls: type[GPTModule] = GPTModule) -> GPTModule:
    torch.manual_seed(workload.seed)
    return cls(**workload.model)


def _fit(module: LightningModule, strategy: Strategy | str, workload: Workload, callback: Callback) -> None:
    trainer(strategy, workload, callback).fit(module, workload.loader())


class _EndStep(Callback):
    def __init__(self, end_step: EndStep) -> None:
        self._end_step = end_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        if not self._end_step(outputs["loss"]):
            trainer.should_stop = True
