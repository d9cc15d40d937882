"""Test training steps whose path through the model changes between steps or depends on values of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier

_PIPELINES = ("pp", "nd")


class _EarlyState(Classifier):
    """Add a term of an early hidden state to the loss in the steps for which ``has_term`` is true."""

    def has_term(self, batch_idx: int) -> bool:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        states = []
        for layer in self.net:
            x = layer(x)
            states.append(x)
        loss = functional.cross_entropy(self.head(x), y)
        if self.has_term(batch_idx):
            loss = loss + states[1].square().mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


class _ByEpoch(_EarlyState):
    def has_term(self, batch_idx: int) -> bool:
        return self.current_epoch >= 1


class _ByGlobalStep(_EarlyState):
    def has_term(self, batch_idx: int) -> bool:
        return min(1.0, self.global_step / 3) >= 1.0


class _ByTrainer(_EarlyState):
    def has_term(self, batch_idx: int) -> bool:
        return self.trainer.global_step % 2 == 1


class _ByBatch(_EarlyState):
    def has_term(self, batch_idx: int) -> bool:
        return batch_idx > 1


class _ByFlag(_EarlyState):
    flag = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.flag = batch_idx % 2 == 1

    def has_term(self, batch_idx: int) -> bool:
        return self.flag


class _ByCount(_EarlyState):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def has_term(self, batch_idx: int) -> bool:
        return self.count > 2


class _ByHyperparameter(_EarlyState):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hparams["optimizer"] = "with the term" if batch_idx == 2 else "sgd"

    def has_term(self, batch_idx: int) -> bool:
        return bool(self.hparams["optimizer"] == "with the term")


@case("a term of an early hidden state from an epoch on")
def by_epoch(run: Run) -> None:
    run.fit(_ByEpoch(), max_epochs=3)


@case("a term of an early hidden state from a global step on")
def by_global_step(run: Run) -> None:
    run.fit(_ByGlobalStep())


@case("a term of an early hidden state in every other step of the Trainer")
def by_trainer(run: Run) -> None:
    run.fit(_ByTrainer())


@case("a term of an early hidden state from a batch on")
def by_batch(run: Run) -> None:
    run.fit(_ByBatch())


@case("a term of an early hidden state by a flag that a hook sets")
def by_flag(run: Run) -> None:
    run.fit(_ByFlag())


@case("a term of an early hidden state by a counter of the module's own")
def by_count(run: Run) -> None:
    run.fit(_ByCount())


@case("a term of an early hidden state by a hyperparameter")
def by_hyperparameter(run: Run) -> None:
    run.fit(_ByHyperparameter())


class _Checked(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert torch.isfinite(x).all()
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        if torch.isnan(loss):
            raise ValueError("the loss is NaN")
        if not torch.isfinite(loss):
            self.log("train/infinite", 1.0)
        return loss


@case("a step that checks whether its loss is finite")
def checked(run: Run) -> None:
    run.fit(_Checked())


class _Printing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        text = f"{loss:.3f} {loss.item():.2f} {float(loss):g} {loss} {logits.argmax(1).tolist()}"
        assert text
        self.log("train/item", loss.item(), sync_dist=True)
        return loss


@case("a step that formats its loss and logs it as a number")
def printing(run: Run) -> None:
    run.fit(_Printing())


class _Deciding(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if loss > 1000 else 2 * loss


@case(
    "a step that decides by the value of its loss how the loss is computed",
    refused=dict.fromkeys(_PIPELINES, "decides by a value of a tensor"),
)
def deciding(run: Run) -> None:
    run.fit(_Deciding())


class _Recurrent(Classifier):
    layer: type[nn.Module] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(self.layer(16, 16, batch_first=True) for _ in range(4))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 16)).expand(-1, 3, -1)
        for layer in self.net:
            x, _ = layer(x)
        return self.head(x[:, -1])


class _Gated(_Recurrent):
    layer = nn.GRU


@case("a stack of nn.LSTM")
def lstm(run: Run) -> None:
    run.fit(_Recurrent())


@case("a stack of nn.GRU")
def gru(run: Run) -> None:
    run.fit(_Gated())


class _Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.Tanh()) for _ in range(4)))


@case("the old weight_norm")
def old_weight_norm(run: Run) -> None:
    run.fit(_Normed())


class _TwoHeads(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.net(x)
        loss = functional.cross_entropy(self.head(x), y)
        return loss + functional.cross_entropy(self.second(x), y) if batch_idx % 2 else loss


@case("an auxiliary head that is unused in some steps")
def unused_in_some_steps(run: Run) -> None:
    run.fit(_TwoHeads())
