"""What a split model is besides equal to one that is not: smaller, refused where it cannot be, and fed alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist import TensorParallelStrategy, full_parameters
from lightning_dist.parity import whole_parameters
from lightning_dist.tensor_parallel import SplitLogits
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
    """Bytes on this rank, of parameters, gradients and optimizer state."""

    held = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        tensors = [t for p in module.parameters() for t in (p, p.grad)]
        tensors += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
        self.held = sum(t.numel() * t.element_size() for t in local)


def held(tp: int, shard: int) -> tuple[float, float]:
    """What a rank holds, against 1 / tp of what is split and the rest, and against the whole model."""
    model, sizes = build("example_gpt", optimizer="adamw"), Sizes()
    strategy = TensorParallelStrategy(tp, shard)
    make_trainer("2x2", strategy=strategy, max_steps=2, callbacks=[sizes]).fit(model)
    split = sum(p.numel() for p in model.parameters() if any(q.is_shard() for q in p.placements[-1:]))
    whole = sum(p.numel() for p in model.parameters())
    per_element = 4 * 4  # a weight, its gradient, and two moments
    return sizes.held / (per_element * (split / tp + whole - split) / shard), sizes.held / (per_element * whole)


def test_a_rank_holds_its_part(pool: WorkerPool) -> None:
    for tp, shard in ((4, 1), (2, 2)):
        for of_formula, of_whole in pool.run(held, 4, tp, shard):
            assert abs(of_formula - 1) < 0.02
            assert of_whole < 0.27


class Largest(TorchDispatchMode):
    """The most elements of a tensor that anything returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, SplitLogits) and not tensor.is_meta:
                self.numel = max(self.numel, tensor.numel())
        return out


class Watching(pl.Callback):
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
    """Notes the weights that training begins with."""

    def __init__(self, seen: list[Weights]) -> None:
        self.seen = seen

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(weights_of(module))


def resume(folder: Path) -> tuple[Weights, list[Weights], list[Weights]]:
    """What was saved, what is read of it, and a step from there: split as it was, split otherwise, and only sharded."""
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


def test_any_layout_resumes_it(pool: WorkerPool, tmp_path: Path) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path):
        assert len(read) == len(stepped) == 3
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0])
            assert any((weights[name] != saved[name]).any() for name in saved)


class Logits(GPT):
    """Returns logits, which are whole for whoever is given them."""

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0], self.model(batch[0])


def call_alone() -> tuple[float, float, Weights]:
    """How far from one process is what all compute in a step, and what rank 0 does alone; and the weights after it."""
    model, reference = Logits(), build("gpt", seed=1).double()
    trainer = tp_trainer(precision="64-true", limit_predict_batches=1)
    trainer.fit(model)
    reference.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights_of(model).items()}, False)
    tokens = next(iter(model.predict_dataloader()))[0]
    # One rank of each tp returns predictions.
    ((tokens, logits),) = trainer.predict(model, model.predict_dataloader()) or [(tokens, reference.model(tokens))]
    expected = alone = reference.model(tokens)
    with full_parameters(model):
        if trainer.is_global_zero:
            alone = model.model(tokens)
    trainer.predict(model, model.predict_dataloader())  # split again
    return float((logits - expected).abs().max()), float((alone - expected).abs().max()), weights_of(model)


def test_a_rank_may_call_the_whole_model_alone(pool: WorkerPool) -> None:
    results = pool.run(call_alone, 4, timeout_s=60)
    for together, alone, weights in results:
        assert together < 1e-12 and alone < 1e-12
        assert_same(weights, results[0][2], 0.0)


def bf16(precision: str) -> float:
    """How far three steps in bfloat16 end from the same in one process, relative to how far they went."""
    results = []
    for strategy, kwargs in ((TensorParallelStrategy(2), {}), ("auto", {"devices": 1, "num_nodes": 1})):
        model = build("example_gpt", global_batch_size=8)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        make_trainer("auto", strategy=strategy, max_steps=3, precision=precision, **kwargs).fit(model)
        results.append({name: param.float() - start[name] for name, param in whole_parameters(model).items()})
    off = sum(float(((results[0][name] - moved) ** 2).sum()) for name, moved in results[1].items())
    return (off / sum(float((moved**2).sum()) for moved in results[1].values())) ** 0.5


def test_bfloat16(pool: WorkerPool) -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        assert max(pool.run(bf16, 4, precision)) < 0.05


def averages(tp: int | None) -> Weights:
    """The weights after a fit that ends with their moving average."""
    average = WeightAveraging(avg_fn=lambda average, weight, number: 0.5 * average + 0.5 * weight)
    kwargs: dict[str, Any] = {"max_steps": 3, "callbacks": [average]}  # Lightning keeps an average in float32
    model = build("example_gpt")
    if tp is None:
        make_trainer("auto", devices=1, num_nodes=1, **kwargs).fit(model)
    else:
        make_trainer("2x2", strategy=TensorParallelStrategy(tp), **kwargs).fit(model)
    return weights_of(model)


def test_weight_averaging(pool: WorkerPool) -> None:
    (expected,) = pool.run(averages, 1, None)
    for weights in pool.run(averages, 4, 2):
        assert_same(weights, expected, 1e-5)


class TooLarge(GPT):
    def data(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor + 20 for tensor in super().data())


def fit_too_large() -> str:
    return refused(TooLarge(), strategy=TensorParallelStrategy(2, plan=PLANS["gpt"]))


def test_a_token_out_of_range_is_told(pool: WorkerPool) -> None:
    for error in pool.run(fit_too_large, 4):
        assert "is out of range: the embedding has 32 rows" in error


class OwnData(GPT):
    """Splits the data by the global rank, as it must not."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        tokens = torch.randint(32, (64, 8), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=4)


def fit_own_data() -> str:
    return refused(OwnData(), strategy=TensorParallelStrategy(2), max_steps=2)


def test_ranks_that_are_given_different_batches_are_told(pool: WorkerPool) -> None:
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


def test_what_cannot_be_split_is_refused_with_the_numbers(pool: WorkerPool) -> None:
    for heads, layer, embedding, tied, size, wrong, zero, unused in pool.run(refusals, 4):
        assert "plan: the 6 heads of model.model.layers.0.self_attn." in heads
        assert "_proj, of 4 features each, do not divide by tp_size=4" in heads
        assert "blocks.0.norm_1 is a LayerNorm, and colwise splits linear layers only" in layer
        assert "blocks.0.qkv is a Linear, and embedding_rowwise splits nn.Embedding only" in embedding
        assert "model.head.weight is tied to a parameter that is split otherwise" in tied
        assert "tp_size must be one of 1, 2, 4" in size
        assert "split as given, model.blocks.0 (Block) does not compute the same as the whole" in wrong
        assert "dp_replicate_size=0 must be a positive number" in zero
        assert "'no.such' matches no module" in unused


class Reshaping(GPT):
    """Its attention counts on all heads being there, by a number in its code; its batch cannot be looked at."""

    def train_dataloader(self) -> Any:
        raise RuntimeError("not now")


def strict() -> tuple[str, str, str, str]:
    """The errors where nothing can be inferred, or what was is wrong, and the table where it need not be right."""
    wrong = refused(build("gpt"), strategy=TensorParallelStrategy(2, strict_plan=True))
    unseen = refused(Reshaping(), strategy=TensorParallelStrategy(2, strict_plan=True))
    asked = refused(build("encoder"), strategy=TensorParallelStrategy(2, sequence_parallel=True))
    asked += refused(build("encoder"), strategy=TensorParallelStrategy(2, loss_parallel=True))
    lines: list[str] = []
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        refused(build("gpt"), strategy=TensorParallelStrategy(2))
    return wrong, unseen, asked, "\n".join(lines)


def test_an_inferred_plan_is_confirmed(pool: WorkerPool) -> None:
    ranks = pool.run(strict, 4)
    for wrong, unseen, asked, _ in ranks:
        assert "strict_plan=True: split as inferred, model.blocks.0 (Block) does not compute the same: its" in wrong
        assert "strict_plan=True: no plan could be inferred: no batch could be made: RuntimeError: not now" in unseen
        assert "sequence_parallel=True: TransformerEncoderLayer: its results differ by" in asked
        assert "loss_parallel=True: no head is split along the vocabulary" in asked
    table = ranks[0][3]
    assert "replicate (inferred; " in table and "model.blocks.*.qkv" in table
    assert "colwise (inferred): 2 x model.blocks.*.mlp.0" in table


def table_of_a_plan_with_gaps() -> str:
    """The table where Hugging Face names the head alone, and the user one layer of each feed-forward pair."""
    model, lines = build("llama3"), []
    for module in model.modules():
        if hasattr(module, "_tp_plan"):
            module._tp_plan = {"lm_head": "colwise_gather_output"}
    strategy = TensorParallelStrategy(2, plan={"mlp.down_proj": "replicate"})
    with patch("lightning_dist.plugins.strategies.mesh.rank_zero_info", lines.append):
        make_trainer("2x2", strategy=strategy, max_steps=1).fit(model)
    return "\n".join(lines)


def test_what_a_plan_leaves_out_is_inferred(pool: WorkerPool) -> None:
    table = pool.run(table_of_a_plan_with_gaps, 4)[0]
    assert "  split       43% of the parameters\n" in table
    assert "colwise_gather_output (Hugging Face): model.lm_head" in table
    assert "embedding_rowwise (inferred): model.model.embed_tokens" in table
    assert "colwise (inferred): 3 x model.model.layers.*.self_attn.q_proj" in table
    assert "replicate (user): 3 x model.model.layers.*.mlp.down_proj" in table
    assert "whole, " in table and "mlp.down_proj.weight" in table


class ReadsAlias(Masked):
    """Reads the head's bias in a step that was not looked at, from the module that it hangs on without being used."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model.head.bias * 2.0


def read_alias() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what the ranks that return predictions have read, and twice the bias."""
    model = ReadsAlias()
    loader = torch.utils.data.DataLoader(tokens(16), batch_size=8)
    trainer = make_trainer("2x2", strategy=TensorParallelStrategy(2), max_steps=1, limit_predict_batches=1)
    trainer.fit(model, loader)
    expected = 2.0 * whole_parameters(model)["model.head.bias"]
    return [(read, expected) for read in trainer.predict(model, loader) or []]


def test_a_parameter_is_whole_where_it_hangs_without_being_used(pool: WorkerPool) -> None:
    results = [pair for pairs in pool.run(read_alias, 4) for pair in pairs]
    assert results
    for read, expected in results:
        torch.testing.assert_close(read, expected)
