"""Test errors about GPUs that are missing or shared, and about an old NCCL, on a machine that need not have any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import device_parser
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist import FullShardStrategy
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import PrecisionPolicy
from lightning_dist.plugins.strategies.gpus import refuse_bfloat16

BF16 = torch.bfloat16


@pytest.mark.parametrize("strategy", ["full_shard", "fsdp"])
def test_more_processes_than_gpus_are_refused_with_the_number_to_set(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 2))
    monkeypatch.setattr(device_parser, "_get_all_available_gpus", lambda **kwargs: [0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(MisconfigurationException) as caught:
        pl.Trainer(accelerator="cuda", devices=4, strategy=strategy, logger=False)
    assert "Trainer(devices=4): each process needs a GPU of its own, and 2 can be used here" in str(caught.value)
    assert "(CUDA_VISIBLE_DEVICES=4,5). Set devices=2 or devices='auto'" in str(caught.value)
    assert "lightning-dist's strategy" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected", "part"),
    [
        (
            "ncclInvalidUsage: Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            MisconfigurationException,
            "Trainer(devices=2, num_nodes=1): two processes use the same GPU",
        ),
        ("ncclSystemError: no route to host", dist.DistBackendError, "no route to host"),
    ],
)
def test_a_gpu_that_two_processes_share_is_explained(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: type[Exception], part: str
) -> None:
    def init(*args: Any) -> str:
        raise dist.DistBackendError(text)

    strategy = FullShardStrategy()
    strategy.accelerator = CUDAAccelerator()
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(2)]
    strategy.cluster_environment = SimpleNamespace(  # type: ignore[assignment]
        local_rank=lambda: 0, global_rank=lambda: 0, node_rank=lambda: 0, world_size=lambda: 2,
        set_global_rank=lambda rank: None, set_world_size=lambda size: None,
    )  # fmt: skip
    monkeypatch.setattr(CUDAAccelerator, "setup_device", lambda self, device: None)
    monkeypatch.setattr(FullShardStrategy, "trainer", SimpleNamespace(callbacks=[]))
    monkeypatch.setattr(_compat, "init_process_group", init)
    monkeypatch.setattr(_compat, "set_rank_zero", lambda rank: None)
    with pytest.raises(expected) as caught:
        strategy.setup_environment()
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "precision", "backend", "version", "asked"),
    [
        (PrecisionPolicy(BF16, torch.float32), "bf16-mixed", "nccl", (2, 9, 9), "precision='bf16-mixed'"),
        (PrecisionPolicy(BF16, BF16), "bf16-mixed", "cpu:gloo,cuda:nccl", (2, 8, 4), "reduce_dtype='bfloat16'"),
        (PrecisionPolicy(), "bf16-true", "nccl", (2, 9, 9), "precision='bf16-true'"),
        (PrecisionPolicy(BF16, BF16), "bf16-mixed", "nccl", (2, 10, 3), None),
        (PrecisionPolicy(BF16, BF16), "bf16-mixed", "nccl", (3, 0, 0), None),
        (PrecisionPolicy(BF16, BF16), "bf16-mixed", "gloo", (2, 9, 9), None),
        (PrecisionPolicy(BF16, BF16), "bf16-mixed", "nccl-rules", (2, 9, 9), None),
        (PrecisionPolicy(), "32-true", "nccl", (2, 9, 9), None),
    ],
)
def test_bfloat16_is_refused_where_nccl_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch,
    policy: PrecisionPolicy,
    precision: str,
    backend: str,
    version: tuple[int, int, int],
    asked: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    if asked is None:
        refuse_bfloat16(policy, precision, backend)
        return
    with pytest.raises(MisconfigurationException) as caught:
        refuse_bfloat16(policy, precision, backend)
    assert str(caught.value).startswith(f"{asked} sends bfloat16, which NCCL has since 2.10")
    assert f"uses NCCL {version[0]}.{version[1]}." in str(caught.value)
