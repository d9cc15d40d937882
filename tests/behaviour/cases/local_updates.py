"""Compare local updates with a loop that trains each replica by hand, by the formulas of LocalSGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.compression import DiLoCo, LocalSGD
from tests.behaviour.case import Run, case
from tests.behaviour.models import tokens
from tests.behaviour.writers import Writer, momentum

TOLERANCE = 1e-9
NUM_REPLICAS, GLOBAL_BATCH = 2, 8


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def _by_hand(
    make: Callable[[], Writer],
    inner_steps: int,
    outer: dict[str, float] | None,
    clip: float,
    accumulate: int,
    epochs: int,
    saved_at: int = 0,
) -> dict[str, Tensor]:
    """Train replicas on their parts of each batch, one after another, and return their common weights at the end."""
    models = [make().double() for _ in range(NUM_REPLICAS)]
    for model in models:
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizers = [model.configure_optimizers() for model in models]
    common = [param.detach().clone() for param in models[0].parameters()]
    velocity = [torch.zeros_like(param) for param in common]

    def synchronize() -> None:
        with torch.no_grad():
            for index, params in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                mean = torch.stack(list(params)).mean(0)
                if outer is not None:
                    change = common[index] - mean
                    velocity[index] = outer["momentum"] * velocity[index] + change
                    mean = common[index] - outer["lr"] * (change + outer["momentum"] * velocity[index])
                common[index] = mean.clone()
                for param in params:
                    param.copy_(mean)

    steps, data = 0, tokens().tensors[0]
    for _ in range(epochs):
        for batch in range(4):
            part = data[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
            for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                (model.loss([part[index::NUM_REPLICAS]]) / accumulate).backward()
                if (batch + 1) % accumulate == 0:
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
            if (batch + 1) % accumulate == 0:
                steps += 1
                if steps % inner_steps == 0:
                    synchronize()
                if steps == saved_at:  # A checkpoint gives all replicas the mean of the optimizers' states.
                    for params in zip(*(model.parameters() for model in models), strict=True):
                        states = [opt.state[param] for opt, param in zip(optimizers, params, strict=True)]
                        mean = torch.stack([state["momentum_buffer"] for state in states]).mean(0)
                        for state in states:
                            state["momentum_buffer"] = mean.clone()
    if steps % inner_steps:
        synchronize()
    return {name: param.detach() for name, param in models[0].named_parameters()}


_DILOCO = {"outer_lr": 0.6, "outer_momentum": 0.8}

_CASES: dict[str, tuple[str, Any, dict[str, float] | None, Any, float, int, int]] = {
    "local_sgd": ("LocalSGD(2) with AdamW", lambda: LocalSGD(2), None, adamw, 0.0, 1, 1),
    "local_sgd_rest": (
        "LocalSGD(3) with clipping, and a rest at the end",
        lambda: LocalSGD(3),
        None,
        momentum,
        0.2,
        1,
        2,
    ),
    "local_sgd_accumulated": (
        "LocalSGD(2) with accumulation over two batches",
        lambda: LocalSGD(2),
        None,
        adamw,
        0.5,
        2,
        2,
    ),
    "diloco": (
        "DiLoCo(2) with AdamW and clipping",
        lambda: DiLoCo(2, **_DILOCO),
        {"lr": 0.6, "momentum": 0.8},
        adamw,
        0.3,
        1,
        2,
    ),
    "diloco_rest": (
        "DiLoCo(3) with momentum, and a rest at the end",
        lambda: DiLoCo(3, **_DILOCO),
        {"lr": 0.6, "momentum": 0.8},
        momentum,
        0.0,
        1,
        1,
    ),
}

for _name, (_title, _sync, _outer, _optimizer, _clip, _accumulate, _epochs) in _CASES.items():

    @case(_title, name=_name, tolerance=TOLERANCE, columns=("data",))
    def _(
        run: Run,
        sync: Any = _sync,
        outer: Any = _outer,
        optimizer: Any = _optimizer,
        clip: float = _clip,
        accumulate: int = _accumulate,
        epochs: int = _epochs,
    ) -> None:
        def make() -> Writer:
            return Writer(optimizer)

        if run.is_reference:
            weights = _by_hand(make, sync().inner_steps, outer, clip, accumulate, epochs)
            run.record("weights", weights)
            return
        model = make()
        strategy = run.make_strategy(sync=sync())
        run.fit(
            model,
            run.loader(tokens()),
            strategy=strategy,
            gradient_clip_val=clip or None,
            accumulate_grad_batches=accumulate,
            max_epochs=epochs,
            observe=False,
        )
        run.record("weights", whole_parameters(model))


@case(
    "LocalSGD(2), saved after a synchronization and resumed, is the run that was not stopped",
    tolerance=TOLERANCE,
    columns=("data",),
)
def resumed(run: Run) -> None:
    """Compare within the strategy; the reference is trained by hand."""

    def make() -> Writer:
        return Writer(momentum)

    if run.is_reference:
        run.record("weights", _by_hand(make, 2, None, 0.0, 1, 2, saved_at=4))
        return
    loader = run.loader(tokens())
    trainer = run.fit(make(), loader, strategy=run.make_strategy(sync=LocalSGD(2)), observe=False)
    trainer.save_checkpoint(run.folder / "half.ckpt")
    model = make()
    path = str(run.folder / "half.ckpt")
    strategy = run.make_strategy(sync=LocalSGD(2))
    run.fit(model, loader, strategy=strategy, max_epochs=2, ckpt_path=path, observe=False)
    run.record("weights", whole_parameters(model))
