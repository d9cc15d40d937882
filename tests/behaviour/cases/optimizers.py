"""Test optimizers of torch and of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.behaviour.case import HOLDS_PARTS, ROUNDED, Run, case
from tests.behaviour.models import Classifier
from tests.whole_optimizers import BySomeRows, Shampoo, Sharpness, ToNormOfAll

PIPELINED = ("pp", "nd", "nd_tp")

# Each name of a class of torch.optim maps to (arguments of the optimizer, arguments of the case).
_OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
    "Adam": ({"lr": 0.01, "weight_decay": 0.1}, {"tolerance": 1e-8}),
    "AdamW": ({"lr": 0.01, "amsgrad": True}, {"tolerance": 1e-8}),
    "NAdam": ({"lr": 0.01}, {"tolerance": 1e-8}),
    "RAdam": ({"lr": 0.01}, {"tolerance": 1e-8}),
    "Adamax": ({"lr": 0.01}, {"tolerance": 1e-8}),
    "Adagrad": ({"lr": 0.01}, {"tolerance": 1e-8}),
    "Adadelta": ({}, {"tolerance": 1e-8}),
    "RMSprop": ({"lr": 0.001, "centered": True, "momentum": 0.5}, {"tolerance": 1e-7}),
    "ASGD": ({"lr": 0.05}, {}),
    "Rprop": ({"lr": 0.001}, {}),
    "LBFGS": (
        {"lr": 0.1, "max_iter": 3},
        {"tolerance": 1e-6, "refused": dict.fromkeys(PIPELINED, "LBFGS with pp_size=2")},
    ),
}

for _name, (_arguments, _more) in _OPTIMIZERS.items():

    @case(f"torch.optim.{_name}", name=f"optimizer_{_name.lower()}", **{"differs": {"compressed": ROUNDED}, **_more})
    def _(run: Run, name: str = _name, arguments: dict[str, Any] = _arguments) -> None:
        class With(Classifier):
            def configure_optimizers(self) -> Any:
                return getattr(torch.optim, name)(self.parameters(), **arguments)

        run.fit(With())


def _with(configure: Callable[[Any], Any]) -> Classifier:
    class With(Classifier):
        def configure_optimizers(self) -> Any:
            return configure(self)

    return With()


# Each name maps to (title, configure_optimizers, arguments of the case).
_WAYS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "no_foreach": (
        "foreach=False",
        lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=False),
        {"tolerance": 1e-8},
    ),
    "fused": ("fused=True", lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True), {"tolerance": 1e-8}),
    "differing_groups": (
        "groups with and without weight decay",
        lambda m: torch.optim.SGD(
            [
                {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.5},
                {"params": [p for p in m.parameters() if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=0.05,
        ),
        {},
    ),
    "rate_of_each_layer": (
        "a learning rate for each layer",
        lambda m: torch.optim.SGD(
            [{"params": layer.parameters(), "lr": 0.01 * (i + 1)} for i, layer in enumerate([*m.net, m.head])], lr=0.1
        ),
        {},
    ),
    "of_named_parameters": ("named_parameters", lambda m: torch.optim.SGD(m.named_parameters(), lr=0.05), {}),
    "of_a_part": ("an optimizer of the head alone", lambda m: torch.optim.SGD(m.head.parameters(), lr=0.05), {}),
    "maximize": ("maximize=True", lambda m: torch.optim.SGD(m.parameters(), lr=0.01, maximize=True), {}),
    "rate_as_tensor": (
        "a learning rate that is a tensor",
        lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.05)),
        {},
    ),
    "muon": (
        "torch.optim.Muon, which looks at whole matrices",
        lambda m: torch.optim.Muon([p for p in m.net.parameters() if p.dim() == 2], lr=0.01),
        {"tolerance": 1e-2},  # Muon orthogonalises in bfloat16.
    ),
    "as_dictionary": (
        "a dictionary with an optimizer and a scheduler",
        lambda m: {
            "optimizer": (o := torch.optim.SGD(m.parameters(), lr=0.1)),
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "interval": "step"},
        },
        {},
    ),
}
for _name, (_title, _configure, _more) in _WAYS.items():

    @case(_title, name=f"optimizer_{_name}", **_more)
    def _(run: Run, configure: Callable[[Any], Any] = _configure) -> None:
        trainer = run.fit(_with(configure))
        trainer.save_checkpoint(run.folder / "a.ckpt")
        run.record_checkpoint(run.folder / "a.ckpt", "checkpoint")


class _Lion(Optimizer):
    """Stand for an elementwise optimizer of the user."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(torch.tanh((0.9 * momentum + 0.1 * p.grad) * 10), alpha=group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class _Lamb(Optimizer):
    """Stand for an optimizer of the user that needs the norm of each whole weight."""

    def __init__(self, params: Any, lr: float = 0.05, as_number: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.as_number = as_number

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad + 0.01 * p
                if self.as_number:
                    trust = min(p.norm().item() / (update.norm().item() + 1e-6), 1.0)
                    p.add_(update, alpha=-group["lr"] * trust)
                else:
                    trust_tensor = torch.clamp(p.norm() / (update.norm() + 1e-6), max=1.0)
                    p.sub_(group["lr"] * trust_tensor * update)
        return loss


@case("an elementwise optimizer of the user's own")
def own_optimizer(run: Run) -> None:
    run.fit(_with(lambda m: _Lion(m.parameters())))


@case("LAMB by hand: norms of weights as tensors")
def lamb(run: Run) -> None:
    run.fit(_with(lambda m: _Lamb(m.parameters())))


@case("LAMB by hand: norms of weights by .item()")
def lamb_by_item(run: Run) -> None:
    run.fit(_with(lambda m: _Lamb(m.parameters(), as_number=True)))


@case("Lookahead: an optimizer around an optimizer, with slow weights")
def lookahead(run: Run) -> None:
    class Lookahead(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.count = getattr(self, "count", 0) + 1
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        slow = self.state[p].setdefault("slow", p.detach().clone())
                        if self.count % 2 == 0:
                            slow.lerp_(p, 0.5)
                            p.copy_(slow)
            return loss

    run.fit(_with(lambda m: Lookahead(m.parameters(), lr=0.05)))


@case("add_param_group while the fit goes on")
def group_is_added(run: Run) -> None:
    class Adds(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.05)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().add_param_group({"params": list(self.net[3:].parameters()), "lr": 0.01})

    run.fit(Adds(), max_epochs=2)


@case("an optimizer over parameters that are not the module's", refused={"*": "optimizer|parameter"})
def foreign_parameters(run: Run) -> None:
    if run.is_reference:
        return
    foreign = nn.Parameter(torch.zeros(2))
    run.fit(_with(lambda m: torch.optim.SGD([*m.parameters(), foreign], lr=0.05)), observe=False)


@case("the state of the optimizer is read and changed while the fit goes on")
def optimizer_state(run: Run) -> None:
    class Reads(Classifier):
        def on_train_epoch_start(self) -> None:
            optimizer = self.optimizers()
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()

    run.fit(Reads(), max_epochs=3)


@case("gradients with noise that depends on the weight alone")
def deterministic_noise(run: Run) -> None:
    class Noisy(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.parameters():
                param.grad.add_(torch.sin(100 * param.detach()), alpha=0.01)

    run.fit(Noisy())


@case("gradient centralisation: the mean of each row is taken away")
def centralised(run: Run) -> None:
    class Centralised(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.parameters():
                if param.dim() > 1:
                    param.grad.sub_(param.grad.mean(dim=1, keepdim=True))

    run.fit(Centralised())


def _orthogonalised(gradient: Tensor) -> Tensor:
    """Run Newton-Schulz steps towards the nearest matrix with orthogonal rows."""
    x = gradient / gradient.pow(2).sum().sqrt()
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.mT @ x)
    return x


@case("an optimizer of the user's own that needs whole matrices: orthogonalised steps")
def whole_matrices(run: Run) -> None:
    class Orthogonal(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.grad = _orthogonalised(p.grad) if p.dim() == 2 else p.grad
            super().step()
            return loss

    run.fit(_with(lambda m: Orthogonal(m.net.parameters(), lr=0.01)))


@case("statistics of rows and columns, saved and resumed", tolerance=1e-8)
def rows_and_columns(run: Run) -> None:
    trainer = run.fit(_with(lambda m: BySomeRows(m.parameters())), max_epochs=1, name="first")
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.record_checkpoint(run.folder / "a.ckpt", "checkpoint")
    run.fit(_with(lambda m: BySomeRows(m.parameters())), max_epochs=2, ckpt_path=str(run.folder / "a.ckpt"))


@case("Shampoo by hand: factors of each dimension in a list", tolerance=1e-7)
def factors(run: Run) -> None:
    run.fit(_with(lambda m: Shampoo(m.parameters())))


@case("gradients are divided by their common norm", refused=dict.fromkeys(PIPELINED, "ToNormOfAll with pp_size=2"))
def norm_of_all(run: Run) -> None:
    run.fit(_with(lambda m: ToNormOfAll(m.parameters())))


@case(
    "sharpness-aware minimisation as an optimizer that computes the loss twice",
    refused=dict.fromkeys(PIPELINED, "Sharpness with pp_size=2"),
    tolerance=1e-9,
)
def sharpness(run: Run) -> None:
    run.fit(_with(lambda m: Sharpness(m.parameters())))


@case(
    "a sparse embedding and SparseAdam",
    refused={
        **dict.fromkeys(HOLDS_PARTS, "SparseAdam takes sparse gradients"),
    },
    tolerance=1e-8,
)
def sparse_embedding(run: Run) -> None:
    class Looks(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.rows = nn.Embedding(32, 16, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = batch
            rows = self.rows(x[:, 0].mul(8).long().clamp(-16, 15) + 16)
            self.manual_backward(nn.functional.cross_entropy(self(x + rows), y))
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            rest = [param for param in self.parameters() if param is not self.rows.weight]
            return [torch.optim.SparseAdam([self.rows.weight], lr=0.1), torch.optim.SGD(rest, lr=0.05)]

    run.fit(Looks())
