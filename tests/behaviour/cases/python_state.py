"""Test state in Python objects: iterators, caches, counters, locks, files, and generators of other libraries."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import VOCABULARY, tokens
from tests.behaviour.writers import WIDTH, FeedForward, Layer, Writer

STAGES = ("pp", "nd", "nd_tp")
SPLIT = (*STAGES, "tp", "data_tp", "tp_tokens", "cp", "tiled")

TOLERANCE = 1e-9


def _fit(run: Run, model: Writer, **kwargs: Any) -> None:
    run.fit(model, run.loader(tokens()), val=run.loader(tokens(seed=1)), **kwargs)


def _with_layers(make: Any) -> type[Writer]:
    class Has(Writer):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(make() for _ in range(2))

    return Has


@case(
    "the step takes the next item of an iterator that the module holds",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "The step takes the next item of self"),
)
def iterator(run: Run) -> None:
    class Takes(Writer):
        def on_train_start(self) -> None:
            self.factors = iter(itertools.cycle([1.0, 0.5, 2.0, 0.1, 3.0]))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            factor = next(self.factors)
            self.log("factor", factor, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx) * factor

    _fit(run, Takes())


@case(
    "the step takes the next batch of a second loader, whose iterator the module holds",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "The step takes the next item of self"),
)
def second_loader(run: Run) -> None:
    class Takes(Writer):
        def setup(self, stage: str) -> None:
            self.others = iter(run.loader(tokens(seed=5)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            other = next(self.others)
            return self.loss([torch.cat([batch[0], other[0]])])

    _fit(run, Takes())


@case("a layer caches a mask and rotations by length in a dict and by functools.lru_cache", tolerance=TOLERANCE)
def caches(run: Run) -> None:
    @functools.lru_cache(maxsize=8)
    def slopes(length: int) -> Tensor:
        return torch.linspace(1.0, 0.5, length, dtype=torch.float64)

    class Caches(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.cached: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if WIDTH not in self.cached:
                self.cached[WIDTH] = torch.cos(torch.arange(WIDTH, dtype=x.dtype, device=x.device))
            return super().forward(x * (1 + 0.1 * self.cached[WIDTH]) * slopes(WIDTH))

    _fit(run, _with_layers(Caches)())


@case("the step caches a mask of positions by length in a dict of the module", tolerance=TOLERANCE)
def cached_by_step(run: Run) -> None:
    class Caches(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.weights: dict[int, Tensor] = {}

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            length = ids.size(1) - 1
            if length not in self.weights:
                self.weights[length] = torch.linspace(0.5, 1.5, length, dtype=torch.float64)
            logits = self(ids[:, :-1]).flatten(0, 1)
            losses = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            return (losses.view(-1, length) * self.weights[length]).mean()

    _fit(run, Caches())


@case(
    "a layer counts its calls in training, and its scale depends on their number",
    tolerance=TOLERANCE,
    differs=dict.fromkeys(STAGES, "A block counts on the ranks of its stage."),
)
def counting_layer(run: Run) -> None:
    class Counts(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return x + (super().forward(x) - x) / (1 + 0.1 * self.calls)

    model = _with_layers(Counts)()
    _fit(run, model)
    run.record("calls", [layer.calls for layer in model.layers])


@case(
    "the feed-forward layer counts its calls, and its scale depends on their number",
    tolerance=TOLERANCE,
    differs=dict.fromkeys(STAGES, "A block counts on the ranks of its stage."),
)
def counting_mlp(run: Run) -> None:
    class Counts(FeedForward):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return super().forward(x) / (1 + 0.1 * self.calls)

    class HasCounts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mixture.shared = Counts()

    model = _with_layers(HasCounts)()
    _fit(run, model)
    run.record("calls", [layer.mixture.shared.calls for layer in model.layers])


@case(
    "a layer is left out at random by Python's generator, seeded before each batch",
    tolerance=TOLERANCE,
    differs=dict.fromkeys(STAGES, "Blocks draw numbers for each microbatch."),
)
def python_random(run: Run) -> None:
    class Drops(Layer):
        def forward(self, x: Tensor) -> Tensor:
            scale = 0.0 if self.training and random.random() < 0.5 else 1.0
            return x + scale * (super().forward(x) - x)

    class Seeds(_with_layers(Drops)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            random.seed(batch_idx)

    _fit(run, Seeds())


@case(
    "a layer scales by a number of NumPy's generator, which the layer holds",
    tolerance=TOLERANCE,
    differs=dict.fromkeys(STAGES, "Blocks draw numbers for each microbatch."),
)
def numpy_generator(run: Run) -> None:
    class Scales(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Tensor:
            scale = float(self.rng.uniform(0.5, 1.5)) if self.training else 1.0
            return x + scale * (super().forward(x) - x)

    _fit(run, _with_layers(Scales)())


@case(
    "the step leaves a layer out by a random.Random that the module holds",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "draws numbers from self.rng, a generator of its own"),
)
def skips_by_own_generator(run: Run) -> None:
    class Skips(Writer):
        def __init__(self) -> None:
            super().__init__(num_layers=3)
            self.rng = random.Random(4)

        def hidden(self, ids: Tensor) -> Tensor:
            x = self.emb(ids)
            for layer in self.layers:
                if not self.training or self.rng.random() < 0.7:
                    x = layer(x)
            return self.norm(x)

    _fit(run, Skips())


@case("layers hold a lock and a deque, and the module an open file, which cannot all be copied", tolerance=TOLERANCE)
def uncopyable(run: Run) -> None:
    class Locks(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.norms = threading.Lock(), collections.deque(maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return super().forward(x)

    class Writes(_with_layers(Locks)):  # type: ignore[misc]
        def on_fit_start(self) -> None:
            self.file = open(run.folder / f"{run.rank}.txt", "w")  # noqa: SIM115

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.file.write(f"{batch_idx}\n")

    model = Writes()
    _fit(run, model)
    model.file.close()
    run.record("file", (run.folder / f"{run.rank}.txt").read_text())


@case(
    "the step writes to a file of each rank and appends to a list of the user's, outside of the module",
    tolerance=TOLERANCE,
    differs=dict.fromkeys(SPLIT, "The step runs on tensors without values as well, before the training."),
)
def side_effects(run: Run) -> None:
    seen: list[int] = []

    class Writes(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch_idx)
            with (run.folder / f"steps-{run.rank}.txt").open("a") as file:
                file.write(f"{batch_idx}\n")
            return super().training_step(batch, batch_idx)

    _fit(run, Writes())
    run.record("seen", seen)
    run.record("file", (run.folder / f"steps-{run.rank}.txt").read_text())


@case(
    "a forward hook on a layer counts its calls, and one on the head keeps its last output",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "A tensor that is made inside head is kept"),
)
def forward_hooks(run: Run) -> None:
    class Hooks(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.kept = 0, None
            self.layers[1].norm2.register_forward_hook(self._count)
            self.head.register_forward_hook(self._keep)

        def _count(self, *args: Any) -> None:
            self.calls += 1

        def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.kept = output.detach()

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("logits", self.kept.square().mean(), sync_dist=True)

    model = Hooks()
    _fit(run, model)
    run.record("calls", model.calls)


@case(
    "hidden states of one batch are carried over to the next one, detached",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "The step could not be traced on tensors without values"),
)
def carried_over(run: Run) -> None:
    class Carries(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.memory: Tensor | None = None
            self.read = nn.Linear(WIDTH, WIDTH)

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            hidden = self.hidden(ids[:, :-1])
            if self.memory is not None and self.training:
                hidden = hidden + self.read(self.memory)
            if self.training:
                self.memory = hidden.detach()
            return functional.cross_entropy(self.head(hidden).view(-1, VOCABULARY), ids[:, 1:].flatten())

    _fit(run, Carries())
