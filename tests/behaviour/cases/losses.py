"""Test losses of many kinds, and further code in training steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples

N, C = NUM_FEATURES, NUM_CLASSES
PIPELINED = ("pp", "nd", "nd_tp")
OF_MICROBATCHES = dict.fromkeys(
    PIPELINED,
    "A pipeline takes the mean of the losses of its microbatches. It is not the loss of the batch where the loss is a"
    " sum over samples, compares them with each other, or weighs them by their classes.",
)


@case("a loss that is a sum over the samples", reference="ddp", differs=OF_MICROBATCHES)
def summed_loss(run: Run) -> None:
    class Sums(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 10

    run.fit(Sums())


@case("a contrastive loss with the batch's own negatives", reference="ddp", differs=OF_MICROBATCHES)
def contrastive(run: Run) -> None:
    class Contrasts(Classifier):
        def loss(self, batch: Any) -> Tensor:
            logits = functional.normalize(self(batch[0]))
            scores = logits @ functional.normalize(batch[0][:, :C]).T / 0.1
            return functional.cross_entropy(scores, torch.arange(len(scores)))

    run.fit(Contrasts())


@case("label smoothing and weights of classes", reference="ddp", differs=OF_MICROBATCHES)
def weighted_classes(run: Run) -> None:
    class Weighs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0, 0.5]), label_smoothing=0.1)

        def loss(self, batch: Any) -> Tensor:
            return self.criterion(self(batch[0]), batch[1])

    run.fit(Weighs())


@case("weights of samples in the loss")
def weighted_samples(run: Run) -> None:
    class Weighs(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return (functional.cross_entropy(self(x), y, reduction="none") * x[:, 0].abs()).mean()

    run.fit(Weighs())


@case("a penalty on the head's weight, which is outside of the blocks")
def head_penalty(run: Run) -> None:
    class Penalises(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.1 * self.head.weight.norm()

    run.fit(Penalises())


@case("a penalty on activations that a forward hook keeps")
def activation_penalty(run: Run) -> None:
    class Penalises(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            for block in self.net[1:5]:
                block.register_forward_hook(lambda module, args, output: self.kept.append(output))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kept.clear()
            loss = self.loss(batch) + 0.01 * sum(h.pow(2).mean() for h in self.kept)
            self.kept.clear()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Penalises())


@case(
    "adversarial samples by the sign of the inputs' gradient (FGSM)",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), r"The step calls torch\.autograd\.grad itself"),
)
def adversarial(run: Run) -> None:
    class Attacks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(functional.cross_entropy(self(x), batch[1]), x)
            return self.loss((x.detach() + 0.05 * gradient.sign(), batch[1]))

    run.fit(Attacks())


@case("the step looks whether the loss is NaN: if torch.isnan(loss)")
def nan_check(run: Run) -> None:
    class Looks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if torch.isnan(loss):
                raise ValueError("The loss is NaN.")
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Looks())


@case('the step prints the loss: f"{loss:.3f}"')
def formats_loss(run: Run) -> None:
    class Prints(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.message = f"{batch_idx}: {loss:.3f} {float(loss.detach()):.3f}"
            return loss

    run.fit(Prints())


@case("an auxiliary loss of an early hidden state, from the second epoch on")
def late_auxiliary_loss(run: Run) -> None:
    class Auxiliary(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(N, C)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            early = self.net[0](x)
            h = early
            for block in self.net[1:]:
                h = block(h)
            loss = functional.cross_entropy(self.head(h), y)
            if self.current_epoch >= 1:
                loss = loss + 0.5 * functional.cross_entropy(self.aux(early), y)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Auxiliary(), max_epochs=2)


@case("the loss changes its kind with the epoch")
def loss_by_epoch(run: Run) -> None:
    class Changes(Classifier):
        def loss(self, batch: Any) -> Tensor:
            logits = self(batch[0])
            if self.current_epoch == 0:
                return functional.cross_entropy(logits, batch[1])
            return functional.multi_margin_loss(logits, batch[1])

    run.fit(Changes(), max_epochs=3)


@case("several tasks, weighted by learned uncertainties")
def uncertainties(run: Run) -> None:
    class Tasks(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(N, 1)
            self.log_variances = nn.Parameter(torch.zeros(2))

        def loss(self, batch: Any) -> Tensor:
            h = self.net(batch[0])
            losses = torch.stack(
                [
                    functional.cross_entropy(self.head(h), batch[1]),
                    functional.mse_loss(self.second(h)[:, 0], batch[0].mean(1)),
                ]
            )
            return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()

    run.fit(Tasks())


@case("a loss with parameters of its own: class centres")
def centres(run: Run) -> None:
    class CentreLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.zeros(C, N))

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return (h - self.centres[y]).pow(2).sum(1).mean()

    class Centred(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = CentreLoss()

        def loss(self, batch: Any) -> Tensor:
            h = self.net(batch[0])
            return functional.cross_entropy(self.head(h), batch[1]) + 0.1 * self.criterion(h, batch[1])

    run.fit(Centred())


@case("distillation from a frozen teacher")
def distillation(run: Run) -> None:
    class Distils(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Classifier(num_blocks=2).requires_grad_(False).eval()

        def loss(self, batch: Any) -> Tensor:
            with torch.no_grad():
                target = self.teacher(batch[0]).softmax(-1)
            return functional.kl_div(self(batch[0]).log_softmax(-1), target, reduction="batchmean")

    run.fit(Distils())


class _Byol(Classifier):
    """Train a student to predict the outputs of a teacher, whose weights are a moving average of the student's."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0].flip(1))
        h = self.net(batch[0])
        loss = functional.mse_loss(h, target) + functional.cross_entropy(self.head(h), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)


@case("a teacher that follows the student in on_train_batch_end (BYOL)")
def byol(run: Run) -> None:
    run.fit(_Byol())


@case("a mean over the tokens that count, as many on each rank")
def masked_mean(run: Run) -> None:
    class Masks(Classifier):
        def loss(self, batch: Any) -> Tensor:
            losses = functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
            mask = torch.ones_like(losses)
            mask[: len(mask) // 2] = 0
            return (losses * mask).sum() / mask.sum()

    run.fit(Masks(), run.loader(TensorDataset(*[t[:1].expand(64, *t.shape[1:]) for t in samples().tensors])))


@case("CTC loss", reference="ddp")
def ctc(run: Run) -> None:
    class Ctc(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(N, 8 * (C + 1))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            log_probs = self(x).unflatten(1, (8, C + 1)).log_softmax(-1).transpose(0, 1)
            targets = torch.stack([y + 1, (y + 1) % C + 1], 1)
            lengths = torch.full((len(x),), 8), torch.full((len(x),), 2)
            return functional.ctc_loss(log_probs, targets, *lengths)

    run.fit(Ctc())


@case("a reinforcement step: REINFORCE with rewards from the outputs")
def reinforce(run: Run) -> None:
    class Reinforces(Classifier):
        def loss(self, batch: Any) -> Tensor:
            log_probs = self(batch[0]).log_softmax(-1)
            action = log_probs.argmax(-1)
            reward = (action == batch[1]).to(log_probs) - 0.25
            return -(log_probs.gather(1, action[:, None])[:, 0] * reward).mean()

    run.fit(Reinforces())


@case("mixup with the reversed batch", reference="ddp")
def mixup(run: Run) -> None:
    class Mixes(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            logits = self(0.7 * x + 0.3 * x.roll(1, 1))
            return 0.7 * functional.cross_entropy(logits, y) + 0.3 * functional.cross_entropy(logits, (y + 1) % C)

    run.fit(Mixes())


@case("an exponential mean of the loss in Python scales the loss")
def scaled_by_running_mean(run: Run) -> None:
    class Scales(Classifier):
        running = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) / self.running

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            value = self.trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")
            self.running = 0.9 * self.running + 0.1 * float(value)

    run.fit(Scales())


@case(
    "a loss that becomes NaN, and EarlyStopping(check_finite)",
    differs={"compressed": "A step with gradients that are not finite is left out."},
)
def nan_loss(run: Run) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.global_step == 2 else loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)

    trainer = run.fit(Breaks(), val=True, callbacks=[EarlyStopping("val/loss")], max_epochs=4, observe=False)
    run.record("stopped at", trainer.current_epoch)


@case("an auxiliary block whose loss needs no main model: a module outside the path")
def side_module(run: Run) -> None:
    class Side(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Sequential(Block(), nn.Linear(N, 1))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            side = self.side(x)[:, 0]
            return functional.cross_entropy(self(x), y) + functional.mse_loss(side, x.sum(1) / 4)

    run.fit(Side())


def _weighted_over_accumulated_batches(run: Run) -> None:
    class Weighs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            keep = (x[:, 0] > -0.5).double()
            losses = functional.cross_entropy(self(x), y, reduction="none")
            return {"loss": (losses * keep).sum() / keep.sum().clamp(min=1), "weight": keep.sum()}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    number = 1 if run.is_reference else 4  # One process ignores weights.
    loader = run.loader(samples(128), 32 // number)
    model = Weighs()
    run.fit(model, loader, max_steps=3, limit_train_batches=None, accumulate_grad_batches=number, observe=False)
    run.record_weights(model)


for _name, _strategy in {"usual": {}, "zero_2": {"zero_stage": 2}, "zero_3": {"zero_stage": 3}}.items():
    case(
        f"weighted losses with accumulated batches, {_name.replace('_', ' ')}",
        name=f"weighted_and_accumulated_{_name}",
        strategy={"full": _strategy},
    )(_weighted_over_accumulated_batches)
