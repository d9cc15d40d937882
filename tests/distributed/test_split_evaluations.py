"""Test that evaluations on parts of the sequence have the results of one process, whatever of the model they use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_dist import ContextParallelStrategy, NDParallelStrategy, full_parameters
from lightning_dist.mesh import split_tensor
from tests.distributed.fit import make_trainer
from tests.models import CONTEXT
from tests.pool import WorkerPool
from tests.split_models import SPLIT_MODELS, Example, LanguageModel, Llama
from tests.thorough import one_in


class Result(NamedTuple):
    """Hold what an evaluation returns.

    Args:
        loss: The logged loss of the validation.
        predictions: What ``predict_step`` has returned on the first rank of a pipeline or of a sequence.
        num_tokens: Numbers of tokens that layers in blocks were given in the evaluations.
        warnings: Warnings about evaluations.
    """

    loss: float
    predictions: list[Any]
    num_tokens: set[int]
    warnings: list[str]


class Validating(pl.LightningModule):
    """Log the loss of the training step in a validation as well, and return the whole output as a prediction."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = self.inputs(batch[0]) if isinstance(self, LanguageModel) and not isinstance(self, Example) else None
        output = self.model(batch[0]) if inputs is None else self.model(**inputs).logits
        return output, output.argmax(-1)


def validating(base: type[pl.LightningModule]) -> type[pl.LightningModule]:
    return type(f"Validating{base.__name__}", (Validating, base), {})


def evaluate(model: pl.LightningModule, strategy: Any, **kwargs: Any) -> Result:
    """Train ``model`` for a step, validate it, and predict."""
    num_tokens: set[int] = set()

    watched = {
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in (".layers.", ".layer.", ".blocks."))
    }

    def record(layer: nn.Module, args: tuple[Tensor]) -> None:
        if layer in watched and not layer.training and not isinstance(args[0], FakeTensor):
            num_tokens.add(args[0].size(-2))

    defaults: dict[str, Any] = {
        "max_steps": 1,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "precision": "64-true",
    }
    devices = {"devices": 1} if strategy == "auto" else {}
    trainer = make_trainer(
        "auto", strategy=strategy, limit_predict_batches=2, **{**defaults, **devices, **kwargs}, val_check_interval=1
    )
    with warnings.catch_warnings(record=True) as caught, ExitStack() as at_end:
        at_end.callback(register_module_forward_pre_hook(record).remove)
        warnings.simplefilter("always")
        trainer.fit(model)
        loss = float(trainer.callback_metrics["val/loss"])
        predictions = trainer.predict(model) or []
    texts = [str(each.message) for each in caught if "split_evaluations" in str(each.message)]
    return Result(loss, predictions, num_tokens, texts)


def evaluate_named(name: str, sizes: dict[str, int] | None, attention: str = "auto") -> Result:
    torch.manual_seed(0)
    model = validating(SPLIT_MODELS[name])()
    if sizes is None:
        return evaluate(model, "auto")
    make = ContextParallelStrategy if sizes.keys() == {"cp_size"} else NDParallelStrategy
    return evaluate(model, make(**sizes, attention=attention, split_evaluations=True))


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, Record):
        actual, expected = actual.states, expected.states
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


CASES = [
    ("example_gpt", {"cp_size": 4}, "ulysses", CONTEXT // 4),
    ("example_gpt", {"cp_size": 2}, "all_gather", CONTEXT // 2),
    ("llama3", {"cp_size": 2}, "ulysses", CONTEXT // 2),
    ("llama3", {"cp_size": 4}, "all_gather", CONTEXT // 4),
    ("bart", {"cp_size": 2}, "ulysses", CONTEXT // 2),
    ("vit", {"cp_size": 4}, "auto", 5),
    ("encoder", {"cp_size": 2}, "auto", 8),
    ("llama3", {"cp_size": 2, "tp_size": 2}, "auto", CONTEXT // 2),
    ("llama3", {"cp_size": 2, "pp_size": 2}, "auto", CONTEXT // 2),
    ("mixtral", {"cp_size": 4, "ep_size": 2}, "auto", CONTEXT // 4),
]


@pytest.mark.parametrize(("name", "sizes", "attention", "own"), one_in(4, CASES))
def test_evaluations_on_parts_have_the_results_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, name: str, sizes: dict[str, int], attention: str, own: int
) -> None:
    expected = reference_pool.run(evaluate_named, 1, name, None)[0]
    num_ranks = 4 if len(sizes) > 1 else sizes["cp_size"]
    results = pool.run(evaluate_named, num_ranks, name, sizes, attention)
    for result in results:
        assert result.loss == pytest.approx(expected.loss, rel=1e-10)
        assert result.num_tokens == {own}
        assert not result.warnings
    assert_equal(next(result.predictions for result in results if result.predictions), expected.predictions)


class Inspecting(Llama):
    """Use hidden states of inner blocks, in a prediction, by the model's option and by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def watch(self) -> None:
        self.model.model.layers[1].register_forward_hook(lambda m, args, out: self.seen.append((out * 2).detach()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.model.model.embed_tokens(batch[0])
        position = self.model.model.rotary_emb(hidden, torch.arange(hidden.size(1)).unsqueeze(0))
        out = self.model.model.layers[0](hidden, position_embeddings=position)  # This leaves the chain of blocks.
        self.log("val/loss", out.pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.clear()
        states = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states
        return states, states[1].mean(1), list(self.seen)


def inspect(splits: bool) -> Result:
    torch.manual_seed(0)
    model = Inspecting()
    model.on_validation_start = model.watch  # In training, a hook on a block would see some of the tokens.
    return evaluate(model, ContextParallelStrategy(4, split_evaluations=True) if splits else "auto")


def test_hidden_states_of_inner_blocks_are_whole_in_evaluations(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    expected = reference_pool.run(inspect, 1, False)[0]
    for result in pool.run(inspect, 4, True):
        assert result.loss == pytest.approx(expected.loss, rel=1e-10)
        assert result.num_tokens == {CONTEXT // 4}
        assert not result.warnings
        if result.predictions:
            assert_equal(result.predictions, expected.predictions)


def evaluate_class(kind: type[pl.LightningModule], splits: bool) -> Result:
    torch.manual_seed(0)
    return evaluate(kind(), ContextParallelStrategy(4, split_evaluations=True) if splits else "auto")


class Generating(Llama):
    """Generate text in a validation, with a cache of keys, from prompts of another length than in training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model.generate(batch[0][:, :5], max_new_tokens=3, do_sample=False, use_cache=True)
        self.log("val/loss", out.double().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch[0][:, :3]).logits, self.model(input_ids=batch[0][:, :7]).logits


def test_cached_keys_and_short_sequences_are_whole_in_evaluations(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    expected = reference_pool.run(evaluate_class, 1, Generating, False)[0]
    for rank, result in enumerate(pool.run(evaluate_class, 4, Generating, True)):
        assert result.loss == pytest.approx(expected.loss, rel=1e-10)
        assert result.num_tokens == {1, 5, 3, 2}  # a generated one, the prompt, a short sequence, and a part of seven
        if rank == 0:
            assert_equal(result.predictions, expected.predictions)
            cached, short = result.warnings
            assert "model.layers.0 runs on whole sequences" in cached
            assert "pass use_cache=False" in cached
            assert "has 3 tokens as input, which are too few to be split" in short


class WithPadding(Llama):
    """Pass a mask to the model in evaluations only."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.ones_like(batch[0])
        mask[0, :3] = 0
        return self.model(input_ids=batch[0], attention_mask=mask).logits[:, 3:]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.model(input_ids=batch[0]).logits.pow(2).mean(), sync_dist=True)


class Scaling(nn.Module):
    """Attend to all tokens, or leave attention out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 72)

    def forward(self, x: Tensor, attends: bool = True) -> Tensor:
        q, k, v = self.layer(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v) if attends else v.flip(-2)
        return x + attended.transpose(1, 2).flatten(2)


class WithOption(LanguageModel):
    """Give blocks another option in evaluations, with which they mix tokens in another way."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.head = nn.Embedding(32, 24), nn.Linear(24, 32)
                self.blocks = nn.ModuleList([Scaling(), Scaling()])

            def forward(self, tokens: Tensor, attends: bool = True) -> Tensor:
                x = self.embedding(tokens)
                for block in self.blocks:
                    x = block(x, attends=attends)
                return self.head(x)

        return Model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0], attends=False)


def test_masks_in_evaluations_alone_are_applied(pool: WorkerPool, reference_pool: WorkerPool) -> None:
    expected = reference_pool.run(evaluate_class, 1, WithPadding, False)[0]
    result = pool.run(evaluate_class, 4, WithPadding, True)[0]
    assert_equal(result.predictions, expected.predictions)
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert result.num_tokens == {CONTEXT // 4}


def test_a_block_that_is_given_another_option_runs_on_the_whole_sequence(
    pool: WorkerPool, reference_pool: WorkerPool
) -> None:
    expected = reference_pool.run(evaluate_class, 1, WithOption, False)[0]
    result = pool.run(evaluate_class, 4, WithOption, True)[0]
    assert_equal(result.predictions, expected.predictions)
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert result.num_tokens == {CONTEXT // 4, CONTEXT}
    assert len(result.warnings) == 1
    assert "is given attends=False, and True in the first step" in result.warnings[0]


class Attending(nn.Module):
    returns_norm = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(24, 72), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.layer(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.dropout(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x, x.norm(dim=-1) if self.returns_norm else None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Record:
    states: tuple[Tensor, ...]
    name: str = "record"


class Using(LanguageModel):
    """Evaluate a model whose code is simple enough to be used in any way.

    Args:
        use: Name of the function of ``USES`` that makes the prediction.
    """

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        for block in self.model.blocks:
            block.returns_norm = use == "other tensors of a block"

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.head = nn.Embedding(32, 24), nn.Linear(24, 32)
                self.blocks = nn.ModuleList([Attending(), Attending(), Attending()])

            def states(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
                states, norms = [self.embedding(tokens)], []
                for block in self.blocks:
                    state, norm = block(states[-1])
                    states.append(state)
                    norms.append(norm)
                return states, norms

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.states(tokens)[0][-1])

        return Model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return USES[self.use](self.model, batch[0])


def with_one_block_in_training(model: Any, tokens: Tensor) -> Tensor:
    model.blocks[0].train()
    return model(tokens)


def with_dropout_in_training(model: Any, tokens: Tensor) -> Tensor:
    model.blocks[1].dropout.train()
    return model(tokens)


def add_to_another_tensor(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    sums = torch.zeros(len(tokens) + 1, *logits.shape[1:], dtype=logits.dtype)
    sums[1:] = logits
    return sums.add_(logits[:1])


def repeat_from_the_middle(model: Any, tokens: Tensor) -> Tensor:
    return model.blocks[0](model.states(tokens)[0][2][:, 2:])[0]


def leave_out_parallelism(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    before = model(tokens) * 1.0
    with full_parameters(model):
        inside = model(tokens) * 1.0
    return before, inside, model(tokens) * 1.0


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "one block in training mode": with_one_block_in_training,
    "a layer in training mode": with_dropout_in_training,
    "other tensors of a block": lambda model, tokens: model.states(tokens)[1],
    "slices of hidden states": repeat_from_the_middle,
    "transposed hidden states": lambda model, tokens: model.blocks[1](model.states(tokens)[0][1].transpose(0, 1))[0],
    "named tuples": lambda model, tokens: Pair(model(tokens), model.states(tokens)[0][1]),
    "another tensor changed in place": add_to_another_tensor,
    "another dtype of the same bits": lambda model, tokens: model(tokens).view(torch.int64).bitwise_and(1 << 62),
    "the whole model within a step": leave_out_parallelism,
    "dataclasses": lambda model, tokens: {"record": Record(tuple(model.states(tokens)[0]))},
}


def use(name: str, splits: bool | None) -> Result:
    torch.manual_seed(0)
    strategy = "auto" if splits is None else ContextParallelStrategy(2, split_evaluations=splits)
    return evaluate(Using(name), strategy)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", one_in(2, USES))
def test_evaluations_may_use_a_model_in_any_way(
    pool: WorkerPool, reference_pool: WorkerPool, name: str, splits: bool
) -> None:
    expected = reference_pool.run(use, 1, name, None)[0]
    for result in pool.run(use, 2, name, splits):
        if splits:
            assert CONTEXT // 2 in result.num_tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-10)
        if result.predictions:
            assert_equal(result.predictions, expected.predictions)


def keep_in_dataclass() -> list[str]:
    """Return the types of the tensors that a callback is given in a dataclass."""
    seen: list[str] = []

    class Writer(pl.Callback):
        def on_predict_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
            seen.extend(type(each).__name__ for each in outputs["record"].states)

    model = Using("dataclasses")
    trainer = make_trainer(
        "auto", strategy=ContextParallelStrategy(2, split_evaluations=True), callbacks=[Writer()],
        limit_predict_batches=1, max_steps=1,
    )  # fmt: skip
    trainer.fit(model)
    trainer.predict(model)
    return seen


def test_a_callback_is_given_whole_values_in_a_dataclass(pool: WorkerPool) -> None:
    assert pool.run(keep_in_dataclass, 2)[0] == ["Tensor"] * 4


class ReturningOnOneRank(Using):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        self.log("val/loss", 0.0)
        return {"logits": logits if self.global_rank == 0 else None}


def return_on_one_rank() -> str:
    timed_barrier = split_tensor.timed_barrier
    with mock.patch.object(split_tensor, "timed_barrier", lambda what, timeout_s, ranks: timed_barrier(what, 3, ranks)):
        try:
            evaluate(ReturningOnOneRank("named tuples"), ContextParallelStrategy(2, split_evaluations=True))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_value_that_one_rank_alone_returns_is_an_error(pool: WorkerPool) -> None:
    error = pool.run(return_on_one_rank, 2)[0]
    assert error.startswith("OtherRankError: the return of a tensor that is split over cp: rank 1 did not arrive")
