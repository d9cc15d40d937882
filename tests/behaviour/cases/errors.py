"""Test that every rank ends with the user's own error after exceptions in hooks and in wrong modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier

_HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "teardown",
]


def _raises_in(hook: str) -> Classifier:
    """Make a module whose ``hook`` raises from its fifth call on, or in the first call if it is called once per fit."""
    calls = 0
    once = hook in ("setup", "on_fit_start", "on_train_start", "on_train_end", "teardown") or "configure" in hook

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if once or calls >= 5:
            raise KeyError(f"in {hook}")
        return getattr(super(kind, self), hook)(*args, **kwargs)

    kind = type("Raises", (Classifier,), {hook: raising})
    return kind()


for _hook in _HOOKS:

    @case(f"an exception in {_hook} of the module", name=f"raises_in_{_hook}", timeout_s=60.0)
    def _(run: Run, hook: str = _hook) -> None:
        options = {"callbacks": [ModelCheckpoint(run.folder, every_n_train_steps=1, save_top_k=-1)]}
        run.record_error("error", lambda: run.fit(_raises_in(hook), val=True, max_epochs=6, observe=False, **options))


for _hook in ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"):

    @case(
        f"an exception in {_hook} of a callback, and on_exception is called",
        name=f"callback_raises_in_{_hook}",
        timeout_s=60.0,
    )
    def _(run: Run, hook: str = _hook) -> None:
        def raising(self: Any, trainer: Any, *args: Any) -> None:
            if trainer.global_step > 2:
                raise KeyError(f"in {hook}")

        def on_exception(self: Any, trainer: Any, module: Any, exception: BaseException) -> None:
            run.record("told", str(exception))

        callback = type("Raises", (pl.Callback,), {hook: raising, "on_exception": on_exception})()
        run.record_error(
            "error", lambda: run.fit(Classifier(), val=True, callbacks=[callback], max_epochs=2, observe=False)
        )


@case("an exception that the loader raises", timeout_s=60.0)
def loader_raises(run: Run) -> None:
    class Breaks:
        def __iter__(self) -> Iterator[Any]:
            for index, batch in enumerate(run.loader()):
                if index == 2:
                    raise OSError("The file is gone.")
                yield batch

    run.record_error("error", lambda: run.fit(Classifier(), Breaks(), observe=False))


@case("an exception in a block's forward", timeout_s=60.0)
def block_raises(run: Run) -> None:
    class Breaks(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].register_forward_pre_hook(self.check)

        def check(self, module: nn.Module, args: Any) -> None:
            if self._trainer is not None and self.trainer.global_step == 2:
                raise ArithmeticError("The block does not like it.")

    run.record_error("error", lambda: run.fit(Breaks(), observe=False))


@case("an exception in the backward, by a hook on an activation", timeout_s=60.0)
def backward_raises(run: Run) -> None:
    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch_idx == 2 and loss.requires_grad:
                loss.register_hook(self.fail)
            return loss

        def fail(self, gradient: Tensor) -> None:
            raise ArithmeticError("The backward fails.")

    run.record_error("error", lambda: run.fit(Breaks(), observe=False))


@case("an exception that the user catches around the fit, and a second fit of the module", timeout_s=60.0)
def caught_exception(run: Run) -> None:
    model = _raises_in("training_step")
    run.record_error("error", lambda: run.fit(model, max_epochs=3, observe=False))
    fresh = Classifier()
    run.fit(fresh, name="second")


@case("an exception on one rank alone ends every rank", timeout_s=60.0)
def one_rank_raises(run: Run) -> None:
    class Breaks(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.trainer.is_global_zero:
                raise KeyError("rank 0 fails")

    ended = False
    try:
        run.fit(Breaks(), observe=False)
    except Exception:
        ended = True
    run.record("ended", ended)


for _hook in ("test_step", "predict_step", "on_test_epoch_end"):

    @case(f"an exception in {_hook}", name=f"evaluation_raises_in_{_hook}", timeout_s=60.0)
    def _(run: Run, hook: str = _hook) -> None:
        def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise KeyError(f"in {hook}")

        model = type("Raises", (Classifier,), {hook: raising})()
        function = "predict" if "predict" in hook else "test"
        run.record_error("error", lambda: getattr(run.trainer(), function)(model, run.loader()))


def _without(name: str) -> type:
    """Make a class of modules that do not override the method ``name`` of LightningModule."""

    class Without(Classifier):
        pass

    setattr(Without, name, getattr(pl.LightningModule, name))
    return Without


for _name in ("training_step", "configure_optimizers"):

    @case(f"a module without {_name} is Lightning's own error", name=f"without_{_name}", timeout_s=60.0)
    def _(run: Run, name: str = _name) -> None:
        run.record_error("error", lambda: run.fit(_without(name)(), observe=False))


@case("validation_step without a loader, and a loader without validation_step")
def lonely_validation(run: Run) -> None:
    run.fit(Classifier(), name="no loader")
    run.fit(_without("validation_step")(), val=True, name="no step")


@case("a training_step that returns a loss without a gradient is torch's own error", timeout_s=60.0)
def no_gradient(run: Run) -> None:
    class Detached(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch).detach()

    error = None
    try:
        run.fit(Detached(), observe=False)
    except Exception as raised:
        error = type(raised).__name__ if str(raised) else "an error without a word"
    run.record("raised", error is not None)


@case("a training_step that returns something that is no loss is Lightning's own error", timeout_s=60.0)
def no_loss(run: Run) -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss(batch)
            return {"result": torch.zeros(1)}

    run.record_error("error", lambda: run.fit(Wrong(), observe=False))
