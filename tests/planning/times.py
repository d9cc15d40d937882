"""Compare the predicted time of a step with the measured one, and the first choice of a plan with the fastest layout.

Run ``python -m tests.planning.times --write docs/planning.md`` on a machine that does nothing else. The layouts are
measured in turn, in several rounds, and the median of the rounds counts. It takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_dist import NDParallelStrategy
from lightning_dist.plugins.planning import Layout, Planned, find_where, layouts_of, plan
from lightning_dist.run.doctor.profile import MachineProfile
from tests.planning.cases import MODELS
from tests.pool import WorkerPool

_BEGIN, _END = "<!-- begin of the times -->", "<!-- end of the times -->"
_MODELS = ("GPT", "Llama", "CNN")
_NUM_STEPS, _NUM_WARM = 7, 2
_TOLERANCE, _OF_BEST = 0.15, 0.10


class Row(NamedTuple):
    """Hold what was predicted and measured for a layout."""

    model: str
    planned: Planned
    seconds: list[float]

    @property
    def predicted(self) -> float:
        assert self.planned.time is not None
        return self.planned.time.total

    @property
    def measured(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Return by how much the slowest round is slower than the fastest."""
        return max(self.seconds) / min(self.seconds) - 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def samples_per_s(self) -> float:
        return self.planned.layout.num_data_parallel * self.planned.batch.samples / self.measured

    def __str__(self) -> str:
        layout = self.planned.layout
        cells = [f"{self.model}, {layout.num_ranks} ranks", str(layout)]
        cells += [f"{1e3 * self.predicted:,.0f}", f"{1e3 * self.measured:,.0f}", f"{self.spread:.0%}"]
        rates = [f"{self.planned.samples_per_s:,.0f}", f"{self.samples_per_s:,.0f}"]
        return f"| {' | '.join([*cells, f'{self.error:+.0%}', *rates])} |"


def make(model: str, layout: Layout) -> tuple[Any, DataLoader[Any], dict[str, Any]]:
    """Return the module of a model, its loader, and the arguments of a Trainer."""
    make_module, make_data, batch_size = MODELS[model]
    torch.manual_seed(0)
    strategy = NDParallelStrategy(**layout.arguments)
    return make_module(), DataLoader(make_data(), batch_size=batch_size), {"strategy": strategy}


class _Clock(Callback):
    """Note the time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(perf_counter())


def seconds_of_step(model: str, layout: Layout) -> float:
    """Train some steps on this rank, and return the median time of one. This is a collective over all processes."""
    torch.set_num_threads(1)
    module, data, arguments = make(model, layout)
    clock = _Clock()
    trainer = Trainer(
        **arguments, accelerator="cpu", devices=layout.num_ranks, max_steps=_NUM_STEPS, logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return median(end - begin for begin, end in pairwise(clock.ends[_NUM_WARM - 1 :]))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all layouts, print their rows, and return 1 if the errors are larger than the bounds."""
    parser = argparse.ArgumentParser("python -m tests.planning.times", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=_MODELS, choices=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    verdicts = []
    for num_ranks in options.ranks:
        profile = _profile(num_ranks)
        for model in options.models:
            own = list(_rows(model, num_ranks, profile, options.rounds))
            print("\n".join(map(str, own)), flush=True)
            verdicts.append(_first_choice(own))
            print(verdicts[-1][0], flush=True)
            rows += own
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    spread = median(row.spread for row in rows)
    bound = max(_TOLERANCE, 2 * spread)
    summary = (
        f"The median error is {median(errors):.0%}, and the largest {worst.error:+.0%} ({worst.model},"
        f" {worst.planned.layout}). The slowest round of a layout took {spread:.0%} longer than its fastest (median)."
    )
    print(summary)
    if options.write:
        text = options.write.read_text()
        begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
        header = (
            "| training | layout | ms a step, planned | measured | spread | error | samples/s, planned | measured |\n"
            "|---|---|---|---|---|---|---|---|\n"
        )
        choices = "".join(f"- {text}\n" for text, _ in verdicts)
        table = f"\n{summary}\n\n{choices}\n{header}" + "".join(f"{row}\n" for row in rows)
        options.write.write_text(text[:begin] + table + text[end:])
    return int(median(errors) > bound or not all(good for _, good in verdicts))


def _first_choice(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return a sentence on the layout that was predicted to be the fastest, and whether it is nearly the fastest."""
    first = max(rows, key=lambda row: row.planned.samples_per_s)
    best = max(rows, key=lambda row: row.samples_per_s)
    behind = 1 - first.samples_per_s / best.samples_per_s
    is_good = behind <= max(_OF_BEST, first.spread, best.spread)
    layout = first.planned.layout
    where = "the fastest" if first is best else f"{behind:.0%} slower than {best.planned.layout}"
    return f"{first.model} on {layout.num_ranks} ranks: the first choice, {layout}, is {where}.", is_good


def _profile(num_ranks: int) -> MachineProfile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "lightning_dist.cli", "doctor", f"--devices={num_ranks}", f"--write={path}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return MachineProfile.read(path)


def _rows(model: str, num_ranks: int, profile: MachineProfile, num_rounds: int) -> Iterator[Row]:
    where = find_where(num_ranks, "gloo", profile=profile)
    planned = plan(partial(make, model), layouts_of(1, num_ranks), None, "gloo", where)
    possible = [one for one in planned if one.peak is not None]
    seconds: dict[Layout, list[float]] = {one.layout: [] for one in possible}
    pool = WorkerPool()
    try:
        for _ in range(num_rounds):
            for one in possible:
                seconds[one.layout].append(max(pool.run(seconds_of_step, num_ranks, model, one.layout)))
    finally:
        pool.close()
    for one in possible:
        yield Row(model, one, seconds[one.layout])


if __name__ == "__main__":
    sys.exit(main())
