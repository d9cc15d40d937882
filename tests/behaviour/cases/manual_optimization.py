"""Test manual optimization: GANs, sharpness-aware minimisation, several optimizers, accumulation by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import OWN_GRADIENTS, ROUNDED, Run, case
from tests.behaviour.models import NUM_FEATURES, Block, Classifier

PIPELINED = ("pp", "nd", "nd_tp")
N = NUM_FEATURES


class _Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train/loss", loss, sync_dist=True)


@case("manual optimization")
def manual(run: Run) -> None:
    run.fit(_Manual(), val=True, max_epochs=2)


@case("gradients are accumulated by hand over batches")
def manual_accumulation(run: Run) -> None:
    class Accumulates(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    run.fit(Accumulates())


@case("several backward passes in one step")
def several_backwards(run: Run) -> None:
    class Several(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            x, y = batch
            for part in range(2):
                self.manual_backward(self.loss((x[part::2], y[part::2])) / 2)
            optimizer.step()

    run.fit(Several())


@case("two losses of one graph: retain_graph")
def retained_graph(run: Run) -> None:
    class Retains(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            logits = self(batch[0])
            self.manual_backward(functional.cross_entropy(logits, batch[1]), retain_graph=True)
            self.manual_backward(0.1 * logits.pow(2).mean())
            optimizer.step()

    run.fit(Retains())


@case("self.clip_gradients by hand")
def manual_clipping(run: Run) -> None:
    class Clips(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()

    run.fit(Clips())


@case("a scheduler that is stepped by hand")
def manual_scheduler(run: Run) -> None:
    class Schedules(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    run.fit(Schedules())


class _TwoOptimizers(_Manual):
    """Give the body and the head an optimizer each."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.Adam(self.head.parameters(), lr=0.01)


@case("two optimizers of two parts, both stepped")
def two_optimizers(run: Run) -> None:
    class Both(_TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    run.fit(Both())


@case("two optimizers that take turns, by toggle_optimizer")
def toggled(run: Run) -> None:
    class Turns(_TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()[batch_idx % 2]
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    run.fit(Turns())


@case("optimizer.toggle_model in gradient accumulation")
def toggled_model(run: Run) -> None:
    class Accumulates(_TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
                    self.manual_backward(self.loss(batch))
                    if batch_idx % 2:
                        optimizer.step()
                        optimizer.zero_grad()

    run.fit(Accumulates())


class _Gan(Classifier):
    """Train a generator and a critic in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(N, N), Block(), Block(), nn.Linear(N, N))
        self.head = nn.Sequential(Block(), Block(), nn.Linear(N, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        x = batch[0]
        self.toggle_optimizer(generator)
        loss = functional.softplus(-self.head(self.net(x.flip(1)))).mean()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        fake = self.net(x.flip(1)).detach()
        critic_loss = functional.softplus(-self.head(x)).mean() + functional.softplus(self.head(fake)).mean()
        self.manual_backward(critic_loss)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.log_dict({"generator": loss, "critic": critic_loss}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.Adam(self.head.parameters(), 1e-3)


@case("a GAN", tolerance=1e-8)
def gan(run: Run) -> None:
    run.fit(_Gan())


@case("SAM without the norm: the sign of the gradient", differs={"local": OWN_GRADIENTS})
def sam_of_signs(run: Run) -> None:
    class Sam(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            saved = [p.detach().clone() for p in self.parameters()]
            with torch.no_grad():
                for p in self.parameters():
                    p.add_(p.grad.sign(), alpha=0.001)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                for p, value in zip(self.parameters(), saved, strict=True):
                    p.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Sam())


@case("optimizer.step with a closure")
def closure_by_hand(run: Run) -> None:
    class Closure(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    run.fit(Closure())


@case(
    "LBFGS by hand",
    refused=dict.fromkeys(PIPELINED, "LBFGS with pp_size=2"),
    tolerance=1e-6,
    differs={"compressed": ROUNDED},
)
def lbfgs_by_hand(run: Run) -> None:
    class Lbfgs(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    run.fit(Lbfgs())


@case(
    "gradients by torch.autograd.grad, set on the parameters by hand",
    refused={
        "*": "The gradient of the parameter 'head.weight' was set on its gathered copy",
        "data": "The parameter 'head.weight' differs between ranks of dp_replicate",
        **dict.fromkeys(PIPELINED, "The step calls torch.autograd.grad for the parameter 'head.weight'"),
    },
)
def meta_step(run: Run) -> None:
    class Meta(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            params = list(self.head.parameters())
            gradients = torch.autograd.grad(self.loss(batch), params)
            with torch.no_grad():
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Meta())


@case("manual optimization with accumulate_grad_batches is Lightning's own error")
def manual_with_accumulation(run: Run) -> None:
    error = ""
    try:
        run.fit(_Manual(), accumulate_grad_batches=2, observe=False)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    run.record("error", error)


@case("a hook sees the gradient of each backward that reaches its parameter, and of no other")
def hooks_of_two_backwards(run: Run) -> None:
    class TwoBackwards(_Manual):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(N, 2)
            for param in (self.head.weight, self.other.weight):
                param.register_post_accumulate_grad_hook(self._halve)

        @staticmethod
        def _halve(param: Tensor) -> None:
            param.grad = param.grad * 0.5

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.manual_backward(self.other(batch[0]).square().mean())
            optimizer.step()

    run.fit(TwoBackwards())
