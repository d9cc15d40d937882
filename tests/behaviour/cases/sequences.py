"""Test sequence models: attention of several kinds, decoding, padded lengths, structured losses."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from tests.behaviour.case import Run, case
from tests.behaviour.models import LENGTH, NUM_FEATURES, VOCABULARY, Block, LanguageModel, tokens

N, V, HEADS, KV_HEADS, TAGS = NUM_FEATURES, VOCABULARY, 4, 2, 4


class _Sequences(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@case("a translator with attention, a loop of GRU cells, and teacher forcing that ends by epoch")
def teacher_forcing(run: Run) -> None:
    class Translator(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.source = nn.Embedding(V, N)
            self.target = nn.Embedding(V, N)
            self.encoder = nn.GRU(N, N, batch_first=True)
            self.cell = nn.GRUCell(2 * N, N)
            self.query = nn.Linear(N, N, bias=False)
            self.out = nn.Linear(2 * N, V)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch[0]
            wanted = ids.flip(1)
            memory, last = self.encoder(self.source(ids))
            hidden, token, losses = last[0], torch.zeros_like(ids[:, 0]), []
            for i in range(wanted.shape[1]):
                weights = (memory @ self.query(hidden)[:, :, None]).softmax(1)
                context = (weights * memory).sum(1)
                hidden = self.cell(torch.cat([self.target(token), context], -1), hidden)
                logits = self.out(torch.cat([hidden, context], -1))
                losses.append(functional.cross_entropy(logits, wanted[:, i]))
                teacher = i % 2 >= self.current_epoch
                token = wanted[:, i] if teacher else logits.argmax(-1).detach()
            loss = torch.stack(losses).mean()
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(Translator(), run.loader(tokens()), max_epochs=2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = N // HEADS
        self.input_norm, self.post_norm = nn.RMSNorm(N), nn.RMSNorm(N)
        self.q_proj = nn.Linear(N, HEADS * width, bias=False)
        self.k_proj = nn.Linear(N, KV_HEADS * width, bias=False)
        self.v_proj = nn.Linear(N, KV_HEADS * width, bias=False)
        self.o_proj = nn.Linear(HEADS * width, N, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(N, 3 * N, bias=False), nn.Linear(N, 3 * N, bias=False)
        self.down_proj = nn.Linear(3 * N, N, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.input_norm(x)
        q = self.q_proj(h).view(batch, length, HEADS, -1).transpose(1, 2)
        k = self.k_proj(h).view(batch, length, KV_HEADS, -1).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, KV_HEADS, -1).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))


@case("a Llama by hand: rotary caches in buffers, grouped queries, SwiGLU, RMSNorm, and a z-loss")
def llama(run: Run) -> None:
    class Llama(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embed_tokens = nn.Embedding(V, N)
            self.layers = nn.ModuleList(_LlamaLayer() for _ in range(4))
            self.norm = nn.RMSNorm(N)
            self.lm_head = nn.Linear(N, V, bias=False)
            width = N // HEADS
            inverse = 1.0 / (100.0 ** (torch.arange(0, width, 2) / width))
            angles = torch.outer(torch.arange(2 * LENGTH), inverse).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed_tokens(ids)
            cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
            for layer in self.layers:
                x = layer(x, cos, sin)
            return self.lm_head(self.norm(x))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch[0]
            logits = self(ids)[..., :-1, :].contiguous()
            loss = functional.cross_entropy(logits.view(-1, V), ids[..., 1:].contiguous().view(-1))
            z_loss = logits.logsumexp(-1).pow(2).mean()
            self.log_dict({"loss": loss, "z_loss": z_loss}, sync_dist=True)
            return loss + 1e-3 * z_loss

    run.fit(Llama(), run.loader(tokens()), max_epochs=2)


@case("predict_step decodes greedily, until all sequences have ended")
def greedy_decoding(run: Run) -> None:
    class Decodes(LanguageModel):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch[0][:, :3]
            ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
            for _ in range(5):
                token = self(ids)[:, -1].argmax(-1)
                token = torch.where(ended, torch.zeros_like(token), token)
                ended = ended | (token < 4)
                ids = torch.cat([ids, token[:, None]], 1)
                if ended.all():
                    break
            return functional.pad(ids, (0, 8 - ids.shape[1]))

    model = Decodes()
    trainer = run.fit(model, run.loader(tokens()), max_epochs=2)
    run.record_predictions(trainer.predict(model, run.loader(tokens())))


def _padded(rows: list[Tensor]) -> dict[str, Tensor]:
    cut = [row[0][: 3 + int(row[0][0]) % 6] for row in rows]
    ids = pad_sequence(cut, batch_first=True, padding_value=0)
    lengths = torch.tensor([len(row) for row in cut])
    return {"ids": ids, "lengths": lengths, "mask": ids.ne(0), "labels": torch.stack([row[0][0] % 4 for row in rows])}


@case(
    "an LSTM over packed sequences of a batch that is a dictionary with lengths",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "could not be traced .*use a strategy without stages"),
)
def packed(run: Run) -> None:
    class Packed(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embedding = nn.Embedding(V, N, padding_idx=0)
            self.lstm = nn.LSTM(N, N, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(4 * N // 2, 4)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            packed = pack_padded_sequence(
                self.embedding(batch["ids"]), batch["lengths"].cpu(), batch_first=True, enforce_sorted=False
            )
            _, (hidden, _) = self.lstm(packed)
            loss = functional.cross_entropy(self.head(torch.cat([hidden[-2], hidden[-1]], -1)), batch["labels"])
            self.log("train/loss", loss, batch_size=len(batch["ids"]), sync_dist=True)
            return loss

    run.fit(Packed(), run.loader(tokens(), collate_fn=_padded))


@case("a conditional random field: its partition function in the loss, Viterbi paths in validation")
def random_field(run: Run) -> None:
    class Field(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embedding = nn.Embedding(V, N)
            self.blocks = nn.Sequential(Block(), Block())
            self.emit = nn.Linear(N, TAGS)
            self.transitions = nn.Parameter(torch.empty(TAGS, TAGS).uniform_(-0.1, 0.1))
            self.start = nn.Parameter(torch.zeros(TAGS))

        def scores(self, ids: Tensor) -> Tensor:
            return self.emit(self.blocks(self.embedding(ids)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch[0]
            tags, emissions = ids % TAGS, self.scores(ids)
            rows = torch.arange(len(ids), device=self.device)
            alpha = self.start + emissions[:, 0]
            gold = self.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
            for i in range(1, ids.shape[1]):
                gold = gold + self.transitions[tags[:, i - 1], tags[:, i]] + emissions[rows, i, tags[:, i]]
                alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, dim=1) + emissions[:, i]
            loss = (alpha.logsumexp(-1) - gold).mean()
            self.log("train/nll", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            ids = batch[0]
            emissions = self.scores(ids)
            best, pointers = self.start + emissions[:, 0], []
            for i in range(1, ids.shape[1]):
                best, pointer = (best[:, :, None] + self.transitions).max(1)
                best = best + emissions[:, i]
                pointers.append(pointer)
            path = [best.argmax(-1)]
            for pointer in reversed(pointers):
                path.append(pointer.gather(1, path[-1][:, None])[:, 0])
            found = torch.stack(path[::-1], 1)
            self.log("val/accuracy", (found == ids % TAGS).double().mean(), sync_dist=True)

    run.fit(Field(), run.loader(tokens()), run.loader(tokens()), max_epochs=2)


@case("T5: the first block makes a relative position bias that it hands on to the others")
def relative_bias(run: Run) -> None:
    class Layer(nn.Module):
        def __init__(self, has_bias: bool) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(N)
            self.qkv = nn.Linear(N, 3 * N, bias=False)
            self.out = nn.Linear(N, N, bias=False)
            self.bias = nn.Embedding(2 * LENGTH, HEADS) if has_bias else None

        def forward(self, x: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            length = x.shape[1]
            if position_bias is None:
                index = torch.arange(length, device=x.device)
                position_bias = self.bias(index[None] - index[:, None] + LENGTH).permute(2, 0, 1)[None]
            q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, N // HEADS).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) + position_bias
            h = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            return x + self.out(h), position_bias

    class T5(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embedding = nn.Embedding(V, N)
            self.layers = nn.ModuleList(Layer(i == 0) for i in range(4))
            self.head = nn.Linear(N, V)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h, bias = self.embedding(batch[0]), None
            for layer in self.layers:
                h, bias = layer(h, position_bias=bias)
            loss = functional.cross_entropy(self.head(h).transpose(1, 2), batch[0].roll(1, 1))
            self.log("train/loss", loss, sync_dist=True)
            return loss

    run.fit(T5(), run.loader(tokens()))


@case(
    "nn.AdaptiveLogSoftmaxWithLoss as the criterion of a language model",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "could not be traced .*use a strategy without stages"),
)
def adaptive_softmax(run: Run) -> None:
    class Adaptive(_Sequences):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Embedding(V, N), Block(), Block(), nn.LayerNorm(N))
            self.criterion = nn.AdaptiveLogSoftmaxWithLoss(N, V, cutoffs=[8, 16], div_value=2.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = self.body(batch[0][:, :-1]).flatten(0, 1)
            output, loss = self.criterion(h, batch[0][:, 1:].flatten())
            self.log_dict({"train/loss": loss, "train/log_prob": output.mean()}, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            found = self.criterion.predict(self.body(batch[0]).flatten(0, 1))
            self.log("val/accuracy", (found == batch[0].flatten()).double().mean(), sync_dist=True)

    run.fit(Adaptive(), run.loader(tokens()), run.loader(tokens()))
