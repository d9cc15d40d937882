"""Test buffers that change during training, and precisions."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.behaviour.case import ROUNDED, Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier

N = NUM_FEATURES


@case("a buffer that counts steps in training_step")
def counting_buffer(run: Run) -> None:
    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.count += 1
            return loss

    run.fit(Counts())


_MICROBATCHES = dict.fromkeys(
    ("pp", "nd", "nd_tp"),
    "A step that changes a buffer by the batch, and computes with it, sees the change of its microbatch.",
)


@case("a buffer with a running mean of the inputs, changed in training_step", reference="ddp", differs=_MICROBATCHES)
def running_mean(run: Run) -> None:
    class Runs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return super().forward(x - self.mean)

    run.fit(Runs(), val=True)


@case("a buffer inside a block, changed by its forward", reference="ddp", differs=_MICROBATCHES)
def buffer_in_block(run: Run) -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(N, N)
            self.register_buffer("centre", torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.layer(x))
            if self.training:
                self.centre.copy_(0.9 * self.centre + 0.1 * h.detach().mean(0))
            return h - self.centre

    class Centred(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[Centres() for _ in range(4)])

    run.fit(Centred(), val=True)


@case("a queue of past outputs in a buffer, filled in on_train_batch_end (MoCo)")
def queue(run: Run) -> None:
    class Queues(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(16, N))
            self.register_buffer("position", torch.zeros((), dtype=torch.long))

        def loss(self, batch: Any) -> Tensor:
            h = self.net(batch[0])
            return nn.functional.cross_entropy(self.head(h), batch[1]) + 0.01 * (h @ self.queue.T).pow(2).mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rows = self.all_gather(batch[0])
            rows = rows.transpose(0, 1).flatten(0, 1) if rows.dim() == 3 else rows
            begin = int(self.position)
            self.queue[begin : begin + len(rows)] = rows
            self.position.fill_((begin + len(rows)) % 16)

    run.fit(Queues())


@case("a buffer that is replaced by a new tensor in on_train_epoch_start")
def replaced_buffer(run: Run) -> None:
    class Replaces(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(N))

        def on_train_epoch_start(self) -> None:
            self.shift = torch.full((N,), 0.1 * self.current_epoch, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift)

    run.fit(Replaces(), max_epochs=2, val=True)


@case("a buffer that is not in checkpoints, and one that is None")
def transient_buffers(run: Run) -> None:
    class Transient(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((N,), 0.5), persistent=False)
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    trainer = run.fit(Transient())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.fit(Transient(), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2, name="second")


@case("a buffer that is registered in on_fit_start")
def late_buffer(run: Run) -> None:
    class Late(Classifier):
        def on_fit_start(self) -> None:
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64))

        def on_train_batch_end(self, *args: Any) -> None:
            self.weights.mul_(0.9)
            self.log("weight", self.weights.sum())

    run.fit(Late())


def _in(precision: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a precision; on the CPU, Lightning replaces 16-mixed by bf16-mixed."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {
        "precision": None,
        "plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
    }


# Each name maps to (title, precision, tolerance), which is a few times the rounding of the format.
_PRECISIONS: dict[str, tuple[str, str, float]] = {
    "32_true": ("precision='32-true'", "32-true", 1e-5),
    "bf16_mixed": ("precision='bf16-mixed'", "bf16-mixed", 2e-2),
    "bf16_true": ("precision='bf16-true'", "bf16-true", 3e-2),
    "16_true": ("precision='16-true'", "16-true", 5e-3),
    "16_mixed": ("precision='16-mixed'", "16-mixed", 5e-3),
}

for _name, (_title, _precision, _tolerance) in _PRECISIONS.items():

    @case(
        f"{_title}, to the rounding of the format",
        name=f"precision_{_name}",
        tolerance=_tolerance,
        reference="ddp",
        differs=dict.fromkeys(("tp_tokens", "cp", "tiled", "ep"), ROUNDED) if "bf16" in _name else {},
    )
    def _(run: Run, precision: str = _precision) -> None:
        class Casts(Classifier):
            def loss(self, batch: Any) -> Tensor:
                x, y = batch
                logits = self(x.to(self.head.weight.dtype))
                run.record("dtype of the output", str(logits.dtype))
                return nn.functional.cross_entropy(logits.float(), y)

        trainer = run.fit(Casts(lr=0.01), **_in(precision))
        run.record("loss", trainer.callback_metrics["train/loss"])


@case("torch.autocast of the user's own around a block", tolerance=1e-2)
def own_autocast(run: Run) -> None:
    class Casts(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.net(x.float())
            return self.head(h.float()).double()

    trainer = run.fit(Casts(lr=0.01), precision="32-true", observe=False)
    run.record("loss", trainer.callback_metrics["train/loss"])


class _Normed(nn.Module):
    """Normalize a convolution's output by statistics of the batch, and filter it by a kernel in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(N, N, 3, padding=1)
        self.norm = nn.BatchNorm1d(N)
        self.register_buffer("kernel", torch.ones(N, 1, 3) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.norm(self.conv(x)))
        return nn.functional.conv1d(x, self.kernel, padding=1, groups=N)


_OF_COMPRESSION = {"compressed": "Gradients are rounded to bfloat16, which has fewer digits than float16."}
_OF_PARTS = {"tp": "Each rank rounds its part of the sum that is the gradient of a layer's input."}
_OF_MICROBATCHES = dict.fromkeys(("pp", "nd", "nd_tp"), "BatchNorm computes with the statistics of microbatches.")

for _precision in ("bf16-mixed", "16-mixed"):
    for _columns, _more in {"": {}, "_zero_1": {"zero_stage": 1}, "_offloaded": {"offload": "both"}}.items():

        @case(
            f"BatchNorm, and a convolution with a kernel in a buffer, in {_precision}"
            + "".join(f", with {key}={value!r} under full_shard" for key, value in _more.items()),
            name=f"batch_norm_{_precision}{_columns}".replace("-", "_"),
            tolerance=1e-6,
            reference="ddp",
            differs=_OF_MICROBATCHES | _OF_PARTS | (_OF_COMPRESSION if _precision == "16-mixed" else {}),
            strategy=dict.fromkeys(("full",) if "zero_stage" in _more else ("full", "hybrid"), _more),
        )
        def _(run: Run, precision: str = _precision) -> None:
            class Norms(Classifier):
                def __init__(self) -> None:
                    super().__init__(lr=0.01)
                    self.net = nn.Sequential(*[_Normed() for _ in range(3)])

                def forward(self, x: Tensor) -> Tensor:
                    out = self.net(x.float()[:, :, None].expand(-1, -1, 4)).mean(2)
                    assert out.dtype is {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
                    return self.head(out)

            model = Norms()
            run.fit(model, **_in(precision), val=True)
            run.record("dtypes", {name: str(tensor.dtype) for name, tensor in model.state_dict().items()})
