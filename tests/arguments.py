"""Describe runs and fits to the checks of technique options."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.options import Fit, Run

__all__ = ["fit_of", "run_of"]


def run_of(layout: ParallelLayout, **others: Any) -> Run:
    """Return a run with ``layout`` on the CPU in float32, unless ``others`` say something else."""
    usual: dict[str, Any] = {
        "strategy": "full_shard",
        "device_type": "cpu",
        "num_devices": layout.world_size,
        "precision": "32-true",
        "scales_losses": False,
        "gathers_float8": False,
    }
    return Run(layout=layout, **{**usual, **others})


def fit_of(**others: Any) -> Fit:
    """Return a fit with automatic optimization and without hooks, unless ``others`` say something else."""
    usual: dict[str, Any] = {
        "module": "Model",
        "is_automatic": True,
        "accumulate_grad_batches": 1,
        "changes_accumulation": False,
        "gradient_clip_val": None,
        "master_weights": "",
        "overridden": lambda hooks: [],
    }
    return Fit(**{**usual, **others})
