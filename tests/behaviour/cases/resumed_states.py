"""Test resumed runs whose hooks have touched the optimizers' states, and schedules of learning rates and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from tests.behaviour.case import ROUNDED, Run, case
from tests.behaviour.models import Classifier


def _look_up(model: Classifier) -> None:
    optimizer = model.optimizers(use_pl_optimizer=False)
    for param in model.parameters():
        optimizer.state[param]


def _zeros(model: Classifier, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = model.optimizers(use_pl_optimizer=False)
    for param in model.parameters():
        optimizer.state[param].setdefault("momentum_buffer", make(param))


def _nothing(model: Classifier) -> None:
    pass


_Touch = Callable[[Classifier], None]

_TOUCHES: dict[str, tuple[str, str, _Touch, _Touch]] = {
    "looked_up": ("on_train_start looks up all states of SGD", "sgd", _look_up, _nothing),
    "looked_up_adamw": ("on_train_start looks up all states of AdamW", "adamw", _look_up, _nothing),
    "looked_up_often": ("states of AdamW are looked up after each batch", "adamw", _nothing, _look_up),
    "own_momentum": (
        "on_train_start puts zeros like the weights into the states",
        "sgd",
        lambda model: _zeros(model, torch.zeros_like),
        _nothing,
    ),
    "whole_momentum": (
        "on_train_start puts plain tensors of zeros into the states",
        "sgd",
        lambda model: _zeros(model, lambda param: torch.zeros(param.shape, dtype=param.dtype)),
        _nothing,
    ),
}

for _name, (_title, _optimizer, _start, _batch) in _TOUCHES.items():

    @case(
        f"{_title}; saved, resumed, saved and resumed again",
        name=_name,
        tolerance=1e-7,
        differs={"compressed": ROUNDED} if _optimizer == "adamw" else {},
    )
    def _(run: Run, optimizer: str = _optimizer, start: _Touch = _start, batch: _Touch = _batch) -> None:
        class Touches(Classifier):
            def on_train_start(self) -> None:
                start(self)

            def on_train_batch_end(self, *args: Any) -> None:
                batch(self)

        for index, steps in enumerate((3, 5, 8)):
            before = None if index == 0 else str(run.folder / f"{index - 1}.ckpt")
            torch.manual_seed(index)
            model = Touches(0.02, optimizer=optimizer)
            trainer = run.fit(model, ckpt_path=before, max_steps=steps, name=f"until {steps}")
            trainer.save_checkpoint(run.folder / f"{index}.ckpt")
            run.record_checkpoint(run.folder / f"{index}.ckpt", f"checkpoint {index}")


def _cosine(optimizer: Any) -> Any:
    return {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 12), "interval": "step"}


def _one_cycle(optimizer: Any) -> Any:
    return {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.05, 16), "interval": "step"}


def _plateau(optimizer: Any) -> Any:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.3, patience=0)
    return {"scheduler": scheduler, "monitor": "train/loss", "interval": "step"}


def _warmup(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    then = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    return {"scheduler": lr_scheduler.SequentialLR(optimizer, [first, then], [4]), "interval": "step"}


def _epochs(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.3)


_SCHEDULES: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "cosine": ("a cosine schedule", _cosine),
    "one_cycle": ("OneCycleLR, which changes betas as well", _one_cycle),
    "plateau": ("ReduceLROnPlateau by the training loss", _plateau),
    "warmup": ("SequentialLR of a warm-up and of a factor for each group", _warmup),
    "epochs": ("StepLR by epochs", _epochs),
    "by_hand": ("a hook that sets learning rates and weight decay in the groups", None),
}


class _Scheduled(Classifier):
    """Train two groups of parameters by AdamW with a schedule, or with values that a hook sets."""

    schedule: Callable[[Any], Any] | None

    @classmethod
    def make(cls, schedule: Callable[[Any], Any] | None) -> _Scheduled:
        model = cls()
        model.schedule = schedule
        return model

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            if self.schedule is None:
                group["lr"], group["weight_decay"] = 0.01 / (1 + self.global_step), 0.1 * self.global_step
            self.log(f"lr of {len(group['params'])}", group["lr"])

    def configure_optimizers(self) -> Any:
        norms = [p for p in self.parameters() if p.ndim == 1]
        others = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


for _in_backward in (False, True):
    for _name, (_title, _schedule) in _SCHEDULES.items():
        if _in_backward and _name not in ("one_cycle", "by_hand"):
            continue

        @case(
            f"{_title}, resumed within an epoch{', with step_in_backward where layers are sharded' * _in_backward}",
            name=f"{_name}_in_backward" if _in_backward else _name,
            tolerance=1e-7,
            strategy={column: {"step_in_backward": True} for column in ("full", "hybrid")} if _in_backward else {},
        )
        def _(run: Run, schedule: Callable[[Any], Any] | None = _schedule) -> None:
            trainer = run.fit(_Scheduled.make(schedule), max_steps=3, name="first")
            trainer.save_checkpoint(run.folder / "a.ckpt")
            run.fit(_Scheduled.make(schedule), max_steps=9, ckpt_path=str(run.folder / "a.ckpt"), name="resumed")


@case("averages that hooks keep in the optimizer's states are saved, and go on after a resume", tolerance=1e-7)
def own_entries(run: Run) -> None:
    class Averages(Classifier):
        def on_train_start(self) -> None:
            self.states = self.optimizers(use_pl_optimizer=False).state
            for param in self.parameters():
                self.states[param].setdefault("average", param.detach().clone())

        @torch.no_grad()
        def on_train_batch_end(self, *args: Any) -> None:
            for param in self.parameters():
                average = self.states[param]["average"]
                average.lerp_(param, 0.1)
                param.lerp_(average, 0.01)

    trainer = run.fit(Averages(), max_steps=3, name="first")
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.fit(Averages(), max_steps=6, ckpt_path=str(run.folder / "a.ckpt"), name="resumed")
