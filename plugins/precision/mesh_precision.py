"""Define a precision plugin with options that Lightning's names do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_dist.plugins.precision.master_weights import MasterWeights, updates_in_float32

__all__ = ["MeshPrecision"]


class MeshPrecision(HalfPrecision):
    """Train in bfloat16 without losing small updates.

    Parameters, activations and gradients are in bfloat16, as with ``precision="bf16-true"``. Optimizers compute in
    float32. For each parameter, a rank keeps these bytes with AdamW, besides its shards' gradients of 2 bytes:

    ================ ========== ============== =======
    master_weights   parameter  kept besides   moments
    ================ ========== ============== =======
    (``bf16-true``)  2          0              4
    ``stochastic``   2          0              8
    ``kahan``        2          2              8
    ``fp32``         2          4              8
    (``bf16-mixed``) 4          0              8
    ================ ========== ============== =======

    During an optimizer step, 8 bytes more are used for each of the rank's parameters.

    Args:
        master_weights: ``"fp32"``: exact updates of copies in float32. ``"kahan"``: what rounding removes is kept in
            bfloat16, and added before the next update, which gives 16 significant bits. ``"stochastic"``: updated
            parameters are rounded up or down at random, with the right mean; the same on all replicas.
        seed: Seed of the random rounding.

    Raises:
        ValueError: If ``master_weights`` is none of these.
    """

    def __init__(self, master_weights: MasterWeights = "kahan", seed: int = 0) -> None:
        super().__init__("bf16-true")
        if master_weights not in get_args(MasterWeights):
            raise ValueError(
                f"master_weights={master_weights!r} must be one of {', '.join(map(repr, get_args(MasterWeights)))}."
            )
        self.master_weights = master_weights
        self.seed = seed
        self._num_steps = 0

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run ``closure``, and let ``optimizer`` update the parameters in float32."""
        if isinstance(optimizer, LBFGS):
            raise ValueError("MeshPrecision with LBFGS, which computes losses within its step: use another optimizer.")
        result = closure()
        self._after_closure(model, optimizer)
        self._num_steps += 1
        with updates_in_float32(optimizer, self.master_weights, self.seed * 1_000_003 + self._num_steps):
            optimizer.step(**kwargs)
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, on which the random rounding depends."""
        return {"num_steps": self._num_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of steps."""
        self._num_steps = state_dict["num_steps"]
