"""Test contrastive and self-supervised learning: queues, memory banks, prototypes, prompts."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.behaviour.case import HOLDS_PARTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples

PIPELINED = ("pp", "nd", "nd_tp")
N, C, WIDTH = NUM_FEATURES, NUM_CLASSES, 8


class _Encoder(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(N, N), Block(), Block())
        self.project = nn.Linear(N, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.project(self.body(x)), dim=1)


class _Contrastive(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = _Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@case(
    "MoCo: a momentum encoder and a queue with a pointer, both changed by training_step",
    reference="ddp",
    refused=dict.fromkeys(PIPELINED, "The step changes the parameter .* on_train_batch_(start|end)"),
)
def moco(run: Run) -> None:
    class Moco(_Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.key_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(WIDTH, 16), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def momentum_update(self) -> None:
            for query, key in zip(self.encoder.parameters(), self.key_encoder.parameters(), strict=True):
                key.data = key.data * 0.9 + query.data * 0.1

        @torch.no_grad()
        def dequeue_and_enqueue(self, keys: Tensor) -> None:
            keys = self.all_gather(keys).reshape(-1, WIDTH)
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + len(keys)] = keys.T
            self.queue_ptr[0] = (ptr + len(keys)) % self.queue.shape[1]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            q = self(x)
            with torch.no_grad():
                self.momentum_update()
                k = self.key_encoder(x.flip(1))
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ self.queue.clone().detach()], dim=1) / 0.2
            loss = functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=self.device))
            self.dequeue_and_enqueue(k)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Moco())


@case("a memory bank of all samples, updated by their index in on_train_batch_end")
def memory_bank(run: Run) -> None:
    class Bank(_Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", functional.normalize(torch.randn(64, WIDTH), dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, _, index = batch
            z = self(x)
            loss = functional.cross_entropy(z @ self.bank.T / 0.1, index)
            self.log("train/loss", loss, sync_dist=True)
            return {"loss": loss, "z": z.detach(), "index": index}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            z = self.all_gather(outputs["z"]).reshape(-1, WIDTH)
            index = self.all_gather(outputs["index"]).reshape(-1)
            self.bank[index] = functional.normalize(0.5 * self.bank[index] + 0.5 * z, dim=1)

    data = TensorDataset(*samples().tensors, torch.arange(64))
    run.fit(Bank(), run.loader(data), max_epochs=2)


@case("SwAV: prototypes that are normalised before each batch and frozen in the first epoch")
def prototypes(run: Run) -> None:
    class Swav(_Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = nn.Linear(WIDTH, 6, bias=False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                w = self.prototypes.weight.data.clone()
                self.prototypes.weight.copy_(functional.normalize(w, dim=1, p=2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            scores = self.prototypes(self(torch.cat([x, x.flip(1)])))
            first, second = scores.chunk(2)
            loss = torch.zeros((), device=self.device)
            for p, q in ((first, second), (second, first)):
                code = (q.detach() / 0.05).softmax(-1)
                loss = loss - 0.5 * (code * (p / 0.1).log_softmax(-1)).sum(-1).mean()
            self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def on_after_backward(self) -> None:
            if self.current_epoch < 1:
                for name, p in self.named_parameters():
                    if "prototypes" in name:
                        p.grad = None

    run.fit(Swav(), max_epochs=2)


@case("CLIP's classifier: a second tower encodes prompts from a buffer, and a learned scale is clamped")
def prompts(run: Run) -> None:
    class TextTower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, N)
            self.positions = nn.Parameter(0.01 * torch.randn(5, N))
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.project = nn.Linear(N, WIDTH, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embedding(ids) + self.positions
            for block in self.blocks:
                h = block(h)
            return functional.normalize(self.project(h.mean(1)), dim=-1)

    class Clip(_Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.text = TextTower()
            self.logit_scale = nn.Parameter(torch.ones([]) * 2.6592)
            self.register_buffer("prompts", torch.randint(10, (C, 5)), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.logit_scale.exp() * self(x) @ self.text(self.prompts).T
            loss = functional.cross_entropy(logits, y)
            self.log_dict({"train/loss": loss, "train/scale": self.logit_scale.exp()}, sync_dist=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                self.logit_scale.clamp_(0, 2.66)

    run.fit(Clip())


@case(
    "a callback classifies by nearest neighbours: it encodes the training loader after each validation",
    refused=dict.fromkeys(HOLDS_PARTS, "was called outside of a training, validation, test or predict step"),
)
def neighbours(run: Run) -> None:
    class Neighbours(pl.Callback):
        @torch.no_grad()
        def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            features, labels = [], []
            for x, y in trainer.train_dataloader:
                features.append(pl_module.all_gather(pl_module.net(x.to(pl_module.device))).reshape(-1, N))
                labels.append(pl_module.all_gather(y).reshape(-1))
            bank, classes = torch.cat(features), torch.cat(labels)
            distances = torch.cdist(bank, bank)
            nearest = distances.topk(4, largest=False).indices[:, 1:]
            accuracy = (classes[nearest].mode(1).values == classes).double().mean()
            pl_module.log("val/knn", accuracy)
            pl_module.log("val/spread", distances.mean())

    run.fit(Classifier(), val=True, callbacks=[Neighbours()], max_epochs=2)
