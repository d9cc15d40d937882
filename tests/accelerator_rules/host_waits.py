"""Count what the host waits for in a training step, by the line of the project that causes it.

``python -m tests.accelerator_rules.host_waits`` prints a table with the numbers per step of a fit on the simulated
accelerator, without logging, validation and checkpoints. ``-v`` adds the lines, and names select rows.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_dist.plugins._compat import around_every_batch
from tests.accelerator import VARIABLE, place
from tests.accelerator_rules import NAME
from tests.accelerator_rules.build import compiled
from tests.accelerator_rules.rows import ROWS, Row

__all__ = ["KINDS", "Wait", "counted", "measure", "waits_per_step"]

KINDS = ("device to host", "host to device", "pageable", "operations", "synchronize", "gloo", "model")
"""Columns: blocking copies in each direction, copies from pageable memory that the program does not wait for,
operations whose result has a size that the host must know, waits for events, streams and the device, exchanges over
gloo for which the host waits in the step in which they began, and all waits that the code of the model causes."""

_FIRST, _LAST = 5, 8
_ROOT = Path(__file__).parents[2]
_SITE_PACKAGES = re.compile(r"\S*site-packages/")
_COLLECTIVES = ("allgather", "allreduce", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv",
                "reduce", "reduce_scatter", "scatter", "send")  # fmt: skip


class Wait(NamedTuple):
    """Describe for what the host waits.

    Args:
        kind: Column of the table.
        what: Name of the operation.
        site: Line of the project that causes it, or the innermost line if none of the project is on the stack.
    """

    kind: str
    what: str
    site: str


class counted:  # noqa: N801 - It is used as a function that returns a context.
    """Count in this context what the host waits for. ``waits`` has the numbers after its end."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.step = 0

    def __enter__(self) -> counted:
        self._watch = _watched_gloo(self)
        self._watch.__enter__()
        compiled().enable_counts(True)
        return self

    def __exit__(self, *_: Any) -> None:
        compiled().enable_counts(False)
        self._watch.__exit__(None, None, None)
        for (what, (own, inner)), number in compiled().counts().items():
            kind = what.partition(",")[0]
            if "pageable" in what:
                kind = "pageable"
            if "/transformers/" in inner:
                kind = "model"
            elif what.startswith("synchronize"):
                kind = "synchronize"
            elif kind not in KINDS:
                kind = "gloo" if what.startswith("gloo") else "operations"
            site = own if inner.startswith(own) or not inner else f"{own} < {inner}"
            self.waits[Wait(kind, what, _SITE_PACKAGES.sub("", site.replace(f"{_ROOT}/", "")))] += number


@contextmanager
def _watched_gloo(counter: counted) -> Iterator[None]:
    begun: dict[int, tuple[Any, int, str]] = {}
    places = [(dist.ProcessGroup, name) for name in _COLLECTIVES if hasattr(dist.ProcessGroup, name)]
    before = {name: vars(owner)[name] for owner, name in places}
    wait = vars(dist.Work)["wait"]

    def starting(name: str) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            work = before[name](*args, **kwargs)
            if type(work) is dist.Work:  # The works of the backend with NCCL's rules have a class of their own.
                begun[id(work)] = work, counter.step, name
            return work

        return start

    def waiting(work: Any, *args: Any) -> Any:
        found = begun.pop(id(work), None)
        on_thread = threading.current_thread()
        is_background = on_thread is not threading.main_thread() and not isinstance(on_thread, threading._DummyThread)
        if found is not None and found[1] == counter.step and not is_background:
            compiled().count(f"gloo {found[2]}")
        return wait(work, *args)

    for owner, name in places:
        setattr(owner, name, starting(name))
    dist.Work.wait = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        for owner, name in places:
            setattr(owner, name, before[name])
        dist.Work.wait = wait  # type: ignore[method-assign]


class _Window(pl.Callback):
    """Count in some steps. A step begins before its batch is fetched, and ends before the next batch is."""

    def __init__(self) -> None:
        self.counter = counted()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        around_every_batch(trainer, "counted steps", self._begin_step)

    def _begin_step(self) -> None:
        self.counter.step += 1
        if self.counter.step == _FIRST:
            self.counter.__enter__()
        if self.counter.step == _LAST + 1:
            self.counter.__exit__()


def measure(name: str) -> Counter[Wait]:
    """Train a row of the table on this rank, and return the numbers of all counted steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    row: Row = ROWS[name]
    model = row.build(int(os.environ["RANK"]))
    window = _Window()
    pl.Trainer(
        **place(),
        strategy=row.strategy(),
        precision="32-true",
        max_steps=_LAST + 2,
        max_epochs=-1,
        gradient_clip_val=row.clip,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[*row.callbacks(), window],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, row.data(model))
    return window.counter.waits


def waits_per_step(waits: Counter[Wait]) -> dict[str, float]:
    """Return the number of waits of each kind per step."""
    numbers = dict.fromkeys(KINDS, 0.0)
    for wait, number in waits.items():
        numbers[wait.kind] += number / (_LAST - _FIRST + 1)
    return numbers


def _cell(every: list[float]) -> str:
    low, high = f"{min(every):.3g}", f"{max(every):.3g}"
    return low if low == high else f"{low}..{high}"


def main() -> None:
    """Print the table."""
    from tests.pool import RankFailed, WorkerPool

    parser = argparse.ArgumentParser(description="Count what the host waits for in a step, for each strategy.")
    parser.add_argument("names", nargs="*", help="parts of names of rows; all rows if there is none")
    parser.add_argument("-v", action="store_true", dest="is_verbose", help="list the lines that cause the waits")
    options = parser.parse_args()
    os.environ.update({VARIABLE: NAME, "LIGHTNING_DIST_TESTS_BACKEND": "nccl-rules", "OMP_NUM_THREADS": "1"})
    names = [name for name in ROWS if not options.names or any(part in name for part in options.names)]
    compiled()
    pool = WorkerPool()
    print(f"| | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}", flush=True)
    for name in names:
        try:
            every: list[Counter[Wait]] = pool.run(measure, ROWS[name].num_ranks, name)
        except RankFailed as error:
            print(f"| {name} | {str(error).strip().splitlines()[-1]} |", flush=True)
            continue
        numbers = [waits_per_step(waits) for waits in every]
        print(f"| {name} | {' | '.join(_cell([n[kind] for n in numbers]) for kind in KINDS)} |", flush=True)
        if options.is_verbose:
            for wait, number in sorted(every[0].items(), key=lambda item: (item[0].kind, -item[1])):
                print(f"|   {number / (_LAST - _FIRST + 1):.3g} {wait.what} | {wait.site} |", flush=True)
    pool.close()


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("forkserver", force=True)
    from tests.accelerator_rules.host_waits import main as imported_main  # Ranks find functions by this name.

    imported_main()
