"""Test sequences: prompts, lengths, padding, generation, encoders and decoders, depth, and pieces of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import VOCABULARY, tokens
from tests.behaviour.writers import MAX_LENGTH, WIDTH, Attention, FeedForward, Layer, Writer

TOLERANCE = 1e-9


def _fit(run: Run, model: Writer, **kwargs: Any) -> Any:
    return run.fit(model, run.loader(tokens()), val=run.loader(tokens(seed=1)), **kwargs)


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@case(
    "soft prompts of learned vectors before the tokens, with the rest frozen except for the head", tolerance=TOLERANCE
)
def soft_prompts(run: Run) -> None:
    class Prompts(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.head.requires_grad_(True)
            self.prompt = nn.Parameter(torch.randn(3, WIDTH) * 0.5)

        def forward(self, ids: Tensor) -> Tensor:
            x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.emb(ids)], 1)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))[:, 3:]

    _fit(run, Prompts())


class _Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return tokens(64, 2)[index][0][: 2 + (5 * index) % 7]


def _pad(items: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)


@case(
    "batches padded to their longest sequence, also of unequal lengths on ranks; the loss is weighted by tokens",
    tolerance=TOLERANCE,
)
def ragged(run: Run) -> None:
    class Pads(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            targets = batch[:, 1:]
            logits = self(batch[:, :-1].clamp(min=0))
            losses = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")
            count = (targets >= 0).sum()
            return {"loss": losses.sum() / count, "weight": count}

    run.fit(Pads(), run.loader(_Ragged(), collate_fn=_pad))


@case(
    "the step cuts sequences to a length that it looks up by batch_idx, also to one token",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "layers.0 returned .* when the step was traced"),
)
def lengths(run: Run) -> None:
    class Cuts(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0][:, : (8, 2, 5, 3)[batch_idx]]], batch_idx)

    _fit(run, Cuts())


@case("validation writes text token by token and logs how much of it is right", tolerance=TOLERANCE)
def generation(run: Run) -> None:
    class Generates(Writer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            ids = batch[0][:, :1]
            for _ in range(4):
                ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
            self.log("val/right", (ids == batch[0][:, :5]).double().mean(), sync_dist=True)

    _fit(run, Generates(), max_epochs=2)


@case("predictions with top-k values and hidden states, after a fit, by the same Trainer", tolerance=TOLERANCE)
def predictions(run: Run) -> None:
    class Predicts(Writer):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.hidden(batch[0])
            return torch.cat([self.head(hidden).topk(3, -1)[0], hidden[..., :2]], -1)

    model = Predicts()
    trainer = _fit(run, model)
    run.record_predictions(trainer.predict(model, run.loader(tokens(16, 7))))


class _Packed(Layer):
    """Attend inside of documents only, whose mask and positions the model hands on."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x) + 0.1 * torch.sin(positions)[..., None]
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.attention.qkv(normed).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attention.out(y.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


@case("two documents in a sequence: masks of pairs and positions are arguments of the layers", tolerance=TOLERANCE)
def packed(run: Run) -> None:
    class Packs(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Packed() for _ in range(2))

        def hidden(self, ids: Tensor) -> Tensor:
            length = ids.size(1)
            ends = ids[:, :1] % 4 + 1
            document = (torch.arange(length) >= ends).long()
            positions = torch.arange(length, dtype=torch.float64) - ends * document
            mask = torch.ones(length, length, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None])
            x = self.emb(ids)
            for layer in self.layers:
                x = layer(x, positions, mask[:, None])
            return self.norm(x)

    _fit(run, Packs())


@case("one layer is called three times, with an embedding of the depth (a universal transformer)", tolerance=TOLERANCE)
def universal(run: Run) -> None:
    class Repeats(Writer):
        def __init__(self) -> None:
            super().__init__(num_layers=1)
            self.depth = nn.Embedding(3, WIDTH)

        def hidden(self, ids: Tensor) -> Tensor:
            x = self.emb(ids)
            for depth in range(3):
                x = self.layers[0](x + self.depth.weight[depth])
            return self.norm(x)

    _fit(run, Repeats())


@case("deep supervision: the head reads hidden states after each layer", tolerance=TOLERANCE)
def deep_supervision(run: Run) -> None:
    class Deep(Writer):
        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            x, losses = self.emb(ids[:, :-1]), []
            for layer in self.layers:
                x = layer(x)
                losses.append(_cross_entropy(self.head(self.norm(x)), ids[:, 1:]))
            return torch.stack(losses).mean()

    _fit(run, Deep())


class _Normalised(FeedForward):
    """Divide by the norm over all tokens (global response normalisation)."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.up(x))
        return self.down(hidden / (1 + hidden.norm(dim=1, keepdim=True)))


class _Mixing(Layer):
    """Add half of the token before to each token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5 * functional.pad(x, (0, 0, 1, 0))[:, :-1])


def _with_layer(change: Any) -> type[Writer]:
    class Has(Writer):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(change() for _ in range(2))

    return Has


@case("a feed-forward layer that normalises over all tokens", tolerance=TOLERANCE)
def normalised_over_tokens(run: Run) -> None:
    class HasIt(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mixture.shared = _Normalised()

    _fit(run, _with_layer(HasIt)())


@case("layers that add the token before to each token", tolerance=TOLERANCE)
def shifted_tokens(run: Run) -> None:
    _fit(run, _with_layer(_Mixing)())


@case("an encoder without a mask, and a decoder whose layers attend to its output", tolerance=TOLERANCE)
def translator(run: Run) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.ff = nn.LayerNorm(WIDTH), Attention(), FeedForward()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.ff(self.norm(x + self.attention(x)))

    class Decoder(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), *self.kv(memory).chunk(2, dim=-1)))
            y = functional.scaled_dot_product_attention(q, k, v)
            return super().forward(x + self.o(y.transpose(1, 2).flatten(2)))

    class Translates(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Encoder() for _ in range(2))
            self.layers = nn.ModuleList(Decoder() for _ in range(2))

        def loss(self, batch: Any) -> Tensor:
            ids = batch[0]
            memory = self.emb(ids.flip(1)[:, :5]) + self.positions.weight[MAX_LENGTH - 5 :]
            for layer in self.encoder:
                memory = layer(memory)
            x = self.emb(ids[:, :-1])
            for layer in self.layers:
                x = layer(x, memory)
            logits: Tensor = self.head(self.norm(x))
            assert logits.size(-1) == VOCABULARY
            return _cross_entropy(logits, ids[:, 1:])

    _fit(run, Translates())
