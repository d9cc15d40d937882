"""Test backwards that reduce gradients at unusual times: unsynced, interrupted, direct, or of other graphs."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, Block, Classifier

OUTSIDE_OF_BLOCK = dict.fromkeys(("pp", "nd", "nd_tp"), "uses the parameter 'net.2.down.weight' outside of net.2")
N = NUM_FEATURES


class _Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _TwoParts(_Manual):
    """Give the body and the head an optimizer each, and toggle them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.SGD(self.head.parameters(), lr=0.05)


@case("parts that are frozen in turns, with backwards that are not synced before one that is")
def frozen_in_turns_without_sync(run: Run) -> None:
    class InTurns(_TwoParts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for optimizer in self.optimizers():
                for part in range(2):
                    with optimizer.toggle_model(sync_grad=part == 1):
                        self.manual_backward(self.loss((x[part::2], y[part::2])) / 2)
                optimizer.step()
                optimizer.zero_grad()

    run.fit(InTurns())


@case("a part is unfrozen between a backward that is not synced and one that is")
def unfrozen_between_backwards(run: Run) -> None:
    class Unfreezes(_TwoParts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            body, head = self.optimizers()
            self.head.requires_grad_(False)
            with body.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 2)
            self.head.requires_grad_(True)
            self.manual_backward(self.loss(batch) * 2)
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()

    run.fit(Unfreezes())


@case("gradients are cleared between a backward that is not synced and one that is")
def cleared_between_backwards(run: Run) -> None:
    class Clears(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(3 * self.loss(batch))
            optimizer.zero_grad()
            if batch_idx % 2:  # This backward reaches the parameters of the head only.
                self.manual_backward(self.head(batch[0]).square().mean())
            else:
                self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Clears())


@case(
    "gradients are clipped between a backward that is not synced and one that is",
    refused={
        **dict.fromkeys(("full", "hybrid", "nd"), "is accumulated and not reduced over the ranks yet.*sync_grad=True"),
    },
    reference="ddp",
    differs={"zero_2": "Each backward reduces its gradients with zero_stage=2, also one that is not synced."},
)
def clipped_between_backwards(run: Run) -> None:
    class Clips(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch))
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Clips())


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError("failed on purpose")


def _catch_error_in_backward(run: Run, is_direct: bool) -> None:
    class Catches(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            backward = torch.Tensor.backward if is_direct else self.manual_backward
            if batch_idx == 1:
                hidden = _RaiseInBackward.apply(self.net(batch[0]))  # type: ignore[no-untyped-call]
                try:
                    backward(self.head(hidden).square().mean())
                except ValueError:
                    optimizer.zero_grad()
            backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Catches())


@case("a backward that raises half-way is caught, and followed by one that does not")
def caught_error_in_backward(run: Run) -> None:
    _catch_error_in_backward(run, is_direct=False)


@case("a direct loss.backward() that raises half-way is caught, and followed by another one")
def caught_error_before_direct_backward(run: Run) -> None:
    _catch_error_in_backward(run, is_direct=True)


@case("a backward that raises half-way is caught, and followed by one of fewer parameters")
def caught_error_before_smaller_backward(run: Run) -> None:
    class Catches(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            if batch_idx == 1:
                hidden = _RaiseInBackward.apply(self.net(batch[0]))  # type: ignore[no-untyped-call]
                with contextlib.suppress(ValueError):
                    self.manual_backward(self.head(hidden).square().mean())
                self.manual_backward(self.net(batch[0]).square().mean())
            else:
                self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Catches())


@case("zero_grad() in on_after_backward drops a batch of an accumulation")
def cleared_in_hook(run: Run) -> None:
    class Drops(Classifier):
        def on_after_backward(self) -> None:
            if self.trainer.fit_loop.batch_idx == 2:
                self.zero_grad()

    run.fit(Drops(), accumulate_grad_batches=4)


@case("a fit that stops in the middle of an accumulation, and another fit of the same module")
def stopped_while_accumulating(run: Run) -> None:
    class Stops(Classifier):
        stops_at: int | None = 1

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == self.stops_at:
                self.trainer.should_stop = True

    model = Stops()
    run.fit(model, accumulate_grad_batches=4, limit_train_batches=8, name="first")
    model.stops_at = None
    run.fit(model, accumulate_grad_batches=2, name="second")


@case("an error in on_after_backward while gradients are accumulated is caught, and the module is fitted again")
def failed_while_accumulating(run: Run) -> None:
    class Fails(Classifier):
        fails_at: int | None = 1

        def on_after_backward(self) -> None:
            if self.trainer.fit_loop.batch_idx == self.fails_at:
                raise ValueError("failed on purpose")

    model = Fails().double()
    with contextlib.suppress(ValueError):
        run.trainer(accumulate_grad_batches=4, limit_train_batches=8).fit(model, run.loader())
    model.fails_at = None
    run.fit(model, accumulate_grad_batches=2)


@case("a module with gradients that no backward has reduced is copied and converted")
def converted_while_accumulating(run: Run) -> None:
    class Accumulates(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
                self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.copies = [copy.deepcopy(param) for param in self.parameters()]

    model = Accumulates()
    run.fit(model, limit_train_batches=3)
    model.float()


@case("manual_backward with create_graph=True")
def backward_with_graph(run: Run) -> None:
    class KeepsGraph(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                self.manual_backward(self.loss(batch) / 2, create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            for param in self.parameters():
                param.grad = None

    run.fit(KeepsGraph())


@case(
    "weights are read in on_before_backward and on_after_backward, and used outside of their block",
    refused=OUTSIDE_OF_BLOCK,
)
def weights_read_around_backward(run: Run) -> None:
    class Reads(Classifier):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before", self.net[1].up.weight.detach().norm())

        def on_after_backward(self) -> None:
            self.log("after", self.head.weight.detach().norm())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            penalty = self.net[2].down.weight.square().mean()
            return super().training_step(batch, batch_idx) + 0.1 * penalty

    run.fit(Reads())


@case("the same in manual optimization with two backwards")
def weights_read_around_two_backwards(run: Run) -> None:
    class Reads(_Manual):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before", self.net[1].up.weight.detach().norm())

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.manual_backward(0.1 * self.net[2].down.weight.square().mean())
            self.log("between", self.net[1].up.weight.detach().norm())
            self.manual_backward(0.1 * self.net[1].up.weight.square().mean())
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Reads())


@case("the module is converted to float32 and back at the start")
def converted_at_start(run: Run) -> None:
    class Converts(Classifier):
        def on_train_start(self) -> None:
            self.float()
            self.double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + 0.1 * self.head.weight.square().mean()

    run.fit(Converts())


@case("a frozen parameter of integers is the first of an optimizer's group")
def integers_come_first(run: Run) -> None:
    class HasScale(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.arange(N), requires_grad=False)

        def configure_optimizers(self) -> Any:
            others = [param for param in self.parameters() if param is not self.scale]
            return torch.optim.SGD([self.scale, *others], 0.05, momentum=0.9)

    run.fit(HasScale())


@case("a frozen parameter of integers, as of a quantized layer")
def frozen_integers(run: Run) -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(N * N).view(N, N) % 7 - 3, requires_grad=False)
            self.scale = nn.Parameter(torch.full((N, 1), 0.1, dtype=torch.get_default_dtype()))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.codes * self.scale).T

    class HasIntegers(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.Sequential(Block(), Quantized())

    run.fit(HasIntegers())


@case("a direct loss.backward() in manual optimization")
def direct_backward(run: Run) -> None:
    class Direct(_Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Direct())


@case(
    "a direct loss.backward() with register_post_accumulate_grad_hook",
    refused={**dict.fromkeys(("data", "data_tp"), "training_step calls backward\\(\\) itself, and")},
)
def direct_backward_with_hook(run: Run) -> None:
    class Direct(_Manual):
        def configure_optimizers(self) -> Any:
            self.head.weight.register_post_accumulate_grad_hook(self._halve)
            return super().configure_optimizers()

        @staticmethod
        def _halve(param: Tensor) -> None:
            param.grad = param.grad * 0.5

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    run.fit(Direct())


@case("a step clears each gradient by hand, also that of a parameter without dimensions")
def scalar_cleared_by_hand(run: Run) -> None:
    class Clears(_Manual):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch) * self.scale)
            self.optimizers().step()
            for param in self.parameters():
                param.grad = None

    run.fit(Clears())
