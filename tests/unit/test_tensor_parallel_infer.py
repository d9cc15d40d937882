"""The plan that is inferred for a model is the one that a user would write by hand."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from lightning_dist.model.layers import LinearLayer, convolution
from lightning_dist.model.units import find_blocks
from lightning_dist.techniques.tensor_parallel import resolve_plan
from lightning_dist.techniques.tensor_parallel.gathered import layers_to_gather
from lightning_dist.techniques.tensor_parallel.infer import inferred
from lightning_dist.techniques.tensor_parallel.plan import Entry, SplitHeads, SplitSequence
from lightning_dist.techniques.tensor_parallel.split_logits import works_on_parts
from lightning_dist.techniques.tensor_parallel.ties import with_tied
from lightning_dist.tracing.step_graph import Dataflow, run_on_fakes
from tests.models import build
from tests.split_models import SPLIT_MODELS, Images

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


def traced(model: Any) -> Dataflow:
    """Trace the training step of a model, and return the dataflow of its tensors."""
    dataflow = Dataflow(frozenset(find_blocks(model)), model, works_on_parts)
    batch = [tensor[:4] for tensor in model.data()]

    def step(fake: Any) -> Any:
        return model.training_step([fake(tensor) for tensor in batch], 0)

    assert run_on_fakes(model, step, torch.device("cpu"), dataflow) == ""
    return dataflow


@pytest.mark.parametrize("name", ["example_gpt", "llama3", "qwen"])
def test_the_inferred_plan_equals_the_one_by_hand(name: str) -> None:
    model = build(name)
    if name == "example_gpt":
        names = [name for name, _ in model.named_modules()]
        by_hand = {n: style for pattern, style in BY_HAND.items() for n in fnmatch.filter(names, pattern)}
    else:
        by_hand = {n: entry.style for n, entry in with_tied(model, resolve_plan(model)).items()}
    found = {n: entry.style for n, entry in with_tied(model, inferred(model, traced(model), 2).entries()).items()}
    assert len(found) > 10 and found == by_hand


def test_tracing_does_not_change_the_model() -> None:
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
    traced(model)
    assert model.kept == [] and not hasattr(model, "last")
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, before[name])


def test_a_step_that_cannot_be_traced_to_its_end_gives_the_reason_and_a_plan() -> None:
    model: Any = build("example_gpt")
    step = model.training_step

    def branching(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        return loss if loss > 3 else 2 * loss

    model.training_step = branching
    dataflow = Dataflow(frozenset(find_blocks(model)), model, works_on_parts)
    batch = [tensor[:4] for tensor in model.data()]
    why = run_on_fakes(
        model, lambda fake: model.training_step([fake(t) for t in batch], 0), torch.device("cpu"), dataflow
    )
    assert why.startswith("GuardOnDataDependentSymNode")
    assert len(inferred(model, dataflow, 2).entries()) == 2 * 7 + 2


@functools.lru_cache
def distances(length: int) -> Tensor:
    return torch.arange(length)[None] - torch.arange(length)[:, None] + length - 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.query_bias = nn.Parameter(torch.randn(8))
        self.table = nn.Embedding(7, 2)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query = query + self.query_bias.view(self.num_heads, 1, -1)
        if bias is None:
            bias = self.table(distances(x.size(1))).permute(2, 0, 1)[None]
        scores = query @ key.transpose(-1, -2) + bias + mask
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)), bias


class WithPositions(nn.Module):
    """Compute the position bias in the first block and pass it to the second, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.first, self.second = Attention(), Attention()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, mask = batch
        x, bias = self.first(self.embedding(tokens), mask, None)
        return self.second(x, mask, bias)[0].sum()

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(4, 4).long(), torch.zeros(4, 1, 1, 4)


def test_biases_of_queries_and_positions_are_split_with_the_heads() -> None:
    model = WithPositions()
    first, second = inferred(model, traced(model), 2).groups
    assert first.cols == ("first.key", "first.query", "first.value")
    assert first.parameters == {"first.query_bias": 0, "first.table.weight": 1}
    assert first.heads == {"first": SplitHeads(2, (), (1,))}
    assert second.parameters == {"second.query_bias": 0}
    assert second.heads == {"second": SplitHeads(2, (2,), ())}


def test_tracing_leaves_no_fake_tensors_in_caches_of_functions() -> None:
    distances.cache_clear()
    traced(WithPositions())
    assert not isinstance(distances(4), FakeTensor)


class Mixed(Images):
    """Have layers that can be split with a gathered output, and others of the same kinds that cannot."""

    def make_model(self) -> nn.Module:
        self.shared, self.odd = nn.Linear(16, 16), nn.Linear(16, 15)
        self.computed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.grouped, self.transposed = nn.Conv2d(3, 6, 1, groups=3), nn.ConvTranspose2d(6, 4, 1)
        self.large, self.small, self.same = nn.Linear(256, 16), nn.Linear(15, 16), nn.Linear(256, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.shared.weight
        return nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.transposed(self.grouped(batch[0])).flatten(1)
        hidden = self.tied(self.computed(self.shared(self.large(hidden) + self.same(hidden))))
        return functional.cross_entropy(self.small(self.odd(hidden)), batch[1])


LARGE = {"large", "same"}
OTHERS = {"small"}  # The transposed convolution is too small to be worth it.


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, LARGE),
        ({"large": Entry("replicate", "user")}, {"same"} | OTHERS),
        ({"large": Entry("replicate", "inferred", "it differs")}, LARGE),
        ({"large": Entry("rowwise", "inferred")}, {"same"}),
        ({name: Entry("rowwise", "inferred") for name in LARGE}, set()),
    ],
)
def test_the_largest_free_layers_are_gathered_until_enough_is_split(
    entries: dict[str, Entry], expected: set[str]
) -> None:
    model = Mixed()
    found = layers_to_gather(model, entries, {}, None, traced(model), 2)
    assert found.keys() == expected
    assert {entry.style for entry in found.values()} <= {"colwise_gather_output"}
    if entries.get("large", Entry("", "user")).why:
        assert found["large"].why == "in no pair: it differs"


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, LARGE), (3, {"odd"}), (32, set())])
def test_output_features_must_divide_by_the_number_of_ranks(num_ranks: int, expected: set[str]) -> None:
    model = Mixed()
    assert layers_to_gather(model, {}, {}, None, traced(model), num_ranks).keys() == expected


def test_layers_are_not_gathered_where_ranks_have_different_tokens() -> None:
    sequence = SplitSequence((("large", "same"),), {}, {})
    model = Mixed()
    assert layers_to_gather(model, {}, {}, sequence, traced(model), 2).keys() == OTHERS


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Conv2d(3, 8, 5), LinearLayer(1, 0, 3, 8, feature_dim=-3)),
        (nn.ConvTranspose1d(3, 8, 5), LinearLayer(0, 1, 3, 8, feature_dim=-2)),
        (nn.Conv3d(4, 8, 1, groups=2), None),
        (torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 1)), None),
        (nn.Linear(3, 8), None),
    ],
)
def test_convolutions_are_described_by_their_channels(module: nn.Module, expected: LinearLayer | None) -> None:
    assert convolution(module) == expected
