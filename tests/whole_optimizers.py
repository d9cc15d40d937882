"""Define small optimizers whose updates depend on rows, on whole parameters, or on all parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["BySomeRows", "Orthogonal", "Shampoo", "Sharpness", "ToNormOfAll"]


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that ``closure`` computes with gradients; None if there is no closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


class _EachParameter(Optimizer):
    """Update each parameter by :meth:`direction`."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, self.state[param]), alpha=group["lr"])
        return loss

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class BySomeRows(_EachParameter):
    """Divide by averages over columns, of which there is one for each row, and by one for each column."""

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        square = param.grad**2 + 1e-12
        if param.ndim < 2:
            state["square"] = 0.9 * state.get("square", 0.0) + 0.1 * square
            return param.grad / state["square"].sqrt()
        state["rows"] = 0.9 * state.get("rows", 0.0) + 0.1 * square.mean(-1)
        state["columns"] = 0.9 * state.get("columns", 0.0) + 0.1 * square.mean(-2)
        rows = (state["rows"] / state["rows"].mean(-1, keepdim=True)).sqrt().unsqueeze(-1)
        return param.grad / (rows * state["columns"].sqrt().unsqueeze(-2))


class Orthogonal(_EachParameter):
    """Turn the momentum of matrices into the nearest orthogonal matrix, as Muon does, in the dtype of the parameter."""

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        state["momentum"] = 0.9 * state.get("momentum", 0.0) + param.grad
        if param.ndim != 2:
            return state["momentum"]
        x = state["momentum"] / (state["momentum"].norm() + 1e-12)
        for _ in range(5):
            x = 1.5 * x - 0.5 * (x @ x.mT @ x)
        return x


class Shampoo(_EachParameter):
    """Precondition each dimension by the inverse root of an average of products (Gupta et al., 2018)."""

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        gradient = param.grad
        factors = state.setdefault("factors", [1e-3 * torch.eye(size).to(param) for size in param.shape])
        state["step"] = state.get("step", 0) + 1
        for dim in range(param.ndim):
            rows = param.grad.movedim(dim, 0).reshape(param.shape[dim], -1)
            factors[dim] = factors[dim] + rows @ rows.mT
            values, vectors = torch.linalg.eigh(factors[dim])
            root = vectors * values.clamp_min(1e-12) ** (-0.5 / param.ndim) @ vectors.mT
            gradient = torch.tensordot(root, gradient.movedim(dim, 0), 1).movedim(0, dim)
        return gradient


class ToNormOfAll(Optimizer):
    """Divide all gradients by their common norm."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _evaluated(closure)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad / norm)
                    param.sub_(momentum, alpha=group["lr"])
        return loss


class Sharpness(Optimizer):
    """Take the gradient at the worst neighbour of the weights (SAM, Foret et al., 2021), for which the loss is computed
    twice."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        with torch.enable_grad():
            loss = closure()
        gradients = [param.grad for param in params]
        norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm() + 1e-12
        moves = [None if g is None else self.param_groups[0]["rho"] * g / norm for g in gradients]
        for param, move in zip(params, moves, strict=True):
            if move is not None:
                param.add_(move)
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            if move is not None:
                param.sub_(move).sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss
