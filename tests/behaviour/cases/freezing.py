"""Test frozen and unfrozen parameters, gradients, and hooks on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import Block, Classifier, LanguageModel, Network, tokens


class _Trainable(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


@case("half of the blocks are frozen in __init__")
def frozen_half(run: Run) -> None:
    class Frozen(_Trainable):
        def __init__(self) -> None:
            super().__init__()
            self.net[:3].requires_grad_(False)

    run.fit(Frozen(), val=True)


@case("every bias alone is trained (BitFit)")
def bias_only(run: Run) -> None:
    class Biases(_Trainable):
        def __init__(self) -> None:
            super().__init__()
            for name, param in self.named_parameters():
                param.requires_grad_(name.endswith("bias"))

    run.fit(Biases())


@case("frozen parameters are given to the optimizer as well")
def frozen_in_optimizer(run: Run) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].requires_grad_(False)

    run.fit(Frozen())


@case("blocks are unfrozen in on_train_epoch_start")
def unfrozen_later(run: Run) -> None:
    class Unfreezes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[3:].requires_grad_(True)

    run.fit(Unfreezes(), max_epochs=3)


@case("blocks are frozen in the middle of training")
def frozen_later(run: Run) -> None:
    class Freezes(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net.requires_grad_(self.current_epoch != 1)

    run.fit(Freezes(), max_epochs=3)


@case("the body runs under torch.no_grad: a linear probe")
def linear_probe(run: Run) -> None:
    class Probe(_Trainable):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.net(x)
            return self.head(h)

    run.fit(Probe())


@case("self.freeze() before a test, self.unfreeze() before a second fit")
def freeze_and_unfreeze(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, name="first")
    model.freeze()
    run.record("tested", trainer.test(model, run.loader(), verbose=False))
    model.unfreeze()
    run.fit(model, name="second")


@case("the tied embedding is frozen")
def frozen_embedding(run: Run) -> None:
    class Frozen(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.emb.weight.requires_grad_(False)

    run.fit(Frozen(), run.loader(tokens()))


@case("the gradient stops between two blocks: detach")
def detached(run: Run) -> None:
    class Detaches(_Trainable):
        def forward(self, x: Tensor) -> Tensor:
            h = self.net[:3](x)
            return self.head(self.net[3:](h.detach()))

    run.fit(Detaches())


@case("only the last blocks are trained, on a copy of a pretrained body")
def pretrained_body(run: Run) -> None:
    torch.manual_seed(7)
    body = nn.Sequential(*[Block() for _ in range(3)]).requires_grad_(False)

    class Finetunes(_Trainable):
        def __init__(self) -> None:
            super().__init__(num_blocks=2)
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.body(x))

    run.fit(Finetunes())


@case("register_full_backward_hook changes the gradient of a block's inputs")
def backward_hooks(run: Run) -> None:
    class Hooked(Classifier):
        def __init__(self) -> None:
            super().__init__()
            for block in self.net[1:5]:
                block.register_full_backward_hook(lambda module, gradients, outputs: (gradients[0] * 0.5,))

    run.fit(Hooked())


@case("register_full_backward_pre_hook changes the gradient of a block's outputs")
def backward_pre_hooks(run: Run) -> None:
    class Hooked(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[3].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))

    run.fit(Hooked())


@case("register_hook on an activation scales its gradient")
def activation_hook(run: Run) -> None:
    class Hooked(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            h = self.net[:3](x)
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * 0.1)
            return self.head(self.net[3:](h))

    run.fit(Hooked())


@case("a gradient-reversal layer between two blocks")
def gradient_reversal(run: Run) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return -0.5 * grad

    class Reverses(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.domain = nn.Linear(16, 2)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            h = self.net(x)
            domain = functional.cross_entropy(self.domain(Reverse.apply(h)), (x[:, 0] > 0).long())
            return functional.cross_entropy(self.head(h), y) + domain

    run.fit(Reverses())


@case("gradients are set to None for some layers in on_after_backward")
def drops_gradients(run: Run) -> None:
    class Drops(Classifier):
        def on_after_backward(self) -> None:
            if self.trainer.global_step % 2:
                for param in self.net[2].parameters():
                    param.grad = None

    run.fit(Drops())


@case("weights are reset to their first values every epoch (iterative training)")
def rewinds(run: Run) -> None:
    class Rewinds(Classifier):
        def on_train_epoch_start(self) -> None:
            with torch.no_grad():
                if self.current_epoch == 0:
                    self.first = [p.detach().clone() for p in self.net.parameters()]
                for param, value in zip(self.net.parameters(), self.first, strict=True):
                    param.copy_(value)

    run.fit(Rewinds(), max_epochs=2)


@case("a layer's weights are initialised in on_fit_start by torch.nn.init")
def initialised_late(run: Run) -> None:
    class Initialises(Classifier):
        def on_fit_start(self) -> None:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.constant_(module.bias, 0.1)

    run.fit(Initialises())


_DRAWN = "Random numbers that a hook draws into sharded weights are others than in one process: draw them in __init__."


@case(
    "a layer's weights are initialised in on_fit_start by random numbers",
    differs={"full": _DRAWN, "hybrid": _DRAWN, "tp": _DRAWN},
)
def initialised_at_random(run: Run) -> None:
    class Initialises(Classifier):
        def on_fit_start(self) -> None:
            torch.manual_seed(3)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.1)
                    module.bias.data.uniform_(-0.1, 0.1)

    run.fit(Initialises())


@case("register_hook on activations that two places use clips their gradients", reference="ddp")
def activation_hooks_of_skips(run: Run) -> None:
    class Hooked(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            h = first = self.net[0](x)
            for block in self.net[1:]:
                h = block(h + 0.1 * first)
                if h.requires_grad:
                    h.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
            return self.head(h)

    run.fit(Hooked())


@case("a block puts a hook on the gradient of its input, in every step")
def input_hook(run: Run) -> None:
    class Scales(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
            return super().forward(x)

    run.fit(Network(lambda: nn.Sequential(nn.Linear(16, 16), *[Scales() for _ in range(4)], nn.Linear(16, 4))))


@case(
    "register_hook on an activation behind the rest of the model, which has used it",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "call register_hook as soon as the tensor is made"),
)
def late_hook(run: Run) -> None:
    class Hooked(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            first = self.net[0](x)
            logits = self.head(self.net[1:](first))
            if first.requires_grad:
                first.register_hook(lambda gradient: gradient * 0.1)
            return logits

    run.fit(Hooked())
