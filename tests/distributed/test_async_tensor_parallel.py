"""Test that layers which exchange tokens while they multiply compute what one process computes.

The kernels of ``torch.ops.symm_mem`` exist for CUDA. On other devices, torch's own descriptions of what they compute
take their place here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import _symmetric_memory

from lightning_dist import NDParallelStrategy, TensorParallelStrategy
from lightning_dist.techniques.tensor_parallel import TensorParallelOptions
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.models import build
from tests.pool import WorkerPool
from tests.split_models import Llama
from tests.thorough import one_in

KERNELS = {
    "fused_all_gather_matmul": _symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": _symmetric_memory._fused_matmul_reduce_scatter_fallback,
}
LIBRARY = torch.library.Library("symm_mem", "IMPL")
CALLS: Counter[tuple[str, torch.dtype]] = Counter()


def counted(name: str, function: Any) -> Any:
    def call(matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        CALLS[name, matrix.dtype] += 1
        return function(matrix, *args, **kwargs)

    return call


if not torch.cuda.is_available():
    for name, function in KERNELS.items():
        LIBRARY.impl(name, counted(name, function), "CPU")

NUM_BLOCKS = {"llama3": 3, "example_gpt": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": "full"},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "replicated": {"dp_replicate_size": 2, "dp_shard_size": 1},
}


@contextmanager
def on_any_device() -> Iterator[None]:
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(patch.object(TensorParallelOptions, "check"))
        yield


class Hooked(Llama):
    """Have a hook on one layer."""

    def on_fit_start(self) -> None:
        self.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: None)


def fit(
    name: str, strategy: str | None, is_async: bool = True, **kwargs: Any
) -> tuple[Weights, dict[tuple[str, torch.dtype], int]]:
    """Train, and return the weights, and how often a rank has called each kernel."""
    torch.manual_seed(0)
    model = build(name)
    parallel: Any = {"devices": 1}
    if strategy is not None:
        sizes = {"dp_shard_size": 2} | STRATEGIES[strategy]
        parallel = {"strategy": TensorParallelStrategy(2, async_tensor_parallel=is_async, **sizes)}
    CALLS.clear()
    with on_any_device():
        make_trainer("auto", **({"max_steps": 3, "precision": "64-true"} | parallel | kwargs)).fit(model)
    return weights_of(model), dict(CALLS)


@pytest.mark.parametrize(
    ("name", "strategy"), one_in(6, [*(("llama3", strategy) for strategy in STRATEGIES), ("example_gpt", "plain")])
)
def test_weights_equal_those_of_one_process(name: str, strategy: str, pool: WorkerPool) -> None:
    ((expected, _),) = pool.run(fit, 1, name, None)
    # Each block has attention and an MLP. Both gather in the forward and scatter their output; in the backward, the
    # row-wise layer gathers. Column-wise layers share their input, so that the sum of its gradients is scattered alone.
    num_pairs = 3 * 2 * NUM_BLOCKS[name]
    num_forwards = 2 if strategy == "checkpointed" else 1
    for weights, calls in pool.run(fit, 4, name, strategy):
        assert_same(weights, expected)
        assert calls == {
            ("fused_all_gather_matmul", torch.float64): (num_forwards + 1) * num_pairs,
            ("fused_matmul_reduce_scatter", torch.float64): num_forwards * num_pairs,
        }


def fit_in_bfloat16() -> tuple[list[Weights], set[torch.dtype]]:
    """Train with and without overlap under autocast, and return the weights and the dtypes that are multiplied."""
    overlapped, calls = fit("llama3", "plain", precision="bf16-mixed")
    plain, _ = fit("llama3", "plain", is_async=False, precision="bf16-mixed")
    return [overlapped, plain], {dtype for _, dtype in calls}


def test_autocast_is_applied(pool: WorkerPool) -> None:
    for (overlapped, plain), dtypes in pool.run(fit_in_bfloat16, 4):
        assert dtypes == {torch.bfloat16}
        assert_same(overlapped, plain, tolerance=2**-8)


def refusals() -> list[str]:
    """Ask for overlap where it cannot be done, and return the errors."""
    strategies = [
        TensorParallelStrategy(2, async_tensor_parallel=True),
        NDParallelStrategy(tp_size=1, async_tensor_parallel=True),
        NDParallelStrategy(tp_size=2, pp_size=2, async_tensor_parallel=True),
    ]
    errors = [refused(build("llama3"), strategy=strategy) for strategy in strategies]
    whole = TensorParallelStrategy(2, async_tensor_parallel=True, sequence_parallel=False)
    with on_any_device():
        errors.append(refused(build("llama3"), strategy=whole))
        hooked = TensorParallelStrategy(2, async_tensor_parallel=True)
        errors.append(refused(Hooked(), strategy=hooked, max_steps=1))
    return errors


def test_it_is_refused_where_there_is_nothing_to_overlap(pool: WorkerPool) -> None:
    for on_cpu, not_split, stages, whole, hooked in pool.run(refusals, 4):
        assert "async_tensor_parallel=True with tp_size=2: its kernels copy between CUDA devices" in on_cpu
        assert "async_tensor_parallel=True with tp_size=1: no layer is split. Set tp_size" in not_split
        assert "with pp_size=2, stages send each other whole hidden states" in stages
        assert "async_tensor_parallel=True: hidden states are not split along the sequence" in whole
        assert "model.model.layers.0.self_attn.q_proj has a hook, which would see only this rank's features" in hooked
