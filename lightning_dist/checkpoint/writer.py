"""Write checkpoints in the background, so that training waits only until the weights are copied.

The writer of each rank has one thread, which executes saves and removals in the order of the requests. A save that
fails on one rank fails on all of them, leaves the checkpoint that was at its path, and cancels the removals after it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from lightning_dist._compat import local_of, version_of
from lightning_dist.checkpoint.format import Path, not_written, read_manifest, verify, write
from lightning_dist.checkpoint.locate import storage_at
from lightning_dist.checkpoint.manifest import CheckpointError
from lightning_dist.checkpoint.parts import own_parts
from lightning_dist.checkpoint.snapshot import Snapshot
from lightning_dist.mesh.consensus import raise_on_all_ranks

__all__ = ["Save", "Writer"]

READ_BACK_S = 5.0
"""Seconds to wait until a finished save is visible, because network file systems show it late."""


@dataclass
class Save:
    """Record a requested save and its outcome.

    Args:
        path: Path or URL that the checkpoint is saved to.
        about: Values in the manifest to show where checkpoints are listed.
        num_bytes: Bytes of all files of the checkpoint, once it is written; known on the first rank.
        stall_s: Seconds for which training waited for the save.
        staging_s: Seconds that copying took. Training waited for a part of this time.
        write_s: Seconds from the end of copying until the checkpoint was at its path, or the save had failed.
        saved_at: The ``saved_at`` of its manifest; 0 if the checkpoint was not written.
        error: The error if the save failed, else None.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    stall_s: float = 0.0
    staging_s: float = 0.0
    write_s: float = 0.0
    saved_at: float = 0.0
    error: CheckpointError | None = None


class Writer:
    """Write checkpoints in a background thread. All ranks must call the same methods in the same order.

    Args:
        timeout: Time that ranks wait for each other within a save; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        self._thread: threading.Thread | None = None
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._current: Save | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._finished: queue.SimpleQueue[Save] = queue.SimpleQueue()
        # Only the thread uses the following attributes.
        self._newest: Save | None = None
        self._is_verified = False
        self._locks: dict[str, Callable[[], None]] = {}

    def save(self, path: Path, snapshot: Snapshot | Exception, asynchronous: bool = True) -> Save:
        """Start a save after all earlier requests are done, and return before the weights are copied.

        The DTensors of ``snapshot`` must not change until :meth:`wait_until_staged` returns. The save fails if they are
        changed in place before; a change through ``.data`` is not detected.

        Args:
            path: Path of the checkpoint, as for :func:`~lightning_dist.checkpoint.format.write`.
            snapshot: Snapshot to save; its tensors other than DTensors are copied at once. A rank that could not take a
                snapshot gives the exception instead, and the save fails on all ranks.
            asynchronous: Whether to return before the save is done. If False, nothing is copied.

        Returns:
            The record of the save, which is completed while the save goes on.
        """
        start = time.perf_counter()
        self.wait()
        self._start()
        problem = None
        if isinstance(snapshot, Exception):
            problem, snapshot = snapshot, Snapshot({}, bytes)
        taken = snapshot
        save = self._current = Save(str(path), dict(taken.about))
        if asynchronous:
            self._prepare_staging(taken)
            taken = replace(taken, tensors=_with_copies(taken.tensors, self._is_first))
        self._staged.clear()
        self._jobs.put(self._job(path, taken, problem, save, asynchronous))
        if not asynchronous:
            self.wait()
        save.stall_s = time.perf_counter() - start
        return save

    def _job(
        self, path: Path, taken: Snapshot, problem: Exception | None, save: Save, asynchronous: bool
    ) -> Callable[[], None]:
        """Return a function that copies and writes ``taken``, and completes ``save``.

        Args:
            path: As for :meth:`save`.
            taken: The snapshot of this rank's tensors that is written.
            problem: The exception because of which this rank has no snapshot; None: there was none.
            save: The record of the save.
            asynchronous: As for :meth:`save`.
        """
        versions = _versions(taken.tensors)
        staging_start = time.perf_counter()

        def staged() -> dict[str, torch.Tensor]:
            try:
                if problem is not None:
                    raise problem
                parts = own_parts(taken.tensors, self._is_first)
                if asynchronous:
                    assert self._stager is not None
                    parts = cast("Future[dict[str, torch.Tensor]]", self._stager.stage(parts)).result()
                if versions != _versions(taken.tensors):
                    raise RuntimeError(CHANGED)
                return parts
            finally:
                save.staging_s = time.perf_counter() - staging_start
                self._staged.set()

        def job() -> None:
            try:
                with raise_on_all_ranks("copying the weights", self._group):
                    parts = staged()
                with raise_on_all_ranks("locking the folder", self._group):
                    self._lock(path)
                save.saved_at, save.num_bytes = write(path, taken, self._group, parts)
            except BaseException as error:
                save.error = error if isinstance(error, CheckpointError) else not_written(path, error)
            self._newest, self._is_verified = save, False
            save.write_s = time.perf_counter() - staging_start - save.staging_s
            self._finished.put(save)

        return job

    def remove(self, path: Path) -> None:
        """Remove the checkpoint at ``path`` if the latest save succeeded and can be read back intact.

        If it cannot be read back, nothing is removed, and :meth:`finished` returns it once more, with an error.
        """

        def job() -> None:
            if not self._verify_newest():
                return
            try:
                # No rank goes on before the checkpoint is removed, or has failed to be.
                with raise_on_all_ranks(f"removing {path}", self._group):
                    if self._is_first:
                        _remove(str(path))
            except Exception as error:  # Object stores raise errors of many classes.
                warnings.warn(f"The checkpoint {path} could not be removed: {error}", stacklevel=1)

        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    @property
    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank(self._group) == 0

    def _verify_newest(self) -> bool:
        """Return whether the latest save is intact, as found by reading it back once.

        This is a collective, in which each rank reads its share of the files.
        """
        save = self._newest
        if save is None or self._is_verified:
            return True
        if save.error is not None:
            return False
        share = (dist.get_rank(self._group), dist.get_world_size(self._group)) if self._group else (0, 1)
        try:
            with raise_on_all_ranks(f"reading the checkpoint {save.path} back", self._group):
                _read_back(save, share)
        except Exception as error:
            error = CheckpointError(f"{error} It was written just now, so that no older checkpoint is removed.")
            self._newest = replace(save, error=error)
            self._finished.put(self._newest)
            return False
        self._is_verified = True
        return True

    def wait_until_staged(self) -> None:
        """Wait until the weights of the last save are copied, so that they may change."""
        if not self._staged.is_set():
            start = time.perf_counter()
            self._staged.wait()
            assert self._current is not None
            self._current.stall_s += time.perf_counter() - start

    def wait(self) -> None:
        """Wait until all requests are done or have failed."""
        self._jobs.join()

    def finished(self) -> list[Save]:
        """Return the saves that have finished or failed since the last call."""
        saves = []
        while not self._finished.empty():
            saves.append(self._finished.get())
        return saves

    def close(self) -> None:
        """Wait for all requests and end the thread. The writer can be used again."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join()
        if self._stager is not None:
            self._stager.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._thread = self._stager = self._group = None

    def _start(self) -> None:
        if self._thread is not None:
            return
        if dist.is_initialized():
            # The writer needs its own group, because training runs collectives at the same time.
            self._group = dist.new_group(
                backend="gloo", timeout=self._timeout, group_desc="background: checkpoint writer"
            )
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _prepare_staging(self, snapshot: Snapshot) -> None:
        """Create the stager. The training thread must call this, because it has selected the device."""
        on_accelerator = any(tensor.device.type != "cpu" for tensor in snapshot.tensors.values())
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_accelerator,
                    use_shared_memory=False,
                    use_async_staging=True,
                    use_non_blocking_copy=on_accelerator,
                )
            )
        if on_accelerator:
            # The stager's stream does not wait for the kernels that update the weights.
            torch.accelerator.synchronize()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # If the thread ended, training would wait for it forever.
                warnings.warn(f"The checkpoint writer continues after an error: {error!r}", stacklevel=1)
            finally:
                self._staged.set()
                self._jobs.task_done()
        for unlock in self._locks.values():
            unlock()
        self._locks = {}
        self._newest = None
        self._jobs.task_done()

    def _lock(self, path: Path) -> None:
        """Lock the folder of ``path`` for this run until the writer is closed."""
        folder = os.path.dirname(os.fspath(path))
        if folder not in self._locks and self._is_first:
            self._locks[folder] = storage_at(path).lock()


def _with_copies(tensors: Mapping[str, torch.Tensor], is_first: bool) -> dict[str, torch.Tensor]:
    """Copy the tensors that the next forward may change, such as buffers, to the CPU, on the first rank only.

    DTensors are returned as they are.
    """
    return {
        name: tensor if isinstance(tensor, DTensor) else tensor.detach().to("cpu", copy=True)
        for name, tensor in tensors.items()
        if is_first or isinstance(tensor, DTensor)
    }


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Return the version counters of the DTensors and of their local tensors, which may be changed directly."""
    sharded = [tensor for tensor in tensors.values() if isinstance(tensor, DTensor)]
    return [(version_of(tensor), version_of(local_of(tensor))) for tensor in sharded]


def _read_back(save: Save, share: tuple[int, int]) -> None:
    """Check this rank's share of the files that ``save`` wrote.

    On a network file system, this node may see the previous checkpoint for a while, so that it waits for the new one.

    Raises:
        CheckpointError: If the checkpoint does not become visible, or is damaged.
    """
    deadline = time.monotonic() + READ_BACK_S
    while not _is_seen(save):
        if time.monotonic() > deadline:
            raise CheckpointError(f"{save.path} is not what was saved to it.")
        time.sleep(0.2)
    verify(save.path, share=share)


def _is_seen(save: Save) -> bool:
    try:
        return read_manifest(save.path).saved_at == save.saved_at
    except CheckpointError:
        return False


CHANGED = (
    "the weights changed while they were copied, so that the checkpoint would mix two steps. Something other than an"
    " optimizer step changes them: save with asynchronous=False"
)


def _remove(path: str) -> None:
    place = storage_at(path)
    if place.exists():
        place.remove()
