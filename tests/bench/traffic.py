"""Count the bytes that a rank sends to the ranks that it splits layers with, and compare them with a formula."""

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
"""The argument that a function of ``torch.distributed`` sends, and the share of it that a rank sends, by function.

The share of an all-reduce is that of the best algorithms, such as a ring. Bytes that other functions send are not
counted; if there were any, the figure would be below the formula's.
"""


def bytes_per_layer(name: str, workload: Workload) -> tuple[float, float]:
    """Return the bytes that this rank sends in a step for one layer, and the bytes that a formula gives.

    This is a collective.

    The formula is that of tensor parallelism with sequence parallelism (Korthikanti et al., 2022,
    https://arxiv.org/abs/2205.05198, section 4.2): forward and backward have two all-gathers and two reduce-scatters
    each, of ``b s h`` elements, of which a rank sends ``(t - 1) / t``. It leaves out the gradients of two norms, which
    add one part in ``2 b s``. An all-reduce sends as much as an all-gather and a reduce-scatter together. So the figure
    does not show whether the sequence is split; it shows exchanges that are superfluous or too large.

    Args:
        name: Key of ``STRATEGIES``.
        workload: Model and data; the number of layers is replaced.
    """
    dist.init_process_group("gloo")
    small, large = 2, 4
    first, layout = _bytes_of_a_step(name, replace(workload, num_layers=small))
    second, _ = _bytes_of_a_step(name, replace(workload, num_layers=large))
    num_tokens = workload.global_batch_size // layout.num_data_parallel * workload.context
    element_size = 4
    formula = 8 * num_tokens * workload.dim * (layout.tp - 1) / layout.tp * element_size
    # The difference leaves out embedding, head and loss, which do not depend on the number of layers.
    return (second - first) / (large - small), formula


def _bytes_of_a_step(name: str, workload: Workload) -> tuple[float, Any]:
    """Return the bytes that this rank sends in the second step, and the layout of the strategy.

    The first step is left out, because it includes checks and preparations.
    """
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
    """Count in ``sent`` the bytes that this rank sends in this context, by process group."""

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
