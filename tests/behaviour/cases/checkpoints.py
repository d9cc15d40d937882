"""Test ModelCheckpoint with all kinds of options, checkpoints that are saved by hand, and loading of both."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_dist import full_parameters
from lightning_dist.mesh.consensus import timed_barrier
from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier, LanguageModel, tokens

# Each name maps to (title, arguments of ModelCheckpoint, arguments of the Trainer).
_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "every_2_steps": ("every_n_train_steps, all kept", {"every_n_train_steps": 2, "save_top_k": -1}, {}),
    "every_2_epochs": ("every_n_epochs", {"every_n_epochs": 2, "save_top_k": -1}, {"max_epochs": 4}),
    "every_interval": (
        "train_time_interval",
        {"train_time_interval": timedelta(0), "save_top_k": -1},
        {"limit_train_batches": 2},
    ),
    "last_only": ("save_last alone", {"save_top_k": 0, "save_last": True}, {"max_epochs": 2}),
    "best_and_link": (
        "save_last='link' with a monitored metric",
        {"save_last": "link", "monitor": "val/loss", "save_top_k": 2},
        {"max_epochs": 3},
    ),
    "weights_only": ("save_weights_only", {"save_weights_only": True}, {}),
    "best_accuracy": (
        "monitor of an accuracy, mode='max'",
        {"monitor": "val/accuracy", "mode": "max"},
        {"max_epochs": 4},
    ),
    "worst_loss": ("mode='max' of a loss that falls", {"monitor": "val/loss", "mode": "max"}, {"max_epochs": 3}),
    "metric_in_name": (
        "the metric in the file's name",
        {"monitor": "val/accuracy", "filename": "{epoch}-{val/accuracy:.2f}", "auto_insert_metric_name": False},
        {"max_epochs": 2},
    ),
    "best_of_training": (
        "monitor of a training metric, at the end of the training epoch",
        {"monitor": "train/loss", "save_on_train_epoch_end": True},
        {"max_epochs": 3},
    ),
    "no_checkpoints": ("save_top_k=0", {"save_top_k": 0}, {}),
    "validation_inside": (
        "validation inside the epoch, the best 2 kept",
        {"monitor": "val/loss", "save_top_k": 2, "filename": "{step}"},
        {"val_check_interval": 1, "limit_train_batches": 5},
    ),
    "best_of_steps": (
        "a monitored metric of each step",
        {"monitor": "train/loss", "every_n_train_steps": 1, "save_top_k": 2, "filename": "{step}"},
        {"limit_train_batches": 6},
    ),
    "three_best": (
        "the best 3 of 5",
        {"monitor": "val/loss", "save_top_k": 3, "filename": "{epoch}", "save_last": True},
        {"max_epochs": 5},
    ),
}

for _name, (_title, _options, _trainer_options) in _VARIANTS.items():

    @case(f"ModelCheckpoint: {_title}", name=f"checkpoint_{_name}")
    def _(run: Run, options: dict[str, Any] = _options, trainer_options: dict[str, Any] = _trainer_options) -> None:
        callback = ModelCheckpoint(run.folder / "new" / "folder", **options)
        run.fit(Classifier(), val=True, callbacks=[callback], **trainer_options)


@case("ModelCheckpoint: without arguments, in the logger's folder")
def checkpoint_default(run: Run) -> None:
    callback = ModelCheckpoint()
    run.fit(Classifier(), callbacks=[callback], max_epochs=2)
    run.record("folder", run.relative(callback.dirpath))


@case("two ModelCheckpoints of different metrics")
def two_checkpoints(run: Run) -> None:
    callbacks = [
        ModelCheckpoint(run.folder / "a", "{epoch}", monitor="val/loss"),
        ModelCheckpoint(run.folder / "b", "{epoch}", monitor="val/accuracy", mode="max", save_top_k=2),
    ]
    run.fit(Classifier(), val=True, callbacks=callbacks, max_epochs=3)


class _Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3:
            raise ValueError("The fourth step fails.")
        return super().training_step(batch, batch_idx)


@case("ModelCheckpoint: save_on_exception")
def save_on_exception(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, save_on_exception=True, save_top_k=-1)
    run.record_error("error", lambda: run.fit(_Fails(), callbacks=[callback]))
    run.record("saved", sorted(run.relative(path) for path in run.folder.glob("*.ckpt")))


@case("OnExceptionCheckpoint saves what a failed step leaves, and it resumes")
def exception_checkpoint(run: Run) -> None:
    run.record_error("error", lambda: run.fit(_Fails(), callbacks=[OnExceptionCheckpoint(run.folder)]))
    run.record_checkpoint(run.folder / "on_exception.ckpt", "content")
    run.fit(Classifier(), ckpt_path=str(run.folder / "on_exception.ckpt"), max_epochs=2)


@case("trainer.save_checkpoint after the fit, and load_from_checkpoint")
def save_by_hand(run: Run) -> None:
    trainer = run.fit(Classifier())
    path = run.folder / "by_hand.ckpt"
    trainer.save_checkpoint(path)
    run.record_checkpoint(path, "content")
    loaded = Classifier.load_from_checkpoint(path, lr=0.5)
    run.record("loaded", loaded.state_dict())
    run.record("lr", loaded.hparams.lr)


@case("trainer.save_checkpoint(weights_only=True)")
def save_weights_by_hand(run: Run) -> None:
    trainer = run.fit(Classifier())
    trainer.save_checkpoint(run.folder / "weights.ckpt", weights_only=True)
    run.record_checkpoint(run.folder / "weights.ckpt", "content")


@case("trainer.save_checkpoint in a hook, every 2 steps")
def save_in_hook(run: Run) -> None:
    class Saves(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2:
                self.trainer.save_checkpoint(run.folder / f"{batch_idx}.ckpt")

    run.fit(Saves())
    for index in (1, 3):
        run.record_checkpoint(run.folder / f"{index}.ckpt", f"content of {index}")


@case("load_state_dict between two fits")
def load_state_dict_between(run: Run) -> None:
    model = Classifier()
    before = copy.deepcopy(model.state_dict())
    run.fit(model, observe=False)
    model.load_state_dict(before)
    run.fit(model)


@case("load_state_dict in setup: pretrained weights of a part")
def load_in_setup(run: Run) -> None:
    class Pretrained(Classifier):
        def setup(self, stage: str) -> None:
            state = {name: value + 0.01 for name, value in self.net.state_dict().items()}
            self.net.load_state_dict(state)

    run.fit(Pretrained())


@case("on_save_checkpoint and on_load_checkpoint of the module and of a callback")
def checkpoint_hooks(run: Run) -> None:
    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["of callback"] = self.batches * 10

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            run.record("callback's own", checkpoint["of callback"])

    class Extra(Classifier):
        extra = 0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = self.trainer.global_step

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = checkpoint["extra"]

    run.fit(Extra(), callbacks=[Counts(), ModelCheckpoint(run.folder, "a")], name="first")
    model, counts = Extra(), Counts()
    run.fit(model, callbacks=[counts], max_epochs=2, ckpt_path=str(run.folder / "a.ckpt"))
    run.record("after", [model.extra, counts.batches])


@case("on_save_checkpoint removes weights from the checkpoint, which is loaded with strict_loading=False")
def checkpoint_without_head(run: Run) -> None:
    class Headless(Classifier):
        strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("head")}

    run.fit(Headless(), callbacks=[ModelCheckpoint(run.folder, "a")], name="first")
    run.record_checkpoint(run.folder / "a.ckpt", "content")
    run.fit(Headless(), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)


@case("a checkpoint of a tied language model is loaded again")
def checkpoint_of_tied(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, "a")
    run.fit(LanguageModel(), run.loader(tokens()), callbacks=[callback], name="first")
    run.fit(LanguageModel(), run.loader(tokens()), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)
    run.record("loaded", LanguageModel.load_from_checkpoint(run.folder / "a.ckpt").state_dict())


@case("hyperparameters in the checkpoint rebuild the module")
def hyperparameters(run: Run) -> None:
    trainer = run.fit(Classifier(lr=0.01, num_blocks=6, optimizer="adamw"))
    trainer.save_checkpoint(run.folder / "a.ckpt")
    loaded = Classifier.load_from_checkpoint(run.folder / "a.ckpt")
    run.record("hyperparameters", dict(loaded.hparams))
    run.record("weights", loaded.state_dict())


@case("save_hyperparameters that leaves a network out")
def hyperparameters_ignored(run: Run) -> None:
    class Around(Classifier):
        def __init__(self, inner: nn.Module, lr: float = 0.05, optimizer: str = "sgd") -> None:
            super().__init__(lr, optimizer=optimizer)
            self.save_hyperparameters(ignore=["inner"])
            self.net = inner

    trainer = run.fit(Around(Classifier(num_blocks=3).net))
    trainer.save_checkpoint(run.folder / "a.ckpt")
    loaded = Around.load_from_checkpoint(run.folder / "a.ckpt", inner=Classifier(num_blocks=3).net)
    run.record("weights", loaded.state_dict())


# These are errors of the other ranks after rank 0 has ended.
_OTHERS_END = r"closed by peer|reset by peer|did not arrive|DistNetworkError|Broken pipe"


@case(
    "trainer.save_checkpoint on rank 0 alone",
    refused={"*": f"trainer.save_checkpoint: rank .* has gone on without it|{_OTHERS_END}"},
)
def save_on_rank_0(run: Run) -> None:
    class Saves(Classifier):
        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                self.trainer.save_checkpoint(run.folder / "a.ckpt")

    run.fit(Saves(), observe=False)
    if not run.is_reference:
        timed_barrier("what comes after the fit", 5.0)


@case("save_weights_only, and a fit that begins with these weights")
def begin_with_weights(run: Run) -> None:
    run.fit(Classifier(), callbacks=[ModelCheckpoint(run.folder, "a", save_weights_only=True)], name="first")
    model = Classifier.load_from_checkpoint(run.folder / "a.ckpt")
    run.fit(model, name="second")


@case("save_pretrained of a Hugging Face model inside full_parameters, and from_pretrained", tolerance=1e-8)
def save_pretrained(run: Run) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LanguageModel):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)
            torch.manual_seed(1)
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            self.net = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.net(input_ids=ids).logits

    model = Llama()
    trainer = run.fit(model, run.loader(tokens()))
    with full_parameters(model):
        model.net.save_pretrained(run.folder / "saved")  # It writes on rank 0 only.
    trainer.strategy.barrier()
    run.record("loaded", LlamaForCausalLM.from_pretrained(run.folder / "saved").state_dict())
