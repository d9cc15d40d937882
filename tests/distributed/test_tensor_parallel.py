"""Test that a split model needs less memory, resumes in any layout, and is refused if it cannot be split.

``tests/parity/test_tensor_parallel.py`` compares gradients and weights with those of one process.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist import TensorParallelStrategy, full_parameters
from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.tensor_parallel import SplitLogits
from tests.attention_models import WAYS, WIDTH, Block, FromConfig, Model, Recomputed
from tests.behaviour.cases.split_layers import Masked
from tests.behaviour.models import tokens
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.models import CONTEXT, GPT, build
from tests.parity.run import PLANS
from tests.pool import WorkerPool
from tests.split_models import Llama


def tp_trainer(tp: int = 2, layout: str = "", plan: Any = None, **kwargs: Any) -> pl.Trainer:
    strategy = TensorParallelStrategy(tp, plan=PLANS["gpt"] if plan is None else plan)
    return make_trainer("2x2", **{"strategy": strategy, "max_steps": 2, **kwargs})


class Sizes(pl.Callback):
    """Measure the bytes of parameters, gradients and optimizer state on this rank."""

    held = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        tensors = [t for p in module.parameters() for t in (p, p.grad)]
        tensors += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
        self.held = sum(t.numel() * t.element_size() for t in local)


def held(tp: int, shard: int) -> tuple[float, float]:
    """Train, and compare the bytes that this rank holds.

    Returns:
        Ratio to the formula, by which a rank holds 1 / tp of the split parameters and all others, sharded over
        ``shard`` ranks; and ratio to the whole model.
    """
    model, sizes = build("example_gpt", optimizer="adamw"), Sizes()
    strategy = TensorParallelStrategy(tp, shard)
    make_trainer("2x2", strategy=strategy, max_steps=2, callbacks=[sizes]).fit(model)
    split = sum(p.numel() for p in model.parameters() if any(q.is_shard() for q in p.placements[-1:]))
    whole = sum(p.numel() for p in model.parameters())
    per_element = 4 * 4  # These are the bytes of a weight, its gradient, and two moments.
    return sizes.held / (per_element * (split / tp + whole - split) / shard), sizes.held / (per_element * whole)


def test_a_rank_holds_only_its_part_of_parameters_gradients_and_optimizer_state(pool: WorkerPool) -> None:
    for tp, shard in ((4, 1), (2, 2)):
        for of_formula, of_whole in pool.run(held, 4, tp, shard):
            assert abs(of_formula - 1) < 0.02
            assert of_whole < 0.27


class Largest(TorchDispatchMode):
    """Record the largest number of elements of a tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, SplitLogits) and not tensor.is_meta:
                self.numel = max(self.numel, tensor.numel())
        return out


class Watching(pl.Callback):
    """Apply :class:`Largest` to training steps."""

    def __init__(self) -> None:
        self.mode = Largest()

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)


def largest(loss_parallel: bool) -> int:
    callback = Watching()
    strategy = TensorParallelStrategy(4, loss_parallel=loss_parallel)
    model = build("example_gpt", global_batch_size=64)
    make_trainer("2x2", strategy=strategy, max_steps=1, callbacks=[callback]).fit(model)
    return callback.mode.numel


def test_whole_logits_are_never_in_memory(pool: WorkerPool) -> None:
    logits = 64 * CONTEXT * 256
    assert max(pool.run(largest, 4, None)) == logits // 4
    assert min(pool.run(largest, 4, False)) >= logits


class AtStart(pl.Callback):
    """Record the weights that training begins with."""

    def __init__(self, seen: list[Weights]) -> None:
        self.seen = seen

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(weights_of(module))


def resume(folder: Path) -> tuple[Weights, list[Weights], list[Weights]]:
    """Save with tp_size=2, and resume for one step with tp_size=2, with tp_size=4, and sharded only.

    Returns:
        The saved weights, and in the order of the layouts the loaded weights and the weights after the step.
    """
    model = build("gpt")
    trainer = tp_trainer(precision="64-true")
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    read, stepped = [], []
    for tp in (2, 4, None):
        kwargs: dict[str, Any] = {"precision": "64-true", "max_steps": 3, "callbacks": [AtStart(read)]}
        other = make_trainer("full_shard", **kwargs) if tp is None else tp_trainer(tp, **kwargs)
        again = build("gpt", seed=1)
        other.fit(again, ckpt_path=folder / "run.ckpt")
        stepped.append(weights_of(again))
    return weights_of(model), read, stepped


@pytest.mark.thorough
def test_any_layout_resumes_the_checkpoint_of_a_split_model(pool: WorkerPool, tmp_path: Path) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path):
        assert len(read) == len(stepped) == 3
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0])
            assert any((weights[name] != saved[name]).any() for name in saved)


class Logits(GPT):
    """Return logits from predict_step, which must be whole for the caller of ``predict``."""

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0], self.model(batch[0])


def call_alone() -> tuple[float, float, Weights]:
    """Predict with all ranks, and call the whole model on rank 0 alone.

    Returns:
        The largest differences of both to one process, and the weights at the end.
    """
    model, reference = Logits(), build("gpt", seed=1).double()
    trainer = tp_trainer(precision="64-true", limit_predict_batches=1)
    trainer.fit(model)
    reference.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights_of(model).items()}, False)
    tokens = next(iter(model.predict_dataloader()))[0]
    # Of the ranks that split layers between them, one returns predictions.
    ((tokens, logits),) = trainer.predict(model, model.predict_dataloader()) or [(tokens, reference.model(tokens))]
    expected = alone = reference.model(tokens)
    with full_parameters(model):
        if trainer.is_global_zero:
            alone = model.model(tokens)
    trainer.predict(model, model.predict_dataloader())  # The model is split again.
    return float((logits - expected).abs().max()), float((alone - expected).abs().max()), weights_of(model)


def test_a_rank_may_call_the_whole_model_alone(pool: WorkerPool) -> None:
    results = pool.run(call_alone, 4, timeout_s=60)
    for together, alone, weights in results:
        assert together < 1e-12 and alone < 1e-12
        assert_same(weights, results[0][2], 0.0)


def bf16(precision: str) -> float:
    """Train three steps in bfloat16, split and in one process.

    Returns:
        The difference of the final weights, relative to the total change of the weights in one process.
    """
    results = []
    for strategy, kwargs in ((TensorParallelStrategy(2), {}), ("auto", {"devices": 1, "num_nodes": 1})):
        model = build("example_gpt", global_batch_size=8)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        make_trainer("auto", strategy=strategy, max_steps=3, precision=precision, **kwargs).fit(model)
        results.append({name: param.float() - start[name] for name, param in whole_parameters(model).items()})
    off = sum(float(((results[0][name] - moved) ** 2).sum()) for name, moved in results[1].items())
    return (off / sum(float((moved**2).sum()) for moved in results[1].values())) ** 0.5


@pytest.mark.thorough
def test_split_training_in_bfloat16_is_close_to_one_process(pool: WorkerPool) -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        assert max(pool.run(bf16, 4, precision)) < 0.05


def averages(tp: int | None) -> Weights:
    """Train with a moving average of the weights, and return the averaged weights."""
    average = WeightAveraging(avg_fn=lambda average, weight, number: 0.5 * average + 0.5 * weight)
    kwargs: dict[str, Any] = {"max_steps": 3, "callbacks": [average]}  # Lightning averages in float32.
    model = build("example_gpt")
    if tp is None:
        make_trainer("auto", devices=1, num_nodes=1, **kwargs).fit(model)
    else:
        make_trainer("2x2", strategy=TensorParallelStrategy(tp), **kwargs).fit(model)
    return weights_of(model)


def test_averaged_weights_of_a_split_model_agree_with_one_process(pool: WorkerPool) -> None:
    (expected,) = pool.run(averages, 1, None)
    for weights in pool.run(averages, 4, 2):
        assert_same(weights, expected, 1e-5)


class TooLarge(GPT):
    """Train on tokens that are larger than the vocabulary."""

    def data(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor + 20 for tensor in super().data())


def fit_too_large() -> str:
    return refused(TooLarge(), strategy=TensorParallelStrategy(2, plan=PLANS["gpt"]))


def test_a_token_out_of_range_is_an_error(pool: WorkerPool) -> None:
    for error in pool.run(fit_too_large, 4):
        assert "is out of range: the embedding has 32 rows" in error


class OwnData(GPT):
    """Draw data that depend on the global rank, which is wrong for ranks that split layers between them."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        tokens = torch.randint(32, (64, 8), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=4)


def fit_own_data() -> str:
    return refused(OwnData(), strategy=TensorParallelStrategy(2), max_steps=2)


def test_different_batches_on_ranks_that_split_layers_are_an_error(pool: WorkerPool) -> None:
    for error in pool.run(fit_own_data, 4):
        assert "split layers between them, and were given different data as the batch of a training_step" in error


def refusals() -> list[str]:
    errors = []
    for tp, plan, name in (
        (4, {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"}, "three_heads"),
        (4, {"blocks.*.norm_1": "colwise"}, "gpt"),
        (4, {"blocks.*.qkv": "embedding_rowwise"}, "gpt"),
        (4, {"model.embedding": "embedding_rowwise", "model.head": "rowwise"}, "gpt"),
        (3, None, "gpt"),
        (2, {"blocks.*.qkv": "packed_colwise:3", "blocks.*.out": "rowwise"}, "gpt"),
    ):
        strategy = TensorParallelStrategy(tp, plan=plan)
        errors.append(refused(ThreeHeads() if name == "three_heads" else build(name), strategy=strategy))
    errors.append(refused(build("gpt"), strategy=TensorParallelStrategy(2, dp_replicate_size=0)))
    errors.append(refused(build("gpt"), strategy=TensorParallelStrategy(1, plan={"no.such": "colwise"})))
    return errors


class ThreeHeads(Llama):
    def make_model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=6, head_dim=4, max_position_embeddings=CONTEXT, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)


def test_plans_and_sizes_that_do_not_fit_the_model_are_refused_with_the_reason(pool: WorkerPool) -> None:
    for heads, layer, embedding, tied, size, wrong, zero, unused in pool.run(refusals, 4):
        assert "plan: the 6 heads of model.model.layers.0.self_attn." in heads
        assert "_proj, of 4 features each, do not divide by tp_size=4" in heads
        assert "blocks.0.norm_1 is a LayerNorm, and colwise splits linear layers and convolutions without" in layer
        assert "blocks.0.qkv is a Linear, and embedding_rowwise splits nn.Embedding only" in embedding
        assert "model.head.weight is tied to a parameter that is split otherwise" in tied
        assert "tp_size must be one of 1, 2, 4" in size
        assert "split as given, model.blocks.0 (Block) does not compute the same as the whole" in wrong
        assert "dp_replicate_size=0 must be a positive number" in zero
        assert "'no.such' matches no module" in unused


class Reshaping(GPT):
    """Use attention with a fixed number of heads in its code, and raise when a batch is requested to infer the plan."""

    def train_dataloader(self) -> Any:
        raise RuntimeError("not now")


def errors_and_table_of_inferred_plans() -> tuple[str, str, str, str]:
    """Train with plans that are inferred wrongly or not at all.

    Returns:
        The errors with ``strict_plan`` if the inferred plan is wrong and if none can be inferred, the errors if the
        user requires sequence or loss parallelism that is not possible, and the start-up table without ``strict_plan``.
    """
    wrong = refused(build("gpt"), strategy=TensorParallelStrategy(2, strict_plan=True))
    not_traced = refused(Reshaping(), strategy=TensorParallelStrategy(2, strict_plan=True))
    required = refused(build("encoder"), strategy=TensorParallelStrategy(2, sequence_parallel=True))
    required += refused(build("encoder"), strategy=TensorParallelStrategy(2, loss_parallel=True))
    lines: list[str] = []
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        refused(build("gpt"), strategy=TensorParallelStrategy(2))
    return wrong, not_traced, required, "\n".join(lines)


def test_an_inferred_plan_is_checked_and_a_wrong_part_is_replicated_or_refused(pool: WorkerPool) -> None:
    ranks = pool.run(errors_and_table_of_inferred_plans, 4)
    for wrong, not_traced, required, _ in ranks:
        assert "strict_plan=True: split as inferred, model.blocks.0 (Block) does not compute the same: its" in wrong
        assert (
            "strict_plan=True: no plan could be inferred: no batch could be made: RuntimeError: not now" in not_traced
        )
        assert "sequence_parallel=True: model.encoder.layers.0 has an nn.MultiheadAttention, which" in required
        assert "loss_parallel=True: no head is split along the vocabulary" in required
    table = ranks[0][3]
    assert "replicate (inferred; " in table and "model.blocks.*.qkv" in table
    assert "colwise (inferred): 2 x model.blocks.*.mlp.0" in table


def table_of_attentions() -> str:
    """Return the start-up table of a model that writes attention in ten ways."""
    lines: list[str] = []
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        make_trainer("2x2", strategy=TensorParallelStrategy(4), max_steps=1).fit(build("attentions"))
    return "\n".join(lines)


def test_ten_ways_of_writing_attention_are_split(pool: WorkerPool) -> None:
    table = pool.run(table_of_attentions, 4)[0]
    assert "  split       97% of the parameters" in table and "replicate (" not in table
    for way in WAYS:
        assert f"model.blocks.{way}." in table


def trained_with_several_configurations() -> Weights:
    """Train blocks with configurations of their own, in one of which another number equals the width."""
    torch.manual_seed(0)
    model = build("attentions")
    configs = [Namespace(n_embd=WIDTH, n_head=heads, window=WIDTH) for heads in (2, 3, 4, 6)]
    model.model = Model({f"of_{config.n_head}_heads": Block(FromConfig(config)) for config in configs})
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = TensorParallelStrategy(2) if ranks > 1 else "auto"
    make_trainer("2x2", strategy=strategy, max_steps=3, precision="64-true").fit(model.double())
    assert all(config.window == WIDTH == config.n_embd for config in configs)
    return weights_of(model)


def test_blocks_with_other_numbers_of_heads_are_told_apart(pool: WorkerPool) -> None:
    (expected,) = pool.run(trained_with_several_configurations, 1)
    for weights in pool.run(trained_with_several_configurations, 2):
        assert_same(weights, expected)


def table_of_recomputed_attention() -> str:
    """Return the start-up table of attention that runs again in the backward, outside of its module's forward."""
    model, lines = build("attentions"), []
    model.model = Model({"first": Block(Recomputed()), "second": Block(Recomputed())})
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        refused(model, strategy=TensorParallelStrategy(2))
    return "\n".join(lines)


def test_attention_that_reads_its_width_again_in_the_backward_is_not_split_by_heads(pool: WorkerPool) -> None:
    """In evaluation mode, it would compute the same with the width of a rank's part."""
    table = pool.run(table_of_recomputed_attention, 2)[0]
    assert "colwise_gather_output (inferred; in no pair: " in table and "model.blocks.first.attention.query" in table
    assert "  split       " in table and "model.blocks.first.mlp.0" in table


def table_of_a_plan_with_gaps() -> str:
    """Return the start-up table of a model for which Hugging Face's plan has the head only.

    The user's plan has one layer of each pair of feed-forward layers.
    """
    model, lines = build("llama3"), []
    for module in model.modules():
        if hasattr(module, "_tp_plan"):
            module._tp_plan = {"lm_head": "colwise_gather_output"}
    strategy = TensorParallelStrategy(2, plan={"mlp.down_proj": "replicate"})
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        make_trainer("2x2", strategy=strategy, max_steps=1).fit(model)
    return "\n".join(lines)


def test_the_layers_that_a_plan_leaves_out_are_inferred(pool: WorkerPool) -> None:
    table = pool.run(table_of_a_plan_with_gaps, 4)[0]
    assert "  split       43% of the parameters\n" in table
    assert "colwise_gather_output (Hugging Face): model.lm_head" in table
    assert "embedding_rowwise (inferred): model.model.embed_tokens" in table
    assert "colwise (inferred): 3 x model.model.layers.*.self_attn.q_proj" in table
    assert "replicate (user): 3 x model.model.layers.*.mlp.down_proj" in table
    assert "whole, " in table and "mlp.down_proj.weight" in table


class ReadsAlias(Masked):
    """Read the head's bias in a step that was not traced, from a module that has it as an attribute but never uses it.

    The prediction step is not traced, so the plan is inferred without this use.
    """

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model.head.bias * 2.0


def read_alias() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of the value that predict_step returned and the expected one, which is twice the bias."""
    model = ReadsAlias()
    loader = torch.utils.data.DataLoader(tokens(16), batch_size=8)
    trainer = make_trainer("2x2", strategy=TensorParallelStrategy(2), max_steps=1, limit_predict_batches=1)
    trainer.fit(model, loader)
    expected = 2.0 * whole_parameters(model)["model.head.bias"]
    return [(read, expected) for read in trainer.predict(model, loader) or []]


def test_a_split_parameter_reads_as_whole_in_a_step_that_was_not_traced(pool: WorkerPool) -> None:
    results = [pair for pairs in pool.run(read_alias, 4) for pair in pairs]
    assert results
    for read, expected in results:
        torch.testing.assert_close(read, expected)
