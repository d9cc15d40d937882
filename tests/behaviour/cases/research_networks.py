"""Test small forms of networks from papers, each with something that ordinary networks do not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import (
    LENGTH,
    NUM_CLASSES,
    NUM_FEATURES,
    VOCABULARY,
    Block,
    Classifier,
    has_variants,
    tokens,
)

N, C, V = NUM_FEATURES, NUM_CLASSES, VOCABULARY


class _OfTokens(pl.LightningModule):
    """Predict the next token from what two of the given layers make of the tokens up to it."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int = 2) -> None:
        super().__init__()
        has_variants()
        torch.manual_seed(1)
        self.emb = nn.Embedding(V, N)
        self.layers = nn.ModuleList(make() for _ in range(num_layers))
        self.head = nn.Linear(N, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0][:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(N), nn.Linear(N, 2 * N), nn.GELU(), nn.Linear(2 * N, N))


class _Layer(nn.Module):
    """Add what a method ``mix`` makes of all tokens, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N)
        self.feed = _feed_forward()

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.feed(x)


class _Fourier(_Layer):
    def mix(self, x: Tensor) -> Tensor:
        shifted = functional.pad(x, (0, 0, x.shape[1], 0))  # No token sees a later one.
        kernel = torch.exp(-torch.arange(2 * x.shape[1], dtype=x.dtype))
        spectrum = torch.fft.rfft(shifted, dim=1) * torch.fft.rfft(kernel)[None, :, None]
        return torch.fft.irfft(spectrum, n=2 * x.shape[1], dim=1)[:, x.shape[1] :]


class _LinearAttention(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(N, N, bias=False) for _ in range(4))

    def mix(self, x: Tensor) -> Tensor:
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        sums = (k[..., :, None] * self.v(x)[..., None, :]).cumsum(1)
        scale = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.out(torch.einsum("btd,btde->bte", q, sums) / scale)


class _StateSpace(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.linspace(-2, 1, N))
        self.gate, self.out = nn.Linear(N, N), nn.Linear(N, N)

    def mix(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        decay = torch.exp(-torch.exp(self.log_decay))
        for t in range(x.shape[1]):
            state = decay * state + (1 - decay) * x[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1) * self.gate(x).sigmoid())


class _Biased(_Layer):
    """Attend with distances as biases, which are kept for the longest sequence so far."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.window = window
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0), persistent=False)
        self.kept: Tensor | None = None

    def bias(self, length: int, like: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape[-1] < length or self.kept.dtype != like.dtype:
            distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            far = (distance < 0) | ((distance >= self.window) if self.window else torch.zeros_like(distance).bool())
            bias = -self.slopes[:, None, None].to(like.dtype) * distance.to(like.dtype)
            self.kept = bias.masked_fill(far, -math.inf)
        return self.kept[:, :length, :length]

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(x.shape[1], x))
        return self.out(y.transpose(1, 2).flatten(2))


class _Windowed(_Biased):
    def __init__(self) -> None:
        super().__init__(window=3)


class _Depths(_Layer):
    """Let the layer work on the half of the tokens that a router chooses, and pass the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(N, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).squeeze(-1)
        kept = score.topk(x.shape[1] // 2, dim=1).indices.sort(1).values
        index = kept[..., None].expand(-1, -1, x.shape[-1])
        chosen = x.gather(1, index)
        return x.scatter_add(1, index, self.feed(self.norm(chosen)) * score.gather(1, kept).sigmoid()[..., None])


class _Latents(nn.Module):
    """Let a few learned latents attend to the tokens, and the tokens to the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, N) * 0.3)
        self.read = nn.MultiheadAttention(N, 4, batch_first=True)
        self.write = nn.MultiheadAttention(N, 2, batch_first=True)
        self.feed = _feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.read(latents, x, x, need_weights=False)[0]
        x = x + self.write(x, latents, latents, need_weights=False)[0]
        return x + self.feed(x)


class _Mixer(_Layer):
    """Mix tokens by a linear layer over their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.over_positions = nn.Linear(LENGTH - 1, LENGTH - 1)

    def mix(self, x: Tensor) -> Tensor:
        return self.over_positions(x.transpose(1, 2)).transpose(1, 2)


class _Convolved(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(N, N, 3, groups=N)
        self.pointwise = nn.Conv1d(N, 2 * N, 1)

    def mix(self, x: Tensor) -> Tensor:
        y = self.depthwise(functional.pad(x.transpose(1, 2), (2, 0)))
        return functional.glu(self.pointwise(y), dim=1).transpose(1, 2)


class _Parallel(nn.Module):
    """Compute attention and the feed-forward layer side by side, from one norm and one projection (PaLM, GPT-J)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N)
        self.inward, self.outward = nn.Linear(N, 3 * N + 4 * N, bias=False), nn.Linear(N + 2 * N, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate, up = self.inward(self.norm(x)).split([N, N, N, 2 * N, 2 * N], dim=-1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.outward(torch.cat([y, functional.silu(gate) * up], -1))


class _Normalised(nn.Module):
    """Attend with normalised queries and keys, a learned temperature, and a norm behind each part (ViT-22B, OLMo 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(N, N, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.full((4, 1, 1), 2.0))
        self.after, self.after_feed = nn.RMSNorm(N), nn.RMSNorm(N)
        self.feed = nn.Sequential(nn.Linear(N, 2 * N), nn.SiLU(), nn.Linear(2 * N, N))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = functional.normalize(q, dim=-1) * self.scale, functional.normalize(k, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        x = x + self.after(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.after_feed(self.feed(x))


class _Latent(nn.Module):
    """Attend with keys and values that are made of one small latent of each token (DeepSeek-V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.latent_norm = nn.RMSNorm(N), nn.RMSNorm(6)
        self.down, self.up = nn.Linear(N, 6 + 2, bias=False), nn.Linear(6, 4 * (4 + 4), bias=False)
        self.q, self.out = nn.Linear(N, 4 * (4 + 2), bias=False), nn.Linear(4 * 4, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        latent, shared = self.down(h).split([6, 2], -1)
        k, v = self.up(self.latent_norm(latent)).unflatten(-1, (4, 8)).transpose(1, 2).split([4, 4], -1)
        k = torch.cat([k, shared[:, None].expand(-1, 4, -1, -1)], -1)
        q = self.q(h).unflatten(-1, (4, 6)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class _Differential(nn.Module):
    """Subtract a second attention from the first, by a learned factor (Differential Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(N, N, bias=False) for _ in range(4))
        self.factor = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (2, 2, -1)).permute(0, 2, 3, 1, 4) for layer in (self.q, self.k))
        v = self.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = (q @ k.transpose(-1, -2)).masked_fill(later, -math.inf).softmax(-1)
        y = (weights[:, :, 0] - self.factor * weights[:, :, 1]) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class _Sinks(nn.Module):
    """Attend with a learned logit per head that takes a part of the weight (gpt-oss)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        logits = (0.5 * q @ k.transpose(-1, -2)).masked_fill(later, -math.inf)
        sinks = self.sinks[None, :, None, None].expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class _Rezero(nn.Module):
    """Add attention and a feed-forward layer, each times a number that is trained and begins small (ReZero)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.feed = _feed_forward()
        self.first, self.second = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.first * self.out(y.transpose(1, 2).flatten(2))
        return x + self.second * self.feed(x)


_LAYERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "fourier": ("layers that mix tokens by a Fourier transform", _Fourier),
    "linear_attention": ("layers with linear attention, by running sums", _LinearAttention),
    "state_space": ("layers with a state that a loop over tokens updates", _StateSpace),
    "alibi": ("attention with distances as biases, kept in an attribute for the longest sequence", _Biased),
    "windowed": ("attention to the last three tokens", _Windowed),
    "mixture_of_depths": ("layers that work on the half of the tokens that a router chooses", _Depths),
    "perceiver": ("learned latents that attend to the tokens, and tokens to the latents", _Latents),
    "mlp_mixer": ("layers with a linear layer over positions", _Mixer),
    "convolved": ("depthwise convolutions along the sequence, and gates", _Convolved),
    "parallel_block": ("attention and feed-forward layer side by side, from one projection", _Parallel),
    "normalised_keys": ("normalised queries and keys, a temperature of each head, norms behind", _Normalised),
    "latent_attention": ("keys and values from a small latent of each token, and a part that heads share", _Latent),
    "differential": ("two attentions, subtracted by a learned factor", _Differential),
    "rezero": ("parts of blocks that numbers without dimensions scale", _Rezero),
    "sinks": ("attention with a learned sink of each head", _Sinks),
}

for _name, (_title, _make) in _LAYERS.items():

    def _train(run: Run, make: Callable[[], nn.Module] = _make) -> None:
        run.fit(_OfTokens(make), run.loader(tokens()), val=run.loader(tokens(seed=1)))

    case(_title, _name)(_train)


class _Net(Classifier):
    """Classify by a network of its own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(num_blocks=1)
        self.net = make()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03)


class _Equilibrium(nn.Module):
    """Iterate a layer without gradients until it hardly changes its output, and once more with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(N, N), nn.Linear(N, N)
        with torch.no_grad():
            self.layer.weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        given, z = self.given(x), torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = torch.tanh(self.layer(z) + given)
        return torch.tanh(self.layer(z.detach()) + given)


class _Ode(nn.Module):
    """Integrate a network by Runge-Kutta of fourth order, which calls it four times a step."""

    def __init__(self) -> None:
        super().__init__()
        self.derivative = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.5
        for _ in range(2):
            k1 = self.derivative(x)
            k2 = self.derivative(x + h / 2 * k1)
            k3 = self.derivative(x + h / 2 * k2)
            k4 = self.derivative(x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class _Hyper(nn.Module):
    """Let one network make the weights of another one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Linear(N, N * 4 + 4 * N))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.makes(x).split([4 * N, 4 * N], -1)
        hidden = torch.einsum("...d,...hd->...h", x, first.unflatten(-1, (4, N))).relu()
        return x + torch.einsum("...h,...dh->...d", hidden, second.unflatten(-1, (N, 4)))


class _Complex(nn.Module):
    """Compute in complex numbers, with complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N, dtype=torch.complex128) * N**-0.5)
        self.linear = nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.weight.dtype) @ self.weight
        return self.linear(torch.cat([z.real, z.imag], -1))


class _Reverses(torch.autograd.Function):
    """Pass values on, and gradients back with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.factor * grads[0], None


class _TwoHeads(nn.Module):
    """Blocks whose middle feeds a second head through reversed gradients (domain adaptation)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.domain = nn.Linear(N, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        other = self.domain(_Reverses.apply(x, 0.3))
        for block in self.blocks[1:]:
            x = block(x)
        return x + torch.tanh(other)


class _Capsules(nn.Module):
    """Route by agreement, in a loop with detached weights."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.randn(4, N // 4, 4, N // 4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("...id,idje->...ije", x.unflatten(-1, (4, -1)), self.votes)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            out = torch.tanh((logits.softmax(-1)[..., None] * votes).sum(-3))
            logits = logits + (votes.detach() * out.detach()[..., None, :, :]).sum(-1)
        return out.flatten(-2)


class _Quantised(nn.Module):
    """Round weights and activations by observed ranges, with gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest * 0.9, self.linear.weight.abs().max()))
        scale = self.largest / 127 + 1e-6
        rounded = torch.round(self.linear.weight / scale) * scale
        weight = self.linear.weight + (rounded - self.linear.weight).detach()
        return x + functional.linear(x, weight, self.linear.bias)


class _Exits(nn.Module):
    """Average the outputs of all blocks by learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.weights = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return (torch.stack(outputs, -1) * self.weights.softmax(0)).sum(-1)


class _Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(N, N) * 2)
        self.layers = nn.Sequential(nn.Linear(2 * N, N), nn.Linear(N, N))

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies.to(x.dtype)
        x = torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = torch.sin(3 * layer(x))
        return x


class _Dense(nn.Module):
    """Give each layer the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(N + 4 * i, 4) for i in range(4))
        self.last = nn.Linear(N + 16, N)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], -1)
        return self.last(x)


class _Squeezed(nn.Module):
    """Share the weights of a bottleneck with its transpose, and gate channels by a statistic of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, N) * 0.3)
        self.gate = nn.Linear(2, N)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(functional.linear(x, self.weight))
        statistic = torch.stack([hidden.mean(-1), hidden.amax(-1)], -1)
        return x + functional.linear(hidden, self.weight.T) * self.gate(statistic).sigmoid()


_NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "equilibrium": ("a layer that is iterated without gradients to its fixed point", _Equilibrium),
    "ode": ("a network that Runge-Kutta calls eight times", _Ode),
    "hypernetwork": ("a network that makes the weights of another one for each sample", _Hyper),
    "complex": ("complex parameters", _Complex),
    "reversed_gradients": ("a head behind reversed gradients, by a function with a backward of its own", _TwoHeads),
    "capsules": ("capsules that are routed in a loop with detached votes", _Capsules),
    "quantised": ("weights that are rounded by observed ranges, with gradients straight through", _Quantised),
    "averaged_exits": ("the outputs of all blocks, averaged by learned weights", _Exits),
    "fourier_features": ("fixed random frequencies in a buffer, and layers with sines", _Siren),
    "dense": ("layers that get the outputs of all layers before them", _Dense),
    "shared_transpose": ("a weight that is used with its transpose, and gates by statistics of the sample", _Squeezed),
}

_SEVERAL = "has parameters of several dtypes"

for _name, (_title, _make) in _NETWORKS.items():

    def _classify(run: Run, make: Callable[[], nn.Module] = _make) -> None:
        run.fit(_Net(make), val=True)

    _refused = {"full": _SEVERAL, "hybrid": _SEVERAL, "nd": _SEVERAL} if _make is _Complex else {}
    case(_title, _name, refused=_refused)(_classify)


@case("several tokens ahead are predicted by heads that share the embedding, in a loop of small blocks")
def tokens_ahead(run: Run) -> None:
    class Ahead(_OfTokens):
        def __init__(self) -> None:
            super().__init__(_Parallel)
            self.ahead = nn.ModuleList(nn.Linear(2 * N, N) for _ in range(2))

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            x = self.emb(ids)
            for layer in self.layers:
                x = layer(x)
            loss = functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            for i, layer in enumerate(self.ahead, 1):
                x = torch.tanh(layer(torch.cat([x[:, :-1], self.emb(ids[:, i:])], -1)))
                wanted = ids[:, i + 1 :]
                loss = loss + 0.3 * functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), wanted.flatten())
            return loss

    run.fit(Ahead(), run.loader(tokens()))


@case("layers of one class that share their weights in groups of two, with a norm of their own each")
def shared_layers(run: Run) -> None:
    class Shared(_OfTokens):
        def __init__(self) -> None:
            super().__init__(_LinearAttention, 4)
            for first, second in ((0, 1), (2, 3)):
                for name in ("q", "k", "v", "out", "feed"):
                    setattr(self.layers[second], name, getattr(self.layers[first], name))

    run.fit(Shared(), run.loader(tokens()), val=run.loader(tokens(seed=1)))


@case(
    "the order of the inner blocks depends on the parity of the batch's index",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "runs the parts of a model in one order"),
)
def order_of_blocks(run: Run) -> None:
    class Ordered(_OfTokens):
        def __init__(self) -> None:
            super().__init__(_Normalised, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.order = [0, 1, 2, 3] if batch_idx % 2 else [0, 2, 1, 3]
            return super().training_step(batch, batch_idx)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.emb(ids)
            for index in getattr(self, "order", [0, 1, 2, 3]):
                x = self.layers[index](x)
            return self.head(x)

    run.fit(Ordered(), run.loader(tokens()))
