"""Test hooks that read and change gradients, if all gradients exist at once and if they do not."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.behaviour.case import OWN_GRADIENTS, Run, case
from tests.behaviour.models import Classifier

_SHARDED = ("full", "hybrid")

_IN_BACKWARD: dict[str, Any] = {"strategy": {column: {"step_in_backward": True} for column in _SHARDED}}
"""The strategies that shard whole layers update parameters in the backward, and free each gradient at once."""


_AT_START = "step_in_backward=True with {}, which would see updated weights and no gradients"


def _refused(
    hook: str, text: str = "step_in_backward=True: {} reads the gradient of .* Leave step_in_backward out"
) -> Any:
    text = text.format(hook)
    return {**_IN_BACKWARD, "refused": dict.fromkeys(_SHARDED, text)}


@case("on_after_backward clips gradients", **_refused("Clips.on_after_backward", _AT_START))
def clipped_after_backward(run: Run) -> None:
    class Clips(Classifier):
        def on_after_backward(self) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    run.fit(Clips())


@case("on_after_backward sets a gradient", **_refused("Sets.on_after_backward", _AT_START))
def set_after_backward(run: Run) -> None:
    class Sets(Classifier):
        def on_after_backward(self) -> None:
            self.head.weight.grad = torch.full_like(self.head.weight, 0.1)

    run.fit(Sets())


@case(
    "a callback logs the gradients' norms at the end of each batch",
    **_refused(r"Norms\.on_train_batch_end"),
    differs={"local": OWN_GRADIENTS},
)
def norms_of_gradients(run: Run) -> None:
    class Norms(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.log("norm", nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]))

    run.fit(Classifier(), callbacks=[Norms()])


def _kept_before_zero_grad(run: Run) -> None:
    class Keeps(Classifier):
        kept = 0.0

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.head.weight.grad is not None:
                self.kept += self.head.weight.grad.norm().item()

    model = Keeps()
    run.fit(model)
    run.record("kept", model.kept)


case("on_before_zero_grad reads the last gradients", "kept_before_zero_grad", differs={"local": OWN_GRADIENTS})(
    _kept_before_zero_grad
)
case(
    "on_before_zero_grad reads the last gradients, with step_in_backward where layers are sharded",
    "kept_before_zero_grad_in_backward",
    **_refused("Keeps.on_before_zero_grad"),
)(_kept_before_zero_grad)


@case(
    "on_before_optimizer_step, of a callback, reads gradients", **_refused("Reads.on_before_optimizer_step", _AT_START)
)
def read_before_step(run: Run) -> None:
    class Reads(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.log("gradient", pl_module.head.bias.grad.norm())

    run.fit(Classifier(), callbacks=[Reads()])


@case("hooks on parameters, registered before and after they are sharded, scale gradients", **_IN_BACKWARD)
def scaled_by_hooks_on_parameters(run: Run) -> None:
    def halve(param: Tensor) -> None:
        param.grad.mul_(0.5)

    def clamp(param: Tensor) -> None:
        param.grad.clamp_(-0.01, 0.01)

    class Scales(Classifier):
        def __init__(self) -> None:
            super().__init__(optimizer="adamw")
            self.head.weight.register_post_accumulate_grad_hook(halve)

        def on_fit_start(self) -> None:
            self.net[0].weight.register_post_accumulate_grad_hook(halve)
            self.net[1].up.weight.register_hook(lambda gradient: 0.1 * gradient)

        def on_train_start(self) -> None:
            self.net[2].up.weight.register_post_accumulate_grad_hook(clamp)

    run.fit(Scales())


@case("hooks read and change weights, and clear gradients, but read none", **_IN_BACKWARD)
def hooks_without_gradients(run: Run) -> None:
    class Changes(Classifier):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before", float(self.head.weight.grad is None))

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("norm", self.head.weight.norm())
            with torch.no_grad():
                self.head.weight.clamp_(-0.2, 0.2)
            self.zero_grad()

        def on_train_epoch_end(self) -> None:
            self.optimizers().zero_grad()

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            self.net[0].bias.data.mul_(0.9)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    run.fit(Changes(), max_epochs=2)
