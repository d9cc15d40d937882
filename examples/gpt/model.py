"""Define a byte-level GPT and its training, in plain PyTorch and plain Lightning."""

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

VOCAB_SIZE = 256  # The vocabulary has one entry per byte.


class Linear(nn.Linear):
    """Apply a linear layer without bias, initialized with the standard deviation ``gain / sqrt(in_features)``."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0) -> None:
        self.gain = gain  # It must be set first, because super().__init__() calls reset_parameters().
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights from a normal distribution."""
        nn.init.normal_(self.weight, std=self.gain / math.sqrt(self.in_features))


class RotaryEmbedding(nn.Module):
    """Embed positions by rotating the two halves of a head (RoPE, Su et al., 2021, https://arxiv.org/abs/2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_len: int, base: float = 10_000.0) -> None:
        super().__init__()
        half = head_dim // 2
        # Use float32 for every default dtype, because bfloat16 cannot distinguish neighbouring positions.
        frequencies = base ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x`` (batch, heads, length, head_dim) by each position's angles."""
        length = x.size(-2)
        cos, sin = self.cos[:length], self.sin[:length]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Apply causal multi-head self-attention with rotary position embeddings."""

    def __init__(self, dim: int, num_heads: int, max_len: int, residual_gain: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = Linear(dim, dim)
        self.key = Linear(dim, dim)
        self.value = Linear(dim, dim)
        self.rotary = RotaryEmbedding(self.head_dim, max_len)
        self.out = Linear(dim, dim, gain=residual_gain)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, length, dim) to the same shape."""

        def split_heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key = self.rotary(split_heads(self.query(x))), self.rotary(split_heads(self.key(x)))
        mixed = functional.scaled_dot_product_attention(query, key, split_heads(self.value(x)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Apply a gated feed-forward layer (SwiGLU, Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, residual_gain: float) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden_dim)
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim, gain=residual_gain)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, length, dim) to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Apply a pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, hidden_dim: int, max_len: int, residual_gain: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads, max_len, residual_gain)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, hidden_dim, residual_gain)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, length, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Predict the next byte by a decoder-only transformer with RMSNorm, rotary position embeddings and SwiGLU.

    The initial weights of projections into the residual stream are smaller by a factor of ``sqrt(2 * num_layers)``, so
    that the variance of the stream does not grow with depth (Radford et al., 2019, GPT-2, section 2.3).

    Args:
        dim: Width of the residual stream, a multiple of ``2 * num_heads``.
        num_layers: Number of blocks.
        num_heads: Number of attention heads of each block.
        hidden_dim: Width of the feed-forward layer; None means 8/3 of ``dim``, rounded up to a multiple of 32.
        max_len: Length of the longest sequence, in bytes.

    Raises:
        ValueError: If ``dim`` does not divide into heads of an even size.
    """

    def __init__(
        self,
        dim: int = 192,
        num_layers: int = 4,
        num_heads: int = 6,
        hidden_dim: int | None = None,
        max_len: int = 128,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(
                f"dim={dim} does not divide into num_heads={num_heads} heads of an even size: "
                f"use a multiple of {2 * num_heads} for dim."
            )
        hidden_dim = hidden_dim or math.ceil(8 * dim / 3 / 32) * 32
        residual_gain = 1 / math.sqrt(2 * num_layers)
        self.max_len = max_len
        self.embedding = nn.Embedding(VOCAB_SIZE, dim)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, hidden_dim, max_len, residual_gain) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = Linear(dim, VOCAB_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes ``x`` (batch, length), int64, to logits (batch, length, 256) of each next byte."""
        if x.size(1) > self.max_len:
            raise ValueError(
                f"A sequence of {x.size(1)} bytes exceeds max_len={self.max_len}: raise the model's max_len or lower "
                f"the data's context."
            )
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTModule(LightningModule):
    """Train a `GPT` with AdamW, a linear warm-up and a cosine decay over the whole run.

    Args:
        dim: Width of the residual stream, a multiple of ``2 * num_heads``.
        num_layers: Number of blocks.
        num_heads: Number of attention heads of each block.
        hidden_dim: Width of the feed-forward layer; None means 8/3 of ``dim``, rounded up to a multiple of 32.
        max_len: Length of the longest sequence, in bytes.
        lr: Peak learning rate.
        warmup_steps: Number of optimizer steps until the peak.
        min_lr_ratio: Final learning rate as a fraction of the peak.
        weight_decay: Weight decay of the weight matrices; the weights of norms are not decayed.
        betas: Decay rates of AdamW's two moments.
    """

    def __init__(
        self,
        dim: int = 192,
        num_layers: int = 4,
        num_heads: int = 6,
        hidden_dim: int | None = None,
        max_len: int = 128,
        lr: float = 3e-3,
        warmup_steps: int = 40,
        min_lr_ratio: float = 0.05,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(dim, num_layers, num_heads, hidden_dim, max_len)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes ``x`` (batch, length), int64, to logits (batch, length, 256)."""
        return self.model(x)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy, in nats per byte."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean cross entropy over all ranks, in nats per byte."""
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean cross entropy over all ranks, in nats per byte."""
        self.log("test/loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the likeliest next byte at each position, of shape (batch, length)."""
        x, _ = batch
        return self.model(x).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list[AdamW], list[dict]]:
        """Build AdamW, and a learning rate schedule that steps with each optimizer step."""
        hparams = self.hparams
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": hparams.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=hparams.lr, betas=hparams.betas)
        num_steps = self.trainer.estimated_stepping_batches

        def lr_scale(step: int) -> float:
            if step < hparams.warmup_steps:
                return (step + 1) / hparams.warmup_steps
            progress = min(1.0, (step - hparams.warmup_steps) / max(1, num_steps - hparams.warmup_steps))
            return hparams.min_lr_ratio + (1 - hparams.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

        return [optimizer], [{"scheduler": LambdaLR(optimizer, lr_scale), "interval": "step"}]

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue ``prompt`` byte by byte.

        Args:
            prompt: Bytes to continue, (batch, length), int64, on the module's device.
            num_tokens: Number of bytes to add.
            temperature: Number by which the logits are divided; below 1, likely bytes become likelier.
            top_k: Number of likeliest bytes to draw from; None means all bytes.
            generator: Random number generator on the module's device; None means torch's global one.

        Returns:
            The prompt and the drawn bytes, of shape (batch, length + num_tokens) and dtype int64.
        """
        text = prompt
        for _ in range(num_tokens):
            logits = self.model(text[:, -self.model.max_len :])[:, -1].float() / temperature
            if top_k is not None:
                kth = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            drawn = torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
            text = torch.cat((text, drawn), dim=1)
        return text
