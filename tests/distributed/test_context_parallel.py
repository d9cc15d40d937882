"""Test what splitting sequences saves, that any batch can be split, and what is refused.

``tests/parity/test_context_parallel.py`` compares gradients and weights with those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import ContextParallelStrategy
from lightning_dist.techniques.context_parallel import ContextParallel
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.distributed.test_tensor_parallel import AtStart, Watching
from tests.models import CONTEXT, GPT, VOCAB, Block, TestModule, build
from tests.pool import WorkerPool
from tests.split_models import T5, Bart, LanguageModel, Llama, Mixer
from tests.thorough import one_in

LENGTHS = (7, 5, 8, 6)


class OfAnyLength(Llama):
    """Train on batches of changing lengths, most of which do not divide by the number of ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = (part[:, : LENGTHS[batch_idx % 4]] for part in batch)
        return functional.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def fit(model: Any, strategy: Any = "auto", **kwargs: Any) -> Weights:
    kwargs = {"max_steps": 4, "precision": "64-true", **kwargs}
    trainer = make_trainer("auto", strategy=strategy, **kwargs, **({"devices": 1} if strategy == "auto" else {}))
    trainer.fit(model)
    return weights_of(model)


def fit_lengths(attention: str | None) -> Weights:
    torch.manual_seed(0)
    return fit(OfAnyLength(), "auto" if attention is None else ContextParallelStrategy(4, attention=attention))


def test_sequences_of_any_length_are_split(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    expected = reference_pool.run(fit_lengths, 1, None)[0]
    for attention in ("ulysses", "all_gather"):
        assert_same(pool.run(fit_lengths, 4, attention)[0], expected)


class OfUnequalLengths(Bart):
    """Train an encoder and a decoder on sequences of other lengths, the first batch on those of ``first``."""

    def __init__(self, first: tuple[int, int], later: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lengths = first, later

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = self.lengths[min(batch_idx, 1)]
        tokens, targets = batch
        out = self.model(input_ids=tokens[:, :source], decoder_input_ids=tokens.flip(1)[:, :target])
        return functional.cross_entropy(out.logits.flatten(0, 1), targets[:, :target].flatten())


def fit_unequal(first: Any, later: Any, attention: str | None) -> Weights:
    torch.manual_seed(0)
    strategy = "auto" if attention is None else ContextParallelStrategy(2, attention=attention)
    return fit(OfUnequalLengths(first, later), strategy)


@pytest.mark.parametrize("attention", one_in(2, ["ulysses", "all_gather"]))
@pytest.mark.parametrize(
    ("first", "later"), one_in(2, [((6, 8), (4, 8)), ((8, 8), (6, 8)), ((4, 8), (4, 7)), ((4, 7), (8, 8))])
)
def test_sequences_of_an_encoder_may_be_as_long_as_anything_else(
    pool: WorkerPool, reference_pool: WorkerPool, first: Any, later: Any, attention: str
) -> None:
    """On two ranks, each with four tokens of eight, the batch has eight samples as well."""
    expected = reference_pool.run(fit_unequal, 1, first, later, None)[0]
    assert_same(pool.run(fit_unequal, 2, first, later, attention)[0], expected)


def refused_lengths() -> str:
    return refused(OfUnequalLengths((8, 8), (4, 7)), strategy=ContextParallelStrategy(2), max_steps=2)


def test_a_sequence_of_an_encoder_that_may_be_taken_for_a_part_is_refused(pool: WorkerPool) -> None:
    for error in pool.run(refused_lengths, 2):
        assert "the positional argument 2 of a block has 4 tokens in this step, as each rank has" in error


def fit_compiled(compiles: bool) -> Weights:
    model = build("example_gpt")  # Its blocks number the tokens themselves.
    return fit(model, ContextParallelStrategy(2, compile="eager" if compiles else False), max_steps=2)


@pytest.mark.thorough
def test_compiled_blocks_compute_the_same(pool: WorkerPool) -> None:
    assert_same(pool.run(fit_compiled, 4, True)[0], pool.run(fit_compiled, 4, False)[0])


class Bytes(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        technique = trainer.strategy.parallel.get(ContextParallel)
        self.sent = technique.metrics(1)["comm/cp_mib_per_step"] * 2**20


def sent(attention: str) -> float:
    callback = Bytes()
    model = build("example_gpt", global_batch_size=4)
    fit(model, ContextParallelStrategy(4, attention=attention), callbacks=[callback], max_steps=1)
    return callback.sent


def test_a_rank_sends_as_many_bytes_as_the_formulas_say(pool: WorkerPool) -> None:
    size, hidden = 4, 4 * CONTEXT * 24 * 8  # These are the ranks, and the bytes of the hidden states of all tokens.
    outside = hidden / size * (size - 1) + 2 * 8 * (size - 1) / size  # The first split's backward; the loss.
    ulysses = 2 * 8 * hidden / size * (size - 1) / size  # Each of 2 layers exchanges q, k, v and the result, and back.
    gathers = 2 * 4 * hidden / size * (size - 1)  # Each layer gathers keys and values, and reduces their gradients.
    for num_bytes in pool.run(sent, 4, "ulysses"):
        assert num_bytes == pytest.approx(ulysses + outside, rel=1e-6)
    for num_bytes in pool.run(sent, 4, "all_gather"):
        assert num_bytes == pytest.approx(gathers + outside, rel=1e-6)


class Checkpointed(Llama):
    """Draw random numbers in blocks."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        return model


def fit_checkpointed(mode: str) -> Weights:
    torch.manual_seed(0)
    return fit(Checkpointed(), ContextParallelStrategy(2, activation_checkpointing=mode), max_steps=2)


@pytest.mark.thorough
def test_blocks_that_run_again_have_the_same_bits(pool: WorkerPool) -> None:
    plain, again = pool.run(fit_checkpointed, 4, "none")[0], pool.run(fit_checkpointed, 4, "full")[0]
    assert_same(again, plain, 0.0)


class Recorded(nn.Dropout):
    """Record which values are set to zero."""

    seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.append((out == 0).flatten().tolist())
        return out


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(24, 72), Recorded(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return x + self.dropout(attended.transpose(1, 2).flatten(2))


class Cleared(pl.Callback):
    """Forget what the search for a plan has dropped."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        Recorded.seen.clear()


class WithDropout(LanguageModel):
    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(32, 24)
                self.blocks = nn.Sequential(Dropping(), Dropping())
                self.head = nn.Linear(24, 32)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.blocks(self.embedding(tokens)))

        return Model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


def masks() -> list[list[bool]]:
    fit(WithDropout(), ContextParallelStrategy(4), callbacks=[Cleared()], max_steps=1)
    return Recorded.seen


@pytest.mark.thorough
def test_each_rank_drops_other_values_of_its_tokens(pool: WorkerPool) -> None:
    seen = [masks[0] for masks in pool.run(masks, 4)]
    assert all(seen[0] != other for other in seen[1:])


def largest(cp_size: int) -> int:
    callback = Watching()
    model = build("example_gpt", global_batch_size=64)
    fit(model, ContextParallelStrategy(cp_size), callbacks=[callback], max_steps=1, precision="32-true")
    return callback.mode.numel


def test_whole_logits_are_never_in_memory(pool: WorkerPool) -> None:
    logits = 64 * CONTEXT * 256
    assert max(pool.run(largest, 4, 4)) == logits // 4
    assert min(pool.run(largest, 4, 1)) >= logits // 4  # Each of the 4 ranks has a fourth of the batch.


def resume(folder: Path) -> tuple[Weights, list[Weights], list[Weights]]:
    """Save with cp_size=2, and resume for one step with cp_size=2, with cp_size=4, and sharded only."""
    model = build("gpt")
    trainer = make_trainer("2x2", strategy=ContextParallelStrategy(2), precision="64-true", max_steps=2)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    read, stepped = [], []
    for cp in (2, 4, None):
        kwargs: dict[str, Any] = {"precision": "64-true", "max_steps": 3, "callbacks": [AtStart(read)]}
        strategy = {} if cp is None else {"strategy": ContextParallelStrategy(cp)}
        again = build("gpt", seed=1)
        make_trainer("full_shard", **strategy, **kwargs).fit(again, ckpt_path=folder / "run.ckpt")
        stepped.append(weights_of(again))
    return weights_of(model), read, stepped


@pytest.mark.thorough
def test_any_layout_resumes_the_checkpoint_of_split_sequences(pool: WorkerPool, tmp_path: Path) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path):
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0])
            assert any((weights[name] != saved[name]).any() for name in saved)


class UsingHiddenStates(Llama):
    """Use a hidden state between blocks, from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(input_ids=batch[0], output_hidden_states=batch_idx > 0)
        loss = functional.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())
        return loss if batch_idx == 0 else loss + output.hidden_states[1].pow(2).mean()


class Short(Llama):
    """Train on batches of which some have fewer tokens than there are ranks."""

    short = (1,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = (part[:, :3] if batch_idx in self.short else part for part in batch)
        return functional.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


class AlwaysShort(Short):
    short = (0, 1)


class MaskingBlock(Block):
    """Make the mask of attention from the shape of the input."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class MakingMasks(GPT):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks = nn.ModuleList(MaskingBlock(20) for _ in range(2))


class LongAsAHead(TestModule):
    """Train a Llama whose sequences have as many tokens as a head has features, and then others."""

    data = GPT.data

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=4 * CONTEXT, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0][:, : CONTEXT - batch_idx]
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


UNUSUAL = {"short": Short, "masks": MakingMasks, "as long as a head": LongAsAHead}


def fit_unusual(cp_size: int | None) -> dict[str, Weights]:
    result = {}
    for name, make in UNUSUAL.items():
        torch.manual_seed(0)
        model = make()
        strategy: Any = "auto" if cp_size is None else ContextParallelStrategy(cp_size)
        make_trainer("auto", strategy=strategy, max_steps=3, precision="64-true").fit(model)
        result[name] = weights_of(model)
    return result


@pytest.mark.parametrize("cp_size", one_in(2, [2, 4]))
def test_unusual_lengths_and_masks_are_those_of_one_process(
    cp_size: int, pool: WorkerPool, reference_pool: WorkerPool
) -> None:
    (expected,) = reference_pool.run(fit_unusual, 1, None)
    for weights in pool.run(fit_unusual, cp_size, cp_size):
        for name in UNUSUAL:
            assert_same(weights[name], expected[name])


REFUSED = {
    "position biases": (T5, {}, "uses more of what model.encoder.block.0 (T5Block) returns", "cp_size=4"),
    "layers across tokens": (Mixer, {}, "F.scaled_dot_product_attention", "cp_size=4"),
    "hidden states": (UsingHiddenStates, {"max_steps": 2}, "model.model.layers.0", "units=[...]"),
    "short sequences": (AlwaysShort, {}, "the 3 tokens of the first batch are too few", "cp_size=4"),
}


def refuse(name: str) -> str:
    make, kwargs, *_ = REFUSED[name]
    return refused(make(), strategy=ContextParallelStrategy(4), **kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_with_the_fix(pool: WorkerPool, name: str) -> None:
    for error in pool.run(refuse, 4, name):
        assert error.startswith("SequenceSplitError"), error
        for text in REFUSED[name][2:]:
            assert text in error


def test_an_unknown_kind_of_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention='ring' must be one of 'auto', 'ulysses', 'all_gather'"):
        ContextParallelStrategy(2, attention="ring")
