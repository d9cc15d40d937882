"""A plan that is inferred is the one that is written by hand."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch

from lightning_dist.tensor_parallel import Provenance, resolve_plan
from lightning_dist.tensor_parallel.infer import inferred
from lightning_dist.tensor_parallel.plan import with_tied
from lightning_dist.tracing import run_on_fakes
from lightning_dist.units import find_blocks
from tests.models import build
from tests.split_models import SPLIT_MODELS

assert SPLIT_MODELS
BY_HAND = {
    "model.embedding": "embedding_rowwise",
    "model.blocks.*.attention.query": "colwise",
    "model.blocks.*.attention.key": "colwise",
    "model.blocks.*.attention.value": "colwise",
    "model.blocks.*.attention.out": "rowwise",
    "model.blocks.*.feed_forward.gate": "colwise",
    "model.blocks.*.feed_forward.up": "colwise",
    "model.blocks.*.feed_forward.down": "rowwise",
    "model.head": "colwise_gather_output",
}


def seen(model: Any) -> Provenance:
    provenance = Provenance(frozenset(find_blocks(model)), model)
    batch = [tensor[:4] for tensor in model.data()]

    def step(fake: Any) -> Any:
        return model.training_step([fake(tensor) for tensor in batch], 0)

    assert run_on_fakes(model, step, torch.device("cpu"), provenance) == ""
    return provenance


@pytest.mark.parametrize("name", ["example_gpt", "llama3", "qwen"])
def test_it_equals_the_one_by_hand(name: str) -> None:
    model = build(name)
    if name == "example_gpt":
        names = [name for name, _ in model.named_modules()]
        by_hand = {n: style for pattern, style in BY_HAND.items() for n in fnmatch.filter(names, pattern)}
    else:
        by_hand = {n: entry.style for n, entry in with_tied(model, resolve_plan(model)).items()}
    found = {n: entry.style for n, entry in with_tied(model, inferred(model, seen(model), 2).entries()).items()}
    assert len(found) > 10 and found == by_hand


def test_the_model_is_as_it_was() -> None:
    model: Any = build("example_gpt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.kept = []
    step = model.training_step

    def keeping(batch: Any, batch_idx: int) -> Any:
        model.kept.append(step(batch, batch_idx))
        model.last = model.kept[-1]
        model.model.norm.weight.data.mul_(0.0)
        return model.last

    model.training_step = keeping
    seen(model)
    assert model.kept == [] and not hasattr(model, "last")
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, before[name])


def test_why_a_step_could_not_be_seen_to_its_end_is_told() -> None:
    model: Any = build("example_gpt")
    step = model.training_step

    def looking(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        return loss if loss > 3 else 2 * loss

    model.training_step = looking
    provenance = Provenance(frozenset(find_blocks(model)), model)
    batch = [tensor[:4] for tensor in model.data()]
    why = run_on_fakes(
        model, lambda fake: model.training_step([fake(t) for t in batch], 0), torch.device("cpu"), provenance
    )
    assert why.startswith("GuardOnDataDependentSymNode")
    assert len(inferred(model, provenance, 2).entries()) == 2 * 7 + 2
