"""Test ranks that differ in unused parameters or in numbers of batches, and buffers that steps change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Subset

from tests.behaviour.case import GLOBAL_BATCH_SIZE, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.up(x))


class _Mixture(nn.Module):
    """Send each sample to one of four experts; an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(NUM_FEATURES, 4)
        self.experts = nn.ModuleList(_Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, expert(x[chosen]) * weights[chosen, index, None])
        return x + out


class _HandWrittenExperts(Classifier):
    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.layers = nn.ModuleList(_Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case("a mixture of experts by hand, with experts that get no sample")
def experts_by_hand(run: Run) -> None:
    run.fit(_HandWrittenExperts(), val=True)


class _SometimesUnused(Classifier):
    """Use a further head in every second step, on all ranks, and another one never."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.extra = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.never = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.net(x)
        head = self.extra if batch_idx % 2 else self.head
        loss = functional.cross_entropy(head(features), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss


@case("parameters that some steps do not use, and some that none uses", tolerance=1e-6)
def sometimes_unused(run: Run) -> None:
    run.fit(_SometimesUnused())


class _OneRankUses(Classifier):
    """Use a further head for the samples of one class only, so that it is unused on some ranks."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.extra = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.net(x)
        loss = functional.cross_entropy(self.main(features), y, reduction="sum")
        chosen = (y == 1).nonzero().flatten()
        if len(chosen):
            loss = loss + functional.cross_entropy(self.extra(features[chosen]), y[chosen], reduction="sum")
        loss = loss / len(y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def main(self, features: Tensor) -> Tensor:
        return self.head(features)


@case("a head that is unused on some ranks", tolerance=1e-6)
def unused_on_some_ranks(run: Run) -> None:
    run.fit(_OneRankUses())


class _FirstHeadIsUnused(_OneRankUses):
    """Have another head after the one that is unused on some ranks, whose gradients are reduced later."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def main(self, features: Tensor) -> Tensor:
        return self.head(features) + self.last(features)


@case("a head that is unused on some ranks, before one that all use", tolerance=1e-6)
def unused_before_used(run: Run) -> None:
    run.fit(_FirstHeadIsUnused())


class _SkipsBlocks(Classifier):
    """Skip a block on ranks with an odd number."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for index, block in enumerate(list(self.net.children())[1:5]):
            if index != 1 or self.global_rank % 2 == 0:
                x = block(x)
        return self.head(self.net[5](x))


@case(
    "a block that one rank skips",
    reference="ddp",
    refused={
        "full": "took different paths through the model",
        "hybrid": "took different paths through the model",
        "tp": "plan of tensor parallelism is not the same on all ranks.*does either depend on the rank",
        "pp": "split of the model into stages is not the same on all ranks.*does either depend on the rank",
        "nd_tp": "split of the model into stages is not the same on all ranks.*does either depend on the rank",
    },
)
def block_that_a_rank_skips(run: Run) -> None:
    run.fit(_SkipsBlocks())


@case("validation batches of unequal number")
def unequal_validation(run: Run) -> None:
    model = Classifier()
    part = GLOBAL_BATCH_SIZE // run.layout.num_data_parallel
    if run.is_reference and run.layout.world_size == 1:
        loader = DataLoader(samples(40), GLOBAL_BATCH_SIZE)
    else:
        indices = list(range(run.data_parallel_rank, 40, run.layout.num_data_parallel))
        loader = DataLoader(Subset(samples(40), indices), part)
    trainer = run.trainer(limit_val_batches=1.0, max_epochs=2, limit_train_batches=2)
    if not run.is_reference and run.data_parallel_rank == 0:
        loader = DataLoader(Subset(samples(40), indices[:-part]), part)
    trainer.fit(model, run.loader(), loader)
    run.record_weights(model)
    run.record("steps", trainer.global_step)


class _Stream(IterableDataset[Any]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Any:
        return iter([samples()[index] for index in range(self.num)])


@case("validation streams of unequal length")
def unequal_streams(run: Run) -> None:
    model = Classifier()
    loader = DataLoader(_Stream(8 if run.data_parallel_rank == 0 else 12), 4)
    trainer = run.trainer(limit_val_batches=1.0, max_epochs=1, limit_train_batches=2)
    trainer.fit(model, run.loader(), loader)
    run.record_weights(model)


class _Centre(Classifier):
    """Keep a running mean of the logits in a buffer, which the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(NUM_CLASSES, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x) - self.centre
        self.centre = self.centre * 0.9 + logits.detach().mean(0) * 0.1
        loss = functional.cross_entropy(logits, y)
        self.log("train/loss", loss, sync_dist=True)
        return loss


_MICROBATCHES = dict.fromkeys(
    ("pp", "nd", "nd_tp"), "A step that changes a buffer changes it for each microbatch of the pipeline."
)


@case("a buffer that the step changes, as under ddp", reference="ddp", differs=_MICROBATCHES)
def buffer_changed_by_the_step(run: Run) -> None:
    run.fit(_Centre())


@case("a buffer that the step changes, with accumulation", reference="ddp", differs=_MICROBATCHES)
def buffer_changed_while_accumulating(run: Run) -> None:
    run.fit(_Centre(), accumulate_grad_batches=2)


class _Convolutional(Classifier):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.conv = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(56, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, None])


@case(
    "BatchNorm, trained and validated, as under ddp",
    reference="ddp",
    differs={**_MICROBATCHES, "compressed": "Rounding errors decide the class of a sample."},
)
def batch_norm(run: Run) -> None:
    run.fit(_Convolutional(), val=True)


class _GradientPenalty(Classifier):
    """Add the norm of the gradient with respect to the input to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.requires_grad_()
        loss = functional.cross_entropy(self(x), y)
        (grad,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        loss = loss + 0.1 * grad.square().sum(1).mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


DOUBLE_BACKWARD = dict.fromkeys(("pp", "nd", "nd_tp"), r"The step calls torch\.autograd\.grad itself")


@case("a gradient penalty", refused=DOUBLE_BACKWARD)
def gradient_penalty(run: Run) -> None:
    run.fit(_GradientPenalty())


class _Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_CLASSES * 2, NUM_FEATURES, sparse=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.net(x) + self.table(x[:, :NUM_CLASSES].argmax(1))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@case("an embedding with sparse gradients")
def sparse_embedding(run: Run) -> None:
    run.fit(_Sparse())
