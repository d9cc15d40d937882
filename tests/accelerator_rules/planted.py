"""Train with one wait removed from the engine or from FSDP2, so that the accelerator has something to report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_dist import DataParallelStrategy, FullShardStrategy, HybridShardStrategy
from lightning_dist.checkpoint.snapshot import take_snapshot
from lightning_dist.checkpoint.writer import Writer
from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.activation_checkpointing import offload
from lightning_dist.techniques.compression import Int8
from tests.accelerator_rules import NAME
from tests.accelerator_rules.device_module import Event, Stream
from tests.distributed.fit import make_trainer
from tests.models import build
from tests.nccl_rules.operations import Operation
from tests.pipeline_models import PIPELINE_MODELS  # noqa: F401 - It adds models.

__all__ = ["DEFECTS", "Defect", "train"]


class Defect(NamedTuple):
    """Describe a wait that is left out.

    Args:
        owner: Object whose attribute ``name`` is replaced.
        name: Name of the method or function that waits.
        callers: Files, or files and functions with a colon between them, from which calls then do nothing; empty: any.
        make: Function that makes the strategy with which the wait is needed; None: a checkpoint is written.
        finds: Regular expression of the report.
    """

    owner: Any
    name: str
    callers: tuple[str, ...]
    make: Callable[[], Any] | None
    finds: str
    model: str = "gpt"


def _compressed() -> Any:
    return HybridShardStrategy(2, 1, compression=Int8(block_size=64, min_numel=64))


_TWO_KERNELS = r"\brace \("
_REUSE = "reuse of freed memory"
_HOST = "pinned memory before the copy|weights are not finite"

DEFECTS = {
    "reduce-scatter does not wait for gradients": Defect(
        Stream, "wait_stream", ("_fsdp_collectives.py:foreach_reduce",), FullShardStrategy, _TWO_KERNELS
    ),
    "all-gather does not wait for its inputs": Defect(
        Stream, "wait_stream", ("_fsdp_collectives.py:foreach_all_gather",), FullShardStrategy, _TWO_KERNELS
    ),
    "forward does not wait for the all-gather": Defect(
        Stream, "wait_event", ("_fsdp_collectives.py:foreach_all_gather_copy_out",), FullShardStrategy, _TWO_KERNELS
    ),
    "optimizer does not wait for the reduce-scatter": Defect(
        Stream, "wait_event", ("_fsdp_param_group.py:finalize_backward", "_fsdp_state.py"), FullShardStrategy,
        f"{_TWO_KERNELS}|{_REUSE}",
    ),
    "all-gathered memory is freed too early": Defect(
        _fsdp_param_group.FSDPParamGroup, "_wait_all_gather_streams_on_event", (), FullShardStrategy,
        _REUSE, model="deep_gpt",
    ),
    "replicas do not wait for their all-reduce": Defect(
        Operation, "wait", ("replication/bucket.py",), DataParallelStrategy, _TWO_KERNELS
    ),
    "optimizer does not wait for compressed gradients": Defect(
        Stream, "wait_event", ("compression/background.py:wait",), _compressed, _TWO_KERNELS
    ),
    "compression does not wait for gradients": Defect(
        Stream, "wait_stream", ("compression/background.py",), _compressed, _TWO_KERNELS
    ),
    "optimizer on the CPU does not wait for gradients": Defect(
        torch.accelerator, "synchronize", ("offload/offloaded_step.py",),
        lambda: FullShardStrategy(offload="optimizer"), _HOST,
    ),
    "gradients on the CPU are used before they have arrived": Defect(
        Event, "synchronize", ("_fsdp_param_group.py",), lambda: FullShardStrategy(offload="both"), _HOST, "llama"
    ),
    "activations are copied before they are computed": Defect(
        Stream, "wait_stream", ("activation_checkpointing/copies.py",),
        lambda: FullShardStrategy(activation_checkpointing="offload"), _TWO_KERNELS,
    ),
    "activations are freed before they are copied": Defect(
        Stream, "wait_event", ("activation_checkpointing/copies.py:_wait_and_free",),
        lambda: FullShardStrategy(activation_checkpointing="offload"), _REUSE, "deep_gpt",
    ),
    "the backward does not wait for activations": Defect(
        Stream, "wait_event", ("activation_checkpointing/copies.py:_take",),
        lambda: FullShardStrategy(activation_checkpointing="offload"), _TWO_KERNELS,
    ),
    "a checkpoint is copied while weights are updated": Defect(
        torch.accelerator, "synchronize", ("checkpoint/writer.py",), None, _TWO_KERNELS
    ),
}  # fmt: skip


@contextmanager
def _left_out(defect: Defect) -> Iterator[list[int]]:
    """Let the calls of a defect do nothing, and count them."""
    function = getattr(defect.owner, defect.name)
    left_out = [0]

    def maybe(*args: Any, **kwargs: Any) -> Any:
        code = sys._getframe(1).f_code
        site = f"{code.co_filename}:{code.co_name}"
        if defect.callers and not any(site.endswith(c) or f"{c}:" in site for c in defect.callers):
            return function(*args, **kwargs)
        left_out[0] += 1
        return None

    with patch.object(defect.owner, defect.name, maybe):
        yield left_out


def train(name: str, is_planted: bool, folder: Path) -> int:
    """Train with or without a defect on this rank, and return how many calls were left out."""
    defect = DEFECTS[name]
    with patch.object(offload, "MIN_NUMEL", 1), _left_out(defect) if is_planted else nullcontext([0]) as left_out:
        if defect.make is None:
            _save_sharded(folder)
        else:
            model = build(defect.model, seed=int(os.environ["RANK"]), optimizer="adamw")
            make_trainer("auto", strategy=defect.make(), max_steps=3).fit(model)
            _check(model)
    return left_out[0]


def _save_sharded(folder: Path) -> None:
    """Change a sharded tensor, and save it in the background. No value is read on the host in between."""
    dist.init_process_group()
    weight = distribute_tensor(torch.ones(8, 8), init_device_mesh(NAME, (dist.get_world_size(),)), [Shard(0)])
    writer = Writer()
    for _ in range(2):
        weight.mul_(2)
        save = writer.save(folder / "last.ckpt", take_snapshot({"weight": weight}))
        writer.wait_until_staged()
        writer.wait()
        assert save.error is None, save.error
    writer.close()


def _check(model: nn.Module) -> None:
    weights = whole_parameters(model)
    assert all(weight.isfinite().all() for weight in weights.values()), "weights are not finite"
