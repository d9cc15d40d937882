"""What a split model is besides equal to one that is not: smaller, refused where it cannot be, and fed alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from lightning_dist import TensorParallelStrategy, full_parameters
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.models import GPT, build
from tests.parity.run import PLANS
from tests.pool import WorkerPool


def tp_trainer(tp: int = 2, layout: str = "", plan: Any = None, **kwargs: Any) -> pl.Trainer:
    strategy = TensorParallelStrategy(tp, plan=PLANS["gpt"] if plan is None else plan)
    return make_trainer("2x2", **{"strategy": strategy, "max_steps": 2, **kwargs})


def sizes() -> tuple[int, int, int]:
    """Elements on this rank: of what is split, and of the rest; and of the whole model."""
    model = GPT()
    tp_trainer().fit(model)
    split = rest = 0
    for param in model.parameters():
        assert isinstance(param, DTensor)
        is_split = any(getattr(placement, "dim", None) is not None for placement in param.placements[-1:])
        if is_split:
            split += param.to_local().numel()
        else:
            rest += param.to_local().numel()
    return split, rest, sum(p.numel() for p in GPT().parameters())


def test_a_rank_holds_its_part(pool: WorkerPool) -> None:
    for split, rest, numel in pool.run(sizes, 4):
        assert split < 0.3 * numel and split + rest < 0.6 * numel


def resume(folder: Path) -> tuple[Weights, list[Weights], list[Weights]]:
    """What was saved, what is read of it, and a step from there: split as it was, split otherwise, and only sharded."""
    model = build("gpt")
    trainer = tp_trainer(precision="64-true")
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    read, stepped = [], []
    for tp in (2, 4, None):
        for max_steps, results in ((2, read), (3, stepped)):
            kwargs: dict[str, Any] = {"precision": "64-true", "max_steps": max_steps}
            other = make_trainer("full_shard", **kwargs) if tp is None else tp_trainer(tp, **kwargs)
            again = build("gpt", seed=1)
            other.fit(again, ckpt_path=folder / "run.ckpt")
            results.append(weights_of(again))
    return weights_of(model), read, stepped


def test_any_layout_resumes_it(pool: WorkerPool, tmp_path: Path) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path):
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0])
            assert any((weights[name] != saved[name]).any() for name in saved)


class Logits(GPT):
    def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0], self.model(batch[0])


def call_alone() -> tuple[float, float, Weights]:
    """How far from one process is what all compute in a step, and what rank 0 does alone; and the weights after it."""
    model, reference = Logits(), build("gpt", seed=1).double()
    trainer = tp_trainer(precision="64-true", limit_predict_batches=1)
    trainer.fit(model)
    reference.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights_of(model).items()}, False)
    ((tokens, logits),) = trainer.predict(model, model.predict_dataloader())
    expected = reference.model(tokens)
    alone = expected
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
        (4, None, "llama"),
        (4, {"blocks.*.norm_1": "colwise"}, "gpt"),
        (4, {"blocks.*.qkv": "embedding_rowwise"}, "gpt"),
        (4, {"model.embedding": "embedding_rowwise", "model.head": "rowwise"}, "gpt"),
        (3, None, "gpt"),
    ):
        errors.append(refused(build(name), strategy=TensorParallelStrategy(tp, plan=plan)))
    errors.append(refused(build("gpt"), strategy=TensorParallelStrategy(2, dp_replicate_size=0)))
    errors.append(refused(build("gpt"), strategy=TensorParallelStrategy(1, plan={"no.such": "colwise"})))
    return errors


def test_what_cannot_be_split_is_refused_with_the_numbers(pool: WorkerPool) -> None:
    for heads, layer, embedding, tied, size, zero, unused in pool.run(refusals, 4):
        assert "the 2 heads of model.model.layers.0.self_attn.k_proj, of 6 features each" in heads
        assert "blocks.0.norm_1 is a LayerNorm, and colwise splits linear layers only" in layer
        assert "blocks.0.qkv is a Linear, and embedding_rowwise splits nn.Embedding only" in embedding
        assert "model.head.weight is tied to a parameter that is split otherwise" in tied
        assert "tp_size must be one of 1, 2, 4" in size
        assert "dp_replicate_size=0 must be a positive number" in zero
        assert "'no.such' matches no module" in unused
