"""Define small models without parallel code, as a user would write them, whose data are drawn from a seed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

__all__ = ["GAN", "GPT", "MODELS", "Llama", "ResNet", "TestModule", "build"]

VOCAB, CONTEXT = 32, 8


class InOrder(Sampler[int]):
    """Yield every ``num_replicas``-th index from ``rank`` on, so that global batches have consecutive indices.

    Each epoch starts a quarter of the indices later than the one before.
    """

    def __init__(self, length: int, num_replicas: int, rank: int) -> None:
        self.indices = range(rank, length - length % num_replicas, num_replicas)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        shift = self.epoch * len(self.indices) // 4
        return iter([*self.indices[shift:], *self.indices[:shift]])

    def __len__(self) -> int:
        return len(self.indices)


class TestModule(pl.LightningModule):
    """Provide an optimizer, and data whose global batches are the same on any number of ranks."""

    __test__ = False
    num_samples = 4096

    def __init__(self, optimizer: str = "sgd", global_batch_size: int = 8, chunks: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def data(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[Any]:
        kwargs = getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler = InOrder(self.num_samples, **kwargs)
        batch_size = self.hparams.global_batch_size // kwargs["num_replicas"]
        return DataLoader(TensorDataset(*self.data()), batch_size=batch_size, sampler=sampler)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.hparams.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=1e-3)
        if self.hparams.optimizer == "foreach_adamw":
            return torch.optim.AdamW(params, lr=1e-3, foreach=True)
        if self.hparams.optimizer == "fused_adamw":
            return torch.optim.AdamW(params, lr=1e-3, fused=True)
        if self.hparams.optimizer == "plain_sgd":
            return torch.optim.SGD(params, lr=0.05)
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, dim: int = 20, num_layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(CONTEXT, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPT(TestModule):
    """Model language with a tied embedding, a frozen parameter, and two parameters outside of any layer.

    Of these two, one is an attribute of the model and one of the LightningModule.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer()
        self.temperature = nn.Parameter(torch.ones(()))
        self.model.blocks[0].norm_1.bias.requires_grad_(False)

    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(VOCAB, (self.num_samples, 1), generator=generator)
        tokens = (start + torch.arange(CONTEXT + 1) * 3) % VOCAB
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self.model(tokens) * self.temperature
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn(self.conv(x)))


class ResNet(TestModule):
    """Classify images with BatchNorm and without a list of blocks.

    The batch is run in ``chunks`` parts, so that BatchNorm normalizes each part as that many ranks would.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.first, self.second = Residual(6), Residual(6)
        self.head = nn.Linear(6, 4)

    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(self.num_samples, 1, 6, 6, generator=generator)
        return images, (images[:, 0, :3].sum((1, 2)) > 0).long() + 2 * (images[:, 0, 3:].sum((1, 2)) > 0).long()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.second(self.first(self.stem(images))).mean((2, 3))
        return functional.cross_entropy(self.head(features), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        parts = [self.loss(images[r :: self.hparams.chunks], labels[r :: self.hparams.chunks])
                 for r in range(self.hparams.chunks)]  # fmt: skip
        return torch.stack(parts).mean()


class GAN(TestModule):
    """Train two networks by manual optimization with two optimizers.

    It accumulates and clips gradients by itself, because Lightning does neither with manual optimization.
    """

    def __init__(self, accumulate: int = 1, clip: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.shift = nn.Parameter(torch.zeros(8))

    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(self.num_samples, 4, generator=generator)
        return noise, torch.randn(self.num_samples, 8, generator=generator) * 0.5 + 1

    def configure_optimizers(self) -> Any:
        ours = [*self.generator.parameters(), self.shift]
        return [self.make_optimizer(ours), self.make_optimizer(self.discriminator.parameters())], []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        optimizer_g, optimizer_d = self.optimizers()
        accumulate = self.hparams.accumulate
        step = (batch_idx + 1) % accumulate == 0

        def loss(samples: Tensor, label: float) -> Tensor:
            logits = self.discriminator(samples)
            target = torch.full_like(logits, label)
            return functional.binary_cross_entropy_with_logits(logits, target) / accumulate

        self.toggle_optimizer(optimizer_g)
        loss_g = loss(self.generator(noise) + self.shift, 1.0)
        self.manual_backward(loss_g)
        if step:
            self.finish(optimizer_g)
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake = (self.generator(noise) + self.shift).detach()
        loss_d = (loss(real, 1.0) + loss(fake, 0.0)) / 2
        self.manual_backward(loss_d)
        if step:
            self.finish(optimizer_d)
        self.untoggle_optimizer(optimizer_d)
        self.log_dict({"train/loss_g": loss_g, "train/loss_d": loss_d}, sync_dist=True)

    def finish(self, optimizer: Any) -> None:
        if self.hparams.clip is not None:
            self.clip_gradients(optimizer, self.hparams.clip, "norm")
        optimizer.step()
        optimizer.zero_grad()


class Llama(TestModule):
    """Train a Hugging Face model that is built from a config with the loss that the model itself computes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    data = GPT.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        return self.model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, type[TestModule]] = {"gpt": GPT, "resnet": ResNet, "gan": GAN, "llama": Llama}


def build(name: str, seed: int = 0, **kwargs: Any) -> TestModule:
    """Build the model named ``name``, with weights that are drawn from ``seed``."""
    torch.manual_seed(seed)
    return MODELS[name](**kwargs)
