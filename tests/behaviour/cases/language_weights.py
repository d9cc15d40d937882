"""Test callbacks and hooks that read and change weights, gradients, buffers and optimizer states, also of experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

import lightning_dist
from tests.behaviour.case import Run, case
from tests.behaviour.models import tokens
from tests.behaviour.writers import Mixture, Writer

TOLERANCE = 1e-8


def _fit(run: Run, model: Writer, **kwargs: Any) -> Any:
    return run.fit(model, run.loader(tokens()), val=run.loader(tokens(seed=1)), **kwargs)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


@case("a callback resets an expert to a noisy copy of another one, with its states, after a batch", tolerance=TOLERANCE)
def reset_expert(run: Run) -> None:
    class Resets(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                return
            for layer in pl_module.layers:
                for param in layer.mixture.experts.parameters():
                    with torch.no_grad():
                        param[2] = 0.9 * param[0] + 0.01
                    for name, state in trainer.optimizers[0].state[param].items():
                        if name != "step":
                            state[2] = 0

    _fit(run, Writer(adamw), callbacks=[Resets()])


@case(
    "experts have a learning rate of their own, routers no decay, biases another group; a hook lowers one",
    tolerance=TOLERANCE,
)
def groups(run: Run) -> None:
    class Groups(Writer):
        def configure_optimizers(self) -> Any:
            experts = [p for n, p in self.named_parameters() if ".experts." in n]
            routers = [p for n, p in self.named_parameters() if ".router." in n]
            others = [p for n, p in self.named_parameters() if ".experts." not in n and ".router." not in n]
            optimizer = torch.optim.AdamW(
                [
                    {"params": experts, "lr": 0.02},
                    {"params": routers, "weight_decay": 0.0},
                    {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
                    {"params": [p for p in others if p.ndim >= 2], "weight_decay": 0.2},
                ],
                lr=0.01,
                eps=1e-3,
            )
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.optimizers().param_groups[0]["lr"] *= 0.1

    _fit(run, Groups())


@case(
    "routers are balanced by a bias that counts of all ranks move after each batch (without a loss)",
    tolerance=TOLERANCE,
)
def balancing_bias(run: Run) -> None:
    class Balanced(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.zeros(4))
            self.register_buffer("counts", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            scores = self.router(flat).softmax(-1)
            indices = (scores + self.bias).topk(2)[1]
            if self.training:
                self.counts += torch.bincount(indices.flatten(), minlength=4)
            return self.shared(x) + self.experts(flat, indices, scores.gather(1, indices)).view_as(x)

    class Balances(Writer):
        def __init__(self) -> None:
            super().__init__(adamw)
            for layer in self.layers:
                layer.mixture = Balanced()

        def on_train_batch_end(self, *args: Any) -> None:
            for layer in self.layers:
                counts = self.all_gather(layer.mixture.counts).view(-1, 4).sum(0)
                layer.mixture.bias += 0.1 * torch.sign(counts.mean() - counts)
                layer.mixture.counts.zero_()

    _fit(run, Balances())


@case(
    "a callback keeps an average of the weights in a dict, swaps it in for validation, and saves it",
    tolerance=TOLERANCE,
)
def own_average(run: Run) -> None:
    class Averages(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.average = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            for name, param in pl_module.named_parameters():
                self.average[name].lerp_(param.detach(), 0.3)

        def _swap(self, pl_module: Any) -> None:
            for name, param in pl_module.named_parameters():
                kept = param.detach().clone()
                param.data.copy_(self.average[name])
                self.average[name] = kept

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self._swap(pl_module)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self._swap(pl_module)

    callback = Averages()
    _fit(run, Writer(adamw), callbacks=[callback], max_epochs=2, val_check_interval=2)


@case("EMAWeightAveraging with ModelCheckpoint, validated twice an epoch, then tested", tolerance=1e-6)
def ema(run: Run) -> None:
    callbacks = [EMAWeightAveraging(decay=0.5), ModelCheckpoint(run.folder, monitor="val/loss", save_last=True)]
    trainer = _fit(run, Writer(adamw), callbacks=callbacks, val_check_interval=2)
    run.record("test", trainer.test(ckpt_path="best", dataloaders=run.loader(tokens(16, 3)), verbose=False))


@case("norms of moments and of experts' gradients are logged; moments are halved in the middle", tolerance=TOLERANCE)
def moments(run: Run) -> None:
    class Reads(Writer):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [p.grad for n, p in self.named_parameters() if ".experts." in n]
            self.log("experts", torch.stack([grad.norm() for grad in grads]).norm())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            states = [self.optimizers(use_pl_optimizer=False).state[p] for p in self.parameters()]
            self.log("moments", sum(state["exp_avg"].square().sum() for state in states))
            if batch_idx == 1:
                for state in states:
                    state["exp_avg"].mul_(0.5)

    _fit(run, Reads(adamw), gradient_clip_val=0.5)


@case("experts and routers are frozen at first, then experts thaw, then the embedding freezes", tolerance=TOLERANCE)
def thawing(run: Run) -> None:
    class Thaws(Writer):
        def on_train_epoch_start(self) -> None:
            for name, param in self.named_parameters():
                if ".experts." in name or ".router." in name:
                    param.requires_grad_(self.current_epoch > 0 and ".router." not in name)
                if name.startswith("emb"):
                    param.requires_grad_(self.current_epoch < 2)

    _fit(run, Thaws(adamw), max_epochs=3, limit_train_batches=2)


@case(
    "low-rank additions to attention are trained alone, and alone are in the checkpoint, which a new module loads",
    tolerance=TOLERANCE,
)
def adapters(run: Run) -> None:
    class Adapted(nn.Linear):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__(base.in_features, base.out_features)
            self.load_state_dict(base.state_dict())
            self.a = nn.Parameter(torch.randn(base.in_features, 2) * 0.3)
            self.b = nn.Parameter(torch.randn(2, base.out_features) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.a @ self.b

    class Adapts(Writer):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__(adamw)
            self.requires_grad_(False)
            for layer in self.layers:
                layer.attention.qkv = Adapted(layer.attention.qkv)
                layer.attention.qkv.weight.requires_grad_(False)
                layer.attention.qkv.bias.requires_grad_(False)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            for name, param in self.named_parameters():
                if not param.requires_grad:
                    del checkpoint["state_dict"][name]

        def configure_optimizers(self) -> Any:
            return adamw([p for p in self.parameters() if p.requires_grad])

    trainer = _fit(run, Adapts())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.record_checkpoint(run.folder / "a.ckpt", "checkpoint")
    run.fit(Adapts(), run.loader(tokens()), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2, name="resumed")


@case(
    "whole weights inside full_parameters at each epoch's end: their checksum, and a sample that the model writes",
    tolerance=TOLERANCE,
)
def sampled(run: Run) -> None:
    class Samples(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            with lightning_dist.full_parameters(pl_module), torch.no_grad():
                state = copy.deepcopy(pl_module.state_dict())
                ids = torch.zeros(1, 1, dtype=torch.long)
                for _ in range(5):
                    ids = torch.cat([ids, pl_module(ids)[:, -1:].argmax(-1)], 1)
            run.record(f"epoch {trainer.current_epoch}", [{k: v.sum() for k, v in state.items()}, ids])

    _fit(run, Writer(adamw, tied=True), callbacks=[Samples()], max_epochs=2)


@case("weights are clamped, and rows normalised, in on_train_batch_start and on_train_batch_end", tolerance=TOLERANCE)
def constrained(run: Run) -> None:
    class Constrains(Writer):
        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                self.emb.weight.div_(self.emb.weight.norm(dim=1, keepdim=True))
                for layer in self.layers:
                    layer.mixture.experts.up.clamp_(-0.5, 0.5)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.head.weight.data.mul_(0.99)

    _fit(run, Constrains(adamw))
