"""Test diffusion models: noise schedules in buffers, hand-written weight averages, sampling, guidance, distillation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.behaviour.case import HOLDS_PARTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Classifier, samples

SEVERAL_CALLS = dict.fromkeys(("pp", "nd", "nd_tp"), "The step calls .* times: a pipeline runs .* once a microbatch")
N, C, STEPS = NUM_FEATURES, NUM_CLASSES, 10


def _noised() -> TensorDataset:
    """Make a dataset of samples, each with a label, a time, a noise, and a flag whether to keep the label."""
    x, y = samples().tensors
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(64, N, generator=generator, dtype=torch.float64)
    t = torch.randint(STEPS, (64,), generator=generator)
    return TensorDataset(x, y, t, noise, torch.rand(64, generator=generator) > 0.3)


class _AdaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N, elementwise_affine=False)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(N, 3 * N))
        self.up = nn.Linear(N, 2 * N)
        self.down = nn.Linear(2 * N, N)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulate(condition).chunk(3, dim=-1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(functional.gelu(self.up(h)))


class _Denoiser(nn.Module):
    """Predict noise by a small diffusion transformer (DiT) whose inputs are vectors."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = torch.exp(-math.log(100.0) * torch.arange(N // 2) / (N // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.time = nn.Sequential(nn.Linear(N, N), nn.SiLU(), nn.Linear(N, N))
        self.label = nn.Embedding(C + 1, N)
        self.blocks = nn.ModuleList(_AdaBlock() for _ in range(3))
        self.out = nn.Linear(N, N)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        angles = t[:, None] * self.frequencies[None]
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        if y is not None:
            condition = condition + self.label(y)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class _Ddpm(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = _Denoiser()
        betas = torch.linspace(1e-2, 0.3, STEPS, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1 - betas, 0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())
        snr = alphas_cumprod / (1 - alphas_cumprod)
        self.register_buffer("loss_weights", snr.clamp(max=5.0) / snr, persistent=False)

    def q_sample(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return self.sqrt_alphas_cumprod[t][:, None] * x + self.sqrt_one_minus_alphas_cumprod[t][:, None] * noise

    def loss(self, batch: Any) -> Tensor:
        x, _, t, noise, _ = batch
        error = functional.mse_loss(self.model(self.q_sample(x, t, noise), t), noise, reduction="none").mean(1)
        return (self.loss_weights[t] * error).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


class _Ema(nn.Module):
    """Average weights as latent-diffusion does: in buffers with the names of the parameters without dots."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.register_buffer("decay", torch.tensor(decay, dtype=torch.float64))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.names[name] = name.replace(".", "")
                self.register_buffer(self.names[name], p.clone().detach().data)

    def forward(self, model: nn.Module) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            shadow = dict(self.named_buffers())
            for name, p in model.named_parameters():
                if p.requires_grad:
                    average = shadow[self.names[name]]
                    average.sub_((1.0 - decay) * (average - p))

    def copy_to(self, model: nn.Module) -> None:
        shadow = dict(self.named_buffers())
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data.copy_(shadow[self.names[name]].data)

    def store(self, parameters: Any) -> None:
        self.collected = [p.clone() for p in parameters]

    def restore(self, parameters: Any) -> None:
        for kept, p in zip(self.collected, parameters, strict=True):
            p.data.copy_(kept.data)


@case(
    "latent-diffusion's average in buffers, swapped in by a context manager in validation_step",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "uses the parameter .* outside of .*what swaps or averages"),
)
def ema_scope(run: Run) -> None:
    class Averaged(_Ddpm):
        def __init__(self) -> None:
            super().__init__()
            self.model_ema = _Ema(self.model)

        @contextmanager
        def ema_scope(self) -> Iterator[None]:
            self.model_ema.store(self.model.parameters())
            self.model_ema.copy_to(self.model)
            try:
                yield
            finally:
                self.model_ema.restore(self.model.parameters())

        def on_train_batch_end(self, *args: Any) -> None:
            self.model_ema(self.model)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            with self.ema_scope():
                averaged = self.loss(batch)
            self.log_dict({"val/loss": loss, "val/loss_ema": averaged}, sync_dist=True)

    data = _noised()
    run.fit(Averaged(), run.loader(data), run.loader(data), max_epochs=2)


@case(
    "samples are drawn step by step in on_validation_epoch_end, from noise of a fixed seed",
    refused=dict.fromkeys(HOLDS_PARTS, "was called outside of a training, validation, test or predict step"),
)
def sampling(run: Run) -> None:
    class Samples(_Ddpm):
        @torch.no_grad()
        def on_validation_epoch_end(self) -> None:
            generator = torch.Generator().manual_seed(7)
            x = torch.randn(4, N, generator=generator, dtype=torch.float64).to(self.device)
            for i in reversed(range(STEPS)):
                t = torch.full((len(x),), i, device=self.device, dtype=torch.long)
                a, s = self.sqrt_alphas_cumprod[i], self.sqrt_one_minus_alphas_cumprod[i]
                noise = self.model(x, t)
                start = ((x - s * noise) / a).clamp(-3, 3)
                if i:
                    x = self.sqrt_alphas_cumprod[i - 1] * start + self.sqrt_one_minus_alphas_cumprod[i - 1] * noise
            self.log("val/samples", start.pow(2).mean())

    data = _noised()
    run.fit(Samples(), run.loader(data), run.loader(data), max_epochs=2)


@case("flow matching with labels that are sometimes left out, and predictions with guidance by a doubled batch")
def guidance(run: Run) -> None:
    class Guided(_Ddpm):
        def loss(self, batch: Any) -> Tensor:
            x, y, t, noise, keep = batch
            time = ((t + 0.5) / STEPS)[:, None]
            labels = torch.where(keep, y, torch.full_like(y, C))
            velocity = self.model((1 - time) * noise + time * x, t, labels)
            return functional.mse_loss(velocity, x - noise)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            _, y, _, x, _ = batch
            for i in range(3):
                t = torch.full((2 * len(x),), 3 * i, device=self.device)
                velocity = self.model(torch.cat([x, x]), t, torch.cat([y, torch.full_like(y, C)]))
                with_label, without = velocity.chunk(2)
                x = x + (without + 2.0 * (with_label - without)) / 3
            return x

    model, data = Guided(), _noised()
    trainer = run.fit(model, run.loader(data))
    run.record_predictions(trainer.predict(model, run.loader(data)))


@case(
    "progressive distillation: the teacher takes the student's weights by load_state_dict at each epoch's start",
    refused=SEVERAL_CALLS,
)
def progressive_distillation(run: Run) -> None:
    class Distils(_Ddpm):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()

        def on_train_epoch_start(self) -> None:
            self.teacher.load_state_dict(self.model.state_dict())
            self.teacher.eval()

        def loss(self, batch: Any) -> Tensor:
            _, _, t, x, _ = batch
            with torch.no_grad():
                middle = x + 0.5 * self.teacher(x, t)
                target = middle + 0.5 * self.teacher(middle, t + 1) - x
            return functional.mse_loss(self.model(x, t), target + batch[0])

    data = _noised()
    run.fit(Distils(), run.loader(data), run.loader(data), max_epochs=2)


@case(
    "latent diffusion: a frozen first stage from a checkpoint, and a scale that the first batch sets in a buffer",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "was called outside of a"),
)
def latent(run: Run) -> None:
    first = Classifier(num_blocks=1)
    trainer = run.fit(first, name="first stage")
    trainer.save_checkpoint(run.folder / "first.ckpt")

    class Latent(_Ddpm):
        def __init__(self, path: Any) -> None:
            super().__init__()
            self.first_stage = Classifier.load_from_checkpoint(path, weights_only=False).eval().requires_grad_(False)
            self.register_buffer("scale_factor", torch.tensor(1.0))

        @torch.no_grad()
        def encode(self, x: Tensor) -> Tensor:
            return self.first_stage.net(x)

        @torch.no_grad()
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 0 and self.global_step == 0 and batch_idx == 0:
                z = self.all_gather(self.encode(batch[0]))
                del self.scale_factor
                self.register_buffer("scale_factor", 1.0 / z.flatten().std())

        def loss(self, batch: Any) -> Tensor:
            x, y, t, noise, _ = batch
            z = self.q_sample(self.scale_factor * self.encode(x), t, noise)
            return functional.mse_loss(self.model(z, t, y), noise)

    data = _noised()
    run.fit(Latent(run.folder / "first.ckpt"), run.loader(data), run.loader(data), name="second stage")
