"""What only shows on an accelerator: where tensors are, what is measured, and what a step waits for."""

from __future__ import annotations

import os

import pytest
from torch.distributed.tensor import DTensor

from lightning_dist import FullShardStrategy
from tests.accelerator_rules import NAME
from tests.distributed.fit import make_trainer
from tests.models import build
from tests.pool import WorkerPool


def places_of_states(offload: str | None) -> set[tuple[str, str]]:
    """Train, and return the device types of parameters and of optimizer states in the last step."""
    model = build("gpt", seed=int(os.environ["RANK"]), optimizer="adamw")
    places: set[tuple[str, str]] = set()

    def on_train_batch_end(*args: object) -> None:
        for param, state in model.trainer.optimizers[0].state.items():
            for key in ("exp_avg", "exp_avg_sq") if param.ndim else ():  # Scalars are replicated, and not offloaded.
                local = [t.to_local() if isinstance(t, DTensor) else t for t in (param, state[key])]
                places.add((local[0].device.type, local[1].device.type))

    model.on_train_batch_end = on_train_batch_end
    make_trainer("auto", strategy=FullShardStrategy(offload=offload), max_steps=2).fit(model)
    return places


@pytest.mark.parametrize(
    ("offload", "places"),
    [(None, {(NAME, NAME)}), ("params", {("cpu", NAME)}), ("optimizer", {(NAME, "cpu")}), ("both", {("cpu", "cpu")})],
)
def test_offloaded_states_are_in_the_memory_of_the_cpu(
    simulated: WorkerPool, offload: str | None, places: set[tuple[str, str]]
) -> None:
    assert simulated.run(places_of_states, 2, offload) == [places] * 2
