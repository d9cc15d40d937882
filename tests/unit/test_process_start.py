"""Test how a process prepares its device and its process groups, with an accelerator that is not there."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_dist import FaultTolerance, FullShardStrategy
from lightning_dist.plugins import _compat
from lightning_dist.plugins._compat import processes
from tests.launched import Forked

CUDA = torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("device", "asked", "backend", "expected"),
    [
        (CUDA, None, "nccl", CUDA),
        (CUDA, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", CUDA),
        (CUDA, "gloo", "gloo", None),
        (CUDA, "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:gloo", None),
        (torch.device("cpu"), None, "gloo", None),
    ],
)
def test_the_process_group_is_bound_to_the_device(
    device: torch.device,
    asked: str | None,
    backend: str,
    expected: torch.device | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append(kwargs))
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setattr(processes, "_num_started", itertools.count())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # Other tests leave a process group in this process.
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    environment: Any = SimpleNamespace(
        global_rank=lambda: 3, world_size=lambda: 8, main_address="127.0.0.1", main_port=29500
    )
    assert _compat.init_process_group(environment, device, asked, timedelta(seconds=5)) == backend
    _compat.init_process_group(environment, device, asked, timedelta(seconds=5))
    ranks = {"rank": 3, "world_size": 8, "timeout": timedelta(seconds=5)}
    assert calls == [{**ranks, "device_id": bound} for bound in (expected, None)]


@pytest.mark.parametrize("hang_timeout", [None, 9.0])
def test_device_and_flight_recorder_are_chosen_before_the_process_group_exists(
    hang_timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the device, NCCL would create a context on the first one for each process of the node."""
    order: list[str] = []
    strategy = FullShardStrategy(timeout=timedelta(seconds=5))
    strategy.accelerator = CUDAAccelerator()
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(4)]
    strategy.cluster_environment = SimpleNamespace(  # type: ignore[assignment]
        local_rank=lambda: 3, global_rank=lambda: 3, node_rank=lambda: 0, world_size=lambda: 4,
        set_global_rank=lambda rank: None, set_world_size=lambda size: None,
    )  # fmt: skip
    monkeypatch.setattr(CUDAAccelerator, "setup_device", lambda self, device: order.append(f"device {device}"))

    def init(*args: Any) -> str:
        recorded = os.environ.get("TORCH_FR_BUFFER_SIZE")
        order.append(f"group on {args[1]}" + (f", recording {recorded}" if recorded else ""))
        raise InterruptedError

    monkeypatch.setattr(_compat, "init_process_group", init)
    monkeypatch.setattr(_compat, "set_rank_zero", lambda rank: None)
    trainer = SimpleNamespace(callbacks=[FaultTolerance(hang_timeout=hang_timeout)])
    monkeypatch.setattr(FullShardStrategy, "trainer", trainer)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    with pytest.raises(InterruptedError):
        strategy.setup_environment()
    recorded = "" if hang_timeout is None else ", recording 2000"
    assert order == ["device cuda:3", f"group on cuda:3{recorded}"]


@pytest.mark.parametrize(
    ("backend", "expected"), [("nccl", [3]), ("cpu:gloo,cuda:nccl", [3]), ("gloo", None), ("cpu:gloo,cuda:gloo", None)]
)
def test_a_barrier_of_nccl_names_its_device(
    backend: str, expected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    strategy = FullShardStrategy()
    strategy.parallel_devices = [CUDA]
    monkeypatch.setattr(FullShardStrategy, "local_rank", 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *args: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: given.append(device_ids))
    strategy.barrier()
    assert given == [expected]


def split_off() -> None:
    """Split a group with options of another backend, as DeviceMesh does with those of NCCL for gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    timeout = timedelta(seconds=9)
    options = torch._C._distributed_c10d.Backend.Options("nccl", timeout)
    own = world.split_group([0], timeout=timeout, opts=options, group_name="own", group_desc="mesh_dp_shard")
    value = torch.tensor([3.0])
    own.allreduce([value]).wait()
    sys.stdout.write(f"{own.size()} {value.tolist()}\n")


def test_groups_that_are_split_off_keep_gloo() -> None:
    """With offload="params", shards on the CPU are reduced over groups that torch splits from the one of all ranks."""
    process = Forked(split_off, environment=dict(os.environ))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output.splitlines()[-1] == "1 [3.0]", output
