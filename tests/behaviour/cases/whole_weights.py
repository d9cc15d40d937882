"""Test whole weights that are saved, loaded, read and copied by the same calls as in one process."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_dist import full_parameters
from tests.behaviour.case import HOLDS_PARTS, OWN_GRADIENTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier


class Inside(Classifier):
    """Classify with all layers in one child of the LightningModule."""

    def __init__(self, seed: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        torch.manual_seed(seed)
        layers = [nn.Linear(NUM_FEATURES, NUM_FEATURES), Block(), Block(), nn.Linear(NUM_FEATURES, NUM_CLASSES)]
        self.net, self.head = nn.Sequential(*layers), nn.Identity()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@case("torch.save(module.state_dict()) inside full_parameters, loaded into a plain module")
def save_whole_state_dict(run: Run) -> None:
    model = Inside()
    run.fit(model)
    with full_parameters(model):
        kept = model.state_dict()
        if run.rank == 0:
            torch.save(kept, run.folder / "whole.pt")
            torch.save(model.net.state_dict(), run.folder / "net.pt")
    _barrier()
    plain = Inside(seed=2).double()
    plain.load_state_dict(torch.load(run.folder / "whole.pt"))
    run.record("plain", plain.state_dict())
    run.record("part", torch.load(run.folder / "net.pt"))
    run.record("kept after the context", kept)


@case(
    "torch.save(module.state_dict()) outside full_parameters",
    refused=dict.fromkeys(HOLDS_PARTS, "torch.save was given .* only a shard"),
)
def save_shards(run: Run) -> None:
    model = Inside()
    run.fit(model)
    torch.save(model.state_dict(), run.folder / f"{run.rank}.pt")


@case("load_state_dict of whole weights in on_fit_start, of the module and of a part")
def load_whole_state_dict(run: Run) -> None:
    class Loads(Inside):
        def on_fit_start(self) -> None:
            other = Inside(seed=3).double()
            self.load_state_dict(other.state_dict())
            self.net[1].load_state_dict(other.net[2].state_dict())

    run.fit(Loads())


@case("load_from_checkpoint and torch.load of ModelCheckpoint's best")
def load_from_best(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, "best")
    run.fit(Inside(lr=0.07), callbacks=[callback])
    loaded = Inside.load_from_checkpoint(callback.best_model_path)
    run.record("loaded", loaded.state_dict())
    run.record("learning rate", loaded.hparams.lr)
    checkpoint = torch.load(callback.best_model_path, map_location="cpu", weights_only=False)
    run.record("state dict", dict(checkpoint["state_dict"]))


@case("ModelCheckpoint(save_last='link') in a folder that is not there yet")
def link_to_last(run: Run) -> None:
    folder = run.folder / "new" / "folder"
    callback = ModelCheckpoint(
        folder, "{step}", save_last="link", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    run.fit(Inside(), callbacks=[callback])
    run.record("link", os.readlink(folder / "last.ckpt"))
    run.fit(Inside(seed=2).double(), max_steps=6, ckpt_path=callback.last_model_path, name="resumed")


@case(
    "copy.deepcopy of a module after the fit",
    refused=dict.fromkeys(HOLDS_PARTS, "Inside is spread over processes and cannot be copied"),
)
def copy_module(run: Run) -> None:
    model = Inside()
    run.fit(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    run.record("weights of the copy", [param.detach() for param in copied.parameters()])
    example = torch.linspace(-1, 1, 2 * NUM_FEATURES, dtype=torch.float64).view(2, -1)
    copied.loss((example, torch.tensor([0, 1]))).backward()
    run.record("gradients of the copy", [param.grad for param in copied.parameters()])


@case(
    "A step copies the module as a teacher, whose outputs enter the loss",
    refused={
        **dict.fromkeys(HOLDS_PARTS, "Teaching is spread over processes and cannot be copied"),
        "pp": "The step uses the parameter .* outside of",
        "nd": "could not be traced on tensors without values .*deepcopy",
        "nd_tp": "The step uses the parameter .* outside of|could not be traced",
    },
)
def copy_in_step(run: Run) -> None:
    class Teaching(Inside):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.teachers = [copy.deepcopy(self).eval()]  # In a list, it is no module of this one.
            loss = self.loss(batch)
            if batch_idx < 2:
                return loss
            with torch.no_grad():
                target = self.teachers[0](batch[0])
            return loss + (self(batch[0]) - target).square().mean()

    run.fit(Teaching())


class _Graph(Logger):
    """Run the module on rank 0 in ``log_graph``, as TensorBoardLogger(log_graph=True) does."""

    _log_graph = True
    name, version = "graph", 0

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.outputs.append(model(model._apply_batch_transfer_handler(model.example_input_array)).detach())


@case("a logger with log_graph=True")
def log_graph(run: Run) -> None:
    class Example(Inside):
        example_input_array = torch.linspace(-1, 1, 2 * NUM_FEATURES, dtype=torch.float64).view(2, -1)

    logger = _Graph()
    run.fit(Example().double(), logger=logger)
    if run.rank == 0:
        run.record("outputs", logger.outputs, per_rank=True)


@case("ModelPruning", refused=dict.fromkeys(HOLDS_PARTS, "ModelPruning replaces parameters"))
def model_pruning(run: Run) -> None:
    run.fit(Inside(), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


@case("torch.optim.Adafactor", tolerance=1e-8)
def adafactor(run: Run) -> None:
    class Factored(Inside):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=0.01)

    run.fit(Factored())


@case("torch.optim.SparseAdam", refused={"*": "SparseAdam takes sparse gradients|dense gradients"})
def sparse_adam(run: Run) -> None:
    class Sparse(Inside):
        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.parameters(), lr=0.01)

    if not run.is_reference:  # In one process, torch refuses the dense gradients of these layers.
        run.fit(Sparse())


@case("histograms of weights (param.cpu().numpy()) inside full_parameters")
def histograms(run: Run) -> None:
    class Histograms(Inside):
        def on_train_epoch_end(self) -> None:
            with full_parameters(self):
                self.seen = {name: param.detach().cpu().numpy().sum() for name, param in self.named_parameters()}

    model = Histograms()
    run.fit(model)
    run.record("sums", {name: float(value) for name, value in model.seen.items()})


@case(
    "histograms of weights outside full_parameters",
    refused={"full": "full_parameters", "hybrid": "full_parameters", "tp": "full_parameters"},
)
def histograms_of_shards(run: Run) -> None:
    class Histograms(Inside):
        def on_train_epoch_end(self) -> None:
            self.seen = [float(param.detach().cpu().numpy().sum()) for param in self.parameters()]

    model = Histograms()
    run.fit(model)
    run.record("sums", model.seen)


@case("grad_norm(self, 2) in on_before_optimizer_step", differs={"local": OWN_GRADIENTS})
def lightning_grad_norm(run: Run) -> None:
    class Norms(Inside):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self.net, norm_type=2)
            self.norms = {name: float(norm) for name, norm in norms.items()}
            self.log_dict(norms)

    model = Norms()
    run.fit(model)
    run.record("norms", model.norms)


class _FloatNorm(nn.LayerNorm):
    """Compute in float32 for inputs of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class _MixedDtypes(Inside):
    """Use blocks in float64 with norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.net.double()
        for block in (self.net[1], self.net[2]):
            block.norm = _FloatNorm(NUM_FEATURES)


@case("blocks in float64 with norms in float32", tolerance=1e-5)
def mixed_dtypes(run: Run) -> None:
    run.fit(_MixedDtypes(), precision="32-true")


class _MixedInOne(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].up.bias = nn.Parameter(self.net[1].up.bias.detach().double())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net[1].up.bias.sum()


@case(
    "a layer whose weight and bias have different dtypes",
    refused={
        **dict.fromkeys(("full", "hybrid", "nd"), "net.1.up has parameters of several dtypes"),
        **dict.fromkeys(("pp", "nd_tp"), "The step calls no module with parameters"),
    },
    tolerance=1e-5,
)
def mixed_dtypes_of_a_layer(run: Run) -> None:
    run.fit(_MixedInOne(), precision="32-true")
