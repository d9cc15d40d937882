"""Define small modules and datasets that many cases share, written as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

__all__ = [
    "VARIANTS",
    "Block",
    "Classifier",
    "LanguageModel",
    "Network",
    "has_variants",
    "samples",
    "sgd",
    "tokens",
    "variant",
]

NUM_FEATURES, NUM_CLASSES, VOCABULARY, LENGTH = 16, 4, 32, 8
NUM_TOKENS = 6
"""Number of tokens of a sample under a variant; it is the size of no batch."""


def samples(num: int = 64, seed: int = 0) -> TensorDataset:
    """Make a dataset of ``num`` points with ``NUM_FEATURES`` features each, and a class for each point."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = (x[:, :NUM_CLASSES] * 2).argmax(1)
    if _variant.name:  # Each sample is a sequence.
        others = torch.randn(num, NUM_TOKENS - 1, NUM_FEATURES, generator=generator, dtype=torch.float64)
        x = torch.cat([x[:, None], others], 1)
    return TensorDataset(x, y)


def tokens(num: int = 64, seed: int = 0, length: int = LENGTH) -> TensorDataset:
    """Make a dataset of ``num`` sequences of ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(VOCABULARY, (num, length), generator=generator))


class Mixing(nn.Module):
    """Compute attention, and a feed-forward layer of each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(x)
        return mixed + self.mlp(x + mixed)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Compute attention with four heads, of each token to itself and to those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_size = width // 4
        # A bias of keys would have no gradient.
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Hold the weights of four experts in two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 4
        self.first = nn.Parameter(torch.randn(4, width, width) * width**-0.5)
        self.second = nn.Parameter(torch.randn(4, width, width) * width**-0.5)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = functional.one_hot(index, self.num_experts).to(x.dtype) * weights[..., None]
        hidden = torch.einsum("nd,edh->neh", x, self.first).relu()
        return (torch.einsum("neh,ehd->ned", hidden, self.second) * chosen.sum(1)[..., None]).sum(1)


class Mixture(nn.Module):
    """Send each token to two experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, index, weights).view_as(x)


VARIANTS: dict[str, Callable[[int], nn.Module]] = {"attention": Mixing, "experts": Mixture}
"""What blocks have in addition, each a function of the width, so that the cases of all models show these as well."""


class _Variant:
    """Hold the key of the variant that :class:`Block` has, and whether a block was made."""

    name = ""
    used = False


_variant = _Variant()


@contextmanager
def variant(name: str) -> Iterator[_Variant]:
    """Give each :class:`Block` that is made in this context what :data:`VARIANTS` has under ``name``.

    The samples of :func:`samples` are sequences then.

    Args:
        name: Key of :data:`VARIANTS`; empty: blocks as they are.
    """
    _variant.name, _variant.used = name, False
    try:
        yield _variant
    finally:
        _variant.name = ""


def has_variants() -> None:
    """Note that the model which is made now has attention and experts of its own, so that it shows all variants."""
    _variant.used = True


class Block(nn.Module):
    """Add a feed-forward layer's output to its input, after what the :func:`variant` says."""

    def __init__(self, width: int = NUM_FEATURES) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        if _variant.name:
            self.varied = VARIANTS[_variant.name](width)
            _variant.used = True

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "varied"):
            x = x + self.varied(x)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Pooled(nn.LayerNorm):
    """Normalize the mean of the tokens of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1) if x.dim() == 3 else x)


class Classifier(pl.LightningModule):
    """Classify by four blocks and a head.

    It logs ``train/loss``, ``test/loss`` and, in validation, ``val/loss`` and ``val/accuracy``.
    """

    def __init__(self, lr: float = 0.05, num_blocks: int = 4, optimizer: str = "sgd") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        norm = Pooled if _variant.name else nn.LayerNorm
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_FEATURES), *[Block() for _ in range(num_blocks)], norm(NUM_FEATURES)
        )
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.log("val/loss", loss, sync_dist=True)
        self.log("val/accuracy", (logits.argmax(1) == y).double().mean(), sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("test/loss", loss, sync_dist=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        params = self.parameters()
        if self.hparams.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=self.hparams.lr)
        return torch.optim.SGD(params, lr=self.hparams.lr, momentum=0.9)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Make a plain gradient descent optimizer; errors of its updates are proportional to those of the gradients."""
    return torch.optim.SGD(params, lr=0.05)


class Network(Classifier):
    """Classify by a given network, which maps the features of the samples to the logits of the classes.

    Args:
        make: Function that builds the network; it is called after torch is seeded.
        optimizer: Function that makes the optimizer of the given parameters.
    """

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[[Any], Any] = sgd) -> None:
        pl.LightningModule.__init__(self)
        torch.manual_seed(1)
        self.net = make()
        self._optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


class LanguageModel(pl.LightningModule):
    """Model language with a tied embedding and head; all layers are direct children of the LightningModule."""

    def __init__(self, num_blocks: int = 2, width: int = NUM_FEATURES) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch[0]
        logits = self(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
