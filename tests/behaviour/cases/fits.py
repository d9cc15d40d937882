"""Test several fits of one module, evaluations, and predictions."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import full_parameters
from tests.behaviour.case import HOLDS_PARTS, Run, case
from tests.behaviour.models import Classifier, samples


@case("two fits of one module, by two Trainers")
def two_trainers(run: Run) -> None:
    model = Classifier()
    run.fit(model, name="first")
    run.fit(model, name="second", val=True)


@case("two fits by one Trainer, with more epochs")
def one_trainer_again(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, name="first")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, run.loader())
    run.observe(trainer, model, "second")


@case("two modules are trained in turns")
def two_modules(run: Run) -> None:
    models = [Classifier(lr=0.05), Classifier(lr=0.1, num_blocks=2)]
    for turn in range(2):
        for index, model in enumerate(models):
            run.fit(model, name=f"fit {turn} of {index}", limit_train_batches=2)


@case("validate, test and predict before any fit")
def evaluation_first(run: Run) -> None:
    model, trainer = Classifier(), run.trainer(limit_predict_batches=2)
    run.record("validated", trainer.validate(model, run.loader(), verbose=False))
    run.record("tested", trainer.test(model, run.loader(), verbose=False))
    run.record_predictions(trainer.predict(model, run.loader()))
    run.fit(model)


@case("fit, then validate, test and predict by the same Trainer")
def evaluation_after(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, val=True)
    run.record("validated", trainer.validate(model, run.loader(samples(seed=1)), verbose=False))
    run.record("tested", trainer.test(model, run.loader(samples(seed=2)), verbose=False))
    run.record_predictions(trainer.predict(model, run.loader(samples(seed=3))))


@case("after the fit, the module is called by hand in eval mode")
def called_after_fit(run: Run) -> None:
    model = Classifier()
    run.fit(model)
    with full_parameters(model), torch.no_grad():
        run.record("logits", model.eval()(samples(4).tensors[0]))


@case("testing on one device after training on several")
def tested_on_one_device(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    one = Classifier.load_from_checkpoint(run.folder / "a.ckpt").double()
    with torch.no_grad():
        run.record("logits", one(samples(4).tensors[0]))


@case(
    "the same module is tested on one device by a Trainer of its own",
    refused=dict.fromkeys(HOLDS_PARTS, "was called outside of .*full_parameters"),
)
def single_device_trainer(run: Run) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    model = Classifier()
    run.fit(model)
    one = run.trainer(strategy=SingleDeviceStrategy("cpu"), devices=1)
    loader = torch.utils.data.DataLoader(samples(16), 8)
    run.record("tested", one.test(model, loader, verbose=False))


@case("the same module is tested on one device by a Trainer of its own, inside full_parameters")
def single_device_trainer_inside(run: Run) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    model = Classifier()
    run.fit(model)
    one = run.trainer(strategy=SingleDeviceStrategy("cpu"), devices=1)
    loader = torch.utils.data.DataLoader(samples(16), 8)
    with full_parameters(model):
        run.record("tested", one.test(model, loader, verbose=False))
    run.fit(model, name="second")


@case("predict_step returns a dictionary")
def predicts_dictionary(run: Run) -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            return {"logits": logits, "class": logits.argmax(1)}

    predictions = run.trainer().predict(Predicts(), run.loader())
    for name in ("logits", "class"):
        run.record_predictions(predictions and [p[name] for p in predictions], name)


@case("no predict_step: the forward is run on the batch")
def predicts_by_forward(run: Run) -> None:
    class Forward(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch[0])

        predict_step = pl.LightningModule.predict_step  # Lightning's default calls forward.

    run.record_predictions(run.trainer().predict(Forward(), run.loader()))


@case("on_predict_epoch_end joins predictions that the step has kept")
def predictions_are_joined(run: Run) -> None:
    class Keeps(Classifier):
        def on_predict_start(self) -> None:
            self.kept: list[Tensor] = []

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.kept.append(self(batch[0]).softmax(1))

        def on_predict_epoch_end(self) -> None:
            run.record("kept", torch.cat(self.kept), per_rank=True)

    run.trainer().predict(Keeps(), run.loader())


@case("a test of the best checkpoint by a new Trainer and module")
def new_trainer_tests(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, monitor="val/loss")
    run.fit(Classifier(), val=True, callbacks=[callback], max_epochs=2, observe=False)
    model = Classifier().double()
    tested = run.trainer().test(model, run.loader(), ckpt_path=callback.best_model_path, verbose=False)
    run.record("tested", tested)


@case("evaluation of several seeds in a loop: a Trainer for each")
def many_trainers(run: Run) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = Classifier(num_blocks=2 + seed % 2)
        run.fit(model, name=f"seed {seed}", limit_train_batches=2)


@case("on_train_start and on_predict_start set what the steps read and count")
def hooks_set_attributes(run: Run) -> None:
    class Sets(Classifier):
        def on_train_start(self) -> None:
            self.factor, self.seen = 0.5, [0.0]

        def on_predict_start(self) -> None:
            self.shift, self.factor = torch.ones(4, dtype=torch.float64), 2.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen[0] += 1
            return self.loss(batch) * self.factor

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]) * self.factor + self.shift

    run.fit(Sets())
    run.record_predictions(run.trainer().predict(Sets(), run.loader()))


@case("a step reads an attribute that nothing sets")
def attribute_is_missing(run: Run) -> None:
    class Misspells(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.los(batch)

    error = ""
    try:
        run.fit(Misspells(), observe=False)
    except AttributeError as raised:
        error = str(raised)
    run.record("said", "object has no attribute 'los'" in error)
