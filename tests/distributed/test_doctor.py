"""The checks of a run's nodes find planted defects, on two ranks."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dist.run.doctor.clocks import check_clocks
from lightning_dist.run.doctor.environment import check_environment
from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.ranks import Ranks
from lightning_dist.run.doctor.storage import check_storage
from lightning_dist.run.doctor.versions import check_versions, installed_versions
from tests.pool import WorkerPool

pytestmark = pytest.mark.gloo


def connected(folder: Path | str = ".") -> Examination:
    """Connect the ranks, and describe them for the checks."""
    dist.init_process_group("gloo")
    return Examination(Ranks.connected(torch.device("cpu")), "gloo", folder)


def storage(folder: Path) -> list[Finding]:
    return check_storage(connected(folder))


def storage_beside_a_covered_folder(folder: Path) -> list[Finding]:
    """Check a folder over which rank 1 has mounted another disk, which only this rank sees."""
    if os.environ["RANK"] == "1":
        assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    return storage(folder)


def clocks(ahead_s: float) -> list[Finding]:
    """Compare the clocks after that of rank 1 was set wrong."""
    examination = connected()
    wrong_ns = int(ahead_s * 1e9) if dist.get_rank() == 1 else 0
    return check_clocks(examination, lambda: time.time_ns() + wrong_ns)


def versions(of_ranks: list[dict[str, str]]) -> tuple[list[Finding], dict[str, str]]:
    examination = connected()
    return check_versions(examination, lambda: of_ranks[dist.get_rank()]), examination.versions


def environment(variables: list[dict[str, str]]) -> list[Finding]:
    rank = int(os.environ["RANK"])
    os.environ.update(variables[rank])
    return check_environment(connected())


def same_on_all(of_ranks: list[list[Finding]]) -> list[Finding]:
    assert all(findings == of_ranks[0] for findings in of_ranks)
    return of_ranks[0]


def test_a_folder_that_all_ranks_share_is_measured_and_left_clean(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    (finding,) = same_on_all(pool.run(storage, 2, folder))
    assert finding.status in ("pass", "warn")  # The disk of this machine may be busy.
    assert f"{folder} (" in finding.seen
    assert "is seen by all ranks. Together they write " in finding.seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: only root can mount a disk")
def test_a_folder_that_another_rank_does_not_see_is_found(own_pool: WorkerPool, tmp_path: Path) -> None:
    (finding,) = same_on_all(own_pool.run(storage_beside_a_covered_folder, 2, tmp_path))
    assert (finding.name, finding.status) == ("checkpoint folder", "fail")
    assert f"{tmp_path} is not the same folder on all ranks: rank 1 (" in finding.seen
    assert "mount at the same path" in finding.advice
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_found(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = same_on_all(pool.run(storage, 2, tmp_path / "file" / "x"))
    assert finding.status == "fail"
    assert f"cannot write to {tmp_path}/file/x: [Errno 20] Not a directory" in finding.seen


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 16 MiB, of which 4 MiB are free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    try:
        (folder / "other").write_bytes(bytes(12 * 2**20))
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: only root can mount a disk")
def test_a_full_disk_is_found(pool: WorkerPool, tiny_disk: Path) -> None:
    (finding,) = same_on_all(pool.run(storage, 2, tiny_disk))
    assert finding.status == "fail"
    assert f"{tiny_disk} is full: rank" in finding.seen
    assert "could not write 64 MiB, and 4 MiB are free" in finding.seen
    assert [path.name for path in tiny_disk.iterdir()] == ["other"]


@pytest.mark.parametrize("ahead_s", [0.0, 7.5, -7.5])
def test_a_wrong_clock_is_found(pool: WorkerPool, ahead_s: float) -> None:
    (finding,) = same_on_all(pool.run(clocks, 2, ahead_s))
    assert (finding.name, finding.status) == ("clocks", "warn" if ahead_s else "pass")
    found = re.match(
        r"The clock of rank 1 \(.*?\) is ([\d.]+) (s|ms|µs) \(± ([\d.]+) (s|ms|µs)\) (ahead of|behind) that of",
        finding.seen,
    )
    assert found is not None, finding.seen
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    offset, uncertainty = float(found[1]) * unit[found[2]], float(found[3]) * unit[found[4]]
    assert abs(offset - abs(ahead_s)) <= uncertainty + 5e-3 * abs(ahead_s)  # Three digits are shown.
    assert not ahead_s or found[5] == ("ahead of" if ahead_s > 0 else "behind")
    assert uncertainty < 0.5


INSTALLED = {"python": "3.11.2", "torch": "2.13.0", "numpy": "2.3.0"}


@pytest.mark.parametrize(
    ("on_rank_1", "found"),
    [
        ({}, [("pass", "All ranks have python 3.11.2, torch 2.13.0, numpy 2.3.0.")]),
        ({"torch": "2.12.1"}, [("fail", r"torch is 2\.13\.0 on rank 0 \(.*\), and 2\.12\.1 on rank 1 \(.*\)\.")]),
        ({"numpy": "2.2.0"}, [("warn", r"numpy is 2\.3\.0 on rank 0 \(.*\), and 2\.2\.0 on rank 1")]),
        ({"NCCL": "2.28.9"}, [("fail", r"NCCL is not installed on rank 0 \(.*\), and 2\.28\.9 on rank 1")]),
        (
            {"python": "3.12.0", "mlflow": "3.1"},
            [("fail", "python is 3.11.2 on rank 0"), ("warn", "mlflow is not inst")],
        ),
    ],
)
def test_different_versions_are_found(
    pool: WorkerPool, on_rank_1: dict[str, str], found: list[tuple[str, str]]
) -> None:
    of_ranks = pool.run(versions, 2, [INSTALLED, INSTALLED | on_rank_1])
    assert of_ranks[0] == of_ranks[1]
    findings, on_rank_0 = of_ranks[0]
    assert on_rank_0 == INSTALLED
    assert [finding.status for finding in findings] == [status for status, _ in found]
    for finding, (_, text) in zip(findings, found, strict=True):
        assert re.search(text, finding.seen), finding.seen


def test_the_versions_are_those_that_are_installed() -> None:
    installed = installed_versions()
    assert installed["torch"] == torch.__version__
    assert set(installed) >= {"python", "lightning", "lightning-dist", "numpy", "mlflow"}
    assert "not installed" not in (installed["lightning"], installed["numpy"])


def test_variables_that_differ_between_ranks_are_found(pool: WorkerPool) -> None:
    found = same_on_all(pool.run(environment, 2, [{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}]))
    assert (found[0].name, found[0].status) == ("environment", "warn")
    assert re.match(r"NCCL_ALGO is Ring on rank 0 \(.*\), and Tree on rank 1 \(.*\)\. Ranks that", found[0].seen)
