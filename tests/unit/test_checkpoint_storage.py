"""One process stores checkpoints in object stores, and on file systems with and without directory exchange."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dist.checkpoint import CheckpointError, file_system, find, read, take_snapshot, verify, write
from lightning_dist.checkpoint.locate import storage_at
from tests.faults.saves import content, found, save


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that cannot exchange two directories, such as NFS."""

    def refuse(source: Path, target: Path, flag: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(target))

    monkeypatch.setattr(file_system, "_rename", refuse)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://runs"
    fsspec.filesystem("memory").store.clear()


def names(folder: Path) -> list[str]:
    """Return the sorted names of the entries of a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_a_save_replaces_the_checkpoint_at_its_path(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path / "runs" / "run.ckpt", number)
        assert found(tmp_path / "runs" / "run.ckpt") == number
    assert names(tmp_path / "runs") == [".tmp", "run.ckpt"]
    assert names(tmp_path / "runs" / ".tmp") == []


def test_a_save_replaces_a_file_at_its_path(tmp_path: Path) -> None:
    (tmp_path / "run.ckpt").write_text("what another strategy saved")
    save(tmp_path / "run.ckpt", 1)
    assert found(tmp_path / "run.ckpt") == 1


def test_without_directory_exchange_each_save_replaces_a_link(tmp_path: Path, no_exchange: None) -> None:
    path = tmp_path / "run.ckpt"
    for number in (1, 2, 3):
        save(path, number)
        assert found(path) == number
        assert path.is_symlink()
        assert not Path(os.readlink(path)).is_absolute(), "an absolute link would break when the folder is moved"
        assert len(names(tmp_path / ".versions")) == 1
    storage_at(path).remove()
    assert names(tmp_path) == [".tmp", ".versions"]
    assert names(tmp_path / ".versions") == names(tmp_path / ".tmp") == []


def test_without_directory_exchange_replacing_a_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    save(tmp_path / "run.ckpt", 1)
    request.getfixturevalue("no_exchange")
    with pytest.raises(CheckpointError, match="cannot be replaced in one step: it is not a symbolic link"):
        save(tmp_path / "run.ckpt", 2)
    assert found(tmp_path / "run.ckpt") == 1


def test_a_checkpoint_in_an_object_store_is_written_replaced_verified_and_removed(memory: str) -> None:
    path = f"{memory}/run.ckpt"
    for number in (1, 2):
        save(path, number)
        checkpoint = read(path, lambda info: torch.empty(info.shape, dtype=info.dtype))
        assert checkpoint["number"] == number
        assert len(fsspec.filesystem("memory").find("/runs")) == 4, "the files of the previous save are still there"
    assert [place for place, _ in find(memory)] == [path.replace("memory://", "memory:///")]
    verify(path)
    fsspec.filesystem("memory").rm_file(fsspec.filesystem("memory").find("/runs/run.ckpt")[0])
    with pytest.raises(CheckpointError, match=r"memory://runs/run.ckpt cannot be read: its file .* is missing"):
        verify(path)
    storage_at(path).remove()
    assert not storage_at(path).exists()


def test_a_save_that_fails_in_an_object_store_keeps_the_old_checkpoint(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{memory}/run.ckpt"
    save(path, 1)
    pipe = fsspec.implementations.memory.MemoryFileSystem.pipe_file

    def fail(filesystem: Any, name: str, value: bytes, **kwargs: Any) -> None:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "pipe_file", fail)
    with pytest.raises(CheckpointError, match="was not written: OSError: 503 Slow Down"):
        save(path, 2)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "pipe_file", pipe)
    assert read(path, lambda info: torch.empty(info.shape, dtype=info.dtype))["number"] == 1
    assert len(fsspec.filesystem("memory").find("/runs")) == 4


def test_a_lost_answer_of_an_object_store_keeps_the_new_one(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to all writes are lost, and nothing can be removed; the new checkpoint is there all the same."""
    path = f"{memory}/run.ckpt"
    save(path, 1)
    store = fsspec.implementations.memory.MemoryFileSystem
    pipe = store.pipe_file

    def lose_the_answer(filesystem: Any, name: str, value: bytes, **kwargs: Any) -> None:
        pipe(filesystem, name, value, **kwargs)
        raise TimeoutError("no answer")

    def fail(filesystem: Any, name: str) -> None:
        raise RuntimeError("503 Slow Down")

    monkeypatch.setattr(store, "pipe_file", lose_the_answer)
    monkeypatch.setattr(store, "rm_file", fail)
    with pytest.warns(UserWarning, match="What was at memory://runs/run.ckpt before could not be removed"):
        save(path, 2)
    monkeypatch.undo()
    assert read(path, lambda info: torch.empty(info.shape, dtype=info.dtype))["number"] == 2


def test_removing_a_link_that_a_user_made_keeps_its_target(tmp_path: Path) -> None:
    save(tmp_path / "best.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    assert [Path(path).name for path, _ in find(tmp_path)] == ["best.ckpt"]
    storage_at(tmp_path / "last.ckpt").remove()
    assert found(tmp_path / "best.ckpt") == 1
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_versions_that_no_link_points_to_are_removed(tmp_path: Path, no_exchange: None) -> None:
    save(tmp_path / "run.ckpt", 1)
    (tmp_path / ".versions" / "run.ckpt-of-a-dead-run").mkdir()
    storage_at(tmp_path / "run.ckpt").lock()()
    assert len(names(tmp_path / ".versions")) == 1
    assert found(tmp_path / "run.ckpt") == 1


def test_an_error_after_the_new_checkpoint_is_in_place_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run.ckpt", 1)
    sync_folder = file_system._sync_folder

    def fail(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_folder(folder)

    monkeypatch.setattr(file_system, "_sync_folder", fail)
    with pytest.warns(UserWarning, match="run.ckpt is there, but what was there before is not removed"):
        save(tmp_path / "run.ckpt", 2)
    assert found(tmp_path / "run.ckpt") == 2


def test_an_open_reader_keeps_reading_the_checkpoint_that_a_save_replaces(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    save(path, 1)
    first = (path / "rank_0.bin").read_bytes()
    with storage_at(path).open() as reader:
        reader.size("rank_0.bin")
        save(path, 2)
        content = bytearray(len(first))
        assert reader.read_into("rank_0.bin", 0, memoryview(content)) == len(first)
    assert content == first


def test_too_little_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run.ckpt", 1)
    monkeypatch.setattr(file_system.LocalStorage, "free_bytes", lambda self: 1000)
    with pytest.raises(CheckpointError, match="it needs 0 MiB, and there is space for 0 MiB"):
        save(tmp_path / "run.ckpt", 2)
    assert found(tmp_path / "run.ckpt") == 1
    assert names(tmp_path / ".tmp") == []


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is below a file, rather than one without write permission, because root may write everywhere."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"was not written: NotADirectoryError.*file"):
        save(tmp_path / "file" / "runs" / "run.ckpt", 1)


class Config:
    """Stand for a class of the user."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config)


def test_objects_of_other_classes_are_only_unpickled_with_weights_only_false(tmp_path: Path) -> None:
    write(tmp_path / "plain.ckpt", take_snapshot({"every": timedelta(hours=1), "path": Path("data"), "lr": [1e-3]}))
    plain = read(tmp_path / "plain.ckpt", lambda info: None)
    assert plain == {"every": timedelta(hours=1), "path": Path("data"), "lr": [1e-3]}
    write(tmp_path / "own.ckpt", take_snapshot({"config": Config()}))
    with pytest.raises(CheckpointError, match=r"holds objects of .*Config.*weights_only=False"):
        read(tmp_path / "own.ckpt", lambda info: None)
    assert read(tmp_path / "own.ckpt", lambda info: None, weights_only=False) == {"config": Config()}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.zeros(0, 5),
        torch.tensor(3.5),
        torch.arange(7, dtype=torch.int16),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.randn(4, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "empty", "scalar", "int16", "bfloat16", "float8", "complex", "bool", "sparse"],
)
def test_tensors_of_every_kind_are_read_as_they_were_written(tmp_path: Path, tensor: torch.Tensor) -> None:
    write(tmp_path / "one.ckpt", take_snapshot({"state": [tensor]}))
    loaded = read(tmp_path / "one.ckpt", lambda info: torch.empty(info.shape, dtype=info.dtype))["state"][0]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.to_dense().view(-1), tensor.to_dense().contiguous().view(-1)) or loaded.numel() == 0


def test_a_manifest_that_names_files_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    from lightning_dist.checkpoint.manifest import FileEntry, Manifest

    (tmp_path / "run.ckpt").mkdir()
    manifest = Manifest({"../secret": FileEntry(1, "")}, {}, 1, 0.0)
    (tmp_path / "run.ckpt" / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(CheckpointError, match="it names files outside of itself"):
        read(tmp_path / "run.ckpt", lambda info: None)


def test_the_command_lists_and_verifies_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_dist.cli.checkpoint import run

    folder = tmp_path / "1" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (10, 20):
        about = {"global_step": step, "epoch": 0, "mlflow_training": "internal"}
        write(folder / f"step={step}.ckpt", take_snapshot(content(step), about=about))
    paths = [str(folder / f"step={step}.ckpt") for step in (10, 20)]
    assert run(["ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", *paths]
    assert lines[0].split()[1:] == ["saved", "global_step", "epoch", "MiB", "ranks"]
    step = lines[0].index("global_step")
    assert [line[step:].split()[0] for line in lines[1:]] == ["10", "20"]
    assert run(["ls", str(tmp_path)]) == 0  # Checkpoints are looked for in the folders below as well.
    assert capsys.readouterr().out.splitlines() == lines
    write("memory://nested/1/run.ckpt", take_snapshot(content(1)))  # An object store
    assert [path for path, _ in find("memory://nested", recurse=True)] == ["memory:///nested/1/run.ckpt"]
    assert find("memory://nested") == []
    assert run(["verify", *paths]) == 0
    assert capsys.readouterr().out.count("good: 2 files") == 2
    (folder / "step=20.ckpt" / "state.pt").write_bytes(b"")
    (folder / "step=10.ckpt" / "manifest.json").write_bytes(b"{}")
    assert run(["verify", *paths]) == 1
    printed = capsys.readouterr().err
    assert "its manifest.json is damaged" in printed
    assert "its file state.pt has 0 bytes" in printed
    assert run(["ls", str(tmp_path)]) == 0
    assert f"{paths[0]}  damaged: " in capsys.readouterr().out
    assert run(["ls", str(tmp_path / "empty")]) == 2
    assert "has no sharded checkpoints in it" in capsys.readouterr().err


def test_a_checkpoint_directory_is_loaded_by_lightning_and_torch_in_one_process(tmp_path: Path) -> None:
    module = BoringModel()
    write(
        tmp_path / "run.ckpt", take_snapshot({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6"})
    )
    for weight in (
        BoringModel.load_from_checkpoint(tmp_path / "run.ckpt").layer.weight,
        torch.load(str(tmp_path / "run.ckpt"))["state_dict"]["layer.weight"],
    ):
        torch.testing.assert_close(weight, module.layer.weight, rtol=0, atol=0)
