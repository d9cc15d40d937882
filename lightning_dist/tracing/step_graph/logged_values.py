"""Find out whether the values that a step logs and returns are means over samples.

A mean over the samples of a batch is the mean of the means over its microbatches. Every other value must be computed
from the whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dist._compat import tree_leaves
from lightning_dist.tracing.step_graph.errors import TraceError
from lightning_dist.tracing.step_graph.fake_run import tensors_in
from lightning_dist.tracing.step_graph.means import is_known_mean, is_mean, is_same_value

__all__ = ["LoggedValues"]

_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__"})
"""Functions that read values of tensors, which the step may log."""


class LoggedValues:
    """Record what a step logs and returns."""

    def __init__(self) -> None:
        self.are_otherwise = False
        """Whether the step logs or returns a value that is not a mean over samples."""
        self.numbers: list[float] = []
        """The Python numbers that the step logs or returns, in order."""
        self._sizes: dict[tuple[str, int], int] = {}
        self._num_logged: Counter[str] = Counter()
        self._no_means: list[Tensor] = []
        self._no_means_read: list[Tensor] = []
        self._has_read = False

    @property
    def sizes(self) -> dict[tuple[str, int], int]:
        """Return the ``batch_size`` of each call of ``self.log`` that has one, by the call's name and number.

        If the step has read a tensor's value, the result is empty: that value is made up, and the same for a microbatch
        and the whole batch, so that the two could not be told apart.
        """
        return {} if self._has_read else self._sizes

    def on_log(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call of ``self.log``, or the update of a metric.

        Args:
            name: The name that is logged, or ``"metric"``.
            value: The value that is logged, or the arguments of the update.
            args: The other positional arguments of the call.
            kwargs: The keyword arguments of the call. For the update of a metric, ``takes`` says how the metric
                combines values; None: it computes with samples.

        Raises:
            TraceError: If the metric would see other values than in one process.
        """
        for tensor in tensors_in(value) if name != "metric" else ():
            self._note_kind(tensor)
        _refuse_value_of_batch(value, kwargs.get("takes"))
        self._num_logged[name] += 1
        if isinstance(kwargs.get("batch_size"), int):
            self._sizes[name, self._num_logged[name]] = kwargs["batch_size"]
        reduce = kwargs.get("reduce_fx", args[4] if len(args) > 4 else "mean")
        if getattr(reduce, "__name__", reduce) not in ("mean", "avg"):
            self.are_otherwise = True
        elif isinstance(value, int | float):
            self.numbers.append(float(value))

    def on_read(self, name: str, tensor: Tensor, is_text: bool) -> None:
        """Record that the step reads the value of ``tensor``.

        Args:
            name: The name of the function that reads it.
            tensor: The tensor whose value is read.
            is_text: Whether the function formats the value.
        """
        self._has_read |= not is_text
        if name in _NUMBERS and not is_mean(tensor):
            self._no_means_read.append(tensor)

    def on_exchange(self) -> None:
        """Record that the step combines tensors of several ranks, so that results need not be means over samples."""
        self.are_otherwise = True

    def on_result(self, result: Any, loss: Tensor | None) -> None:
        """Record what the step returns at its end: its loss, and the numbers besides it.

        Args:
            result: The result of the step.
            loss: The loss in ``result``; None if there is none.
        """
        others = result
        if isinstance(result, Mapping):
            others = {key: value for key, value in result.items() if key not in ("loss", "weight")}
        for leaf in tree_leaves(others) if not isinstance(others, Tensor) else ():
            if isinstance(leaf, Tensor):
                self.are_otherwise |= leaf.ndim == 0 and not leaf.is_floating_point()
                self._note_kind(leaf)
            elif isinstance(leaf, int | float):
                self.numbers.append(float(leaf))
        no_means = [*self._no_means, *(self._no_means_read if self.numbers else ())]
        # If the loss itself is logged, the mean of the microbatches' losses is logged, because that is the pipeline's
        # loss.
        self.are_otherwise |= any(loss is None or not is_same_value(tensor, loss) for tensor in no_means)

    def _note_kind(self, tensor: Tensor) -> None:
        if not is_mean(tensor):
            self._no_means.append(tensor)


def _refuse_value_of_batch(value: Any, takes: str | None) -> None:
    """Refuse to update a metric with a value of the whole batch, because a pipeline only has those of microbatches.

    Args:
        value: The arguments of the update.
        takes: The way in which the metric combines values, such as ``"sums"``; None for a metric of samples.

    Raises:
        TraceError: If the metric would see other values than in one process.
    """
    if takes is not None and any(is_known_mean(tensor) for tensor in tensors_in(value)):
        raise TraceError(
            "The step updates a metric that adds up, keeps or compares values with one value for the whole batch. A"
            " pipeline runs the step once for each microbatch, so that the metric would see the microbatches' values."
            " Return the value, and update the metric in a hook such as on_train_batch_end."
        )
