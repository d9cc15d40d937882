"""What the checks of a run's nodes have measured is judged by its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.run.doctor import storage
from lightning_dist.run.doctor.devices import judge_devices
from lightning_dist.run.doctor.environment import Environment, judge_environment, own_environment
from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.profile import DeviceFigures
from lightning_dist.run.doctor.ranks import Ranks
from lightning_dist.run.doctor.storage import check_storage, file_system_of

RANKS = Ranks(0, torch.device("cpu"), (0, 1, 2), ("a", "b", "c"))
GIB = 2**30


def device(rank: int, flops_per_s: float, free: float = 0.9, name: str = "NVIDIA H100 PCIe") -> DeviceFigures:
    return DeviceFigures(rank, "abc"[rank], name, 80 * GIB, int(free * 80 * GIB), 2e12, {"bfloat16": flops_per_s})


@pytest.mark.parametrize(
    ("devices", "seen"),
    [
        ([device(0, 5e14), device(1, 5e14), device(2, 4e14)], None),
        (
            [device(0, 5e14), device(1, 5e14), device(2, 3e14)],
            "Slower than the others: rank 2 (c), with 300 TFLOP/s in bfloat16, where 500 TFLOP/s is usual",
        ),
        ([device(0, 3e14), device(1, 3e14)], "reaches 300 TFLOP/s in bfloat16, less than half of the 756 TFLOP/s"),
        ([device(0, 1e12, name="x"), device(1, 1e12, name="x")], None),
        (
            [device(0, 5e14), device(1, 5e14, free=0.05)],
            "Others use the memory of rank 1 (b): 4.0 of 80.0 GiB are free",
        ),
        ([device(0, 5e14), device(1, 5e14, name="NVIDIA L4")], "different devices: NVIDIA H100 PCIe, NVIDIA L4"),
    ],
)
def test_slow_used_and_different_devices_are_found(devices: list[DeviceFigures], seen: str | None) -> None:
    first, *others = judge_devices(devices, RANKS)
    assert first.status == "pass"
    assert [finding.status for finding in others] == ([] if seen is None else ["warn"])
    assert seen is None or seen in others[0].seen


FAST = storage._Figures("ext4", 100 * GIB, 2**26, 0.1, 1e-3, 0.05)


@pytest.mark.parametrize(
    ("figures", "status", "text"),
    [
        (FAST, "pass", "write 2.0 GB/s and read 4.0 GB/s, flushing a few bytes takes 1 ms, and 100.0 GiB are free."),
        (storage._Figures("ext4", 100 * GIB, 2**26, 4.0, 1e-3, 0.05), "warn", "slower than one hard disk"),
        (storage._Figures("nfs4", 100 * GIB, 2**26, 0.1, 0.2, 0.05), "warn", "Flushing takes long"),
        (storage._Figures("tmpfs", 100 * GIB, 2**26, 0.1, 1e-3, 0.05), "warn", "tmpfs is in memory"),
        (storage._Figures("ext4", 9 * GIB, 2**26, 0.1, 1e-3, 0.05), "warn", "a model with 805 million parameters"),
        (storage._Figures("ext4", 9, error="writing: denied"), "fail", "cannot use here; rank 0, writing: denied."),
    ],
)
def test_a_folder_is_judged_by_its_figures(figures: storage._Figures, status: str, text: str) -> None:
    (finding,) = storage.judge_storage(Path("here"), [figures] * 3, RANKS)
    assert finding.status == status
    assert text in f"{finding.seen} {finding.advice}"


def test_an_object_store_is_left_out_aloud() -> None:
    (finding,) = check_storage(Examination(RANKS, checkpoint_folder="s3://bucket/runs"))
    assert finding.status == "skip"
    assert finding.seen.startswith("s3://bucket/runs is in an object store, which was not measured.")


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"23 22 0:21 / {tmp_path} rw - nfs4 server:/x rw\n"
        f"24 22 0:21 / {tmp_path}x rw - xfs /dev/vdb rw\n"
    )
    assert file_system_of(tmp_path / "a" / "b", mounts) == "nfs4"
    assert file_system_of(Path("/etc"), mounts) == "ext4"
    assert file_system_of(Path("/etc"), tmp_path / "missing") == ""


GOOD = Environment({"OMP_NUM_THREADS": "4"}, ("lo", "eth0", "ib0"), 65536, None, True, 8 * GIB, 8 * GIB)


def test_an_environment_without_defects_passes() -> None:
    variables, limits = judge_environment([GOOD] * 3, RANKS)
    assert (variables.status, variables.seen) == ("pass", "All ranks have OMP_NUM_THREADS=4.")
    assert (limits.status, limits.seen) == ("pass", "65,536 open files, and 8.0 GiB of shared memory in /dev/shm.")


@pytest.mark.parametrize(
    ("variables", "status", "seen"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "NCCL_P2P_DISABLE=1 is set on rank 2 (c). GPUs of a node then send"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warn", "TORCH_DISTRIBUTED_DEBUG=DETAIL is set on rank 2 (c)."),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn", "A collective that hangs then never ends."),
        ({"NCCL_P2P_DISABLE": "0"}, None, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None, ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "fail", "NCCL_SOCKET_IFNAME names eth, and rank 2 (c) has no such interface"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, None, ""),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "fail", "has no such interface, but lo, eth0, ib0. The ranks cannot connect."),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, None, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, "fail", "GLOO_SOCKET_IFNAME names eth1, and rank 2 (c)"),
    ],
)
def test_dangerous_and_wrong_variables_are_found(variables: dict[str, str], status: str | None, seen: str) -> None:
    # Interfaces may differ between nodes, but the other variables differ from those of the first ranks here.
    environments = [GOOD, GOOD, replace(GOOD, variables={**GOOD.variables, **variables})]
    found = [item for item in judge_environment(environments, RANKS) if "Ranks that choose" not in item.seen]
    found = [item for item in found if item.status != "pass"]
    assert [item.status for item in found] == ([] if status is None else [status])
    assert status is None or seen in found[0].seen


@pytest.mark.parametrize(
    ("change", "name", "seen"),
    [
        ({"max_open_files": 535}, "limits", "rank 0, 1, 2 (a, b, c) may open 535 files. 3 ranks need about 536"),
        ({"max_locked_bytes": 2**26}, "limits", "may lock 64 MiB of memory"),
        ({"shared_bytes": 2**26, "free_shared_bytes": 2**26}, "shared memory", "has 64 free of 64 MiB"),
        ({"free_shared_bytes": 2**20}, "shared memory", "has 1 free of 8,192 MiB"),
    ],
)
def test_limits_that_are_too_small_are_found(change: dict[str, Any], name: str, seen: str) -> None:
    found = [item for item in judge_environment([replace(GOOD, **change)] * 3, RANKS) if item.status == "warn"]
    assert [item.name for item in found] == [name]
    assert seen in found[0].seen


def test_locked_memory_is_only_needed_by_infiniband() -> None:
    ethernet = replace(GOOD, has_infiniband=False, max_locked_bytes=2**16)
    assert {item.status for item in judge_environment([ethernet] * 3, RANKS)} == {"pass"}


def test_missing_shared_memory_is_found(tmp_path: Path) -> None:
    own = own_environment(tmp_path / "shm")
    assert (own.shared_bytes, own.free_shared_bytes) == (0, 0)
    assert "lo" in own.interfaces
    found = judge_environment([own] * 3, RANKS)
    assert "has 0 free of 0 MiB" in next(item.seen for item in found if item.name == "shared memory")
