"""Test modules of many architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier, Network, samples

N, C = NUM_FEATURES, NUM_CLASSES


def _around(make_block: Callable[[], nn.Module], num: int = 4) -> Callable[[], nn.Module]:
    """Return a function that makes a network of ``num`` blocks between a linear layer and a head."""
    return lambda: nn.Sequential(nn.Linear(N, N), *[make_block() for _ in range(num)], nn.Linear(N, C))


class _Tokens(nn.Module):
    """Embed the features as 4 tokens of 4 numbers, apply ``num`` layers of ``make()``, and classify the mean token."""

    def __init__(self, make: Callable[[], nn.Module], num: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(4, N)
        self.layers = nn.ModuleList(make() for _ in range(num))
        self.head = nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (4, 4)))
        for layer in self.layers:
            h = layer(h)
            h = h[0] if isinstance(h, tuple) else h
        return self.head(h.mean(1))


class _SelfAttention(nn.MultiheadAttention):
    def forward(self, h: Tensor) -> Any:  # type: ignore[override]
        return super().forward(h, h, h, need_weights=False)


class _Attention(nn.Module):
    """Compute attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N)
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, N // 2)).permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(a.transpose(1, 2).flatten(2))


class _Cell(nn.Module):
    """Run an RNN cell over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(N, N)

    def forward(self, h: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(h[:, 0]), []
        for i in range(h.shape[1]):
            state = self.cell(h[:, i], state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class _Convolutions(nn.Module):
    """Convolve the features as an image of 4 by 4 pixels.

    Args:
        norm: Function that makes the norm of a block for the given number of channels.
    """

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()

        def block(channels: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), norm(8), nn.ReLU())

        self.blocks = nn.ModuleList([block(1), block(8), block(8), block(8)])
        self.head = nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 4)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _UNet(nn.Module):
    """Connect layers that narrow the features to layers that widen them by skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(N, 12), nn.Linear(12, 8)])
        self.middle = Block(8)
        self.up = nn.ModuleList([nn.Linear(16, 12), nn.Linear(24, N)])
        self.head = nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = functional.gelu(layer(x))
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = functional.gelu(layer(torch.cat([x, skips.pop()], -1)))
        return self.head(x)


class _Repeated(nn.Module):
    """Run one block several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(N, N), Block(), nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class _Dict(nn.Module):
    """Use branches and a head in ModuleDicts by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Sequential(Block(), Block()) for name in ("left", "right")})
        self.heads = nn.ModuleDict({"main": nn.Linear(2 * N, C)})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["main"](torch.cat([self.branches[name](x) for name in ("left", "right")], -1))


class _Parameters(nn.Module):
    """Use parameters in a ParameterList and a ParameterDict as layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(N, N) / 4 for _ in range(3))
        self.biases = nn.ParameterDict({str(i): torch.zeros(N) for i in range(3)})
        self.head = nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        for i, weight in enumerate(self.weights):
            x = torch.tanh(x @ weight + self.biases[str(i)])
        return self.head(x)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


class _Custom(Block):
    """Use an autograd Function of the user in a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(_Square.apply(self.up(self.norm(x)))) * 0.1


class _Scaled(nn.Module):
    """Scale the output of a block by a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.block(x)


class _Out(NamedTuple):
    hidden: Tensor
    extra: Tensor | None


class _Tuples(nn.Module):
    """Take and return a NamedTuple with a field that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, out: _Out) -> _Out:
        return _Out(self.block(out.hidden), out.extra)


class _Structured(nn.Module):
    """Call blocks with a NamedTuple, which they also return, or with keyword arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(_Tuples() if kind == "tuple" else Block() for _ in range(4))
        self.head = nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tuple":
            out = _Out(x, None)
            for block in self.blocks:
                out = block(out)
            return self.head(out.hidden)
        for block in self.blocks:
            x = block(x=x)
        return self.head(input=x)


class _Checkpointed(nn.Module):
    """Run blocks by torch's activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(N, N), nn.Linear(N, C)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class _Experts(nn.Module):
    """Compute a mixture of experts by hand, in which each sample uses its best expert."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(N, num)
        self.experts = nn.ModuleList(nn.Linear(N, N) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        output = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            output = output + expert(x) * weights[:, i : i + 1] * (weights.argmax(-1) == i)[:, None]
        return x + output


class _Lora(nn.Module):
    """Add a trained low-rank layer to a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(N, N).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, N) / 4), nn.Parameter(torch.zeros(N, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


class _Hyper(nn.Module):
    """Compute the weights of a linear layer by a network."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(), Block(), nn.Linear(N, N * C))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,bio->bo", x, self.generator(x).view(-1, N, C)) / 4


class _Functional(nn.Module):
    """Call a layer by ``torch.func.functional_call`` with changed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Sequential(Block(), Block()), nn.Linear(N, C)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: param * 1.1 for name, param in self.layer.named_parameters()}
        return self.head(torch.func.functional_call(self.layer, weights, (x,)))


class _EarlyExit(nn.Module):
    """Classify the output of every block, and return the mean of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(N, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits.append(head(x))
        return torch.stack(logits).mean(0)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _symmetric() -> nn.Module:
    layer = nn.Linear(N, N)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


def _hooked_block() -> nn.Module:
    block = Block()
    block.register_forward_hook(lambda module, args, output: output * 0.9)
    block.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return block


def _unused() -> nn.Module:
    block = Block()
    block.unused = nn.Linear(N, N)  # type: ignore[assignment]
    return block


# Each name maps to (title, function that builds the network, arguments of the case).
_SHAPES: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "nested": ("nested Sequentials", lambda: nn.Sequential(_around(Block, 2)(), _OneMore(), nn.Linear(C, C)), {}),
    "lstm": ("nn.LSTM", lambda: _Tokens(lambda: nn.LSTM(N, N, batch_first=True), 2), {}),
    "gru": ("nn.GRU of 2 layers", lambda: _Tokens(lambda: nn.GRU(N, N, 2, batch_first=True), 2), {}),
    "gru_cell": ("nn.GRUCell in a loop", lambda: _Tokens(_Cell, 2), {}),
    "multihead": ("nn.MultiheadAttention", lambda: _Tokens(lambda: _SelfAttention(N, 2, batch_first=True), 3), {}),
    "hand_attention": ("attention by hand", lambda: _Tokens(_Attention, 4), {}),
    "encoder_layers": (
        "nn.TransformerEncoderLayer",
        lambda: _Tokens(lambda: nn.TransformerEncoderLayer(N, 2, 32, 0.0, batch_first=True), 3),
        {},
    ),
    "encoder": (
        "nn.TransformerEncoder",
        lambda: _Tokens(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(N, 2, 32, 0.0, batch_first=True), 3, enable_nested_tensor=False
            )
        ),
        {},
    ),
    "group_norm": ("convolutions with GroupNorm", lambda: _Convolutions(lambda c: nn.GroupNorm(2, c)), {}),
    "instance_norm": (
        "convolutions with InstanceNorm",
        lambda: _Convolutions(lambda c: nn.InstanceNorm2d(c, affine=True)),
        {},
    ),
    "unet": ("a U-Net with skips", _UNet, {}),
    "repeated_block": ("one block that is run several times", _Repeated, {}),
    "module_dict": ("branches in a ModuleDict", _Dict, {}),
    "parameter_list": (
        "a ParameterList and a ParameterDict",
        _Parameters,
        {"refused": dict.fromkeys(("pp", "nd", "nd_tp"), "2 stages, and the model only 1 parts.*use fewer stages")},
    ),
    "custom_function": ("an autograd Function of the user's own", _around(_Custom), {}),
    "scalar_parameters": ("scalar parameters", _around(_Scaled), {}),
    "named_tuples": ("blocks that hand on a NamedTuple with None in it", lambda: _Structured("tuple"), {}),
    "keywords": ("blocks that are called with keywords", lambda: _Structured("keyword"), {}),
    "checkpointed": ("activation checkpointing of the user's own", lambda: _Checkpointed(False), {}),
    "reentrant": ("reentrant activation checkpointing of the user's own", lambda: _Checkpointed(True), {}),
    "experts": ("a mixture of experts by hand", _around(_Experts), {}),
    "lora": ("frozen layers with trained additions of low rank", _around(_Lora), {}),
    "hyper": ("a network that computes the weights of another", _Hyper, {}),
    "functional_call": (
        "torch.func.functional_call",
        _Functional,
        {
            "refused": {
                **dict.fromkeys(("pp", "nd", "nd_tp"), "uses the parameter 'net.layer.0.norm.weight' outside of")
            }
        },
    ),
    "early_exit": ("early exits: a head after each block", _EarlyExit, {}),
    "parametrized": ("torch.nn.utils.parametrize", _around(_symmetric), {}),
    "orthogonal": ("parametrizations.orthogonal", _around(lambda: parametrizations.orthogonal(nn.Linear(N, N))), {}),
    "hooked_blocks": ("forward hooks that change inputs and outputs", _around(_hooked_block), {}),
    "unused_parameters": ("parameters that are never used", _around(_unused), {}),
    "no_bias": ("layers without a bias", _around(lambda: nn.Linear(N, N, bias=False)), {}),
    "prelu": ("activations with parameters", _around(lambda: nn.Sequential(nn.Linear(N, N), nn.PReLU(N))), {}),
    "bilinear": ("nn.Bilinear", _around(lambda: _Bilinear()), {}),
}


class _OneMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(C, C), nn.Tanh()), nn.ModuleDict({"a": nn.Linear(C, C)})])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner[1]["a"](self.inner[0](x))


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(N, N, N)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.layer(x, x)


for _name, (_title, _make, _more) in _SHAPES.items():

    @case(_title, name=f"module_{_name}", **_more)
    def _(run: Run, make: Callable[[], nn.Module] = _make) -> None:
        run.fit(Network(make), val=True)


@case(
    "Trainer(sync_batchnorm=True) on the CPU",
    refused={"*": r"sync_batchnorm=True\) cannot be honoured on the CPU.*use GroupNorm"},
)
def sync_batch_norm(run: Run) -> None:
    run.fit(Network(lambda: _Convolutions(nn.BatchNorm2d)), val=True, sync_batchnorm=True)


@case("BatchNorm in eval mode, as in finetuning")
def batch_norm_in_eval(run: Run) -> None:
    class Frozen(Network):
        def on_train_epoch_start(self) -> None:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    run.fit(Frozen(lambda: _Convolutions(nn.BatchNorm2d)), val=True)


@case("nn.EmbeddingBag")
def embedding_bag(run: Run) -> None:
    class Embeds(Classifier):
        def __init__(self) -> None:
            super().__init__(num_blocks=3)
            self.embedding = nn.EmbeddingBag(16, N, mode="mean")

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(self.embedding(ids))

    x, y = samples().tensors
    run.fit(Embeds(), run.loader(TensorDataset((x[:, :6] * 3).round().long().clamp(0, 15), y)))


@case(
    "torch.func.functional_call in validation alone",
    refused={
        "tp": r"The step has replaced net\.\d\.\w+\.bias by a tensor of its own",
        **dict.fromkeys(("pp", "nd", "nd_tp"), "The step has replaced|uses the parameter 'net"),
    },
)
def functional_call_in_validation(run: Run) -> None:
    class Averaged(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            weights = {name: param * 0.5 for name, param in self.net.named_parameters()}
            logits = self.head(torch.func.functional_call(self.net, weights, (x,)))
            self.log("val/loss", functional.cross_entropy(logits, y), sync_dist=True)

    run.fit(Averaged(), val=True)


class _Recurrent(nn.Module):
    """Apply the same blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.blocks(x))


@case(
    "torch.func.functional_call of blocks that run twice, with weights of an exponential average",
    refused={
        "tp": r"The step has replaced net\.blocks\.\d\.\w+\.\w+ by a tensor of its own",
        **dict.fromkeys(("pp", "nd", "nd_tp"), "The step has replaced|uses the parameter 'net|calls net"),
    },
)
def functional_call_of_recurrence(run: Run) -> None:
    class Teaches(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Recurrent()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            weights = {name: param.detach() * 0.5 for name, param in self.net.named_parameters()}
            target = torch.func.functional_call(self.net, weights, (x,))
            loss = functional.cross_entropy(self(x), y) + functional.mse_loss(self.net(x), target)
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Teaches())


@case("parameters of the LightningModule itself: a temperature and a class token")
def own_parameters(run: Run) -> None:
    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))
            self.shift = nn.Parameter(torch.full((N,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift) / self.temperature

    run.fit(Own())


@case("lazy modules, made by a first batch in setup")
def lazy_modules(run: Run) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(N), *[Block() for _ in range(3)], nn.LazyLinear(N))

        def setup(self, stage: str) -> None:
            torch.manual_seed(3)
            self.net.float()(samples().tensors[0][:2].float())

    run.fit(Lazy())


@case("lazy modules that no batch has made", refused={"*": "(?i)lazy"})
def lazy_unmade(run: Run) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(N), *[Block() for _ in range(3)])

    run.fit(Lazy(), observe=False)


@case("a Siamese network: the model runs twice in a step, on both halves at once")
def siamese(run: Run) -> None:
    class Siamese(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            a, b = self(torch.cat([x, x.flip(1)])).chunk(2)
            return functional.mse_loss(a, b) - 0.1 * functional.cosine_similarity(a, b.detach()).mean()

    run.fit(Siamese())


@case(
    "a Siamese network: the model is called twice in a step",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "calls net.1 2 times"),
)
def siamese_two_calls(run: Run) -> None:
    class Siamese(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            return functional.mse_loss(self(x), 2 * self(x.flip(1)))

    run.fit(Siamese())


@case("an autoencoder: encode and decode are methods of the module")
def autoencoder(run: Run) -> None:
    class Autoencoder(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(N, N), Block(), Block(), nn.Linear(N, 8))
            self.head = nn.Sequential(nn.Linear(8, N), Block(), Block(), nn.Linear(N, N))

        def encode(self, x: Tensor) -> Tensor:
            return self.net(x)

        def decode(self, z: Tensor) -> Tensor:
            return self.head(z)

        def loss(self, batch: Any) -> Tensor:
            return functional.mse_loss(self.decode(self.encode(batch[0])), batch[0])

    run.fit(Autoencoder())


@case("the network is the user's own module, built outside and handed in")
def handed_in(run: Run) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(N, C))
    run.fit(Network(lambda: net))


@case("complex numbers inside a block: a Fourier transform")
def fourier(run: Run) -> None:
    class Mixes(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fft.irfft(torch.fft.rfft(x) * 0.9, n=N))

    run.fit(Network(_around(Mixes)))


@case("torch.vmap and torch.func.jacrev in the step, over the inputs")
def vmap_in_step(run: Run) -> None:
    class Maps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            scaled = torch.vmap(lambda row: row / (1 + row.norm()))(x)
            return functional.cross_entropy(self(scaled), y)

    run.fit(Maps())
