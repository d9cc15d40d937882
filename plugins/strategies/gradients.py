"""When the last step's gradients are freed.

Lightning runs ``training_step``, ``zero_grad`` and ``backward`` in this order, so that during the forward the last
step's gradients are in memory with the activations: as much as all the weights again, where nothing shards them.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["are_free_before_forward", "free_gradients"]


def are_free_before_forward(module: LightningModule, trainer: Trainer) -> bool:
    """Whether nobody can tell: no hook of the module or of a callback looks at gradients, or clears them itself."""
    return (
        module.automatic_optimization
        and not is_overridden("optimizer_zero_grad", module)
        and not any(
            is_overridden("on_before_zero_grad", hooked)
            for hooked in (module, *trainer.callbacks)  # type: ignore[attr-defined]
        )
    )


def free_gradients(trainer: Trainer) -> None:
    """Free what the optimizers hold, if a new optimizer step begins, as Lightning's ``zero_grad`` will."""
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
