"""Test ways of training from papers: losses of several passes, weights of losses, and what optimizers are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import clip_grad_value_, parametrize

from tests.behaviour.case import HOLDS_PARTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, samples, tokens
from tests.behaviour.writers import Writer

N, C = NUM_FEATURES, NUM_CLASSES
PIPELINED = ("pp", "nd", "nd_tp")
TWICE = "calls .* 2 times: a pipeline runs a model's blocks once a microbatch"


class _Sgd(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _writer() -> Writer:
    return Writer(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))


@case(
    "preferences (DPO): log probabilities of two answers under the model and under a frozen copy of it",
    refused=dict.fromkeys(PIPELINED, TWICE),
)
def preferences(run: Run) -> None:
    class Prefers(Writer):
        def __init__(self) -> None:
            super().__init__(lambda params: torch.optim.SGD(params, lr=0.05))
            reference = _writer().requires_grad_(False)
            self.reference_layers, self.reference_head = reference.layers, reference.head

        def log_probability(self, hidden: Tensor, head: nn.Module, ids: Tensor) -> Tensor:
            logits = head(hidden)[:, :-1].log_softmax(-1)
            return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            chosen, rejected = batch[0], batch[0].flip(1)
            rewards = []
            for ids in (chosen, rejected):
                own = self.log_probability(self.hidden(ids), self.head, ids)
                x = self.emb(ids)
                for layer in self.reference_layers:
                    x = layer(x)
                rewards.append(own - self.log_probability(x, self.reference_head, ids).detach())
            loss = -functional.logsigmoid(0.1 * (rewards[0] - rewards[1])).mean()
            self.log("train/loss", loss, sync_dist=True)
            self.log("margin", (rewards[0] - rewards[1]).mean(), sync_dist=True)
            return loss

    run.fit(Prefers(), run.loader(tokens()))


@case(
    "a consistency loss between two views, of which the second has stopped gradients and runs in evaluation mode",
    refused=dict.fromkeys(PIPELINED, TWICE),
)
def consistency(run: Run) -> None:
    class Consistent(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self(x)
            self.eval()
            with torch.no_grad():
                target = self(x * 1.1).softmax(-1)
            self.train()
            loss = functional.cross_entropy(logits, y) + functional.cross_entropy(logits, target)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Consistent(), val=True)


@case(
    "virtual adversarial training: a direction from a gradient with regard to the input, taken in the step",
    refused=dict.fromkeys(PIPELINED, "calls torch.autograd.grad itself"),
)
def adversarial_input(run: Run) -> None:
    class Adversarial(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            x = x.detach().requires_grad_()
            loss = functional.cross_entropy(self(x), y, reduction="sum")
            (direction,) = torch.autograd.grad(loss, x)
            loss = functional.cross_entropy(self(x.detach() + 0.1 * direction.sign()), y)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Adversarial())


@case("a penalty on how much the output changes with the input, by a difference of two passes")
def smoothness(run: Run) -> None:
    class Smooth(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            first, second = self(torch.cat([x, x + 0.01])).chunk(2)
            loss = functional.cross_entropy(first, y) + (first - second).pow(2).sum(-1).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Smooth())


@case("weights of three losses that are learned, by the logarithms of their variances")
def learned_variances(run: Run) -> None:
    class Weighs(_Sgd):
        def __init__(self) -> None:
            super().__init__()
            self.log_variances = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self(x)
            losses = (
                functional.cross_entropy(logits, y),
                functional.multi_margin_loss(logits, y),
                logits.pow(2).mean(),
            )
            loss = sum(part * torch.exp(-v) + v for part, v in zip(losses, self.log_variances, strict=True))
            self.log_dict({f"train/{i}": part for i, part in enumerate(losses)}, sync_dist=True)
            return loss

    run.fit(Weighs(), max_epochs=2)


@case("a multiplier of a constraint, whose gradient ascends by a hook on the parameter")
def multiplier(run: Run) -> None:
    class Constrained(_Sgd):
        def __init__(self) -> None:
            super().__init__()
            self.multiplier = nn.Parameter(torch.zeros(()))
            self.multiplier.register_hook(lambda grad: -grad)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self(x)
            excess = logits.pow(2).mean() - 0.5
            loss = functional.cross_entropy(logits, y) + functional.softplus(self.multiplier) * excess
            self.log("train/excess", excess, sync_dist=True)
            return loss

    run.fit(Constrained(), max_epochs=2)


@case(
    "one step inside of another: a loss of weights after a step of gradients, by functional_call (MAML)",
    reference="ddp",
    refused=dict.fromkeys(PIPELINED, "calls torch.autograd.grad itself"),
)
def inner_step(run: Run) -> None:
    class Meta(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            params = dict(self.head.named_parameters())
            hidden = self.net(x)
            loss = functional.cross_entropy(functional_call(self.head, params, (hidden,)), y)
            grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
            stepped = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            loss = functional.cross_entropy(functional_call(self.head, stepped, (hidden,)), y)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Meta())


@case(
    "the head and a block compute once more with the parameters of others of their kind, by functional_call",
    refused={"tp": "has replaced .* as torch.func.functional_call does", **dict.fromkeys(PIPELINED, TWICE)},
)
def borrowed_parameters(run: Run) -> None:
    class Borrows(Writer):
        def __init__(self) -> None:
            super().__init__(lambda params: torch.optim.SGD(params, lr=0.05))
            self.other_head, self.other_layer = copy.deepcopy(self.head), copy.deepcopy(self.layers[0])
            with torch.no_grad():
                for param in (*self.other_head.parameters(), *self.other_layer.parameters()):
                    param.mul_(0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch[0]
            hidden = self.hidden(ids)
            loss = functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            borrowed = dict(self.other_layer.named_parameters())
            hidden = functional_call(self.layers[0], borrowed, (self.emb(ids),))
            logits = functional_call(self.head, dict(self.other_head.named_parameters()), (hidden,))
            loss = loss + functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Borrows(), run.loader(tokens()))


@case("parameters are frozen between the loss and its backward, by toggle_optimizer")
def frozen_before_backward(run: Run) -> None:
    class Freezes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            optimizer = self.optimizers()[batch_idx % 2]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("train/loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.net[:3].parameters(), lr=0.1)
            second = torch.optim.SGD([*self.net[3:].parameters(), *self.head.parameters()], lr=0.1)
            return first, second

    run.fit(Freezes())


class _Settings(nn.Module):
    """Compute an MLP with a gain and a mask that the step sets, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(N, 2 * N), nn.Dropout(0.5), nn.Linear(2 * N, N)
        self.gain = 1.0
        self.register_buffer("mask", torch.ones(2 * N))
        self.register_buffer("shift", torch.zeros(2 * N))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x) * self.gain + self.shift) * self.mask
        return x + self.down(self.dropout(hidden))


class _Set(Classifier):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.net = nn.Sequential(nn.Linear(N, N), *[_Settings() for _ in range(4)])

    def set_all(self, gain: float) -> None:
        for block in self.net[1:]:
            block.gain = gain
            if self.in_place:
                block.shift.fill_(gain)
            else:
                block.mask = torch.full((2 * N,), gain, dtype=block.mask.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.net.eval()
        self.set_all(0.5)
        loss = functional.cross_entropy(self(x), y)
        self.set_all(1.5)
        loss = loss + functional.cross_entropy(self(x * 0.9), y)
        self.set_all(1.0)
        self.net.train()
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


for _name, _in_place, _how in (("assigned", False, "assigns"), ("in_place", True, "changes in place")):

    def _train_set(run: Run, in_place: bool = _in_place) -> None:
        run.fit(_Set(in_place), val=True)

    case(
        f"a step switches to evaluation mode, and sets an attribute and {_how} a buffer of blocks between two forwards",
        f"settings_{_name}",
        refused=dict.fromkeys(PIPELINED, TWICE),
    )(_train_set)


for _name, _before, _inside in (
    ("inputs of layers in blocks", True, True),
    ("outputs of layers in blocks", False, True),
    ("inputs of blocks", True, False),
    ("outputs of blocks", False, False),
):

    def _patch(run: Run, before: bool = _before, inside: bool = _inside) -> None:
        class Patches(_Sgd):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                layers = [block.up if inside else block for block in self.net[1:5]]
                if before:
                    handles = [layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)) for layer in layers]
                else:
                    handles = [layer.register_forward_hook(lambda m, args, out: 0.5 * out + 0.1) for layer in layers]
                loss = super().training_step(batch, batch_idx)
                for handle in handles:
                    handle.remove()
                return loss

        run.fit(Patches(), val=True)

    case(f"hooks that change {_name}, put on and taken off by each step", f"patched_{_name}".replace(" ", "_"))(_patch)


class _SetOnce(_Set):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.eval()
        self.set_all(0.5)
        loss = Classifier.training_step(self, batch, batch_idx)
        self.set_all(1.0)
        self.net.train()
        return loss


for _name, _in_place, _how in (("assigned", False, "assigns"), ("in_place", True, "changes in place")):

    def _train_set_once(run: Run, in_place: bool = _in_place) -> None:
        model = _SetOnce(in_place)
        run.fit(model, val=True, max_epochs=2)
        run.record("modes", [module.training for module in model.modules()])

    case(
        f"a step switches to evaluation mode, sets an attribute and {_how} a buffer of blocks, and sets all of it back",
        f"undone_{_name}",
        refused=dict.fromkeys(PIPELINED, "after it has called net.1, the part of the model that it belongs to"),
    )(_train_set_once)


@case("a step switches to evaluation mode, sets an attribute of blocks, and sets both back")
def undone_attribute(run: Run) -> None:
    class Sets(_SetOnce):
        def set_all(self, gain: float) -> None:
            for block in self.net[1:]:
                block.gain = gain

    model = Sets()
    run.fit(model, val=True, max_epochs=2)
    run.record("modes", [module.training for module in model.modules()])


@case("the forward of layers in blocks is replaced by each step, and given back")
def replaced_forward(run: Run) -> None:
    class Replaces(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            layers = [block.up for block in self.net[1:5]]
            for layer in layers:
                own = layer.forward
                layer.forward = lambda x, own=own: 0.5 * own(x) + 0.1
            loss = super().training_step(batch, batch_idx)
            for layer in layers:
                del layer.forward
            return loss

    run.fit(Replaces(), val=True)


@case(
    "a buffer of blocks that their forwards change in place from the third step on",
    differs=dict.fromkeys(PIPELINED, "A block changes a buffer for each microbatch of the pipeline."),
)
def buffer_that_changes_later(run: Run) -> None:
    class Later(_Settings):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                if self.steps >= 2:
                    self.shift.mul_(0.5).add_(0.1)
                self.steps += 1
            return x + self.down(functional.gelu(self.up(x) + self.shift))

    class Model(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(N, N), *[Later() for _ in range(4)])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    run.fit(Model(), val=True)


@case("centers of the classes, which an optimizer of their own moves, by manual optimization")
def centers(run: Run) -> None:
    class Centers(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.centers = nn.Embedding(C, N)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            features = self.net(x)
            near = (features - self.centers(y)).pow(2).sum(-1).mean()
            loss = functional.cross_entropy(self.head(features), y) + 0.1 * near
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            first.step()
            second.step()
            self.log_dict({"train/loss": loss, "train/near": near}, sync_dist=True)

        def configure_optimizers(self) -> Any:
            own = [*self.net.parameters(), *self.head.parameters()]
            return torch.optim.SGD(own, lr=0.05), torch.optim.SGD(self.centers.parameters(), lr=0.5)

    run.fit(Centers(), max_epochs=2)


@case("gradients of each parameter are clipped by its norm, in configure_gradient_clipping (AGC)")
def adaptive_clipping(run: Run) -> None:
    class Clips(_Sgd):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            clip_grad_value_(self.parameters(), 0.05)

    run.fit(Clips(), gradient_clip_val=1.0)


@case("the learning rate of each layer falls with its depth, in groups by the number in its name, with OneCycleLR")
def rates_by_depth(run: Run) -> None:
    class Decays(Classifier):
        def configure_optimizers(self) -> Any:
            groups: dict[int, list[nn.Parameter]] = {}
            for name, param in self.named_parameters():
                depth = int(name.split(".")[1]) if name.startswith("net.") else 6
                groups.setdefault(depth, []).append(param)
            made = [{"params": params, "lr": 0.1 * 0.8 ** (6 - depth)} for depth, params in sorted(groups.items())]
            optimizer = torch.optim.SGD(made, momentum=0.9)
            rates = [group["lr"] for group in made]
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=12)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    checkpoint = ModelCheckpoint(run.folder, save_last=True)
    run.fit(Decays(), callbacks=[checkpoint], max_epochs=2, name="first")
    run.fit(Decays(), ckpt_path=checkpoint.last_model_path, max_epochs=3, name="second")


@case("a callback unfreezes the blocks one by one, from the last to the first, with lower rates (ULMFiT)")
def unfreezing(run: Run) -> None:
    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
            self.freeze(pl_module.net)

        def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
            if 0 < epoch < 4:
                block = pl_module.net[5 - epoch]
                self.unfreeze_and_add_param_group(block, optimizer, lr=0.05 * 0.5**epoch)

    class Head(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    run.fit(Head(), callbacks=[Thaws()], max_epochs=4, val=True)


@case("a low-rank parametrization of frozen weights, which is merged at the end of the fit")
def merged_parametrization(run: Run) -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, N) * 0.1), nn.Parameter(torch.randn(N, 2) * 0.1)

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.b @ self.a

    class Adapted(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.mix = nn.ModuleList(nn.Linear(N, N) for _ in range(2)).requires_grad_(False)
            for layer in self.mix:
                parametrize.register_parametrization(layer, "weight", LowRank())

        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            for layer in self.mix:
                x = x + torch.tanh(layer(x))
            return self.head(x)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2)

    run.fit(Adapted(), val=True, max_epochs=2)


@case("labels that the model corrects by its own past predictions, which a buffer holds for each sample")
def corrected_labels(run: Run) -> None:
    class Corrects(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y, past = batch
            logits = self(x)
            target = 0.5 * functional.one_hot(y, C).to(x.dtype) + 0.5 * past.softmax(-1)
            loss = functional.cross_entropy(logits, target) + functional.kl_div(
                logits.log_softmax(-1), past.softmax(-1), reduction="batchmean"
            )
            self.log("train/loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch[:2], batch_idx)

    data = samples()
    past = torch.randn(64, C, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    stacked = torch.utils.data.TensorDataset(*data.tensors, past)
    run.fit(Corrects(), run.loader(stacked), val=run.loader(stacked))


@case("a loss of time: the cross-entropy of logits and the mean square of their differences between neighbours")
def losses_of_sequences(run: Run) -> None:
    class Smooths(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch[0]
            logits = self(ids)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss = loss + 0.1 * (logits[:, 1:] - logits[:, :-1]).pow(2).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Smooths(lambda params: torch.optim.SGD(params, lr=0.05)), run.loader(tokens()))


@case("unlikelihood of tokens that were seen before, beside the likelihood of the next one")
def unlikelihood(run: Run) -> None:
    class Unlikely(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch[0]
            log_p = self(ids)[:, :-1].log_softmax(-1)
            seen = functional.one_hot(ids[:, :-1], log_p.shape[-1]).cumsum(1).clamp(max=1)
            seen = seen.scatter(-1, ids[:, 1:, None], 0)
            loss = -log_p.gather(-1, ids[:, 1:, None]).mean()
            loss = loss - (torch.log1p(-log_p.exp().clamp(max=0.999)) * seen).sum(-1).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Unlikely(lambda params: torch.optim.SGD(params, lr=0.05)), run.loader(tokens()))


@case("distillation from hidden states: the layers of a frozen teacher match those of half as many, by hooks")
def layers_match(run: Run) -> None:
    class Student(_Sgd):
        def __init__(self) -> None:
            super().__init__(num_blocks=2)
            self.teacher = nn.ModuleList(Block() for _ in range(4)).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            found: list[Tensor] = []
            handles = [block.register_forward_hook(lambda m, a, out: found.append(out)) for block in self.net[1:3]]
            logits = self(x)
            for handle in handles:
                handle.remove()
            wanted, teacher = [], self.net[0](x).detach()
            for block in self.teacher:
                teacher = block(teacher)
                wanted.append(teacher)
            distances = [(a - b.detach()).pow(2).mean() for a, b in zip(found, wanted[1::2], strict=True)]
            loss = functional.cross_entropy(logits, y) + 0.1 * torch.stack(distances).sum()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Student())


@case("a copy of the head, made by deepcopy in on_train_epoch_start, is a target of the epoch")
def target_of_epoch(run: Run) -> None:
    class Targets(_Sgd):
        def __init__(self) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.head).requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            self.target.load_state_dict(self.head.state_dict())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            features = self.net(x)
            logits = self.head(features)
            loss = functional.cross_entropy(logits, y) + 0.1 * (logits - self.target(features)).pow(2).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Targets(), max_epochs=3)


@case("two optimizers in turn by the epoch, each with its own groups, schedule and clipping")
def optimizers_in_turn(run: Run) -> None:
    class Turns(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()[self.current_epoch % 2]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("train/loss", loss, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            second = torch.optim.AdamW(self.head.parameters(), lr=0.01, eps=1e-3)
            schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (first, second)]
            return [first, second], schedules

    checkpoint = ModelCheckpoint(run.folder, save_last=True)
    run.fit(Turns(), callbacks=[checkpoint], max_epochs=3, name="first")
    run.fit(Turns(), ckpt_path=checkpoint.last_model_path, max_epochs=4, name="second")


@case("a step size from the loss, set in on_before_optimizer_step (Polyak)")
def polyak(run: Run) -> None:
    class Polyak(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.last = self.all_gather(loss.detach()).mean()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = float(self.last.clamp(max=1.0)) * 0.1

    run.fit(Polyak(), max_epochs=2)


@case(
    "the loss of the hardest half of the global batch, by all_gather of the losses",
    differs=dict.fromkeys(
        PIPELINED, "A pipeline takes the mean of its microbatches' losses, each with its own median."
    ),
)
def hardest(run: Run) -> None:
    class Hardest(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            losses = functional.cross_entropy(self(x), y, reduction="none")
            everyone = self.all_gather(losses.detach()).flatten()
            threshold = everyone.median()
            weight = (losses.detach() >= threshold).to(losses.dtype)
            loss = (losses * weight).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Hardest())


@case("a loss that is scaled by hand, whose gradients are divided again before they are clipped")
def scaled_by_hand(run: Run) -> None:
    class Scales(_Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 1024

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.div_(1024)

    run.fit(Scales(), gradient_clip_val=0.2)


@case("frames of one sample are folded into the batch, and unfolded again before the head")
def folded_frames(run: Run) -> None:
    class Folds(_Sgd):
        def forward(self, x: Tensor) -> Tensor:
            frames = torch.stack([x, x.flip(-1), x * 0.5], 1)
            out = self.net(frames.flatten(0, 1)).unflatten(0, (-1, 3)).mean(1)
            return self.head(out)

    run.fit(Folds(), val=True)


@case("samples are sorted by length in the step, and their outputs put back in order")
def sorted_samples(run: Run) -> None:
    class Sorts(_Sgd):
        def forward(self, x: Tensor) -> Tensor:
            order = x.flatten(1).norm(dim=-1).argsort()
            return self.head(self.net(x[order]))[order.argsort()]

    run.fit(Sorts(), val=True)


@case("only the samples of a mask go through a part of the model, and are put back by index")
def masked_samples(run: Run) -> None:
    class Masks(_Sgd):
        def __init__(self) -> None:
            super().__init__()
            self.special = Block()

        def forward(self, x: Tensor) -> Tensor:
            mask = x.flatten(1)[:, 0] > 0
            out = self.net[0](x)
            out = torch.where(mask.view(-1, *[1] * (out.dim() - 1)), self.special(out), out)
            for layer in self.net[1:]:
                out = layer(out)
            return self.head(out)

    run.fit(Masks(), val=True)


def _with_hooks(make: Callable[[nn.Module], Any], module: Classifier) -> list[Any]:
    return [make(block) for block in module.net[1:5]]


@case("hooks that scale gradients of blocks, put on in setup and taken off after two epochs")
def scaled_gradients(run: Run) -> None:
    class Scales(_Sgd):
        def setup(self, stage: str) -> None:
            self.handles = _with_hooks(
                lambda b: b.register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.5,)), self
            )

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                for handle in self.handles:
                    handle.remove()

    run.fit(Scales(), max_epochs=3)


@case(
    "a hook before each block adds a learned prompt to its input, which a function has kept since __init__",
    refused=dict.fromkeys(set(HOLDS_PARTS) - {"pp"}, "as it was before the strategy replaced it"),
)
def prompts_by_hooks(run: Run) -> None:
    class Prompts(_Sgd):
        def __init__(self) -> None:
            super().__init__()
            self.prompts = nn.ParameterList(nn.Parameter(torch.zeros(N)) for _ in range(4))
            for prompt, block in zip(self.prompts, self.net[1:5], strict=True):
                block.register_forward_pre_hook(lambda m, args, prompt=prompt: (args[0] + prompt,))

    run.fit(Prompts(), val=True)
