"""The checks of a run's nodes find planted defects, on two ranks."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.ranks import Ranks
from lightning_dist.run.doctor.storage import check_storage
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
