"""Test regularisation and constraints: dropped blocks, standardised and quantised weights, pruning, margins."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, Network, samples

PIPELINED = ("pp", "nd", "nd_tp")
N, C = NUM_FEATURES, NUM_CLASSES


@case("stochastic depth by a schedule: each step leaves other blocks out")
def stochastic_depth(run: Run) -> None:
    class Drops(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            step = self.trainer.global_step if self.training else None
            h = self.net[0](x)
            for i, block in enumerate(self.net[1:-1]):
                if step is not None and (step + i) % 3 == 0:
                    continue
                h = block(h)
            return self.head(self.net[-1](h))

    run.fit(Drops(optimizer="adamw"), val=True, max_epochs=2)


@case("convolutions with standardised weights, depthwise groups, squeeze-and-excitation and layer scale")
def standardised(run: Run) -> None:
    class StandardisedConv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
            return functional.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)

    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = StandardisedConv(8, 8, 3, padding=1, groups=8)
            self.norm = nn.GroupNorm(2, 8)
            self.expand, self.project = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
            self.layer_scale = nn.Parameter(0.1 * torch.ones(8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            h = functional.gelu(self.expand(self.norm(self.depthwise(x))))
            return x + self.layer_scale * self.project(h * self.squeeze(h).sigmoid())

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            StandardisedConv(1, 8, 3, padding=1),
            *[Convolutional() for _ in range(3)],
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.PixelUnshuffle(2),
            nn.Flatten(),
            nn.Linear(256, C),
        )

    run.fit(Network(make), val=True)


class _Quantise(torch.autograd.Function):
    """Quantise weights to multiples of a step size, which gets a gradient too (LSQ)."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, step: Tensor) -> Tensor:
        scaled = w / step
        ctx.save_for_backward(scaled)
        return scaled.round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (scaled,) = ctx.saved_tensors
        inside = (scaled >= -8) & (scaled <= 7)
        by_step = torch.where(inside, scaled.round() - scaled, scaled.clamp(-8, 7))
        return grad * inside, (grad * by_step).sum().reshape(1)


@case(
    "training for quantised weights: linear layers that round them to steps with gradients of their own",
    differs={"compressed": "Rounded gradients move weights from one step of the quantizer to the next."},
)
def quantised(run: Run) -> None:
    class QuantisedLinear(nn.Linear):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__(num_in, num_out)
            self.step = nn.Parameter(2 * self.weight.detach().abs().mean().reshape(1) / 7**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, _Quantise.apply(self.weight, self.step), self.bias)

    class QuantisedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = QuantisedLinear(N, 2 * N), QuantisedLinear(2 * N, N)

    run.fit(Network(lambda: nn.Sequential(*[QuantisedBlock() for _ in range(3)], nn.Linear(N, C))), max_epochs=2)


@case("a callback prunes the smallest weights of all layers by epoch, and holds them at zero")
def pruning_callback(run: Run) -> None:
    class Prunes(pl.Callback):
        def __init__(self) -> None:
            self.masks: dict[str, Tensor] = {}

        @torch.no_grad()
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            weights = {k: p for k, p in pl_module.named_parameters() if p.ndim == 2}
            magnitudes = torch.cat([p.abs().flatten() for p in weights.values()])
            threshold = magnitudes.quantile(0.2 * (trainer.current_epoch + 1))
            self.masks = {k: (p.abs() > threshold).to(p.dtype) for k, p in weights.items()}
            self.apply(pl_module)
            kept = sum(int(m.sum()) for m in self.masks.values()) / len(magnitudes)
            pl_module.log("density", kept)

        @torch.no_grad()
        def apply(self, pl_module: pl.LightningModule) -> None:
            for name, p in pl_module.named_parameters():
                if name in self.masks:
                    p.mul_(self.masks[name])

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            self.apply(pl_module)

    run.fit(Classifier(), val=True, callbacks=[Prunes()], max_epochs=3)


@case("ArcFace: a normalised weight that is a parameter of the head, and a margin for the true class")
def arcface(run: Run) -> None:
    class ArcFace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(C, N))
            nn.init.xavier_uniform_(self.weight)

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            cosine = functional.linear(functional.normalize(h), functional.normalize(self.weight))
            angle = cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos()
            one_hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1.0)
            return 8.0 * torch.where(one_hot.bool(), (angle + 0.2).cos(), cosine)

    class Faces(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.head = ArcFace()

        def loss(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self.head(self.net(batch[0]), batch[1]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            similarity = functional.normalize(self.net(batch[0])) @ functional.normalize(self.head.weight).T
            self.log("val/accuracy", (similarity.argmax(1) == batch[1]).double().mean(), sync_dist=True)

    run.fit(Faces(), val=True)


class _Mixed(torch.utils.data.Dataset[Any]):
    """Return samples that are each mixed with a partner as in CutMix, with the labels of both."""

    def __init__(self) -> None:
        self.x, self.y = samples().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        partner, start = (7 * i + 3) % len(self.x), i % 10
        x = self.x[i].clone()
        x[start : start + 5] = self.x[partner, start : start + 5]
        classes = functional.one_hot(self.y, C).double()
        return x, classes[i] * (11 / 16) + classes[partner] * (5 / 16), self.x[partner], classes[partner]


@case(
    "manifold mixup: hidden states of two inputs are mixed after a block that the step chooses; soft labels",
    refused=dict.fromkeys(PIPELINED, "The step calls .* times: a pipeline runs .* once a microbatch"),
)
def manifold_mixup(run: Run) -> None:
    class Mixes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, soft, other, other_soft = batch
            where = 1 + batch_idx % 3
            h, g = x, other
            for i, block in enumerate(self.net):
                h = block(h)
                if i < where:
                    g = block(g)
                if i == where - 1:
                    h = 0.6 * h + 0.4 * g
            loss = functional.cross_entropy(self.head(h), 0.6 * soft + 0.4 * other_soft)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Mixes(), run.loader(_Mixed()))
