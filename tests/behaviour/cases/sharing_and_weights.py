"""Test weights that the user's code shares, reads, changes, penalises, or registers hooks on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, Block, Classifier

OTHER_STAGES_WEIGHTS = dict.fromkeys(("pp", "nd", "nd_tp"), r"uses the parameter '.*' outside of .*, the block that it")
CHANGED_IN_STEP = dict.fromkeys(("pp", "nd", "nd_tp"), r"uses the parameter|changes the parameter '.*'")
"""Refused, because a stage has only the weights of its own blocks, and all stages run the code between the blocks."""


class _SharedWeight(Classifier):
    """Share one weight between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.net.children())[2:5]:
            block.up.weight = self.net[1].up.weight


class _SharedModule(Classifier):
    """Share one module between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        for block in list(self.net.children())[1:5]:
            block.norm = nn.Sequential(nn.LayerNorm(NUM_FEATURES), shared)


class _RepeatedBlock(Classifier):
    """Run the same blocks three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.net(x)
        return self.head(x)


@case("a weight that several blocks share")
def weight_shared_by_blocks(run: Run) -> None:
    run.fit(_SharedWeight())


@case("a module that several blocks share")
def module_shared_by_blocks(run: Run) -> None:
    run.fit(_SharedModule())


@case(
    "the whole network runs three times in a step", refused=dict.fromkeys(("pp", "nd", "nd_tp"), "calls net.1 3 times")
)
def repeated_network(run: Run) -> None:
    run.fit(_RepeatedBlock())


class _TensorHooks(Classifier):
    """Scale and record gradients by hooks on parameters, which are registered in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.net[1].up.weight.register_hook(self._half)
        self.head.bias.register_hook(lambda grad: grad * 0.1)

    def _half(self, grad: Tensor) -> Tensor:
        self.calls.append("up")
        return grad * 0.5


@case("hooks on parameters, set in __init__, change gradients")
def tensor_hooks(run: Run) -> None:
    model = _TensorHooks()
    run.fit(model)


class _LateHooks(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.handle = pl_module.net[2].down.weight.register_hook(lambda grad: grad * 3.0)
        pl_module.net[0].weight.register_hook(lambda grad: -grad)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.handle.remove()


@case("hooks on parameters, set and removed while training")
def late_tensor_hooks(run: Run) -> None:
    run.fit(Classifier(), callbacks=[_LateHooks()])


class _PostAccumulate(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for param in (self.net[1].up.weight, self.head.weight):
            param.register_post_accumulate_grad_hook(self._clip)

    @staticmethod
    def _clip(param: Tensor) -> None:
        param.grad = param.grad * 0.25


@case("post-accumulate-grad hooks on parameters")
def post_accumulate_hooks(run: Run) -> None:
    run.fit(_PostAccumulate())


@case("weights are added to gradients in on_after_backward, with autograd on")
def decay_added_to_gradients(run: Run) -> None:
    class Decays(Classifier):
        def on_after_backward(self) -> None:
            for param in self.parameters():
                param.grad.add_(param, alpha=0.1)

    run.fit(Decays())


class _Norms(pl.Callback):
    """Read norms of weights and gradients as Python numbers, and log them."""

    def __init__(self, record: dict[str, list[float]]) -> None:
        self.record = record

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        norms = self.record.setdefault("norms", [])
        for param in (pl_module.net[1].up.weight, pl_module.head.weight):
            norms.append(param.grad.norm().item())
            norms.append(float(param.detach().norm()))
            norms.append(float(f"{param.abs().mean():.12f}"))
            norms.append(float(param.sum() > 0))


@case("numbers read from weights and gradients: item(), float(), format, comparison")
def numbers_of_weights(run: Run) -> None:
    found: dict[str, list[float]] = {}
    run.fit(Classifier(), callbacks=[_Norms(found)])
    run.record("numbers", found["norms"])


class _SkipsLargeSteps(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())
        if norm > 1.0:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.mul_(1.0 / norm)


@case("gradients clipped by hand, by a norm that is read as a number")
def clipped_by_hand(run: Run) -> None:
    run.fit(_SkipsLargeSteps())


class _Penalty(Classifier):
    """Add a penalty on weights to the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.kind == "l2 of all":
            penalty = sum(param.pow(2).sum() for param in self.parameters())
        elif self.kind == "l1 of a block":
            penalty = sum(param.abs().sum() for param in self.net[2].parameters())
        elif self.kind == "norm of a block's weight":
            penalty = self.net[2].up.weight.norm()
        else:  # This penalises weights that are not orthogonal.
            weight = self.net[3].down.weight
            penalty = (weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype)).square().mean()
        self.log("penalty", penalty)
        return loss + 0.01 * penalty


@case("the L2 norm of all weights in the loss", refused=OTHER_STAGES_WEIGHTS)
def l2_of_all(run: Run) -> None:
    run.fit(_Penalty("l2 of all"))


@case("the L1 norm of a block's weights in the loss", refused=OTHER_STAGES_WEIGHTS)
def l1_of_a_block(run: Run) -> None:
    run.fit(_Penalty("l1 of a block"))


@case("a block's weight read in the step, outside of the block", refused=OTHER_STAGES_WEIGHTS)
def weight_read_in_the_step(run: Run) -> None:
    run.fit(_Penalty("norm of a block's weight"), accumulate_grad_batches=2)


@case("an orthogonality penalty on a block's weight", refused=OTHER_STAGES_WEIGHTS)
def orthogonality(run: Run) -> None:
    run.fit(_Penalty("orthogonality"))


class _OtherMethod(Classifier):
    """Call the layers of blocks instead of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for block in list(self.net.children())[1:5]:
            x = x + block.down(functional.gelu(block.up(block.norm(x))))
        return self.head(self.net[5](x))


@case("blocks whose layers are called one by one")
def layers_of_blocks_called(run: Run) -> None:
    run.fit(_OtherMethod(), val=True)


class _EncodingBlock(Block):
    def encode(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("forward is not used")


class _Encodes(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_EncodingBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        for block in self.blocks:
            x = block.encode(x)
        return self.head(x)


@case("blocks called by another method than forward")
def other_method(run: Run) -> None:
    run.fit(_Encodes())


class _FunctionalUse(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        x = x + functional.linear(x, self.net[2].down.weight @ self.net[1].up.weight)
        return self.head(x)


@case("weights of blocks used by functions outside of the blocks", refused=OTHER_STAGES_WEIGHTS)
def functional_use(run: Run) -> None:
    run.fit(_FunctionalUse())


class _Prototypes(Classifier):
    """Normalise weights in place in the step."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for weight in (self.head.weight, self.net[1].up.weight):
            if self.through_data:
                weight.data = functional.normalize(weight.data, dim=1)
            else:
                with torch.no_grad():
                    weight.copy_(functional.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)


@case("weights that the step normalises in place", refused=CHANGED_IN_STEP)
def normalised_in_place(run: Run) -> None:
    run.fit(_Prototypes(through_data=False))


@case("weights that the step replaces through .data", refused=CHANGED_IN_STEP)
def normalised_through_data(run: Run) -> None:
    run.fit(_Prototypes(through_data=True))


class _Momentum(pl.LightningModule):
    """Update a momentum encoder at the beginning of the step, as in MoCo."""

    def __init__(self, through_data: bool = False) -> None:
        super().__init__()
        self.through_data = through_data
        torch.manual_seed(1)
        self.student = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), Block(), Block())
        self.teacher = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), Block(), Block())
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.predictor = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.through_data:
                    theirs.data = theirs.data * 0.9 + ours.data * 0.1
                else:
                    theirs.mul_(0.9).add_(ours, alpha=0.1)
        x = batch[0]
        with torch.no_grad():
            target = self.teacher(x)
        loss = functional.mse_loss(self.predictor(self.student(x + 0.1)), target)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@case("a momentum encoder that the step updates in place", refused=CHANGED_IN_STEP)
def momentum_encoder(run: Run) -> None:
    run.fit(_Momentum())


@case("a momentum encoder that the step updates through .data", refused=CHANGED_IN_STEP)
def momentum_encoder_through_data(run: Run) -> None:
    run.fit(_Momentum(through_data=True))
