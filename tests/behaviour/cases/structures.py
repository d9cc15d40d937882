"""Test data and networks of other structures: graphs, boxes, ensembles, differential equations, forecasts."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples

PIPELINED = ("pp", "nd", "nd_tp")
N, C = NUM_FEATURES, NUM_CLASSES


@case("a graph network over one graph in buffers: a batch is the nodes whose loss counts")
def transductive_graph(run: Run) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.others = nn.Linear(N, N), nn.Linear(N, N, bias=False)

        def forward(self, x: Tensor, edges: Tensor, degree: Tensor) -> Tensor:
            messages = self.others(x)[edges[0]] / degree[edges[1]][:, None]
            gathered = torch.zeros_like(x).index_add(0, edges[1], messages)
            return functional.relu(self.own(x) + gathered)

    class Graph(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.register_buffer("x", samples().tensors[0], persistent=False)
            edges = torch.randint(64, (2, 200))
            self.register_buffer("edges", edges, persistent=False)
            degree = torch.bincount(edges[1], minlength=64).clamp(min=1)
            self.register_buffer("degree", degree, persistent=False)
            self.convolutions = nn.ModuleList(Convolution() for _ in range(3))
            self.head = nn.Linear(N, C)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nodes, y = batch
            h = self.x
            for convolution in self.convolutions:
                h = convolution(h, self.edges, self.degree)
            loss = functional.cross_entropy(self.head(h)[nodes], y)
            self.log("train/loss", loss, batch_size=len(nodes), sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    data = TensorDataset(torch.arange(64), samples().tensors[1])
    run.fit(Graph(), run.loader(data), max_epochs=2)


def _boxes(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    targets = [{"boxes": x[: 4 * (1 + int(y))].view(-1, 4), "labels": (x[: 1 + int(y)] > 0).long()} for x, y in rows]
    return torch.stack([x for x, _ in rows]), targets


@case(
    "detection: images with a list of dictionaries of boxes, as many as each image has",
    refused=dict.fromkeys(PIPELINED, "a pipeline splits every tensor of a batch .* or define split_batch"),
)
def boxes(run: Run) -> None:
    class Detector(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.backbone = nn.Sequential(nn.Linear(N, N), Block(), Block())
            self.queries = nn.Parameter(torch.randn(4, N))
            self.box_head, self.class_head = nn.Linear(N, 4), nn.Linear(N, 2)

        def losses(self, batch: Any) -> dict[str, Tensor]:
            images, targets = batch
            h = self.backbone(images)[:, None] + self.queries
            found, logits = self.box_head(h), self.class_head(h)
            box, label = [], []
            for i, target in enumerate(targets):
                num = len(target["boxes"])
                box.append(functional.l1_loss(found[i, :num], target["boxes"]))
                label.append(functional.cross_entropy(logits[i, :num], target["labels"]))
            return {"loss_box": torch.stack(box).mean(), "loss_label": torch.stack(label).mean()}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            losses = self.losses(batch)
            self.log_dict(losses, batch_size=len(batch[0]), sync_dist=True)
            return sum(losses.values())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    run.fit(Detector(), run.loader(collate_fn=_boxes))


@case("an ensemble whose members run at once: stacked weights, functional_call and vmap")
def ensemble(run: Run) -> None:
    class Ensemble(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, C)) for _ in range(3))
            self.template = [copy.deepcopy(self.members[0]).to("meta")]

        def forward(self, x: Tensor) -> Tensor:
            named = [dict(member.named_parameters()) for member in self.members]
            stacked = {name: torch.stack([params[name] for params in named]) for name in named[0]}

            def run_one(params: dict[str, Tensor], h: Tensor) -> Tensor:
                return torch.func.functional_call(self.template[0], params, (h,))

            return torch.vmap(run_one, in_dims=(0, None))(stacked, self.net(x)).mean(0) + self.head(x)

    run.fit(Ensemble(), val=True)


@case(
    "a physics-informed network: second derivatives by the inputs, and a learned coefficient",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), r"The step calls torch\.autograd\.grad itself"),
)
def differential_equation(run: Run) -> None:
    class Pinn(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(2, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 1))
            self.diffusivity = nn.Parameter(torch.tensor(0.5))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            points = batch[0][:, :2].clone().requires_grad_(True)
            u = self.net(points)
            du = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)[0]
            d2u = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)[0][:, 0]
            residual = du[:, 1] - self.diffusivity * d2u
            boundary = self.net(points * torch.tensor([1.0, 0.0])) - torch.sin(points[:, :1])
            losses = {"residual": residual.pow(2).mean(), "boundary": boundary.pow(2).mean()}
            self.log_dict(losses, sync_dist=True)
            return sum(losses.values())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=5e-3)

    run.fit(Pinn(), max_epochs=2)


@case("N-BEATS: blocks that take their part away from the input, and add theirs to a forecast of quantiles")
def doubly_residual(run: Run) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, N), nn.ReLU(), nn.Linear(N, N), nn.ReLU())
            self.backcast, self.forecast = nn.Linear(N, 12), nn.Linear(N, 4 * 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.backcast(h), self.forecast(h).unflatten(-1, (4, 3))

    class Forecasts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.stacks = nn.ModuleList(Stack() for _ in range(4))
            self.affine = nn.Parameter(torch.ones(2))
            self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

        def forward(self, x: Tensor) -> Tensor:
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            residual, forecast = (x - mean) / std * self.affine[0] + self.affine[1], 0.0
            for stack in self.stacks:
                backcast, part = stack(residual)
                residual = residual - backcast
                forecast = forecast + part
            return (forecast - self.affine[1]) / self.affine[0] * std[..., None] + mean[..., None]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            past, future = batch[0].split([12, 4], dim=1)
            error = future[..., None] - self(past)
            loss = torch.maximum(self.quantiles * error, (self.quantiles - 1) * error).sum(-1).mean()
            self.log("pinball", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=5e-3)

    run.fit(Forecasts())
