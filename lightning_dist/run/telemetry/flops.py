"""Count the floating-point operations of a training step while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from lightning_dist._compat import DispatchMode, FakeTensor, is_in_backward

__all__ = ["FlopCounter", "Flops", "flops_formula"]

_RECOMPUTED_SCORES = 1 / 5
"""Fraction of the operations of a fused attention's backward that compute the scores again."""


class Flops(NamedTuple):
    """Hold the numbers of floating-point operations of this rank in a step.

    Args:
        model: The operations that the model needs, so that their sum over the ranks does not depend on how the model
            is distributed.
        hardware: All operations that the device has run, including those that compute activations again.
    """

    model: float
    hardware: float


@cache
def flops_formula(packet: Any) -> Callable[..., int] | None:
    """Return the formula of an operation; None: its operations are not counted.

    torch's registry lacks attention on the CPU (torch 2.13), which is known by its name.
    """
    name = str(packet)
    if packet not in flop_registry and "scaled_dot_product" in name and "for_cpu" in name:
        return sdpa_backward_flop if _is_attention_backward(packet) else sdpa_flop
    return flop_registry.get(packet)


@cache
def _is_attention_backward(packet: Any) -> bool:
    """Return whether an operation is the backward of a fused attention."""
    return "attention" in str(packet) and str(packet).endswith("_backward")


class FlopCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations of matrix products, convolutions and attention in this context, by torch's own formulas.

    A product of an ``m x k`` and a ``k x n`` matrix counts ``2mkn``. Attention counts all scores, also if it is causal.
    Operations that run in a backward with gradients enabled count as recomputation. This is how activation
    checkpointing runs forwards again; a backward with ``create_graph=True`` looks the same. Compiled code is seen where
    it calls torch's operations, as Inductor's does for products unless it generates kernels for them (max-autotune).
    Attention between layers that tensor parallelism leaves whole, in a module with other layers that it splits, counts
    on every rank.

    Args:
        copied: Modules that several ranks run on the same input.
        num_copies: The number of these ranks.
    """

    def __init__(self, copied: Iterable[nn.Module] = (), num_copies: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failure = ""
        """Why an operation could not be counted; empty: all were."""
        self._copied = tuple(copied)
        self._num_copies = num_copies
        self._num_running_copied = 0
        self._forward = self._of_copied = self._backward = self._recomputed = 0.0
        self._hooks = ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile compiles a step that runs in this context as it does others."""
        return True

    def __enter__(self) -> Self:
        """Begin to count."""
        for module in self._copied:
            self._hooks.callback(module.register_forward_pre_hook(self._enter_copied, prepend=True).remove)
            self._hooks.callback(module.register_forward_hook(self._leave_copied, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _enter_copied(self, *args: Any) -> None:
        self._num_running_copied += 1

    def _leave_copied(self, *args: Any) -> None:
        self._num_running_copied -= 1

    @property
    def flops(self) -> Flops:
        """Return the operations counted so far.

        The backwards of copied modules are taken to be the same fraction of all backwards as their forwards of all
        forwards.
        """
        copied = self._of_copied / self._forward if self._forward else 0.0
        own = 1 - copied * (1 - 1 / self._num_copies)
        ran = self._forward + self._backward
        return Flops(own * ran, ran + self._recomputed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and add its operations."""
        if DTensor in types:  # Its operations on this rank's tensors are counted.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        formula = None if packet is None else flops_formula(packet)
        if formula is not None and FakeTensor not in types:
            try:
                self._add(packet, formula(*args, **(kwargs or {}), out_val=result))
            except Exception as error:  # A formula may not cover all forms of its operation.
                self.failure = f"{packet}: {type(error).__name__}: {error}"
        return result

    def _add(self, packet: Any, number: int) -> None:
        if not is_in_backward():
            self._forward += number
            self._of_copied += number if self._num_running_copied else 0
        elif torch.is_grad_enabled():
            self._recomputed += number
        else:
            again = number * _RECOMPUTED_SCORES if _is_attention_backward(packet) else 0
            self._backward += number - again
            self._recomputed += again
