"""Synchronize the weights of replicas that have trained on their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.compressor import Compressor, CompressorState, Gradient, compressor_from
from lightning_dist.techniques.compression.wire import Wire

__all__ = ["DiLoCo", "LocalSGD", "SyncMethod", "sync_method_from"]


class SyncMethod(ABC):
    """Give all replicas the same weights after a number of local optimizer steps.

    Args:
        inner_steps: Number of optimizer steps that each replica takes between two synchronizations.
        start_step: Number of first optimizer steps after each of which the weights of the replicas are averaged. They
            change most at the beginning of a training (post-local SGD, Lin et al., 2020).

    Raises:
        ValueError: If ``inner_steps`` is not at least 1, or ``start_step`` is negative.
    """

    compression: Compressor | None = None
    """The compressor of what replicas send each other; None: it is sent exactly."""

    needs_automatic_optimization: ClassVar[bool] = False
    """Whether the method works only if Lightning calls the optimizer."""

    def __init__(self, inner_steps: int = 50, start_step: int = 0) -> None:
        if inner_steps < 1:
            raise ValueError(f"inner_steps={inner_steps} must be a number of optimizer steps of at least 1.")
        if start_step < 0:
            raise ValueError(f"start_step={start_step} must be a number of optimizer steps of at least 0.")
        self.inner_steps = inner_steps
        self.start_step = start_step
        self.residuals: dict[str, CompressorState] = {}
        """The compressor's tensors by the names of weights."""

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Begin from ``weights``, which are the same on all replicas.

        Args:
            weights: This rank's shards of the weights by full name; they stay the same tensors.
        """
        return

    @abstractmethod
    def synchronize(self, weights: Mapping[str, Tensor], wire: Wire) -> None:
        """Give all replicas the same weights, in place. This is a collective over the replicas.

        Args:
            weights: The same as for :meth:`begin`, in the same order on all replicas.
            wire: Connection to the other replicas.
        """

    @property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that the next synchronization needs, by the names of weights; each replica has the same.

        They have the shapes of the weights.
        """
        return {}

    def load_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore :attr:`states`."""
        return

    def __str__(self) -> str:
        start = f", every step until {self.start_step}" if self.start_step else ""
        return f"{type(self).__name__} every {self.inner_steps} steps{start}"

    def __eq__(self, other: object) -> bool:
        """Return whether the other method is of the same class and has the same arguments."""
        return isinstance(other, SyncMethod) and type(self) is type(other) and self._public() == other._public()

    def _public(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "residuals"}

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the method's name and its arguments as plain values."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "residuals"}
        return {
            "name": type(self).__name__,
            **{name: str(v) if isinstance(v, Compressor) else v for name, v in own.items()},
        }


class LocalSGD(SyncMethod):
    """Average the weights of the replicas (local SGD, Stich, 2019, https://arxiv.org/abs/1805.09767)."""

    @torch.no_grad()
    def synchronize(self, weights: Mapping[str, Tensor], wire: Wire) -> None:
        """Replace the weights by their means over the replicas. This is a collective over the replicas."""
        wire.average_each(list(weights.values()))


class DiLoCo(SyncMethod):
    """Take an outer optimizer step along the mean of the replicas' changes (Douillard et al., 2023, algorithm 1).

    The outer gradient is the mean over the replicas of the weights at the last synchronization minus the weights now.
    The outer optimizer is SGD with Nesterov momentum. See https://arxiv.org/abs/2311.08105.

    Args:
        inner_steps: Number of optimizer steps that each replica takes between two synchronizations.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum of the outer optimizer.
        nesterov: Whether the momentum is Nesterov's.
        compression: Compressor of the outer gradients, such as ``"int8"``. None: they are averaged exactly.
        start_step: Number of first optimizer steps after each of which the weights of the replicas are averaged.

    Raises:
        ValueError: If an argument is not valid.
    """

    needs_automatic_optimization = True

    def __init__(
        self,
        inner_steps: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        compression: str | Compressor | None = None,
        start_step: int = 0,
    ) -> None:
        super().__init__(inner_steps, start_step)
        if outer_lr <= 0:
            raise ValueError(f"outer_lr={outer_lr} must be above 0.")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} must be at least 0 and below 1.")
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.nesterov = nesterov and outer_momentum > 0
        self.compression = None if compression is None else compressor_from(compression)
        if self.compression is not None and (self.compression.start_step or self.compression.fallback):
            raise ValueError(
                f"compression={self.compression} of DiLoCo with start_step={self.compression.start_step} and"
                f" fallback={self.compression.fallback}: outer gradients are compressed from the first one on, and"
                " those that the compressor does not take are sent exactly. Leave both arguments out."
            )
        self._outer: dict[str, Tensor] = {}
        self._optimizer: torch.optim.SGD | None = None

    @torch.no_grad()
    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Keep a copy of ``weights``, from which the next outer gradient is computed."""
        self._outer = {name: weight.clone() for name, weight in weights.items()}
        if not self._outer:
            return
        self._optimizer = torch.optim.SGD(
            list(self._outer.values()), lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov
        )

    @torch.no_grad()
    def synchronize(self, weights: Mapping[str, Tensor], wire: Wire) -> None:
        """Take an outer step, and give all replicas its result. This is a collective over the replicas."""
        if self._optimizer is None:
            return
        gradients = {name: (outer - weights[name]).contiguous() for name, outer in self._outer.items()}
        compressed, exact = list[Gradient](), list[Tensor]()
        for name, gradient in gradients.items():
            is_real = not gradient.is_complex() and gradient.numel() > 0
            if self.compression is not None and is_real and self.compression.compresses(name, gradient.shape):
                compressed.append(Gradient(name, gradient, self.residuals.setdefault(name, {}), num_reductions=0))
            else:
                exact.append(gradient)
        if compressed and self.compression is not None:
            self.compression.average(compressed, wire)
        wire.average_each(exact)
        for name, outer in self._outer.items():
            outer.grad = gradients[name]
        self._optimizer.step()
        self._optimizer.zero_grad()
        for name, outer in self._outer.items():
            weights[name].copy_(outer)

    @property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the momentum of each weight, once there is one."""
        if self._optimizer is None:
            return {}
        momenta = {name: self._optimizer.state[outer].get("momentum_buffer") for name, outer in self._outer.items()}
        return {name: {"momentum": momentum} for name, momentum in momenta.items() if momentum is not None}

    def load_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the momenta."""
        for name, state in states.items():
            if self._optimizer is not None and name in self._outer:
                self._optimizer.state[self._outer[name]]["momentum_buffer"] = state["momentum"].clone()


def sync_method_from(choice: str | SyncMethod) -> SyncMethod:
    """Return the method that a configuration chooses.

    Args:
        choice: A method, or the name of one that is made with its default arguments: its class's name, in any case.

    Raises:
        ValueError: If there is no method of this name.
    """
    if isinstance(choice, SyncMethod):
        return choice
    names = {kind.__name__.lower(): kind for kind in (DiLoCo, LocalSGD)}
    if not isinstance(choice, str) or choice.lower() not in names:
        raise ValueError(
            f"sync={choice!r}: there is no such method. The names are {', '.join(names)}; or pass an instance, or in"
            " YAML a class_path with init_args."
        )
    return names[choice.lower()]()
