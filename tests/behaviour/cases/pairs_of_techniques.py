"""Test pairs of techniques on one module with ordinary extras, saved in the middle, resumed, tested and used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

import lightning_dist
from lightning_dist.techniques.compression import LocalSGD, TopK
from tests.behaviour.case import Run, case
from tests.behaviour.models import tokens
from tests.behaviour.writers import Writer

TOLERANCE = 1e-8


class _Extras(Writer):
    """Have a tied head, a temperature of its own, two groups, a schedule, a penalty, a buffer, and frozen positions."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(optimizer, num_layers=3, tied=True)
        self.temperature = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("steps", torch.zeros(()))
        self.positions.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids)) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * self.temperature**2

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        with torch.no_grad():
            self.temperature.clamp_(0.5, 0.79)

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.ndim < 2], "lr": 0.02},
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        ]
        optimizer = self._optimizer(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Decays(Callback):
    """Shrink the head's rows a little after each epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.emb.weight.mul_(0.95)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.01, eps=(1e-3, 1e-3))  # Biases of keys have gradients of rounding alone.


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _train(run: Run, optimizer: Callable[[Any], Any] = adamw, **kwargs: Any) -> None:
    def fit(path: str | None, epochs: int, name: str) -> tuple[Any, _Extras]:
        model = _Extras(optimizer)
        loader = run.loader(tokens())
        callbacks = [_Decays()] if epochs > 1 else [_Decays(), ModelCheckpoint(run.folder, monitor="val/loss")]
        trainer = run.fit(
            model,
            loader,
            val=run.loader(tokens(seed=1)),
            ckpt_path=path,
            max_epochs=epochs,
            callbacks=callbacks,
            name=name,
            **kwargs,
        )
        return trainer, model

    trainer, _ = fit(None, 1, "first")
    trainer, model = fit(trainer.checkpoint_callback.best_model_path, 2, "second")
    run.record("test", trainer.test(model, run.loader(tokens(16, 3)), verbose=False))
    run.record_predictions(trainer.predict(model, run.loader(tokens(16, 4))))
    with lightning_dist.full_parameters(model):
        run.record("weights", {name: value.sum() for name, value in model.state_dict().items()})


_TILED: dict[str, Any] = {"tiled_mlp": 3, "tiled_loss": 3}
_HALF: dict[str, Any] = {"activation_checkpointing": {"budget": 0.5}}
_SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
_COMPILED: dict[str, Any] = {"compile": "aot_eager"}
_FILES: dict[str, Any] = {"offload": "both", "offload_folder": "/tmp"}


def _sync(**kwargs: Any) -> dict[str, Any]:
    return {"sync": LocalSGD(1), **kwargs}


def _all(**kwargs: Any) -> dict[str, Any]:
    return {"compression": TopK(1.0, min_numel=1), **kwargs}


_PAIRS: dict[str, tuple[str, dict[str, dict[str, Any]], Any, dict[str, Any]]] = {
    "first": (
        "zero 1 and files; tiles and hybrid; offload and tp; tiles and pp; experts and nd; offload and data",
        {
            "full": {"zero_stage": 1, **_FILES},
            "hybrid": {**_TILED, "ep_size": 2},
            "tp": {"offload": "optimizer", **_HALF},
            "pp": {**_TILED, **_SELECTIVE},
            "nd": {"ep_size": 2, "offload": "optimizer"},
            "data": {"offload": "optimizer", **_TILED},
        },
        adamw,
        {},
    ),
    "second": (
        "zero 2 and experts; files and hybrid; compiled tp; compiled pp; files and nd; checkpointing and compiled data",
        {
            "full": {"zero_stage": 2, "ep_size": 2, **_TILED, **_HALF},
            "hybrid": {**_FILES, **_HALF},
            "tp": {**_COMPILED, "sequence_parallel": False},
            "pp": {**_COMPILED, **_HALF},
            "nd": {**_FILES, **_TILED},
            "data": {**_COMPILED, **_HALF},
        },
        adamw,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
    ),
    "in_backward": (
        "steps in the backward with zero 1, experts and tiles; with replicas and files",
        {
            "full": {"step_in_backward": True, "zero_stage": 1, "ep_size": 2, **_TILED},
            "hybrid": {"step_in_backward": True, **_FILES, **_SELECTIVE},
        },
        adamw,
        {},
    ),
    "fewer_messages": (
        "local updates with offloaded states and tiles; compression with checkpointing, in pipelines and on shards",
        {
            "data": _sync(offload="optimizer", **_TILED),
            "hybrid": _sync(**_HALF, **_COMPILED),
            "data_tp": _sync(**_HALF),
        },
        sgd,
        {},
    ),
    "compressed": (
        "compression with tiles, with compiled layers and checkpointing, and of split layers, with accumulation",
        {
            "data": _all(**_TILED, **_COMPILED),
            "hybrid": _all(**_SELECTIVE, **_FILES),
            "data_tp": _all(offload="optimizer"),
        },
        sgd,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
    ),
    "whole": (
        "an optimizer on whole parameters with zero 1, replicas, split layers and stages",
        {
            "full": {"zero_stage": 1, "ep_size": 2, "optimizer_step": "whole"},
            "hybrid": {"optimizer_step": "whole", **_TILED},
            "tp": {"optimizer_step": "whole", **_HALF},
            "pp": {"optimizer_step": "whole"},
            "nd": {"optimizer_step": "whole", "ep_size": 2},
        },
        adafactor,
        {"gradient_clip_val": 0.2},
    ),
}

for _name, (_title, _options, _optimizer, _kwargs) in _PAIRS.items():

    @case(_title, name=_name, tolerance=TOLERANCE, strategy=_options, columns=tuple(_options))
    def _(run: Run, optimizer: Any = _optimizer, kwargs: dict[str, Any] = _kwargs) -> None:
        _train(run, optimizer, **kwargs)
