"""Define the base class of gradient compressors.

A compressor sends less than the gradients themselves, so that each replica applies an approximation of their mean.
Error feedback (Seide et al., 2014; Karimireddy et al., 2019) keeps what an approximation lacks as a residual, which is
added to the next gradient. The sum of all applied gradients is then the sum of all true mean gradients minus the mean
of the residuals.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_dist.mesh.objects import gather_objects
from lightning_dist.techniques.compression.wire import Wire

__all__ = ["COMPRESSORS", "Compressor", "CompressorState", "Gradient", "SaveResiduals", "compressor_from", "wide_dtype"]

CompressorState = dict[str, Tensor]
"""A compressor's tensors about one parameter, by name."""

SaveResiduals = Literal["all", "mean", "none"]
"""Which residuals a checkpoint has: each replica's, their mean, or none."""


class Gradient(NamedTuple):
    """Hold the gradient of one parameter, and what a compressor keeps about it between steps.

    Args:
        name: Full name of the parameter.
        value: This rank's gradient, or its shard of it; :meth:`Compressor.average` replaces it by the mean.
        state: Tensors about the parameter, by name, which go into checkpoints.
        num_reductions: Number of earlier reductions of this parameter's gradient; the same on all replicas.
    """

    name: str
    value: Tensor
    state: CompressorState
    num_reductions: int


class Compressor(ABC):
    """Average gradients over replicas approximately, with fewer bytes than an all-reduce sends.

    Parameters with fewer than two dimensions, small ones, and those that ``exclude`` names are not compressed. They are
    reduced together, exactly or by ``fallback``.

    Args:
        error_feedback: Whether a rank keeps what the approximation of its gradient lacks, and adds it to its next
            gradient.
        start_step: Number of reductions of a parameter's gradient before the first one that is compressed. Gradients
            change most at the beginning of a training.
        min_numel: Smallest number of elements of a parameter, or of this rank's shard of it, that is compressed.
        exclude: Regular expressions; parameters are not compressed if one of them is found in their full name.
        fallback: Compressor of the gradients that this one does not compress, such as ``"bf16"``. None: they are
            reduced exactly.
        save_residuals: Which residuals a checkpoint has. ``"all"``: each replica's, so that a resumed run continues
            exactly; the checkpoint grows by the size of the model for each replica. ``"mean"``: their mean, which is
            what matters for the sum of the applied gradients. ``"none"``: none of them.

    Raises:
        ValueError: If an argument is not valid.
    """

    takes_any_shape: ClassVar[bool] = False
    """Whether the compressor also works on parameters with fewer than two dimensions, as the fallback of another."""

    per_replica: ClassVar[frozenset[str]] = frozenset({"residual"})
    """Names of the states that differ between replicas; they have the gradient's shape."""

    def __init__(
        self,
        error_feedback: bool = True,
        start_step: int = 0,
        min_numel: int = 1024,
        exclude: Sequence[str] = (),
        fallback: str | Compressor | None = None,
        save_residuals: SaveResiduals = "all",
    ) -> None:
        if start_step < 0:
            raise ValueError(f"start_step={start_step} must be a number of steps of at least 0.")
        if save_residuals not in ("all", "mean", "none"):
            raise ValueError(f"save_residuals={save_residuals!r} must be 'all', 'mean' or 'none'.")
        self.error_feedback = error_feedback
        self.start_step = start_step
        self.min_numel = min_numel
        self.exclude = tuple(exclude)
        self.fallback = fallback
        self.save_residuals: SaveResiduals = save_residuals
        self._exclude = [_compiled(pattern) for pattern in self.exclude]

    def compresses(self, name: str, shape: torch.Size) -> bool:
        """Return whether this compressor takes a parameter.

        Args:
            name: Full name of the parameter.
            shape: Shape of the parameter, or of a rank's shard of it.
        """
        is_large = len(shape) >= 2 and shape.numel() >= max(self.min_numel, 1)
        return is_large and not any(pattern.search(name) for pattern in self._exclude)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check that the compressor can work on a model.

        Args:
            shapes: Shapes of all parameters of the whole model, by full name.

        Raises:
            ValueError: If an argument does not fit, or if no parameter would be compressed.
        """
        if not any(self.compresses(name, shape) for name, shape in shapes.items()):
            raise ValueError(self.refusal(shapes, "parameter of this model"))

    def refusal(self, shapes: Mapping[str, torch.Size], what: str) -> str:
        """Return the text of an error that says why no parameter is compressed.

        Args:
            shapes: Shapes of the parameters, or of this rank's parts of them, by full name.
            what: Phrase that follows "no" in the error, such as ``"parameter of this model"``.
        """
        name, shape = max(shapes.items(), key=lambda item: item[1].numel(), default=("", torch.Size()))
        return (
            f"compression={self} compresses no {what}: the largest one is {name!r}, of shape {tuple(shape)}. Only"
            f" those {self._requirement()} are compressed. Leave compression out, or change its arguments."
        )

    def _requirement(self) -> str:
        return f"of at least two dimensions and min_numel={self.min_numel} elements that exclude does not name"

    def fallback_compressor(self) -> Compressor | None:
        """Return the compressor of the gradients that this one does not compress; None: they are reduced exactly.

        Raises:
            ValueError: If ``fallback`` has error feedback, or does not take gradients of any shape.
        """
        if self.fallback is None:
            return None
        fallback = compressor_from(self.fallback, "fallback")
        if fallback.error_feedback or not fallback.takes_any_shape:
            raise ValueError(
                f"fallback={str(fallback)!r} keeps residuals, or works on matrices only: choose one without error"
                " feedback that takes any shape, such as 'bf16'."
            )
        return fallback

    @abstractmethod
    def average(self, gradients: Sequence[Gradient], wire: Wire) -> None:
        """Replace the values of ``gradients`` by an approximation of their means. This is a collective.

        All replicas must compute the same bits. Non-finite values must lead to non-finite means.

        Args:
            gradients: Gradients for which :meth:`compresses` is true, in the same order on all replicas; at least one.
            wire: Connection to the other replicas.
        """

    def shard_state_shape(self, key: str, shape: torch.Size) -> torch.Size:
        """Return the shape of one shard's state, for a state whose name is not in :attr:`per_replica`.

        Args:
            key: Name of the state.
            shape: Shape of the gradient, or of this rank's shard of it.

        Raises:
            NotImplementedError: If the compressor has no such state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state {key!r}.")

    def add_residuals(self, gradients: Sequence[Gradient]) -> list[Tensor]:
        """Return what is to be compressed: each gradient plus its residual.

        With error feedback, the returned tensors are the residuals themselves, in float32 or float64. A compressor
        subtracts from them what it sends, so that they hold what is missing. Without error feedback they are the
        gradients' values.
        """
        if not self.error_feedback:
            return [gradient.value for gradient in gradients]
        inputs = []
        for gradient in gradients:
            residual = gradient.state.get("residual")
            if residual is None:
                residual = gradient.state["residual"] = gradient.value.to(wide_dtype(gradient.value), copy=True)
            else:
                residual.add_(gradient.value)
            inputs.append(residual)
        return inputs

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def __eq__(self, other: object) -> bool:
        """Return whether the other compressor is of the same class and has the same arguments."""
        return isinstance(other, Compressor) and type(self) is type(other) and self._public() == other._public()

    def _public(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the compressor's name and its arguments as plain values."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        fallback = None if self.fallback is None else str(self.fallback)
        return {"name": str(self), **own, "exclude": list(self.exclude), "fallback": fallback}

    def describe(self) -> dict[str, Any]:
        """Return the arguments that matter most, for the table at the start of a run."""
        shown: dict[str, Any] = {"error_feedback": self.error_feedback}
        if self.start_step:
            shown["start_step"] = self.start_step
        return shown


def refuse_if_unused(compressor: Compressor, shapes: Mapping[str, torch.Size]) -> None:
    """Check that ``compressor`` takes the part that some rank has of some parameter.

    This is a collective over all ranks.

    Args:
        compressor: The compressor that a configuration has chosen.
        shapes: Shapes of this rank's parts of the parameters by full name.

    Raises:
        ValueError: On all ranks, if it takes none.
    """
    if not any(gather_objects(any(compressor.compresses(name, shape) for name, shape in shapes.items()))):
        raise ValueError(compressor.refusal(shapes, "part of a parameter that a rank holds"))


COMPRESSORS: dict[str, type[Compressor]] = {}
"""The compressors by the names that a configuration uses; the folder ``compressors`` fills it."""


def compressor_from(choice: str | Compressor, argument: str = "compression") -> Compressor:
    """Return the compressor that a configuration chooses.

    Args:
        choice: A compressor, or the name of one that is made with its default arguments.
        argument: Name of the argument in the configuration, for the error.

    Raises:
        ValueError: If there is no compressor of this name.
    """
    if isinstance(choice, Compressor):
        return choice
    if choice not in COMPRESSORS:
        raise ValueError(
            f"{argument}={choice!r}: there is no such compressor. The names are {', '.join(COMPRESSORS)}; or pass an"
            " instance, or in YAML a class_path with init_args."
        )
    return COMPRESSORS[choice]()


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which the sums about ``tensor`` are computed: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"exclude={pattern!r} is not a regular expression: {error}.") from None
