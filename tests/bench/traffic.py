"""Bytes that a rank sends to those it splits layers with, counted, beside the formula of what it must."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.bench.sides import STRATEGIES, make_loader, make_module, make_trainer
from tests.bench.workload import Workload

__all__ = ["bytes_per_layer"]

SENDS: dict[str, tuple[str, Callable[[int], float]]] = {
    "isend": ("tensor", lambda num_ranks: 1),
    "all_to_all_single": ("input", lambda num_ranks: (num_ranks - 1) / num_ranks),
    "all_reduce": ("tensor", lambda num_ranks: 2 * (num_ranks - 1) / num_ranks),
}
"""Function of ``torch.distributed`` to its argument that is sent, and the share of it that a rank sends.

An all-reduce as by the best algorithms, a ring among them. What is sent by other functions is not counted: the figure
would be below the formula's.
"""


def bytes_per_layer(name: str, workload: Workload) -> tuple[float, float]:
    """What a rank sends in a step for one layer, and what the formula says. To be called on every rank.

    The formula is of layers that are split with their sequence (Korthikanti et al., 2022,
    https://arxiv.org/abs/2205.05198, section 4.2): forward and backward have two all-gathers and two reduce-scatters
    each, of ``b s h`` elements, of which a rank sends ``(t - 1) / t``. The gradients of two norms come on top, a
    ``2 b s``-th of it. An all-reduce is as much as an all-gather and a reduce-scatter, so that the figure does not tell
    whether the sequence is split; it tells of exchanges that are more, or wider, than need be.

    Args:
        name: A key of ``STRATEGIES``.
        workload: The model, but for its number of layers, and the data.
    """
    dist.init_process_group("gloo")
    small, large = 2, 4
    first, layout = _bytes_of_a_step(name, replace(workload, num_layers=small))
    second, _ = _bytes_of_a_step(name, replace(workload, num_layers=large))
    num_tokens = workload.global_batch_size // layout.num_data_parallel * workload.context
    element_size = 4
    formula = 8 * num_tokens * workload.dim * (layout.tp - 1) / layout.tp * element_size
    return (second - first) / (large - small), formula  # embedding, head and loss drop out


def _bytes_of_a_step(name: str, workload: Workload) -> tuple[float, Any]:
    """Those of the second step, which no check or preparation is part of, and the strategy's layout."""
    sent: Counter[dist.ProcessGroup | None] = Counter()
    after_step: list[float] = []

    class EndOfStep(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            after_step.append(sent[trainer.strategy.mesh["tp"].get_group()])  # type: ignore[attr-defined]

    strategy, cls = STRATEGIES[name]
    trainer = make_trainer(strategy(), workload, EndOfStep(), max_steps=2)
    with _counting(sent):
        trainer.fit(make_module(cls, workload), make_loader(trainer, workload))
    return after_step[1] - after_step[0], trainer.strategy.layout  # type: ignore[attr-defined]


@contextmanager
def _counting(sent: Counter[dist.ProcessGroup | None]) -> Iterator[None]:
    """Inside, ``sent`` counts the bytes that this rank sends, by group."""

    def counted(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        argument, share = SENDS[name]
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        tensor: Tensor = given[argument]
        sent[group] += tensor.nbytes * share(dist.get_world_size(group))  # type: ignore[assignment]
        return function(*args, **kwargs)

    with ExitStack() as stack:
        for name in SENDS:
            stack.enter_context(patch.object(dist, name, partial(counted, name, getattr(dist, name))))
        yield
