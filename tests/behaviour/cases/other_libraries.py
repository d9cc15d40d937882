"""Test what other libraries add to a module or a Trainer: callbacks, configurations and averages."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytorch_lightning
import torch
from torch import Tensor, nn

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier


@case("callbacks that derive from pytorch_lightning.Callback, as those of mlflow.pytorch.autolog()")
def callback_of_the_other_package(run: Run) -> None:
    class Counts(pytorch_lightning.Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen.append(type(pl_module).__name__)

        @torch.no_grad()
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.seen.append("batch")
            pl_module.head.weight.clamp_(-0.2, 0.2)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("norm", pl_module.head.weight.norm())

    callback = Counts()
    run.fit(Classifier(), callbacks=[callback], val=True)
    run.record("seen", callback.seen)


class _Frozen(OrderedDict[str, Any]):
    """Refuse changes, as ``diffusers.configuration_utils.FrozenDict`` does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"You cannot change a {type(self).__name__} instance.")

    __delitem__ = setdefault = pop = update = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_Frozen__frozen"):
            self._refuse()
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "_Frozen__frozen"):
            self._refuse()
        super().__setitem__(name, value)


class _Configured(nn.Module):
    """Classify by blocks, with a configuration that cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.config = _Frozen(scale=0.5, sizes=(1, 2), inner={"steps": [1, 2]})
        self._internal_dict = _Frozen(config=self.config)
        self.inp = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) * self.config["scale"]
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _ConfiguredClassifier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Configured()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@case("a model whose configuration is a dict that refuses changes, as those of diffusers")
def frozen_configuration(run: Run) -> None:
    run.fit(_ConfiguredClassifier(), val=True)


class _Average:
    """Average parameters outside of modules, as ``diffusers.training_utils.EMAModel`` does."""

    def __init__(self, params: Any) -> None:
        self.shadow = [p.clone().detach() for p in params]
        self.stored: list[Tensor] = []

    @torch.no_grad()
    def step(self, params: Any) -> None:
        for shadow, param in zip(self.shadow, list(params), strict=True):
            if param.requires_grad:
                shadow.sub_(0.1 * (shadow - param))
            else:
                shadow.copy_(param)

    def store(self, params: Any) -> None:
        self.stored = [p.detach().cpu().clone() for p in params]

    def copy_to(self, params: Any) -> None:
        for shadow, param in zip(self.shadow, list(params), strict=True):
            param.data.copy_(shadow.to(param.device).data)

    def restore(self, params: Any) -> None:
        for stored, param in zip(self.stored, params, strict=True):
            param.data.copy_(stored.data)
        self.stored = []


@case("an average of the parameters, stepped in on_before_zero_grad, is swapped in for validation")
def average_of_diffusers(run: Run) -> None:
    class Averages(_ConfiguredClassifier):
        def on_fit_start(self) -> None:
            object.__setattr__(self, "average", _Average(self.net.parameters()))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.average.step(self.net.parameters())

        def on_validation_start(self) -> None:
            self.average.store(self.net.parameters())
            self.average.copy_to(self.net.parameters())

        def on_validation_end(self) -> None:
            self.average.restore(self.net.parameters())

    run.fit(Averages(), val=True, val_check_interval=2)
