"""Test code inside of blocks that sees, keeps or changes values of the whole batch or the whole sequence.

Under context parallelism, a block runs on a part of the sequence, and a tiled MLP on a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, VOCABULARY, Block, Classifier, LanguageModel, tokens

STAGES = ("pp", "nd", "nd_tp")
SPLIT_LAYERS = ("tp", "nd_tp", "data_tp")
ESCAPES = "is made inside net.. is given to .* outside of it, and net.. does not return it"
OF_MICROBATCHES = dict.fromkeys(STAGES, "Statistics over a batch are those of a microbatch under a pipeline.")


class Changing(Block):
    """Apply a function to the hidden features, before the output layer."""

    change: Callable[[Any, Tensor], Tensor]

    def __init__(self, width: int = NUM_FEATURES) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(2 * width))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "varied"):
            x = x + self.varied(x)
        return x + self.down(type(self).change(self, functional.gelu(self.up(self.norm(x)))))


def _over_tokens(hidden: Tensor) -> tuple[int, ...]:
    """Return the dimensions of samples and tokens."""
    return tuple(range(hidden.dim() - 1))


class Model(Classifier):
    """Classify by blocks that change their hidden features, and add what they keep to the loss."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor] | None = None, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.kept: list[Tensor] = []
        if change is not None:
            block = type("Changed", (Changing,), {"change": change})
            torch.manual_seed(2)
            for index in (1, 2, 3, 4):
                self.net[index] = block()

    @property
    def blocks(self) -> list[Any]:
        return list(self.net)[1:5]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.clear()
        loss: Tensor = super().training_step(batch, batch_idx)
        if not self.weight:
            return loss
        auxiliary = [block.auxiliary for block in self.blocks if hasattr(block, "auxiliary")]
        return loss + self.weight * sum([*self.kept, *auxiliary])


# Hooks


class Penalty(Model):
    def __init__(self) -> None:
        super().__init__(weight=0.1)
        self.net[2].up.register_forward_hook(lambda module, args, out: self.kept.append(out.square().mean()))


class Scaling(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].down.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.net[3].register_forward_hook(lambda module, args, out: out.clamp(-2, 2))


class Gradients(Model):
    """Change the gradients of a layer's input and of another layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].down.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.net[3].up.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))


class ProbeOfGradients(Model):
    """Sum up gradients of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)
        self.net[3].up.register_full_backward_pre_hook(lambda module, outputs: self._add(outputs[0]))

    def _add(self, gradient: Tensor) -> None:
        self.total += gradient.abs().sum()


class OfNorms(Model):
    """Add what a norm in a block and the output layer of another return to the loss."""

    def __init__(self) -> None:
        super().__init__(weight=0.1)
        self.net[2].norm.register_forward_hook(lambda module, args, out: self.kept.append(out.amax()))
        self.net[3].down.register_forward_hook(lambda module, args, out: self.kept.append(out.square().mean()))


class Probe(Model):
    """Look at activations inside of blocks from the first step on, without using them in the step."""

    def on_train_start(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.net[2].up.register_forward_hook(lambda module, args, out: self._add(out))
        self.net[3].register_forward_hook(lambda module, args, out: self._add(out))

    def _add(self, out: Tensor) -> None:
        self.total += out.detach().abs().sum()


class OfTensors(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].up.register_forward_hook(lambda module, args, out: self._attach(out))

    def _attach(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class ForAWhile(Model):
    """Have a hook from the first batch to the third."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.handle = self.net[2].register_forward_hook(lambda module, args, out: out * 0.9)
        if batch_idx == 2:
            self.handle.remove()


_HOOKS = {
    "penalty_in_hook": ("a forward hook on a layer of a block adds to the loss", Penalty),
    "scaling_hooks": ("hooks change the input of a layer and the output of a block", Scaling),
    "backward_hooks": ("backward hooks change gradients of layers in blocks", Gradients),
    "probe_of_gradients": ("a backward hook sums up gradients of a layer in a block", ProbeOfGradients),
    "hooks_of_norms": ("hooks on a norm and on an output layer of blocks add to the loss", OfNorms),
    "late_probe": ("hooks that on_train_start puts into blocks sum up activations", Probe),
    "hooks_of_tensors": ("a hook clamps the gradient of an activation in a block", OfTensors),
    "hook_for_a_while": ("a block has a hook for two batches", ForAWhile),
}


@case("rank 0 alone has a hook inside of a block")
def hook_of_rank_0(run: Run) -> None:
    model = Model()
    shapes: list[Any] = []

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        shapes.append(out.shape)

    if run.rank == 0:
        model.net[2].up.register_forward_hook(keep)
    run.fit(model)


_REFUSED = {
    "penalty_in_hook": dict.fromkeys(STAGES, ESCAPES),
    "hooks_of_norms": dict.fromkeys(STAGES, ESCAPES),
    "late_probe": dict.fromkeys(SPLIT_LAYERS, "net.2.up has a hook, which would see only this rank's features"),
}

_ON_A_STAGE = dict.fromkeys(STAGES, "Hooks in a block run on the stage of the block, and keep what they see there.")
_DIFFERS = {"late_probe": _ON_A_STAGE, "probe_of_gradients": _ON_A_STAGE}

for _name, (_title, _model) in _HOOKS.items():

    @case(_title, name=_name, reference="ddp", refused=_REFUSED.get(_name, {}), differs=_DIFFERS.get(_name, {}))
    def _(run: Run, make: Callable[[], Model] = _model) -> None:
        model = make()
        run.fit(model)
        if hasattr(model, "total") and run.column not in STAGES:  # It is on the stage that has the hooked module.
            run.record("total", model.total[None], per_rank=True)


# Attributes


def _auxiliary(self: Any, hidden: Tensor) -> Tensor:
    self.auxiliary = hidden.softmax(-1).mean(_over_tokens(hidden)).square().sum()
    return hidden


def _list(self: Any, hidden: Tensor) -> Tensor:
    self.kept.append(hidden.square().mean())
    return hidden


class Listed(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.kept.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * torch.stack([block.kept[-1] for block in self.blocks]).mean()


class Logged(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("auxiliary", self.blocks[1].auxiliary.detach(), sync_dist=True)
        return loss


_ESCAPES = dict.fromkeys(STAGES, ESCAPES)


@case("blocks keep a loss of all samples as an attribute", reference="ddp", refused=_ESCAPES)
def kept_auxiliary(run: Run) -> None:
    run.fit(Model(_auxiliary, 0.1))


@case("blocks append to lists, whose last items are averaged into the loss", refused=_ESCAPES)
def kept_in_lists(run: Run) -> None:
    run.fit(Listed(_list))


PENALTIES: list[Tensor] = []
"""A list of the program, to which blocks append."""


def _append(self: Any, hidden: Tensor) -> Tensor:
    PENALTIES.append(hidden.square().mean())
    return hidden


class Penalised(Model):
    """Add what blocks or hooks have appended to a list to the loss, and clear the list."""

    def __init__(self, penalties: list[Tensor], change: Any = None) -> None:
        super().__init__(change)
        self.take = lambda: [penalties.pop(0) for _ in range(len(penalties))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * torch.stack(self.take()).mean()


@case(
    "blocks append to a list of the program, which the step adds to the loss and clears",
    reference="ddp",
    refused=_ESCAPES,
)
def list_of_the_program(run: Run) -> None:
    run.fit(Penalised(PENALTIES, _append))


@case(
    "hooks inside of blocks append to a list, which the step adds to the loss and clears",
    reference="ddp",
    refused=_ESCAPES,
)
def list_of_hooks(run: Run) -> None:
    penalties: list[Tensor] = []
    model = Penalised(penalties)
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, args, output: penalties.append(output.square().mean()))
    run.fit(model)


@case("an attribute of a block is logged", reference="ddp", refused=_ESCAPES)
def logged_attribute(run: Run) -> None:
    run.fit(Logged(_auxiliary))


# Buffers


def _average(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.seen.lerp_(hidden.detach().mean(_over_tokens(hidden)), 0.1)
    return hidden - self.seen.detach().clone()


def _count(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.seen += 1
    return hidden * (1 + 0.01 * self.seen)


def _observe(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.seen.copy_(torch.maximum(self.seen, hidden.detach().abs().amax(_over_tokens(hidden))))
        return hidden
    return torch.minimum(hidden, 0.5 * self.seen)


_BUFFERS = {
    "averaged_activations": ("blocks subtract a running average of their activations", _average, "ddp"),
    "counted_calls": ("blocks count their calls in a buffer, which scales their output", _count, "one"),
    "observed_range": ("blocks observe ranges in training, and clip by them in validation", _observe, "ddp"),
}

for _name, (_title, _change, _reference) in _BUFFERS.items():

    @case(_title, name=_name, reference=_reference, differs=OF_MICROBATCHES if _change is _average else {})
    def _(run: Run, change: Callable[[Any, Tensor], Tensor] = _change) -> None:
        run.fit(Model(change), val=run.loader() if change is _observe else None)


# Statistics in training mode


def _centre(self: Any, hidden: Tensor) -> Tensor:
    return hidden - (hidden.mean(_over_tokens(hidden)) if self.training else self.seen)


def _scale(self: Any, hidden: Tensor) -> Tensor:
    return hidden / hidden.detach().std() if self.training else hidden


def _drop(self: Any, hidden: Tensor) -> Tensor:
    """Set the hidden features of the tokens with the smallest norms to zero."""
    if not self.training:
        return hidden
    norms = hidden.detach().norm(dim=-1)
    return hidden * (norms > norms.median())[..., None]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class InBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = Normed()


_STATISTICS: dict[str, tuple[str, Callable[[], Model]]] = {
    "centred_features": ("blocks centre features by their batch, in training", lambda: Model(_centre)),
    "scaled_features": ("blocks scale features by a deviation over their batch, in training", lambda: Model(_scale)),
    "dropped_tokens": ("blocks drop tokens below the median norm of the batch, in training", lambda: Model(_drop)),
    "batch_norm_in_blocks": ("blocks normalize by BatchNorm over samples and tokens", InBlocks),
}

for _name, (_title, _make) in _STATISTICS.items():

    @case(_title, name=_name, reference="ddp", differs=OF_MICROBATCHES)
    def _(run: Run, make: Callable[[], Model] = _make) -> None:
        run.fit(make(), val=True)


# Norms and losses after the blocks


class AfterBlocks(Model):
    """Normalize by BatchNorm over samples and tokens after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.net[5] = nn.Sequential(Normed(), self.net[5])


@case("BatchNorm over samples and tokens after the last block", reference="ddp", differs=OF_MICROBATCHES)
def batch_norm_after_blocks(run: Run) -> None:
    run.fit(AfterBlocks(), val=True)


class ZLoss(LanguageModel):
    """Add a loss of the logits, and one that distils a teacher, to the cross entropy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        logits, targets = self(ids[:, :-1]), ids[:, 1:]
        teacher = functional.one_hot(targets, VOCABULARY).to(logits.dtype) * 0.9 + 0.1 / VOCABULARY
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train/loss", loss, sync_dist=True)
        distilled = functional.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")
        return loss + 0.1 * torch.logsumexp(logits, -1).square().mean() + 0.1 * distilled


@case("logits are used by a z-loss and a distillation besides the cross entropy")
def z_loss(run: Run) -> None:
    run.fit(ZLoss(), run.loader(tokens()))


@case("a sequence has as many tokens as a head has features")
def as_long_as_wide(run: Run) -> None:
    run.fit(LanguageModel(), run.loader(tokens(length=5)))
