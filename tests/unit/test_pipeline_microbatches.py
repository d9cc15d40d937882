"""Batches of all kinds are split into microbatches."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist.plugins.strategies.steps.result import merged_outputs
from lightning_dist.techniques.pipeline import (
    batch_size_of,
    check_divides,
    greatest_divisor,
    signature,
    split_batch,
)

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    image: Tensor
    label: Tensor
    scale: float


def test_every_container_is_split_and_keeps_its_kind() -> None:
    tokens = torch.arange(12).view(6, 2)
    batch: Any = {
        "tokens": tokens,
        "pair": Pair(tokens.float(), [tokens + 1, (tokens + 2,)]),
        "ordered": OrderedDict(a=tokens[:, 0]),
        "sample": Sample(tokens, tokens[:, 1], 0.5),
        "texts": list("abcdef"),
        "name": "train",
        "temperature": torch.tensor(2.0),
        "nothing": None,
        "sizes": [1, 2],
    }
    parts = split_batch(batch, 3)
    assert len(parts) == 3
    second = parts[1]
    assert second["tokens"].tolist() == [[4, 5], [6, 7]]
    assert second["tokens"].data_ptr() == tokens[2:].data_ptr()  # It is a view.
    assert isinstance(second["pair"], Pair)
    assert second["pair"].second[1][0].tolist() == [[6, 7], [8, 9]]
    assert type(second["ordered"]) is OrderedDict
    assert isinstance(second["sample"], Sample)
    assert second["sample"].label.tolist() == [5, 7]
    assert second["sample"].scale == 0.5
    assert second["texts"] == ["c", "d"]
    assert (second["name"], second["nothing"], second["sizes"]) == ("train", None, [1, 2])
    assert second["temperature"] == 2


def test_tensors_with_different_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch\['a'\] has shape \(4, 2\) and batch\['b'\]\[0\] has shape \(3,\)"):
        batch_size_of({"a": torch.zeros(4, 2), "b": [torch.zeros(3)]})


@pytest.mark.parametrize(("size", "wanted", "number"), [(8, 4, 4), (6, 4, 3), (5, 4, 1), (2, 4, 2), (0, 4, 1)])
def test_a_smaller_batch_is_split_into_as_many_microbatches_as_divide_it(size: int, wanted: int, number: int) -> None:
    assert greatest_divisor(size, wanted) == number


def test_a_full_batch_must_be_divisible_by_the_number_of_microbatches() -> None:
    check_divides(8, 4)
    with pytest.raises(ValueError, match=r"num_microbatches=4 does not divide the batch of 6 .* one of 1, 2, 3, 6"):
        check_divides(6, 4)


def test_signatures_differ_by_shapes_dtypes_and_flags_but_not_by_values_and_text() -> None:
    batches: list[Any] = [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 4), True),
        (torch.zeros(2, 3, dtype=torch.int64), True),
        (torch.zeros(2, 3), False),
        [torch.zeros(2, 3), True, "more"],
    ]
    assert len({signature(batch) for batch in batches}) == len(batches)
    assert signature(("a", torch.zeros(2))) == signature(("b", torch.ones(2)))


def test_a_list_of_samples_is_split_and_the_batches_in_a_list_are_split_one_by_one() -> None:
    samples = [(torch.full((3,), float(k)), torch.tensor(k)) for k in range(4)]
    first, second = split_batch(samples, 2)
    assert batch_size_of(samples) == 4
    assert [int(label) for _, label in first] == [0, 1]
    assert [int(label) for _, label in second] == [2, 3]
    batches = [(torch.zeros(6, 3), torch.zeros(6)), (torch.ones(6, 3), torch.ones(6))]
    assert batch_size_of(batches) == 6
    assert [len(part) for part in split_batch(batches, 3)[0]] == [2, 2]
    assert split_batch(batches, 3)[0][1][0].shape == (2, 3)


def test_a_microbatch_of_weight_zero_whose_mean_is_not_a_number_does_not_count() -> None:
    losses = [torch.tensor(2.0), torch.tensor(torch.nan), torch.tensor(4.0)]
    weights = [torch.tensor(1), torch.tensor(0), torch.tensor(3)]
    results = [{"loss": loss, "weight": w} for loss, w in zip(losses, weights, strict=True)]
    merged = merged_outputs(losses, results, are_counts=True)
    assert merged["loss"] == 3.5 and merged["weight"] == 4


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="has no samples"):
        check_divides(0, 4)
