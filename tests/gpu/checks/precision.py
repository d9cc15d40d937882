"""Compare the losses of low precision with those of one process in the same or a higher one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_dist import Float8Precision, MeshPrecision
from tests.accelerator import on_gpu, place
from tests.gpu.check import Found
from tests.gpu.ranks import Ranks
from tests.models import GPT, Transformer
from tests.parity.run import Case, make_strategy

__all__ = ["OF_LIGHTNING", "PRECISIONS", "low_precision"]

NUM_STEPS = 12

BOUND = 1e-2
"""The largest accepted difference of losses from those of float32, relative to the first one."""

SMALLEST = 1e-6
"""The smallest accepted difference; a smaller one means that steps were computed in float32."""

INITIAL_SCALE = 1024.0
"""Scale of losses with float16 in the first step, which is so small that none overflows."""

PRECISIONS = {
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "MeshPrecision-bfloat16": ("mesh", {"param_dtype": "bfloat16"}),
    "MeshPrecision-reduce-bfloat16": ("mesh", {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
    "MeshPrecision-kahan": ("mesh", {"master_weights": "kahan"}),
    "MeshPrecision-stochastic": ("mesh", {"master_weights": "stochastic"}),
    "float16-scaled": ("scaled", {}),
    "MeshPrecision-float16": ("mesh", {"param_dtype": "float16"}),
    "float8-tensorwise": ("float8", {"recipe": "tensorwise"}),
    "float8-rowwise": ("float8", {"recipe": "rowwise"}),
}
"""Values of the Trainer's ``precision``, or plugins and their arguments, by the names of checks."""

OF_LIGHTNING = ("bf16-mixed", "float16-scaled")
"""Precisions by Lightning's own plugin, whose autocast knows no simulated device."""


class Wide(GPT):
    """Have layers whose features are multiples of 16, which units for float8 need."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(global_batch_size=32)
        self.model = Transformer(dim=64, tied=False)


def _plugin(kind: str, arguments: dict[str, Any]) -> Precision:
    if kind == "mesh":
        return MeshPrecision(**arguments)
    if kind == "float8":
        return Float8Precision(min_size=64, emulate=not on_gpu(), **arguments)
    device = "cuda" if on_gpu() else "cpu"
    return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=INITIAL_SCALE))  # type: ignore[arg-type]


def losses(layout: str, precision: Any) -> list[float]:
    """Return the losses of the first steps."""
    found: list[float] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
            found.append(float(trainer.callback_metrics["train/loss"]))

    trainer = pl.Trainer(
        **place(in_one_process=layout == "auto"),
        strategy=make_strategy(Case(layout, "gpt", 1, None)),
        precision=precision if isinstance(precision, str) else None,
        plugins=[] if isinstance(precision, str) else [_plugin(*precision)],
        max_steps=NUM_STEPS,
        max_epochs=-1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Record()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if scaler := getattr(trainer.precision_plugin, "scaler", None):
        scaler.load_state_dict({**scaler.state_dict(), "scale": INITIAL_SCALE})
    trainer.fit(Wide())
    return found


def low_precision(ranks: Ranks, num_ranks: int, layout: str, name: str) -> Found:
    """Compare the losses of a precision of :data:`PRECISIONS` with those of float32 in one process."""
    expected = ranks.run(losses, 1, "auto", "32-true")[0]
    found = ranks.run(losses, num_ranks, layout, PRECISIONS[name])[0]
    differences = [abs(a - b) / expected[0] for a, b in zip(found, expected, strict=True)]
    is_met = SMALLEST <= max(differences) <= BOUND and found[-1] < found[0]
    figure = f"losses {found[0]:.3f} to {found[-1]:.3f}, at most {max(differences):.1e} from float32"
    return Found(figure, is_met)
