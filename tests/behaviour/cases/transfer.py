"""Test weights that are transferred from one training to another: backbones, adapters, soups, averages."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Classifier

N, C = NUM_FEATURES, NUM_CLASSES


@case("a backbone from the best checkpoint of a first fit, by load_from_checkpoint, under a new head")
def backbone(run: Run) -> None:
    class Finetunes(pl.LightningModule):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.backbone = Classifier.load_from_checkpoint(path, weights_only=False)
            self.backbone.freeze()
            torch.manual_seed(2)
            self.probe = nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Linear(N, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                features = self.backbone.net(batch[0])
            loss = functional.cross_entropy(self.probe(features), batch[1] % 2)
            self.log("probe/loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)

    checkpoint = ModelCheckpoint(run.folder / "first", "{epoch}", "val/loss")
    run.fit(Classifier(), val=True, callbacks=[checkpoint], max_epochs=2, name="first")
    run.fit(Finetunes(checkpoint.best_model_path), name="second")


@case("load_from_checkpoint with another number of classes: on_load_checkpoint leaves out what does not fit")
def changed_head(run: Run) -> None:
    class Changes(Classifier):
        def __init__(self, num_classes: int = C, lr: float = 0.05, num_blocks: int = 4, optimizer: str = "sgd") -> None:
            super().__init__(lr, num_blocks, optimizer)
            self.save_hyperparameters()
            self.head = nn.Linear(N, num_classes)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            own, state = self.state_dict(), checkpoint["state_dict"]
            for name in list(state):
                if name in own and own[name].shape != state[name].shape:
                    del state[name]

    trainer = run.fit(Changes(), name="first")
    trainer.save_checkpoint(run.folder / "first.ckpt")
    model = Changes.load_from_checkpoint(
        run.folder / "first.ckpt", strict=False, weights_only=False, num_classes=6, lr=0.01, optimizer="adamw"
    )
    run.record("hyperparameters", dict(model.hparams))
    run.fit(model, name="second")


@case("learning rates that decay by layer, OneCycleLR with a rate for each, LearningRateMonitor of everything")
def layerwise_decay(run: Run) -> None:
    class Layerwise(Classifier):
        def configure_optimizers(self) -> Any:
            layers = [*self.net, self.head]
            groups = []
            for i, layer in enumerate(layers):
                lr = 0.05 * 0.7 ** (len(layers) - 1 - i)
                weights = [p for p in layer.parameters() if p.ndim > 1]
                others = [p for p in layer.parameters() if p.ndim <= 1]
                if weights:
                    groups.append({"params": weights, "lr": lr, "weight_decay": 0.05, "name": f"layer{i}"})
                if others:
                    groups.append({"params": others, "lr": lr, "weight_decay": 0.0, "name": f"layer{i}-no-decay"})
            optimizer = torch.optim.AdamW(groups)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                max_lr=[group["lr"] for group in groups],
                total_steps=self.trainer.estimated_stepping_batches,
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "one cycle"}]

    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    run.fit(Layerwise(), callbacks=[monitor], max_epochs=2)
    run.record("rates", dict(sorted(monitor.lrs.items())))


class _Lora(nn.Module):
    """Add a trained low-rank layer to a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        return h if self.merged else h + functional.linear(functional.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight.data += self.lora_b @ self.lora_a
        self.merged = True


def _inject(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _Lora(child))
        else:
            _inject(child)


class _WithLora(Classifier):
    def __init__(self, lr: float = 0.05, num_blocks: int = 4, optimizer: str = "adamw") -> None:
        super().__init__(lr, num_blocks, optimizer)
        self.requires_grad_(False)
        _inject(self.net)
        self.head.requires_grad_(True)

    def layers(self) -> list[_Lora]:
        return [m for m in self.modules() if isinstance(m, _Lora)]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@case("LoRA layers put in by hand; a checkpoint of the trained weights alone; merged before predictions")
def lora_checkpoint(run: Run) -> None:
    class Slim(_WithLora):
        strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}

        def on_predict_start(self) -> None:
            for layer in self.layers():
                layer.merge()

    checkpoint = ModelCheckpoint(run.folder, save_last=True)
    run.fit(Slim(), callbacks=[checkpoint])
    model = Slim().double()
    trainer = run.trainer()
    run.record("validated", trainer.validate(model, run.loader(), checkpoint.last_model_path, weights_only=False))
    run.record_predictions(trainer.predict(model, run.loader()))


@case("ReLoRA: additions are merged at the epoch's end, begin anew, and the optimizer forgets them")
def relora(run: Run) -> None:
    class Restarts(_WithLora):
        def on_train_epoch_end(self) -> None:
            (optimizer,) = self.trainer.optimizers
            with torch.no_grad():
                for layer in self.layers():
                    layer.base.weight += layer.lora_b @ layer.lora_a
                    layer.lora_b.zero_()
                    for p in (layer.lora_a, layer.lora_b):
                        optimizer.state[p]["exp_avg"].zero_()
                        optimizer.state[p]["exp_avg_sq"].zero_()

    run.fit(Restarts(), val=True, max_epochs=3)


@case("a soup: the mean of the three best checkpoints' state_dicts is loaded and validated")
def soup(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.folder / "all", "{epoch}", "val/loss", save_top_k=3)
    run.fit(Classifier(), val=True, callbacks=[checkpoint], max_epochs=4)
    states = [torch.load(path, weights_only=False)["state_dict"] for path in sorted(checkpoint.best_k_models)]
    model = Classifier().double()
    model.load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    run.record("soup", run.trainer().validate(model, run.loader()))


@case("torch's AveragedModel as a submodule, updated in on_train_batch_end and used in validation")
def averaged_model(run: Run) -> None:
    class Averages(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.averaged = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
            self.averaged.requires_grad_(False)

        def on_train_batch_end(self, *args: Any) -> None:
            self.averaged.update_parameters(self.net)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self.head(self.averaged(batch[0]))
            self.log("val/loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], lr=1e-2)

    run.fit(Averages(), val=True, max_epochs=2)
