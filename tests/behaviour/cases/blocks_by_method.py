"""Test blocks that a model does not call as ``block(...)``, with activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier


class _Methods(Block):
    """Have other methods than ``forward``."""

    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))

    def twice(self, x: Tensor) -> Tensor:
        return self(self.compute(x))


class _Net(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inp = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.blocks = nn.ModuleList(_Methods() for _ in range(4))
        self.out = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.use(block, x)
        return self.out(x)


_USES: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "forward": ("block.forward(x)", lambda block, x: block.forward(x)),
    "method_with_forward": ("a method that calls self.forward", lambda block, x: block.encode(x)),
    "method_with_layers": ("a method that calls the layers of the block", lambda block, x: block.compute(x)),
    "method_and_call": ("a method that calls the layers, and then the block", lambda block, x: block.twice(x)),
    "alternately": ("the block and its method in turn", lambda block, x: block.encode(block(x))),
}

_REFUSED = {
    "forward": "blocks.0 cannot run again in the backward",
    "method_with_forward": "blocks.0 cannot run again in the backward",
    "method_and_call": r"calls net\.blocks\.2\.norm on its own, and again inside a module",
}
"""Why a pipeline refuses a case."""

for _name, (_title, _use) in _USES.items():
    for _mode in ("full", "selective"):

        @case(
            f"blocks are used by {_title}, with activation_checkpointing='{_mode}'",
            name=f"{_name}_{_mode}",
            strategy={"*": {"activation_checkpointing": _mode}},
            refused=dict.fromkeys(("pp", "nd"), _REFUSED[_name]) if _name in _REFUSED else {},
        )
        def _(run: Run, use: Callable[[Any, Tensor], Tensor] = _use) -> None:
            class Uses(Classifier):
                def __init__(self) -> None:
                    super().__init__()
                    self.net = _Net(use)
                    del self.head

                def forward(self, x: Tensor) -> Tensor:
                    return self.net(x)

            run.fit(Uses(), val=True)
