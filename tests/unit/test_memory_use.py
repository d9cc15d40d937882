"""Test the predicted memory of a rank, and the advice for a run whose memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.parameters.memory_use import RunSize, advise, predict, state_bytes_per_element
from lightning_dist.plugins.strategies.memory_report import is_out_of_memory

MIB = 2**20
ONE = RunSize(
    parameters=400 * MIB, trainable=400 * MIB, elements=100 * MIB, state_bytes=8, activations=100 * MIB,
    block=20 * MIB, blocks=400 * MIB, num_blocks=20,
)  # fmt: skip
FOUR = replace(ONE, num_shards=4)


@pytest.mark.parametrize(
    ("size", "peak_mib"),
    [
        (ONE, 400 + 800 + 2 * 400),
        (FOUR, 100 + 200 + max(100 + 4 * 20, 100 + 4 * 20 + 5)),
        (replace(FOUR, activations=200 * MIB), 100 + 200 + 200 + 4 * 20),
        (replace(FOUR, frees_blocks=False), 100 + 200 + 100 + 400 + 2 * 20),
        (replace(FOUR, accumulates=True), 100 + 200 + 100 + 400 + 4 * 20),
        (replace(FOUR, offloads_states=True), 100 + 100 + 64 + 128),
        (replace(FOUR, offloads_params=True), 200 + 100 + 4 * 20 + 5 + max(0, 64 + 128 - 4 * 20 - 5)),
    ],
)
def test_the_peak_is_the_largest_sum(size: RunSize, peak_mib: float) -> None:
    assert predict(size).peak / MIB == pytest.approx(peak_mib)


def test_the_most_effective_setting_comes_first() -> None:
    big = replace(FOUR, activations=1000 * MIB)
    savings = advise(big, 1, True)
    assert savings[0].setting == "activation_checkpointing='full'"
    assert [saving.num_bytes for saving in savings] == sorted((s.num_bytes for s in savings), reverse=True)
    assert all(saving.num_bytes > 0 for saving in savings)
    assert "offload_folder" in next(saving.setting for saving in savings if "optimizer" in saving.setting)
    assert advise(ONE, 4, False)[0].setting.startswith("strategy='full_shard'")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda params: torch.optim.AdamW(params, fused=True), 8),
        (lambda params: torch.optim.Adam(params, amsgrad=True), 12),
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 4),
        (lambda params: torch.optim.Adafactor(params), 4 * 128 / 4096),
    ],
)
def test_states_of_optimizers_are_counted(make: Callable[[Any], torch.optim.Optimizer], expected: float) -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    optimizer = make([param])
    assert state_bytes_per_element(optimizer, optimizer.param_groups[0], torch.float32) == expected
    assert not optimizer.state
    assert torch.equal(param, torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_errors_about_memory_are_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
