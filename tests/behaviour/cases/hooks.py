"""Test hooks of the LightningModule, of callbacks and of the DataModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from tests.behaviour.case import OWN_GRADIENTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples

_HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_train_end",
    "on_fit_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_end",
    "on_predict_end",
    "teardown",
]
_OF_MODULE = [
    "configure_callbacks",
    "configure_model",
    "configure_optimizers",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_test_model_eval",
    "on_test_model_train",
    "on_predict_model_eval",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "training_step",
    "validation_step",
]


def _spy(base: type, names: list[str], calls: list[str]) -> type:
    """Make a subclass of ``base`` that appends the name of each called hook to ``calls``."""

    def noting(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(spied, self), name)(*args, **kwargs)

        return hook

    spied = type(f"Spied{base.__name__}", (base,), {name: noting(name) for name in names if hasattr(base, name)})
    return spied


class _Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _without_repeats(calls: list[str]) -> list[str]:
    """Replace consecutive equal names by one, because a step calls some hooks once for each microbatch."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


@case("every hook of the LightningModule, in Lightning's order")
def hooks_of_module(run: Run) -> None:
    calls: list[str] = []
    model = _spy(_Scheduled, _HOOKS + _OF_MODULE, calls)()
    trainer = run.fit(
        model, val=True, num_sanity_val_steps=1, gradient_clip_val=1.0, callbacks=[ModelCheckpoint(run.folder)]
    )
    trainer.test(model, run.loader(), verbose=False)
    trainer.predict(model, run.loader())
    begin = calls.index("on_fit_start")  # Before it, a pipeline traces the step once, on an example batch.
    run.record("hooks", _without_repeats(calls[begin:]))


@case("every hook of a callback, in Lightning's order")
def hooks_of_callback(run: Run) -> None:
    calls: list[str] = []
    model = _Scheduled()
    callbacks = [_spy(pl.Callback, _HOOKS, calls)(), ModelCheckpoint(run.folder)]
    trainer = run.fit(model, val=True, num_sanity_val_steps=1, callbacks=callbacks)
    trainer.test(model, run.loader(), verbose=False)
    trainer.predict(model, run.loader())
    run.record("hooks", calls)


class _Data(pl.LightningDataModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def train_dataloader(self) -> Any:
        return self._run.loader()

    def val_dataloader(self) -> Any:
        return self._run.loader(samples(seed=1))

    def test_dataloader(self) -> Any:
        return self._run.loader(samples(seed=2))

    def predict_dataloader(self) -> Any:
        return self._run.loader(samples(seed=3))


@case("every hook of the DataModule, in Lightning's order")
def hooks_of_datamodule(run: Run) -> None:
    calls: list[str] = []
    names = [name for name in dir(_Data) if name.endswith("_dataloader")]
    names += ["prepare_data", "setup", "teardown", "on_before_batch_transfer", "on_after_batch_transfer"]
    data = _spy(_Data, [name for name in names if name != "prepare_data"], calls)(run)
    model, trainer = Classifier(), run.trainer(limit_predict_batches=1)
    trainer.fit(model, data)
    run.observe(trainer, model)
    run.record("validated", trainer.validate(model, data, verbose=False))
    run.record("tested", trainer.test(model, data, verbose=False))
    trainer.predict(model, data)
    # Strategies that trace the step on an example batch before the run also call the hooks for batches with it.
    transfers = ["on_before_batch_transfer", "on_after_batch_transfer"]
    run.record("hooks", _without_repeats([call for call in calls if call not in transfers]))
    run.record("are transfers in pairs", len({calls.count(name) for name in transfers}) == 1)


def _transfer_case(name: str, title: str) -> None:
    @case(title, name=name)
    def _(run: Run) -> None:
        class Scales(Classifier):
            def change(self, batch: Any) -> Any:
                x, y = batch
                return (x * 2 + 1, (y + 1) % NUM_CLASSES)

            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
                return self.change(batch) if name == "transfer_batch" else batch

            def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                return self.change(batch) if name == "before_transfer" else batch

            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                if name == "after_transfer" and self.trainer.training:
                    return self.change(batch)
                return batch

        run.fit(Scales(), val=True)


_transfer_case("before_transfer", "on_before_batch_transfer changes the batch")
_transfer_case("transfer_batch", "transfer_batch_to_device changes the batch")
_transfer_case("after_transfer", "on_after_batch_transfer changes the batch, in training only")


@case("on_before_batch_transfer makes a batch of samples of another kind")
def before_transfer_collates(run: Run) -> None:
    class Unpacks(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return torch.stack([sample[0] for sample in batch]), torch.stack([sample[1] for sample in batch])

    run.fit(Unpacks(), run.loader(collate_fn=list))


@case("on_train_batch_start returns -1: the rest of the epoch is skipped")
def skips_epoch(run: Run) -> None:
    class Skips(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    run.fit(Skips(), max_epochs=2)


@case("on_after_backward changes gradients in place")
def after_backward(run: Run) -> None:
    class Halves(Classifier):
        def on_after_backward(self) -> None:
            for name, param in self.named_parameters():
                if param.grad is not None and "head" not in name:
                    param.grad.mul_(0.5)

    run.fit(Halves())


@case("on_before_optimizer_step adds weight decay to gradients")
def decays_by_hand(run: Run) -> None:
    class Decays(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.add_(param.detach(), alpha=0.1)

    run.fit(Decays())


@case("optimizer_step clamps the weights after each step")
def clamps_weights(run: Run) -> None:
    class Clamps(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            with torch.no_grad():
                for param in self.parameters():
                    param.clamp_(-0.2, 0.2)

    run.fit(Clamps())


@case("on_train_batch_end normalises the rows of the head's weight")
def normalises_weights(run: Run) -> None:
    class Normalises(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                weight = self.head.weight
                weight.div_(weight.norm(dim=1, keepdim=True))

    run.fit(Normalises())


@case("configure_gradient_clipping calls self.clip_gradients", differs={"local": OWN_GRADIENTS})
def clipping_hook(run: Run) -> None:
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            value = 0.1 if self.trainer.global_step < 2 else 0.05
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")

    run.fit(Clips())


@case("configure_gradient_clipping calls torch.nn.utils.clip_grad_norm_ and logs the norm")
def clipping_by_torch(run: Run) -> None:
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))

    run.fit(Clips())


@case("configure_gradient_clipping with a total norm by hand", differs={"local": OWN_GRADIENTS})
def clipping_by_hand(run: Run) -> None:
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            total = torch.stack([g.norm() for g in gradients]).norm()
            self.log("norm", total)
            for gradient in gradients:
                gradient.mul_(torch.clamp(0.1 / total, max=1.0))

    run.fit(Clips())


@case("configure_gradient_clipping adapts each gradient to its weight (AGC)", differs={"local": OWN_GRADIENTS})
def adaptive_clipping(run: Run) -> None:
    class Adapts(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            for param in self.parameters():
                if param.grad is not None:
                    limit = 0.01 * param.detach().norm().clamp(min=1e-3)
                    norm = param.grad.norm()
                    if norm > limit:
                        param.grad.mul_(limit / norm)

    run.fit(Adapts())


@case("optimizer_step with a warm-up of the learning rate")
def warm_up(run: Run) -> None:
    class WarmsUp(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)

    run.fit(WarmsUp())


@case("optimizer_step that steps every second batch")
def seldom_steps(run: Run) -> None:
    class Seldom(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    run.fit(Seldom())


@case("optimizer_zero_grad with zeros in place of None")
def zero_grad_hook(run: Run) -> None:
    class Zeros(Classifier):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    run.fit(Zeros())


@case("lr_scheduler_step of the module's own")
def scheduler_hook(run: Run) -> None:
    class Steps(_Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch * 2)

    run.fit(Steps(), max_epochs=3)


@case("backward of the module's own", refused={"pp": "backward", "nd": "backward", "nd_tp": "backward"})
def backward_hook(run: Run) -> None:
    class Twice(Classifier):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (2 * loss).backward()

    run.fit(Twice())


@case(
    "training_step returns None for some batches",
    refused={"*": "returning None in distributed training|another path|none of the model.s parts"},
)
def skips_batches(run: Run) -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    run.fit(Skips())


@case("training_step returns a dictionary, which on_train_batch_end reads")
def returns_dictionary(run: Run) -> None:
    class Returns(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            return {"loss": nn.functional.cross_entropy(logits, batch[1]), "logits": logits.detach()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.record(f"logits {batch_idx}", outputs["logits"], per_rank=True)
            self.log("train/loss", outputs["loss"], sync_dist=True)

    run.fit(Returns())


@case("lists of outputs that on_validation_epoch_end joins", reference="ddp")
def outputs_in_lists(run: Run) -> None:
    class Collects(Classifier):
        def on_validation_epoch_start(self) -> None:
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self(batch[0]))

        def on_validation_epoch_end(self) -> None:
            joined = torch.cat(self.outputs)
            self.log("val/spread", joined.std(0).mean(), sync_dist=True)
            run.record("outputs", joined, per_rank=True)

    run.fit(Collects(), val=True)


@case("lists of training outputs that on_train_epoch_end joins and logs", reference="ddp")
def training_outputs_in_lists(run: Run) -> None:
    class Collects(Classifier):
        def on_train_epoch_start(self) -> None:
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("train/mean", torch.stack(self.losses).mean(), sync_dist=True)

    run.fit(Collects(), max_epochs=2)


@case("configure_callbacks of the module")
def module_callbacks(run: Run) -> None:
    class Stops(Classifier):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val/loss", patience=0, mode="max")]

    run.fit(Stops(), val=True, max_epochs=5)


@case("configure_model builds the layers")
def configured_model(run: Run) -> None:
    class Configured(Classifier):
        def __init__(self) -> None:
            super().__init__(num_blocks=1)
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(5)
                self.net = nn.Sequential(*[Block() for _ in range(4)], nn.LayerNorm(NUM_FEATURES))

    model = Configured()
    trainer = run.fit(model, val=True)
    run.record("test", trainer.test(model, run.loader(), verbose=False))


@case("setup builds the layers, for as many classes as the data has")
def built_in_setup(run: Run) -> None:
    class Built(Classifier):
        def setup(self, stage: str) -> None:
            torch.manual_seed(5)
            self.head = nn.Linear(NUM_FEATURES, len(samples().tensors[1].unique()))

    run.fit(Built())


@case("on_validation_model_eval leaves dropout on")
def own_eval(run: Run) -> None:
    class Own(Classifier):
        def on_validation_model_eval(self) -> None:
            self.eval()
            self.head.train()

        def on_validation_epoch_end(self) -> None:
            run.record("modes", [self.training, self.net.training, self.head.training])

    model = Own()
    run.fit(model, val=True)
    run.record("modes after", [model.training, model.net.training, model.head.training])


@case("on_train_start puts a part of the module in eval mode, and it stays so")
def eval_part(run: Run) -> None:
    class Half(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[1].eval()

        def on_train_batch_end(self, *args: Any) -> None:
            run.record("modes", [module.training for module in self.net])

    run.fit(Half(), val=True, max_epochs=2)


@case("a callback reads outputs of validation and prediction steps")
def callback_reads_outputs(run: Run) -> None:
    class Reads(pl.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int, *a: Any) -> None:
            module.log("seen", outputs, sync_dist=True)

        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int, *a: Any) -> None:
            run.record(f"predicted {i}", outputs, per_rank=True)

    model = Classifier()
    trainer = run.fit(model, val=True, callbacks=[Reads()])
    trainer.predict(model, run.loader())


@case("a callback stops training inside an epoch")
def callback_stops(run: Run) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.should_stop = True

    run.fit(Classifier(), val=True, callbacks=[Stops()], max_epochs=5)


@case("a callback changes the learning rate of the optimizer")
def callback_changes_lr(run: Run) -> None:
    class Changes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.1 / (1 + trainer.global_step)

    run.fit(Classifier(), callbacks=[Changes()])


@case("a callback changes weights at the end of an epoch: it adds to them")
def callback_changes_weights(run: Run) -> None:
    class Changes(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(0.9).add_(0.01)

    run.fit(Classifier(), callbacks=[Changes()], max_epochs=2)


@case("a callback logs the norm of a weight and of its gradient")
def callback_logs_norms(run: Run) -> None:
    class Logs(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for name, param in module.named_parameters():
                module.log(f"weight/{name}", float(param.norm()))
                module.log(f"gradient/{name}", param.grad.norm().item())

    run.fit(Classifier(), callbacks=[Logs()])


@case("a callback looks at all gradients and skips steps whose norm is too large", differs={"local": OWN_GRADIENTS})
def skips_large_gradients(run: Run) -> None:
    class Skips(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            total = sum(p.grad.norm().item() ** 2 for p in module.parameters() if p.grad is not None) ** 0.5
            run.record(f"norm {trainer.global_step}", total)
            if total > 0.9:
                for param in module.parameters():
                    param.grad = None

    run.fit(Classifier(), callbacks=[Skips()], max_epochs=2)


@case("self.all_gather of outputs in validation_step", reference="ddp")
def gathers_in_validation(run: Run) -> None:
    class Gathers(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            gathered = self.all_gather(self(batch[0])).flatten(0, -2)
            self.log("val/rows", float(gathered.shape[0]))
            self.log("val/sum", gathered.sum())

    run.fit(Gathers(), val=True)


@case("self.all_gather of a list's rows in on_validation_epoch_end")
def gathers_at_epoch_end(run: Run) -> None:
    class Gathers(Classifier):
        def on_validation_epoch_start(self) -> None:
            self.rows: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.rows.append(self(batch[0]))

        def on_validation_epoch_end(self) -> None:
            gathered = self.all_gather(torch.cat(self.rows)).flatten(0, -2)
            run.record("rows", [gathered.shape[0], gathered.sum()])

    run.fit(Gathers(), val=True)


@case("self.all_gather of a loss in training_step", reference="ddp")
def gathers_in_training(run: Run) -> None:
    class Gathers(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("spread", self.all_gather(loss.detach()).reshape(-1).max())
            return loss

    run.fit(Gathers())


@case("self.print and trainer.print in steps")
def prints(run: Run) -> None:
    class Prints(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.print(f"{batch_idx}: {loss:.3f}", end="\r")
            return loss

    run.fit(Prints())


@case("on_train_batch_start fills attributes that training_step reads")
def attributes_for_step(run: Run) -> None:
    class Fills(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.factor = 1.0 + 0.1 * batch_idx
            self.offset = torch.full((NUM_FEATURES,), 0.1 * batch_idx, dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.loss((x + self.offset, y)) * self.factor

    run.fit(Fills())


@case("training_step keeps attributes that on_train_batch_end reads")
def attributes_of_step(run: Run) -> None:
    class Keeps(Classifier):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last_loss = self.loss(batch)
            return self.last_loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen += 1
            self.log("last", self.last_loss.detach(), sync_dist=True)

    model = Keeps()
    run.fit(model)
    run.record("seen", model.seen)
