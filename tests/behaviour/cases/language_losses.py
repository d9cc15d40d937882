"""Test losses of language models: masked, smoothed, of several heads, of routers, of pooled tokens and of a teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import VOCABULARY, tokens
from tests.behaviour.writers import WIDTH, Layer, Writer

STAGES = ("pp", "nd", "nd_tp")

TOLERANCE = 1e-9


def _fit(run: Run, model: Writer, **kwargs: Any) -> None:
    run.fit(model, run.loader(tokens()), val=run.loader(tokens(seed=1)), **kwargs)


def _shifted(model: Writer, ids: Tensor) -> tuple[Tensor, Tensor]:
    return model(ids)[:, :-1], ids[:, 1:]


def _transposed(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    targets = targets.masked_fill(torch.arange(targets.size(1)) < 2, -100)
    return functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, label_smoothing=0.1)


def _summed(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=logits.dtype)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weight, reduction="sum")
    return loss / targets.numel()


def _unreduced(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (losses * (targets % 3 != 0)).mean(1).mul(1.0 + ids[:, 0] % 2).mean()


def _soft_targets(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    soft = 0.9 * functional.one_hot(targets, VOCABULARY).to(logits.dtype) + 0.1 / VOCABULARY
    return functional.cross_entropy(logits.flatten(0, 1), soft.flatten(0, 1))


def _by_hand(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def _with_entropy(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    z = logits.logsumexp(-1).square().mean()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) - 0.1 * entropy + 0.01 * z


def _two_shifts(model: Writer, ids: Tensor) -> Tensor:
    logits = model(ids)
    first = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    second = functional.cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
    model.log("train/accuracy", (logits[:, :-1].argmax(-1) == ids[:, 1:]).double().mean(), sync_dist=True)
    return first + 0.3 * second


def _last_token(model: Writer, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model.head(model.hidden(ids)[:, -1]), ids[:, 0])


def _mean_token(model: Writer, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model.head(model.hidden(ids).mean(1)), ids.sum(1) % VOCABULARY)


def _capped(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    logits = 5 * torch.tanh(logits / 5)
    return functional.cross_entropy(logits.flatten(0, 1).float().double(), targets.flatten())


def _focal(model: Writer, ids: Tensor) -> Tensor:
    logits, targets = _shifted(model, ids)
    losses = functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def _pairs(model: Writer, ids: Tensor) -> Tensor:
    """Prefer the first half of a sequence to the second one (DPO without a reference)."""
    logits, targets = _shifted(model, torch.cat([ids, ids.flip(1)]))
    scores = logits.log_softmax(-1).gather(-1, targets[..., None]).sum((1, 2))
    chosen, rejected = scores.chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


_LOSSES: dict[str, tuple[str, Callable[[Writer, Tensor], Tensor]]] = {
    "transposed": ("transposed logits, smoothed labels, and tokens that do not count", _transposed),
    "summed": ("a sum over tokens with weights of the classes, divided by their number", _summed),
    "unreduced": ("losses of tokens that a mask of the targets and a weight of each sample multiply", _unreduced),
    "soft_targets": ("targets that are probabilities", _soft_targets),
    "by_hand": ("log_softmax and gather in place of cross_entropy", _by_hand),
    "with_entropy": ("an entropy of torch.distributions and a z-loss of the same logits", _with_entropy),
    "two_shifts": ("two losses of one tensor of logits, and an accuracy of the training", _two_shifts),
    "last_token": ("a class for the last token of a sequence", _last_token),
    "mean_token": ("a class for the mean of a sequence's hidden states", _mean_token),
    "capped": ("logits that are capped by tanh and cast", _capped),
    "focal": ("a focal loss, from the losses of tokens", _focal),
    "pairs": ("preferences between two sequences that are concatenated into one batch", _pairs),
}

for _name, (_title, _loss) in _LOSSES.items():

    @case(_title, name=_name, tolerance=TOLERANCE)
    def _(run: Run, loss: Callable[[Writer, Tensor], Tensor] = _loss) -> None:
        class Trains(Writer):
            def loss(self, batch: Any) -> Tensor:
                return loss(self, batch[0])

        _fit(run, Trains())


@case(
    "three heads predict the next three tokens, each with a loss of its own, logged in a dictionary",
    tolerance=TOLERANCE,
)
def three_heads(run: Run) -> None:
    class ThreeHeads(Writer):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.more = nn.ModuleDict({str(k): nn.Linear(WIDTH, VOCABULARY) for k in (2, 3)})

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            hidden = self.hidden(ids)
            losses = {}
            for k, head in {"1": self.head, **self.more}.items():
                logits = head(hidden[:, : -int(k)])
                losses[k] = functional.cross_entropy(logits.flatten(0, 1), ids[:, int(k) :].flatten())
            self.log_dict({f"head {k}": loss for k, loss in losses.items()}, sync_dist=True)
            return torch.stack(list(losses.values())).mean()

    _fit(run, ThreeHeads())


class _ReturnsRouting(Layer):
    """Return the square of the router's logsumexp, for each token, or their mean, besides the hidden states."""

    is_mean = True

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        z = self.mixture.router(normed).logsumexp(-1).square()
        return x + self.mixture(normed), z.mean() if self.is_mean else z


class _WithRouting(Writer):
    def __init__(self, is_mean: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ReturnsRouting() for _ in range(2))
        for layer in self.layers:
            layer.is_mean = is_mean

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0][:, :-1]
        x = self.emb(ids) + self.positions(torch.arange(ids.size(1)))
        extra = []
        for layer in self.layers:
            x, z = layer(x)
            extra.append(z.mean())
        logits = self.head(self.norm(x))
        self.log("z", sum(extra), sync_dist=True)
        return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten()) + 0.1 * sum(extra)


@case("layers return the mean of their router's z-loss beside the hidden states", tolerance=TOLERANCE)
def routing_means(run: Run) -> None:
    _fit(run, _WithRouting(True))


@case("layers return their router's z-loss of each token beside the hidden states", tolerance=TOLERANCE)
def routing_of_tokens(run: Run) -> None:
    _fit(run, _WithRouting(False))


@case(
    "layers keep their router's z-loss in an attribute, which the step adds up",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "A tensor that is made inside layers"),
)
def routing_in_attributes(run: Run) -> None:
    class Keeps(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            normed = self.norm2(x)
            self.z = self.mixture.router(normed).logsumexp(-1).square().mean()
            return x + self.mixture(normed)

    class Adds(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Keeps() for _ in range(2))

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.1 * torch.stack([layer.z for layer in self.layers]).sum()

    _fit(run, Adds())


@case(
    "a frozen teacher, a copy of the student, runs in the step; the student learns its softened logits",
    tolerance=TOLERANCE,
)
def teacher(run: Run) -> None:
    class Student(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(nn.ModuleDict({"emb": self.emb, "layers": self.layers, "head": self.head}))
            self.teacher.requires_grad_(False)
            with torch.no_grad():
                for param in self.teacher.parameters():
                    param.mul_(1.3)

        def teach(self, ids: Tensor) -> Tensor:
            x = self.teacher["emb"](ids)
            for layer in self.teacher["layers"]:
                x = layer(x)
            return self.teacher["head"](x)

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            with torch.no_grad():
                wanted = (self.teach(ids) / 2).log_softmax(-1)
            logits = self(ids)
            kl = functional.kl_div((logits / 2).log_softmax(-1), wanted, reduction="none", log_target=True)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            return loss + kl.sum(-1).mean()

        def configure_optimizers(self) -> Any:
            return self._optimizer([p for p in self.parameters() if p.requires_grad])

    _fit(run, Student())
