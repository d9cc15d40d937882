"""Train a model in one process or on several ranks, and return the values that are compared."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.run.parity import whole_gradients, whole_parameters
from tests.accelerator import place
from tests.expert_models import EXPERT_MODELS
from tests.models import build
from tests.sequence_models import SEQUENCE_MODELS
from tests.split_models import SPLIT_MODELS

__all__ = [
    "CP_LAYOUTS", "EP_LAYOUTS", "EXPERT_MODELS", "FEW_RANKS", "LAYOUTS", "PLANS", "SEQUENCE_MODELS", "SPLIT_MODELS",
    "TP_LAYOUTS", "Case", "Outcome", "briefly", "make_strategy", "reference", "run", "tensors",
]  # fmt: skip

LAYOUTS = {
    "full_shard": lambda **kwargs: FullShardStrategy(**kwargs),
    "4x1": lambda **kwargs: HybridShardStrategy(4, 1, **kwargs),
    "2x2": lambda **kwargs: HybridShardStrategy(2, 2, **kwargs),
    "1x4": lambda **kwargs: HybridShardStrategy(1, 4, **kwargs),
}
TP_LAYOUTS = {
    "tp4": lambda **kwargs: TensorParallelStrategy(4, **kwargs),
    "tp2": lambda **kwargs: TensorParallelStrategy(2, **kwargs),
    "2xtp2": lambda **kwargs: TensorParallelStrategy(2, 1, 2, **kwargs),
}
CP_LAYOUTS = {
    "cp2": lambda **kwargs: ContextParallelStrategy(2, **kwargs),
    "cp4": lambda **kwargs: ContextParallelStrategy(4, **kwargs),
    "2xcp2": lambda **kwargs: ContextParallelStrategy(2, 1, 2, **kwargs),
    "cp2 x tp2": lambda **kwargs: NDParallelStrategy(cp_size=2, tp_size=2, **kwargs),
    "cp2 x pp2": lambda **kwargs: NDParallelStrategy(cp_size=2, pp_size=2, **kwargs),
}
EP_LAYOUTS = {
    "ep2": lambda **kwargs: FullShardStrategy(ep_size=2, **kwargs),
    "ep4": lambda **kwargs: FullShardStrategy(ep_size=4, **kwargs),
    "2xep2": lambda **kwargs: HybridShardStrategy(2, 2, ep_size=2, **kwargs),
    "ep2 x tp2": lambda **kwargs: NDParallelStrategy(ep_size=2, tp_size=2, **kwargs),
    "ep2 x pp2": lambda **kwargs: NDParallelStrategy(ep_size=2, pp_size=2, **kwargs),
    "ep2 x cp2": lambda **kwargs: NDParallelStrategy(ep_size=2, cp_size=2, **kwargs),
    "tp2 x pp2": lambda **kwargs: NDParallelStrategy(tp_size=2, pp_size=2, **kwargs),
}
FEW_RANKS = {
    "data_parallel": lambda **kwargs: DataParallelStrategy(**kwargs),
    "1x1": lambda **kwargs: HybridShardStrategy(1, 1, **kwargs),
    "2x1": lambda **kwargs: HybridShardStrategy(2, 1, **kwargs),
    "1x2": lambda **kwargs: HybridShardStrategy(1, 2, **kwargs),
    "tp1": lambda **kwargs: TensorParallelStrategy(1, **kwargs),
    "cp1": lambda **kwargs: ContextParallelStrategy(1, **kwargs),
    "pp1": lambda **kwargs: PipelineParallelStrategy(1, **kwargs),
    "pp2": lambda **kwargs: PipelineParallelStrategy(2, **kwargs),
    "pp4": lambda **kwargs: PipelineParallelStrategy(4, **kwargs),
    "nd": lambda **kwargs: NDParallelStrategy(**kwargs),
}
PLANS = {
    "gpt": {
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "model.embedding": "embedding_rowwise",
        "model.head": "colwise_gather_output",
    }
}


@dataclass(frozen=True)
class Case:
    """Describe a training run."""

    layout: str
    model: str
    accumulate: int
    clip: float | None
    precision: str = "64-true"
    optimizer: str = "sgd"
    num_steps: int = 20
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of the strategy; ``("plan", "withheld")`` removes Hugging Face's plan from the model instead."""

    def __str__(self) -> str:
        parts = [self.model, self.layout, f"acc{self.accumulate}", "clip" if self.clip else "noclip"]
        parts += [p for p in (self.precision, self.optimizer) if p not in ("64-true", "sgd")]
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.options)])


AnyCase = TypeVar("AnyCase")


def briefly(cases: list[AnyCase]) -> list[AnyCase]:
    """Reduce the cases to four steps each, to save time.

    The first case, and those in single precision, keep their number of steps, because rounding errors add up in them.
    """
    return [
        case if index == 0 or case.precision == "32-true" else replace(case, num_steps=4)
        for index, case in enumerate(cases)
    ]


@dataclass
class Outcome:
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]


class Recorder(pl.Callback):
    """Record the whole gradients before the first two optimizer steps, before clipping."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, np.ndarray]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if len(self.gradients) < 2:
            self.gradients.append({name: grad.numpy() for name, grad in whole_gradients(pl_module).items()})


def reference(case: Case, chunks: int = 4) -> Outcome:
    """Train the case in one process by Lightning's own single-device strategy, on the whole batch at once.

    Args:
        case: The case, whose layout is ignored.
        chunks: Number of ranks that share a batch of the compared run, each of which has its own BatchNorm.
    """
    return _fit(replace(case, layout="auto"), chunks)


def run(case: Case) -> Outcome:
    """Train the case on this rank."""
    return _fit(case, chunks=1)


def make_strategy(case: Case) -> Any:
    """Make the strategy of the case's layout, with its options."""
    if case.layout in TP_LAYOUTS:
        options = {name: value for name, value in case.options if value != "withheld"}
        return TP_LAYOUTS[case.layout](**{"plan": PLANS.get(case.model), **options})
    if case.layout == "auto":
        return "auto"
    return {**LAYOUTS, **CP_LAYOUTS, **EP_LAYOUTS, **FEW_RANKS}[case.layout](**dict(case.options))


def _fit(case: Case, chunks: int) -> Outcome:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # It has errors of 1e-3.
    rank = int(os.environ["RANK"])
    by_hand = {"accumulate": case.accumulate, "clip": case.clip} if case.model == "gan" else {}
    # Every rank draws different weights, since the strategy must broadcast those of rank 0.
    model = build(case.model, seed=rank, optimizer=case.optimizer, chunks=chunks, **by_hand)
    if ("plan", "withheld") in case.options:
        for module in model.modules():
            vars(module).pop("_tp_plan", None)
    recorder = Recorder()
    trainer = pl.Trainer(
        **place(in_one_process=case.layout == "auto"),
        strategy=make_strategy(case),
        precision=case.precision,
        max_steps=case.num_steps * (2 if case.model == "gan" else 1),
        max_epochs=-1,
        accumulate_grad_batches=1 if by_hand else case.accumulate,
        gradient_clip_val=None if by_hand else case.clip,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[] if ("step_in_backward", True) in case.options else [recorder],  # It keeps no gradients.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return Outcome(
        recorder.gradients,
        {name: weight.numpy() for name, weight in whole_parameters(model).items()},
        # Buffers of other stages are on the meta device.
        {name: buffer.double().cpu().numpy() for name, buffer in model.named_buffers() if not buffer.is_meta},
    )


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
