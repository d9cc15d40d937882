"""Test steps that keep metric values, use generators of their own, or clear gradients in unusual places."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MaxMetric, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.behaviour.case import HOLDS_PARTS, OWN_GRADIENTS, ROUNDED, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Classifier, LanguageModel, tokens

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


@case("module.zero_grad() in a step, as in the DCGAN tutorial")
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


@case("a step freezes and unfreezes a parameter without dimensions")
def scalar_frozen_in_step(run: Run) -> None:
    class Freezes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step in (1, 3):
                self.scale.requires_grad_(self.global_step == 3)
            return super().training_step(batch, batch_idx) * self.scale

    run.fit(Freezes())


@case(
    "a step changes the weights of a frozen copy of its blocks by functions of lists, by nn.init and by out=",
    refused=dict.fromkeys(STAGES, "The step changes the parameter|uses the parameter"),
)
def teacher_changed_by_lists(run: Run) -> None:
    class Teacher(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                block = self.teacher[1]
                torch._foreach_mul_(list(block.up.parameters()), 0.9)
                nn.init.constant_(self.teacher[2].up.bias, 0.01 * batch_idx)
                torch.mul(block.down.weight, 0.5, out=block.down.weight)
                target = self.teacher(batch[0])
            return super().training_step(batch, batch_idx) + (self.net(batch[0]) - target).square().mean()

    run.fit(Teacher())


@case("a hook changes one element of a weight and of a bias")
def element_changed_in_hook(run: Run) -> None:
    class Changes(Classifier):
        def on_fit_start(self) -> None:
            self.head.bias.data[0] = -0.5
            with torch.no_grad():
                self.net[0].weight[2, 3] = 0.25

    run.fit(Changes())


@case("random signs before the model and after it, in a step that counts its calls")
def signs_around_model(run: Run) -> None:
    class Signs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(N, N, bias=False) for _ in range(4)])
            self.head = nn.Linear(N, NUM_CLASSES, bias=False)
            self.num_steps = 0

        def forward(self, x: Tensor) -> Tensor:
            signs = torch.randint(2, (len(x), 1)).to(x) * 2 - 1
            return signs * self.head(self.net(signs * x))  # The network is linear, so the signs cancel.

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.num_steps += 1
            return super().training_step(batch, batch_idx)

    model = Signs()
    run.fit(model)
    run.record("number of steps", model.num_steps)


@case("a penalty on activations that hooks take from inside blocks")
def activations_from_hooks(run: Run) -> None:
    class Sparse(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Tensor] = []
            for block in list(self.net)[1:5]:
                block.up.register_forward_hook(lambda module, args, out: self.found.append(out))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.found.clear()
            loss = super().training_step(batch, batch_idx)
            loss = loss + 0.1 * torch.stack([found.abs().mean() for found in self.found]).mean()
            self.found.clear()
            return loss

    run.fit(Sparse())


class _Scaled(nn.Module):
    """Change a parameter of a block in the block's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.scale = nn.Parameter(torch.ones(2 * N))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0.99, 1.01)
        return x + self.down(functional.gelu(self.up(x)) * self.scale)


@case(
    "a block clamps a parameter through `.data` in its forward",
    refused=dict.fromkeys(STAGES, r"The step changes the parameter 'net\.0\.scale'"),
)
def data_clamped_in_block(run: Run) -> None:
    class Clamps(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=2.0)
            self.net = nn.Sequential(*[_Scaled() for _ in range(4)])

    run.fit(Clamps())


@case(
    "a step clamps a parameter through `.data`, from the second step on",
    refused=dict.fromkeys(STAGES, "The step changes the parameter 'scale'"),
    differs=dict.fromkeys(("tp_tokens", "cp", "tiled"), ROUNDED),
)
def data_clamped_in_step(run: Run) -> None:
    class Clamps(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=2.0)
            self.scale = nn.Parameter(torch.ones(N))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step > 0:
                self.scale.data.clamp_(0.99, 1.01)
            return super().training_step(batch, batch_idx)

    run.fit(Clamps())


@case("a step clears gradients by hand")
def cleared_by_hand(run: Run) -> None:
    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2:  # The head adds up the gradients of two steps.
                for param in self.net.parameters():
                    param.grad = None
            loss = self.loss(batch)
            if batch_idx % 2 == 0:
                for param in self.parameters():
                    param.grad = None
            self.manual_backward(loss)
            self.optimizers().step()

    run.fit(ByHand())


@case("a step zeroes gradients by hand, in place")
def zeroed_by_hand(run: Run) -> None:
    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            if batch_idx % 2 == 0:
                self.zero_grad(set_to_none=False)
            else:
                for param in self.head.parameters():
                    param.grad.zero_()
            self.manual_backward(loss)
            self.optimizers().step()

    run.fit(ByHand())


@case(
    "views of weights are changed in a step",
    refused=dict.fromkeys(STAGES, "The step changes the parameter|uses the parameter"),
)
def views_changed(run: Run) -> None:
    class Views(Classifier):
        @torch.no_grad()
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weight = self.net[1].up.weight
            weight[:, 0].zero_()
            weight.data[1].mul_(0.5)
            weight.t()[2:4].add_(0.01)
            torch.add(weight[3], 1.0, out=weight[3])
            first, second = weight.view(-1).chunk(2)
            second.clamp_(-0.1, 0.1)
            first[0] = 0.25
            with torch.enable_grad():
                return super().training_step(batch, batch_idx)

    run.fit(Views())


@case(
    "parameters collected in __init__ are clipped after the backward",
    refused=dict.fromkeys(set(HOLDS_PARTS) - {"pp"}, "'head.weight' as it was before"),
    differs={"local": OWN_GRADIENTS},
)
def collected_in_init(run: Run) -> None:
    class Collects(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.collected = [self.head.weight]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.collected[0].shape == self.head.weight.shape
            nn.utils.clip_grad_norm_(self.collected, 0.01)

    run.fit(Collects())


@case(
    "an optimizer is made in __init__",
    refused=dict.fromkeys(set(HOLDS_PARTS) - {"pp"}, "It was created before the module was sharded"),
)
def optimizer_made_in_init(run: Run) -> None:
    class Makes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.optim.SGD(self.parameters(), lr=0.05)

        def configure_optimizers(self) -> Any:
            return self.made

    run.fit(Makes())


class _Annealed(nn.Module):
    """Lower the temperature of a block in each forward, and count the forwards in an object of the user's."""

    def __init__(self, annealer: _Annealer) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.temperature = 1.0
        self.annealer = annealer

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.9
        return x + self.down(functional.gelu(self.up(x))) * self.temperature * self.annealer.next()


class _Annealer:
    def __init__(self) -> None:
        self.num_calls = 0

    def next(self) -> float:
        self.num_calls += 1
        return 0.95**self.num_calls


@case("blocks lower a temperature and count their calls in objects of their own")
def state_in_blocks(run: Run) -> None:
    class Anneals(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[_Annealed(_Annealer()) for _ in range(4)])

    run.fit(Anneals())


@case("a step counts its calls in an object that several modules share")
def state_in_object(run: Run) -> None:
    class Anneals(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.annealer = _Annealer()
            self.head.annealer = self.annealer

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/calls", float(self.head.annealer.num_calls))
            return super().training_step(batch, batch_idx) * self.annealer.next()

    run.fit(Anneals())


@case(
    "a block and the step draw from generators that are not seeded",
    refused=dict.fromkeys(STAGES, "draws numbers from self.rng, a generator of its own"),
    differs=dict.fromkeys(("full", "hybrid", "data", "data_tp"), "each rank draws its own numbers, as under ddp"),
)
def unseeded_generators(run: Run) -> None:
    class Draws(Classifier):
        def __init__(self) -> None:
            super().__init__()
            # Unseeded generators would differ between processes. They are seeded by the rank, so that rank 0 draws the
            # same numbers as the reference.
            self.rng = np.random.default_rng(run.rank)
            self.further = random.Random(run.rank)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (self.rng.random() + self.further.random())

    run.fit(Draws())


@case("validation_step uses hidden states of inner blocks")
def hidden_states_in_validation(run: Run) -> None:
    class Probes(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].roll(-1, 1).flatten())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            hidden = [self.emb(batch[0])]
            for block in self.blocks:
                hidden.append(block(hidden[-1]))
            self.log("val/tokens", float(hidden[2].shape[1]), sync_dist=True)
            self.log("val/first", hidden[2][:, 0].square().mean(), sync_dist=True)

    run.fit(Probes(num_blocks=4), run.loader(tokens()), val=run.loader(tokens()))


@case(
    "training_step uses hidden states of an inner block from the second step on",
    refused=dict.fromkeys(("tp", "data_tp"), "uses the hidden states that blocks.1 returns in another place"),
)
def hidden_states_later(run: Run) -> None:
    class Deep(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = [self.emb(batch[0])]
            for block in self.blocks:
                hidden.append(block(hidden[-1]))
            logits = self.head(self.norm(hidden[-1]))
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[0].roll(-1, 1).flatten())
            return loss if self.global_step == 0 else loss + hidden[2].square().mean()

    run.fit(Deep(num_blocks=4), run.loader(tokens()))


class _Scores(NamedTuple):
    logits: Tensor
    labels: Tensor


@case(
    "validation_step logs values that are no means over samples, and returns arrays and named tuples",
    differs=dict.fromkeys(
        ("full", "hybrid", "data", "data_tp", "nd", "nd_tp"), "each rank logs what its own samples give, as under ddp"
    ),
)
def other_than_means(run: Run) -> None:
    class Logs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self(x)
            loss = functional.cross_entropy(logits, y)
            chosen = y % 2 == 0
            self.log("val/perplexity", loss.exp())
            self.log("val/spread", logits.std(0).mean())
            self.log("val/count", chosen.sum().float())
            self.log("val/masked", (logits.argmax(-1) == y)[chosen].float().sum() / chosen.sum().clamp(min=1))
            self.log("val/summed", functional.cross_entropy(logits, y, reduction="sum").item())
            return {"probs": logits.softmax(-1).cpu().numpy(), "scores": _Scores(logits, y), "count": chosen.sum()}

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert outputs["probs"].shape == (len(batch[0]), NUM_CLASSES)
            assert len(outputs["scores"].labels) == len(batch[0])

    run.fit(Logs(), val=True)


@case("validation_step gives self.log a batch size that is always the same")
def constant_batch_size(run: Run) -> None:
    class Logs(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", functional.cross_entropy(self(batch[0]), batch[1]), batch_size=8, sync_dist=True)

    run.fit(Logs(), val=True)


@case(
    "a callback draws random numbers on the first rank alone, and the step draws some as well",
    differs=dict.fromkeys(
        ("full", "hybrid", "pp", "nd", "data", "data_tp", "nd_tp"), "each rank draws its own numbers, as under ddp"
    ),
)
def draws_on_one_rank(run: Run) -> None:
    class Samples(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.is_global_zero:
                self.numbers = torch.randn(3), random.random(), np.random.rand()

    class Masks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            keep = random.random() + np.random.rand()
            loss = functional.cross_entropy(self(batch[0]) * keep, batch[1])
            self.log("train/loss", loss, sync_dist=True)
            return loss

    random.seed(0)
    np.random.seed(0)
    run.fit(Masks(), callbacks=[Samples()])


@case("a callback counts samples in a metric of its own")
def counts_in_callback(run: Run) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.total = SumMetric()

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
            self.total.update(len(batch[0]))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("val/total", self.total.compute())
            self.total.reset()

    run.fit(Classifier(), val=True, callbacks=[Counts()])


@case("a callback logs norms of a weight and of its gradient by its own self.log")
def callback_logs_norms(run: Run) -> None:
    class Norms(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.log("norm", next(pl_module.parameters()).detach().norm(), sync_dist=True)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.log("last", list(pl_module.parameters())[-1].detach().sum())

    run.fit(Classifier(), callbacks=[Norms()])


@case(
    "a plateau scheduler monitors a metric that is logged without sync_dist",
    differs=dict.fromkeys(
        ("full", "hybrid", "data", "data_tp", "nd", "nd_tp"), "it sees the value of the first rank, as under ddp"
    ),
)
def plateau_without_sync(run: Run) -> None:
    class Plateau(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}

    run.fit(Plateau(), val=True)


@case(
    "validation_step writes to the logger itself",
    refused=dict.fromkeys(STAGES, "uses the History itself"),
)
def own_use_of_logger(run: Run) -> None:
    class Writes(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)
            if batch_idx == 1:
                self.logger.log_metrics({"index": float(batch_idx)}, step=self.global_step)

    run.fit(Writes(), val=True)


@case(
    "validation_step updates a metric that adds up with losses",
    refused=dict.fromkeys(STAGES, "updates a metric that adds up, keeps or compares values"),
    differs=dict.fromkeys(
        ("full", "hybrid", "data", "data_tp"), "each rank adds the losses of its parts, as under ddp"
    ),
)
def losses_in_sum_metric(run: Run) -> None:
    class Sums(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.total = SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.total.update(self.loss(batch))
            self.log("val/total", self.total)

    run.fit(Sums(), val=True)


@case("metrics that are inside others and read by themselves, and sums and extremes of the batch")
def metrics_inside_others(run: Run) -> None:
    class Nested(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
            self.best = MinMaxMetric(self.accuracy)
            self.all_metrics = [self.accuracy]
            self.seen = SumMetric()
            self.largest = MaxMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            self.accuracy.update(logits, batch[1])
            self.seen.update(batch[1].double().mean() * len(batch[0]))
            self.largest.update(logits.max())
            self.log("val/accuracy", self.accuracy)
            self.log("val/seen", self.seen)
            self.log("val/largest", self.largest)

        def on_validation_epoch_end(self) -> None:
            self.log("val/best", self.best.compute()["max"])

    run.fit(Nested(), val=True)
