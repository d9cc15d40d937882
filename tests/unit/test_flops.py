"""Operations are counted as the formulas of the model say, and peaks are those of the data sheets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.run.telemetry import FlopCounter, Flops, peak_of
from lightning_dist.run.telemetry.peak import known_peak
from tests.models import CONTEXT, VOCAB, Transformer

BATCH, DIM, NUM_LAYERS = 4, 20, 2
TOKENS = BATCH * CONTEXT
BLOCK_PARAMS = 8 * DIM**2  # These are the weights of the query, key, value and output layers and of the two of the MLP.
PARAMS = NUM_LAYERS * BLOCK_PARAMS + VOCAB * DIM
ATTENTION = NUM_LAYERS * CONTEXT * DIM  # The operations of one matrix product of attention for a token, divided by two.
MODEL = TOKENS * (6 * PARAMS + 12 * ATTENTION)


def count(model: nn.Module, **kwargs: Any) -> Flops:
    counter = FlopCounter(**kwargs)
    with counter:
        model(torch.zeros(BATCH, CONTEXT, dtype=torch.int64)).sum().backward()
    assert not counter.failure
    return counter.flops


def test_a_step_takes_six_operations_per_parameter_and_token_and_those_of_attention() -> None:
    flops = count(Transformer(DIM, NUM_LAYERS))
    assert flops.model == MODEL
    # The backward of fused attention computes the scores again.
    assert flops.hardware == MODEL + TOKENS * 2 * ATTENTION


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_for_the_hardware_alone(use_reentrant: bool) -> None:
    model = Transformer(DIM, NUM_LAYERS)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)
    flops = count(model)
    assert flops.model == MODEL
    # Without reentry, a block stops when it has all that its backward needs, before its last layer.
    again_per_block = BLOCK_PARAMS if use_reentrant else BLOCK_PARAMS - 2 * DIM**2
    again = TOKENS * (2 * NUM_LAYERS * again_per_block + 4 * ATTENTION)
    assert flops.hardware == MODEL + again + TOKENS * 2 * ATTENTION


def test_modules_that_several_ranks_run_on_the_same_input_count_once() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
    whole = TOKENS * 6 * 2 * DIM**2
    flops = count(model, copied=[model[2]], num_copies=4)
    assert flops == Flops(whole * (1 / 2 + 1 / 2 / 4), whole)


@pytest.mark.parametrize(
    ("name", "dtype", "allows_tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA H200", torch.float32, True, 494),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA L40S", torch.bfloat16, False, 362),
        ("NVIDIA L4", torch.bfloat16, False, 121),
        ("NVIDIA B200", torch.bfloat16, False, 2250),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, False, None),
        ("cpu", torch.float32, False, None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, dtype: torch.dtype, allows_tf32: bool, teraflops: float | None
) -> None:
    known = known_peak(name, dtype, allows_tf32)
    assert (known and known.flops_per_s) == (teraflops and teraflops * 1e12)


def test_the_peak_of_a_cpu_is_measured() -> None:
    peak = peak_of(torch.device("cpu"), torch.float32)
    assert 1e9 < peak.flops_per_s < 1e13
    assert peak.source.startswith("measured by products of 512 x 512 matrices on 2")
