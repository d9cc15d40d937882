"""Test state that must survive: weights after any optimizer step, data in low precision, and checkpoints."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from tests.behaviour.case import GLOBAL_BATCH_SIZE, Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier, Network, samples

N = NUM_FEATURES
STAGES = ("pp", "nd", "nd_tp")


@case("manual optimization calls the model between the backward and the optimizer step")
def forward_before_optimizer_step(run: Run) -> None:
    class Looks(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                self.log("train/loss", self.loss(batch), sync_dist=True)
            self.optimizers().step()

    run.fit(Looks())


@case("manual optimization takes gradients of the inputs by torch.autograd.grad")
def gradients_of_inputs(run: Run) -> None:
    class Adversarial(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss((x, batch[1])), x)
            self.optimizers().zero_grad()
            self.manual_backward(self.loss((x.detach() + 0.1 * gradient.sign(), batch[1])))
            self.optimizers().step()

    run.fit(Adversarial())


class _Helper:
    """Count steps, and hold a reference to the module."""

    def __init__(self, module: Any) -> None:
        self.module, self.num_steps, self.classes = module, 0, collections.Counter[int]()


@case("a step counts in an object that holds the module, and in a Counter")
def counted_in_helper(run: Run) -> None:
    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.helper = _Helper(self)
            self.seen: collections.Counter[str] = collections.Counter()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.helper.num_steps += 1
            self.seen["steps"] += 1
            self.log("train/steps", float(self.helper.num_steps + self.seen["steps"]))
            return super().training_step(batch, batch_idx)

    model = Counts()
    run.fit(model)
    run.record("counted", [model.helper.num_steps, dict(model.seen), model.helper.module is model])


@case("ranks evaluate unequal numbers of batches before the first step")
def uneven_evaluation_first(run: Run) -> None:
    part = GLOBAL_BATCH_SIZE // run.layout.num_data_parallel
    indices = list(range(run.data_parallel_rank, 40, run.layout.num_data_parallel))
    if not run.is_reference and run.data_parallel_rank == 0:
        indices = indices[:-part]
    trainer = run.trainer(limit_val_batches=1.0)
    trainer.validate(Classifier(), DataLoader(Subset(samples(40), indices), part), verbose=False)
    run.record("done", "val/loss" in trainer.callback_metrics)


class _ByData(torch.optim.Optimizer):
    """Descend along the gradient by changing ``param.data``, as many third-party optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.data, alpha=-group["lr"])


@case(
    "two optimizers step one after the other, the second one of a parameter of the module itself",
    refused=dict.fromkeys(STAGES, "_ByData with pp_size=2"),
)
def two_optimizers_in_a_row(run: Run) -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.ones(N))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

        def configure_optimizers(self) -> Any:
            rest = [param for name, param in self.named_parameters() if name != "scale"]
            return torch.optim.SGD(rest, lr=0.05), _ByData([self.scale])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in optimizers:
                optimizer.step()

    run.fit(Two())


class _Timed(nn.Module):
    """Take a time in float32 as input of a block, which the low precisions cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.seen = 0.0

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        self.seen = float(time.double().sum())
        return x + self.down(functional.gelu(self.up(x))) * torch.cos(time).to(x.dtype)


@case("precision='bf16-mixed' leaves the data that blocks are given as it is", tolerance=0.3)
def data_in_low_precision(run: Run) -> None:
    class Times(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=0.01)
            self.net = nn.ModuleList(_Timed() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            time = torch.tensor([999.4])
            for block in self.net:
                x = block(x, time)
            return self.head(x)

        def loss(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self(batch[0].float()).float(), batch[1])

    model = Times()
    trainer = run.fit(model, precision="bf16-mixed", observe=False)
    run.record("loss", trainer.callback_metrics["train/loss"])
    run.record("times are exact", all(abs(block.seen - 999.4) < 1e-3 for block in model.net if block.seen))


@case("precision='bf16-mixed' with a part that is unfrozen in the second epoch", tolerance=0.3)
def unfrozen_in_low_precision(run: Run) -> None:
    class Unfreezes(Classifier):
        def __init__(self) -> None:
            super().__init__(lr=0.01)
            self.net.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net.requires_grad_(True)

        def loss(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self(batch[0].float()).float(), batch[1])

    trainer = run.fit(Unfreezes(), precision="bf16-mixed", max_epochs=2, observe=False)
    run.record("loss", trainer.callback_metrics["train/loss"])


class _Norms(nn.Module):
    """Keep running statistics and a count of forwards in a block, and draw random numbers by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(N, N), nn.BatchNorm1d(N), nn.Linear(N, N)
        self.register_buffer("num_forwards", torch.zeros(()))
        self.rng = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_forwards += 1
            x = x * self.rng.uniform(0.9, 1.1)
        return x + self.down(self.norm(self.up(x))) / self.num_forwards.clamp(min=1)


@case(
    "activation_checkpointing=True with blocks that keep state",
    reference="ddp",
    strategy={key: {"activation_checkpointing": True} for key in ("full", "hybrid", "tp", "data", "data_tp")},
    differs=dict.fromkeys(STAGES, "batch norm computes with microbatches, and each draws a number of its own"),
)
def recomputed_state(run: Run) -> None:
    trainer = run.fit(Network(lambda: nn.Sequential(*[_Norms() for _ in range(4)], nn.Linear(N, 4))))
    if run.column not in STAGES:
        run.record("forwards", [float(block.num_forwards) for block in trainer.lightning_module.net[:4]])


@case("LambdaCallback changes weights through `.data` and through views")
def lambda_callback_changes(run: Run) -> None:
    def constrain(trainer: Any, module: Any, *args: Any) -> None:
        weight = module.head.weight
        weight.data = functional.normalize(weight.data, dim=1)
        weight.data[0].mul_(0.5)

    run.fit(Classifier(), callbacks=[LambdaCallback(on_train_batch_end=constrain)])


@case("an overridden optimizer_step changes weights through `.data` and through views")
def changes_after_optimizer_step(run: Run) -> None:
    class Clips(Classifier):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            for param in self.net.parameters():
                param.data = param.data.clamp(-0.2, 0.2)
            self.head.weight.data[0].zero_()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            with torch.no_grad():
                self.head.bias[0] = 0.5

    run.fit(Clips())


@case("on_save_checkpoint keeps the weights of a part under a key of its own")
def weights_under_own_key(run: Run) -> None:
    class Keeps(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["body"] = self.net.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            run.record("kept", {name: torch.as_tensor(value) for name, value in checkpoint["body"].items()})

    run.fit(Keeps(), callbacks=[ModelCheckpoint(run.folder, "a")], name="first")
    run.record_checkpoint(run.folder / "a.ckpt", "content")
    run.fit(Keeps(), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)


class _Average(Callback):
    """Keep an average of the weights in a whole copy of the module, and save it."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = copy.deepcopy(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        whole = dict(pl_module.named_parameters())
        with torch.no_grad():
            for name, param in self.average.named_parameters():
                param.mul_(0.9).add_(float(whole[name].sum()), alpha=0.001)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average.load_state_dict(state_dict["average"])


@case("a callback's whole copy of the module is saved, and loaded again")
def whole_copy_in_callback(run: Run) -> None:
    run.fit(Classifier(), callbacks=[_Average(), ModelCheckpoint(run.folder, "a")], name="first")
    callback = _Average()
    run.fit(Classifier(), callbacks=[callback], ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)
    run.record("average", callback.average.state_dict())


class _Bank(nn.Module):
    """Collect samples in a buffer that grows with them, and load the buffer by code that depends on its version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0, N))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        kept = state_dict[f"{prefix}bank"]
        self.bank = torch.zeros_like(kept)
        if metadata.get("version") != 2:
            state_dict[f"{prefix}bank"] = -kept
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


@case("a buffer that grows, of a module whose loading code looks at its version, is loaded again")
def growing_buffer(run: Run) -> None:
    class Collects(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.memory = _Bank()

        def on_train_epoch_end(self) -> None:
            self.memory.bank = torch.cat([self.memory.bank, torch.ones(1, N).to(self.memory.bank)])

    run.fit(Collects(), callbacks=[ModelCheckpoint(run.folder, "a")], name="first")
    model = Collects()
    run.fit(model, ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)
    run.record("bank", model.memory.bank)
    run.record("loaded", Collects.load_from_checkpoint(run.folder / "a.ckpt").memory.bank)
