"""Test hooks that change weights and gradients by views, by assignments, and by values of plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier

N = NUM_FEATURES


@case("an average is swapped in for validation by assignments to param.data, and out again from a backup")
def average_by_assignment(run: Run) -> None:
    class Averages(Classifier):
        def on_train_start(self) -> None:
            self.shadow = {name: p.data.clone() for name, p in self.named_parameters()}

        def on_train_batch_end(self, *args: Any) -> None:
            for name, p in self.named_parameters():
                self.shadow[name] = 0.1 * p.data + 0.9 * self.shadow[name]

        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking:
                self.backup = {}
                for name, p in self.named_parameters():
                    self.backup[name] = p.data
                    p.data = self.shadow[name]

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                for name, p in self.named_parameters():
                    p.data = self.backup[name]

    run.fit(Averages(), val=True, max_epochs=2)


@case("on_train_batch_end changes rows, columns and chunks of weights through views")
def views_of_weights(run: Run) -> None:
    class Changes(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            weight = self.net[0].weight
            weight.data[0].zero_()
            weight.data[:, 1].mul_(0.5)
            weight.data[2][3] = 0.25
            weight.data.t()[1:3].add_(0.01)
            with torch.no_grad():
                weight[1:3].mul_(0.9)
                weight.view(-1)[5:9] += 0.1
                first, *_, last = self.head.weight.chunk(2)
                first.mul_(0.5)
                last[0, 0] = 1.0
                for row in self.net[0].weight[2:4]:
                    row.div_(row.norm())
                nn.init.constant_(self.head.bias[:1], 0.5)

    run.fit(Changes())


@case("on_train_batch_end changes weights where a mask says so, and by functions that torch has no rule for")
def masks_of_weights(run: Run) -> None:
    class Masks(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                weight = self.net[0].weight
                weight[weight.abs() < 0.05] = 0.0
                weight[weight.norm(dim=1) > 1] *= 0.9
                weight.index_fill_(1, torch.tensor([2]), 0.1)
                weight.copy_(torch.renorm(weight, 2, 0, 0.8))
                self.head.weight.data = functional.normalize(self.head.weight.data, dim=1)
                distances = torch.cdist(weight, weight)
                self.log("distance", distances.mean())

    run.fit(Masks())


@case("all weights as one vector, in buffers: interpolated by vector_to_parameters at each epoch's end")
def weights_as_a_vector(run: Run) -> None:
    class Slow(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slow", nn.utils.parameters_to_vector(self.parameters()).detach().clone())

        def on_train_epoch_end(self) -> None:
            fast = nn.utils.parameters_to_vector(self.parameters()).detach()
            self.slow += 0.5 * (fast - self.slow)
            nn.utils.vector_to_parameters(self.slow.clone(), self.parameters())
            self.log("moved", (fast - self.slow).norm())

    run.fit(Slow(), max_epochs=2)


@case("averages in buffers by functions of lists of tensors, copied into the weights for validation")
def lists_of_buffers(run: Run) -> None:
    class Lists(Classifier):
        def __init__(self) -> None:
            super().__init__()
            for i, p in enumerate(self.parameters()):
                self.register_buffer(f"average{i}", p.detach().clone())

        def averages(self) -> list[Tensor]:
            return [buffer for name, buffer in self.named_buffers() if name.startswith("average")]

        @torch.no_grad()
        def on_train_batch_end(self, *args: Any) -> None:
            torch._foreach_lerp_(self.averages(), list(self.parameters()), 0.1)

        @torch.no_grad()
        def on_train_epoch_end(self) -> None:
            torch._foreach_copy_(list(self.parameters()), self.averages())
            total = torch.zeros((), dtype=torch.float64)
            for p in self.parameters():
                total += p.norm() ** 2
            self.log("total", total)

    run.fit(Lists(), max_epochs=2)


@case("on_after_backward sets rows of gradients to zero, and adds what is no parameter's to others")
def parts_of_gradients(run: Run) -> None:
    class Freezes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keep", (torch.arange(N) % 2)[:, None].double())
            self.register_buffer("shift", torch.linspace(-0.1, 0.1, N * N).view(N, N))

        def on_after_backward(self) -> None:
            first, head = self.net[0].weight, self.head.weight
            head.grad[:1] = 0
            head.grad[1:3].mul_(0.5)
            head.grad.data[3].zero_()
            first.grad *= self.keep
            first.grad = first.grad + self.shift
            self.net[0].bias.grad = torch.ones(N, dtype=torch.float64)

    run.fit(Freezes())


@case(
    "on_train_batch_end adds this rank's mean of the batch to a weight",
    reference="ddp",
    refused=dict.fromkeys(("full", "hybrid", "nd"), "writes values into a sharded tensor that are not the same on all"),
    differs=dict.fromkeys(
        ("data", "compressed", "local"),
        "Each rank keeps what its hook writes, as under ddp; check_replicas_every_n_steps finds it.",
    ),
)
def own_values_into_weights(run: Run) -> None:
    class Adds(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.net[0].bias.data.add_(0.01 * batch[0].mean(0))

    run.fit(Adds())
