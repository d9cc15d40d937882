"""Train a model as a pipeline, and in one process on the same microbatches with the same random numbers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from lightning_dist import NDParallelStrategy, PipelineParallelStrategy
from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.pipeline.replay import MicrobatchSeed
from tests.accelerator import place
from tests.models import build
from tests.parity.run import Outcome, Recorder
from tests.pipeline_models import PIPELINE_MODELS

__all__ = ["PIPELINE_MODELS", "PipelineCase", "one_process", "pipelined"]

LAYOUTS = {
    "pp2": (2, {"pp_size": 2}),
    "pp4": (4, {"pp_size": 4}),
    "pp2 x shard2": (4, {"pp_size": 2, "dp_shard_size": 2}),
    "pp2 x replicate2": (4, {"pp_size": 2, "dp_shard_size": 1, "dp_replicate_size": 2}),
    "pp2 x tp2": (4, {"pp_size": 2, "tp_size": 2}),
    "pp2 x replicate2 x shard2": (8, {"pp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}),
}


@dataclass(frozen=True)
class PipelineCase:
    model: str
    layout: str
    schedule: str = "1f1b"
    accumulate: int = 1
    clip: float | None = None
    num_microbatches: int = 4
    num_steps: int = 20
    precision: str = "64-true"

    def __str__(self) -> str:
        parts = [self.model, self.layout.replace(" ", ""), self.schedule]
        parts += [f"acc{self.accumulate}"] if self.accumulate > 1 else []
        parts += ["clip"] if self.clip else []
        return "-".join([*parts, *([self.precision] if self.precision != "64-true" else [])])

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def num_data_parallel(self) -> int:
        sizes = LAYOUTS[self.layout][1]
        return sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)


@dataclass
class PipelineOutcome(Outcome):
    losses: list[float]
    logged: list[dict[str, float]]


class Seeds(pl.Callback):
    """Seed torch before each optimizer step, in a way that does not depend on the layout.

    Args:
        every: Number of batches per optimizer step.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index % self._every == 0:
            torch.manual_seed(100 + index // self._every)


class Losses(pl.Callback):
    """Record the loss and the logged metrics of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, *args: Any) -> None:
        # Lightning divides the loss by the number of accumulated batches.
        self.losses.append(float(out["loss"]) * trainer.accumulate_grad_batches)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def pipelined(case: PipelineCase) -> PipelineOutcome:
    """Train the case on this rank.

    Every rank draws different weights, since the strategy must broadcast those of rank 0.
    """
    sizes = LAYOUTS[case.layout][1]
    cls = NDParallelStrategy if "tp_size" in sizes else PipelineParallelStrategy
    strategy = cls(schedule=case.schedule, num_microbatches=case.num_microbatches, **sizes)
    model = build(case.model, seed=int(os.environ["RANK"]), global_batch_size=8 * case.num_data_parallel)
    return _fit(case, model, strategy, case.accumulate, every=1)


def one_process(case: PipelineCase) -> PipelineOutcome:
    """Train on the same batches by Lightning's own single-device strategy, one microbatch of a rank at a time."""
    model = build(case.model, seed=0, global_batch_size=8 * case.num_data_parallel)
    number = case.num_microbatches * case.num_data_parallel
    model.train_dataloader = lambda: _microbatches(type(model).train_dataloader(model), case)  # type: ignore[method-assign]
    _reseed(model, case)
    outcome = _fit(case, model, "auto", case.accumulate * number, every=number)
    outcome.losses = [float(np.mean(outcome.losses[i : i + number])) for i in range(0, len(outcome.losses), number)]
    outcome.logged = outcome.logged[number - 1 :: number]
    return outcome


def _microbatches(batches: Any, case: PipelineCase) -> Iterator[Any]:
    """Yield the microbatches of a batch: all of the first data-parallel rank, then those of the next."""
    for batch in batches:
        for rank in range(case.num_data_parallel):
            own = [tensor[rank :: case.num_data_parallel] for tensor in batch]
            for index in range(case.num_microbatches):
                size = len(own[0]) // case.num_microbatches
                yield [tensor[index * size : (index + 1) * size] for tensor in own]


def _reseed(model: pl.LightningModule, case: PipelineCase) -> None:
    """Seed the step of each microbatch, and each call of the model's ``calls`` in it, as a pipeline does."""
    step: Callable[..., Any] = model.training_step
    number = case.num_microbatches
    base, seed = 0, MicrobatchSeed(0, 0, 0)

    def training_step(batch: Any, batch_idx: int) -> Any:
        nonlocal base, seed
        index = batch_idx % (number * case.num_data_parallel)
        if index == 0:
            base = int(torch.randint(2**62, ()))
        seed = MicrobatchSeed(base, index % number, index // number)
        with _seeded(seed.seed_between_parts):
            return step(batch, batch_idx)

    def reseeded(call: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _seeded(seed.seed_of_call(call)):
                return forward(*args)

        return run

    for call, name in enumerate(getattr(model, "calls", [])):
        module = model.get_submodule(name)
        module.forward = reseeded(call, module.forward)  # type: ignore[method-assign]
    model.training_step = training_step  # type: ignore[method-assign]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    yield
    torch.set_rng_state(state)


def _fit(case: PipelineCase, model: nn.Module, strategy: Any, accumulate: int, every: int) -> PipelineOutcome:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # It has errors of 1e-3.
    recorder, losses = Recorder(), Losses()
    trainer = pl.Trainer(
        **place(in_one_process=strategy == "auto"),
        strategy=strategy,
        precision=case.precision,
        max_steps=case.num_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=case.clip,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Seeds(every), recorder, losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return PipelineOutcome(
        recorder.gradients,
        {name: weight.numpy() for name, weight in whole_parameters(model).items()},
        {name: buffer.double().cpu().numpy() for name, buffer in model.named_buffers() if not buffer.is_meta},
        losses.losses,
        losses.logged,
    )
