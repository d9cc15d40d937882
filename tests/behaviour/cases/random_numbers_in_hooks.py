"""Test hooks that draw random numbers into weights and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier

N = NUM_FEATURES


@case("on_train_start draws weights anew, by all functions of torch.nn.init and by methods")
def weights_drawn_anew(run: Run) -> None:
    class Redraws(Classifier):
        def on_train_start(self) -> None:
            torch.manual_seed(4)
            first, *blocks, _ = self.net
            nn.init.normal_(first.weight, std=0.1)
            nn.init.uniform_(first.bias)
            nn.init.kaiming_uniform_(blocks[0].up.weight, a=5**0.5)
            nn.init.kaiming_normal_(blocks[0].down.weight)
            nn.init.xavier_uniform_(blocks[1].up.weight)
            nn.init.xavier_normal_(blocks[1].down.weight)
            nn.init.trunc_normal_(blocks[2].up.weight, std=0.2)
            nn.init.orthogonal_(blocks[2].down.weight)
            nn.init.sparse_(blocks[3].up.weight, 0.5)
            blocks[3].down.reset_parameters()
            with torch.no_grad():
                self.head.weight.exponential_(20)
                self.head.bias.bernoulli_(0.5)
                blocks[3].norm.bias.copy_(torch.randn(N))

    run.fit(Redraws())


@case("noise is added to gradients, and to weights after each batch; weights and rows are dropped at random")
def noise_and_dropped_weights(run: Run) -> None:
    class Noisy(Classifier):
        def on_train_start(self) -> None:
            torch.manual_seed(5)

        def on_after_backward(self) -> None:
            for p in self.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
                p.grad.mul_(torch.bernoulli(torch.full_like(p.grad, 0.9)))

        @torch.no_grad()
        def on_train_batch_end(self, *args: Any) -> None:
            for name, p in self.named_parameters():
                p.add_(torch.normal(torch.zeros_like(p), 0.01))
                if name.endswith("up.weight"):
                    p.copy_(functional.dropout(p, 0.1))
            rows = torch.multinomial(self.net[0].weight.norm(dim=1), 3)
            self.net[0].weight[rows] = 0.1 * torch.rand(3, N, dtype=torch.float64)
            self.head.weight.data += 0.01 * torch.rand_like(self.head.weight)
            self.log("kept", torch.rand_like(self.head.bias).mean())

    run.fit(Noisy())


@case("random numbers are drawn into rows, columns and copies of weights, by a generator of the module's own")
def views_drawn_anew(run: Run) -> None:
    class Views(Classifier):
        def on_fit_start(self) -> None:
            self.generator = torch.Generator().manual_seed(7)

        @torch.no_grad()
        def on_train_epoch_start(self) -> None:
            torch.manual_seed(6)
            weight = self.net[0].weight
            weight[1:3].normal_(generator=self.generator)
            weight[:, 4:7].uniform_(-0.1, 0.1, generator=self.generator)
            weight.data[5].normal_(0, 0.1)
            weight.t()[2].exponential_(9)
            nn.init.uniform_(self.head.weight[1:], -0.3, 0.3)
            self.head.bias.add_(torch.empty_like(self.head.bias).normal_())
            self.net[1].norm.weight.mul_(1 + torch.randint_like(self.net[1].norm.weight, 2))

    run.fit(Views(), max_epochs=2)


@case(
    "weights are drawn anew after the ranks' generators have got different states: those of the first rank count",
    refused={
        "data": "differs between ranks of dp_replicate",
        **dict.fromkeys(
            ("pp", "nd"), "Redraws.on_train_start draws random numbers, and torch's generators have different"
        ),
    },
    differs={"local": "Replicas that train on their own may draw weights of their own."},
)
def drawn_by_other_generators(run: Run) -> None:
    class Redraws(Classifier):
        def on_train_start(self) -> None:
            torch.manual_seed(self.global_rank)
            nn.init.normal_(self.head.weight)
            with torch.no_grad():
                self.net[0].weight[2:5].uniform_(-0.1, 0.1)
                self.net[0].bias.add_(torch.randn_like(self.net[0].bias))

    run.fit(Redraws())
