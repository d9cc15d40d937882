"""Steps that keep metric values, draw numbers from generators of their own, or clear gradients in unusual places."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Classifier

STAGES = ("pp", "nd", "nd_tp")
N = NUM_FEATURES


@case("validation_step appends what a metric returns, and logs what follows from another one")
def metric_values_kept(run: Run) -> None:
    class Keeps(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
            self.other = MulticlassAccuracy(NUM_CLASSES, average="micro")
            self.found: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            self.found.append(self.accuracy(logits, batch[1]).detach())
            self.log("val/error", 1 - self.other(logits, batch[1]), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.log("val/found", torch.stack(self.found).mean(), sync_dist=True)
            self.found.clear()

    run.fit(Keeps(), val=True)


@case("optimizer_zero_grad is overridden to accumulate two batches by hand")
def zero_grad_every_second_batch(run: Run) -> None:
    class SecondOnly(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure)
            else:
                closure()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    run.fit(SecondOnly())


@case(
    "mixup by a NumPy generator of the module's own",
    refused=dict.fromkeys(STAGES, "draws numbers from self.rng, a generator of its own"),
    differs=dict.fromkeys(("full", "hybrid", "data", "data_tp"), "each rank mixes its own samples, as under ddp"),
)
def own_numpy_generator(run: Run) -> None:
    class Mixes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)
            self.further = random.Random(0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            share, order = self.rng.beta(0.4, 0.4), torch.as_tensor(self.rng.permutation(len(x)))
            out = self(share * x + (1 - share) * x[order])
            loss = share * functional.cross_entropy(out, y) + (1 - share) * functional.cross_entropy(out, y[order])
            self.log("train/loss", loss)
            return loss

    run.fit(Mixes())


@case("module.zero_grad() in a step, as in the DCGAN tutorial", refused=dict.fromkeys(STAGES, "automatic_optimization"))
def module_zero_grad_in_step(run: Run) -> None:
    class Gan(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            body, head = self.optimizers()
            self.head.zero_grad()
            self.manual_backward(self.loss(batch))
            head.step()
            self.net.zero_grad()
            self.manual_backward(self.loss(batch))
            body.step()
            self.log("step", float(batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.SGD(self.head.parameters(), lr=0.05)

    run.fit(Gan())


@case(
    "`.data =` on a parameter without dimensions, in each step",
    refused=dict.fromkeys(STAGES, "The step changes the parameter 'scale'"),
)
def scalar_data_assigned(run: Run) -> None:
    class Clamps(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=0.5)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.scale.data = torch.clamp(self.scale.data, 0, 1.005)
            return super().training_step(batch, batch_idx)

    run.fit(Clamps())


@case("blocks of one class that differ in a flag")
def blocks_with_flags(run: Run) -> None:
    class Flagged(nn.Module):
        def __init__(self, normalizes: bool) -> None:
            super().__init__()
            self.normalizes = normalizes
            self.norm, self.up, self.down = nn.LayerNorm(N), nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.gelu(self.up(self.norm(x)))
            return x + self.down(functional.normalize(hidden, dim=-1) if self.normalizes else hidden)

    class Mixed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[Flagged(index == 3) for index in range(4)])

    run.fit(Mixed())


@case("a step freezes and unfreezes a part of the model")
def frozen_in_step(run: Run) -> None:
    class Freezes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 1:
                self.head.requires_grad_(False)
            if self.global_step == 3:
                self.head.requires_grad_(True)
            return super().training_step(batch, batch_idx)

    run.fit(Freezes())
