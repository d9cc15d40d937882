"""Test variational autoencoders, quantisation, normalising flows, and critics with clipped weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, samples

N, C, Z = NUM_FEATURES, NUM_CLASSES, 8


def _with_noise(width: int = Z) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*samples().tensors, torch.randn(64, width, generator=generator, dtype=torch.float64))


class _Autoencoder(pl.LightningModule):
    def __init__(self, latent: int = Z) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(N, N), Block(), Block(), nn.Linear(N, latent))
        self.decoder = nn.Sequential(nn.Linear(Z, N), Block(), Block(), nn.Linear(N, N))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@case("a variational autoencoder whose KL weight rises with the step")
def vae(run: Run) -> None:
    class Vae(_Autoencoder):
        def __init__(self) -> None:
            super().__init__(2 * Z)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _, noise = batch
            mean, log_variance = self.encoder(x).chunk(2, dim=-1)
            reconstruction = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
            error = functional.mse_loss(reconstruction, x, reduction="none").sum(-1).mean()
            kl = (-0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())).sum(-1).mean()
            beta = min(1.0, self.trainer.global_step / 6)
            loss = error + beta * kl
            self.log_dict({"elbo": loss, "error": error, "kl": kl, "beta": beta}, sync_dist=True)
            return loss

    run.fit(Vae(), run.loader(_with_noise()), max_epochs=2)


@case("a VQ-VAE: a straight-through codebook, counts of its use, and unused codes that begin anew")
def codebook(run: Run) -> None:
    class Vq(_Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.codebook = nn.Embedding(24, Z)
            self.codebook.weight.data.uniform_(-1, 1)
            self.register_buffer("usage", torch.zeros(24, dtype=torch.long))
            self.register_buffer("fresh", torch.randn(24, Z), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x = batch[0]
            z = self.encoder(x)
            codes = torch.cdist(z, self.codebook.weight).argmin(1)
            quantised = self.codebook(codes)
            loss = functional.mse_loss(quantised, z.detach()) + 0.25 * functional.mse_loss(z, quantised.detach())
            loss = loss + functional.mse_loss(self.decoder(z + (quantised - z).detach()), x)
            self.log("train/loss", loss, sync_dist=True)
            return {"loss": loss, "codes": codes}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            codes = self.all_gather(outputs["codes"]).flatten()
            self.usage += torch.bincount(codes, minlength=24)

        def on_train_epoch_end(self) -> None:
            dead = self.usage == 0
            self.codebook.weight.data[dead] = self.fresh[dead]
            self.log("dead codes", dead.double().sum())
            self.usage.zero_()

    run.fit(Vq(), max_epochs=2)


@case("Gumbel softmax, hard and straight-through, at a temperature that falls by epoch in a buffer")
def gumbel(run: Run) -> None:
    class Gumbel(_Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.tensor(2.0))

        def on_train_epoch_start(self) -> None:
            self.temperature.mul_(0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _, noise = batch
            soft = ((self.encoder(x) + noise) / self.temperature).softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
            loss = functional.mse_loss(self.decoder(hard - soft.detach() + soft), x)
            self.log("train/loss", loss, sync_dist=True)
            self.log("temperature", self.temperature)
            return loss

    run.fit(Gumbel(), run.loader(_with_noise()), max_epochs=2)


@case("WGAN: a critic with clamped weights, two critic steps for each of the generator")
def wgan(run: Run) -> None:
    class Wgan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(1)
            self.generator = nn.Sequential(nn.Linear(Z, N), Block(), nn.Linear(N, N))
            self.critic = nn.Sequential(nn.Linear(N, N), Block(), nn.Linear(N, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, _, noise = batch
            generator_optimizer, critic_optimizer = self.optimizers()
            critic_loss = self.critic(self.generator(noise).detach()).mean() - self.critic(x).mean()
            critic_optimizer.zero_grad()
            self.manual_backward(critic_loss)
            critic_optimizer.step()
            for p in self.critic.parameters():
                p.data.clamp_(-0.2, 0.2)
            self.log("critic", critic_loss, prog_bar=True, sync_dist=True)
            if (batch_idx + 1) % 2 == 0:
                loss = -self.critic(self.generator(noise)).mean()
                generator_optimizer.zero_grad()
                self.manual_backward(loss)
                generator_optimizer.step()
                self.log("generator", loss, prog_bar=True, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.RMSprop(m.parameters(), lr=5e-3) for m in (self.generator, self.critic)]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]

    run.fit(Wgan(), run.loader(_with_noise()), max_epochs=2)


@case("a normalising flow: couplings with masks in buffers hand on a sum of log-determinants")
def coupling_flow(run: Run) -> None:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.register_buffer("mask", (torch.arange(N) % 2 == flip).to(torch.get_default_dtype()))
            self.scale = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh())
            self.shift = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))

        def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
            kept = x * self.mask
            s = self.scale(kept) * (1 - self.mask)
            return kept + (1 - self.mask) * (x * s.exp() + self.shift(kept)), log_det + s.sum(-1)

    class Flow(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.couplings = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))
            self.prior_mean = nn.Parameter(torch.zeros(N))
            self.prior_log_std = nn.Parameter(torch.zeros(N))

        def log_prob(self, x: Tensor) -> Tensor:
            z, log_det = x, x.new_zeros(len(x))
            for coupling in self.couplings:
                z, log_det = coupling(z, log_det)
            prior = torch.distributions.Normal(self.prior_mean, self.prior_log_std.exp())
            return prior.log_prob(z).sum(-1) + log_det

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = -self.log_prob(batch[0]).mean()
            self.log("nll", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/bits", -self.log_prob(batch[0]).mean() / N, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=5e-3)

    run.fit(Flow(), val=True, max_epochs=2, gradient_clip_val=5.0)
