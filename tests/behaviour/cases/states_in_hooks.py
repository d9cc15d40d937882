"""Test hooks that read the states of an optimizer, and keep them until after the fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from tests.behaviour.case import OWN_GRADIENTS, Run, case
from tests.behaviour.models import Classifier

_STAGES = ("pp", "nd", "nd_tp")


class _Momentum(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _by_name(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _by_class(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _redistributed(tensor: Any) -> Any:
    return (
        tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
        if isinstance(tensor, DTensor)
        else tensor
    )


_WHOLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "by_name": ("that have such a method", _by_name),
    "by_class": ("that are DTensors", _by_class),
    "redistributed": ("that are DTensors, by redistribute()", _redistributed),
}

for _name, (_which, _function) in _WHOLE.items():

    @case(
        f"a hook calls full_tensor() of states, weights and gradients {_which}",
        name=f"full_tensor_{_name}",
        differs={"local": OWN_GRADIENTS},
    )
    def _(run: Run, whole: Callable[[Any], Any] = _function) -> None:
        class Reads(_Momentum):
            def on_train_batch_end(self, *args: Any) -> None:
                optimizer = self.trainer.optimizers[0]
                total = 0.0
                for param in self.parameters():
                    state = optimizer.state[param]
                    total += float(whole(param.grad).abs().max()) + float(whole(param).sum())
                    total += float(whole(state["momentum_buffer"]).norm())
                    with torch.no_grad():
                        param.mul_(1 - 0.01 * whole(state["momentum_buffer"]).norm())
                self.log("total", total)

        run.fit(Reads())


@case(
    "a hook calls full_tensor() of what it computes from weights and states, where these are sharded",
    refused=dict.fromkeys(("data", "pp", "compressed"), "has no attribute 'full_tensor'"),
)
def full_tensor_of_all(run: Run) -> None:
    def whole(tensor: Any) -> Tensor:
        return tensor if run.is_reference else tensor.full_tensor()  # type: ignore[no-any-return]

    class Reads(_Momentum):
        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            for index in (0, -1):
                param = self.net[index].weight
                self.log(f"state of {index}", whole(2 * optimizer.state[param]["momentum_buffer"].clone()).std())
                self.log(f"weight of {index}", whole(param.detach() + 1).std() + whole(param).std())

    run.fit(Reads())


@case(
    "a hook keeps clones of states, which are read after the fit",
    refused=dict.fromkeys(_STAGES, r"on_train_batch_end kept a tensor .* of another stage.*\.numpy\(\)"),
)
def kept_states(run: Run) -> None:
    class Keeps(_Momentum):
        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            self.kept = [optimizer.state[param]["momentum_buffer"].double().clone() for param in self.parameters()]

    model = Keeps()
    run.fit(model)
    run.record("largest", [float((kept / 2).abs().max()) for kept in model.kept])


@case("a hook keeps the values of states, which are read after the fit")
def kept_values(run: Run) -> None:
    class Keeps(_Momentum):
        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            states = [optimizer.state[param]["momentum_buffer"] for param in self.parameters()]
            self.kept = [_by_name(state).cpu().numpy() for state in states]

    model = Keeps()
    run.fit(model)
    run.record("kept", [abs(kept).max().item() for kept in model.kept])


for _name, _is_shard in {
    "by_name": lambda tensor: hasattr(tensor, "to_local"),
    "by_class": lambda tensor: isinstance(tensor, DTensor),
}.items():

    @case(
        f"a hook reads to_local() of states, {_name.replace('_', ' ')}",
        name=f"local_parts_{_name}",
        refused={"nd": r"on_train_batch_end calls to_local\(\) of a tensor of one stage"},
        differs=dict.fromkeys(("full", "hybrid", "tp", "data_tp", "nd_tp"), "Each rank reads its own part."),
    )
    def _(run: Run, is_shard: Callable[[Any], bool] = _is_shard) -> None:
        class Reads(_Momentum):
            def on_train_batch_end(self, *args: Any) -> None:
                optimizer = self.trainer.optimizers[0]
                for index in (-1, 0):
                    state: Any = optimizer.state[self.net[index].weight]["momentum_buffer"]
                    self.last = float((state.to_local() if is_shard(state) else state).sum())

        run.fit(Reads())
