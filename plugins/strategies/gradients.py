"""Free the previous step's gradients before the forward, and compute gradient norms of sharded modules.

Lightning runs ``training_step``, ``zero_grad`` and ``backward`` in this order, so that the previous step's gradients
are in memory together with the activations of the forward. Unless they are sharded, they take as much memory as all
the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parallel_module import parallelized_around
from lightning_dist.plugins.strategies.wrapped_hooks import defines_hook

__all__ = ["are_free_before_forward", "free_gradients", "gradient_norms"]


def are_free_before_forward(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether gradients can be freed before the forward without a difference that user code can notice.

    They can if optimization is automatic and no hook of the module or of a callback reads the gradients before
    ``zero_grad`` or overrides it.
    """
    return (
        module.automatic_optimization
        and not defines_hook("optimizer_zero_grad", module)
        and not any(
            defines_hook("on_before_zero_grad", hooked)
            for hooked in (module, *trainer.callbacks)  # type: ignore[attr-defined]
        )
    )


def free_gradients(trainer: Trainer) -> None:
    """Free the optimizers' gradients if the batch begins a new optimizer step, as ``zero_grad`` would do later."""
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


def gradient_norms(module: torch.nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    """Return the norm of each parameter's gradient, and the total norm, as Lightning's ``grad_norm`` in one process.

    This is a collective if ``module`` is sharded.

    Args:
        module: The LightningModule of a run, or a module in it, with gradients.
        norm_type: The order of the norms; ``"inf"`` for the largest absolute value.
        group_separator: Text between ``grad_<order>_norm`` and the parameter's name in the keys.

    Raises:
        ValueError: If the order is not positive.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {order}")
    names = [name for name, _ in module.named_parameters()]
    parallel = parallelized_around(module)
    if parallel is None or not parallel.states.has_remote_parameters:
        found = _norms(module, order)
    else:
        with parallel.without_hook_views():
            own = {name: norm.cpu() for name, norm in _norms(module, order).items()}
        found = {name: norm for part in parallel.states.collect_parts(own) for name, norm in part.items()}
    norms: dict[str, Any] = {
        f"grad_{order}_norm{group_separator}{name}": found[name] for name in names if name in found
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.tensor(list(norms.values())).norm(order)
    return norms


def _norms(module: torch.nn.Module, order: float) -> dict[str, torch.Tensor]:
    """Return the norms of the gradients of the parameters on this rank, by name.

    This is a collective over the ranks that have shards of them.
    """
    # Parameters of other stages are on the meta device.
    here = ((name, param) for name, param in module.named_parameters() if not is_remote(param))
    return {name: _norm(param.grad, order) for name, param in here if param.grad is not None}


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    norm = gradient.detach().norm(order)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
