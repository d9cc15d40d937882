"""Measure how long training waits for a save, and how fast checkpoints are written and read in different ways."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint import Save
from tests.bench.harness import Pace, Pairs, alternate
from tests.bench.sides import STRATEGIES, make_module, make_trainer
from tests.bench.workload import Workload

__all__ = ["compare_stalls", "compare_transfers"]

Transfer = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]
"""Three functions, of which the first removes a checkpoint, the second writes it, and the third reads it."""


def compare_stalls(workload: Workload, pace: Pace) -> Pairs:
    """Measure the seconds that training waits for a save, in the background (ours) and in the foreground (theirs).

    Both are measured in one fit, which saves after every step, in turn. This is a collective.
    """
    dist.init_process_group("gloo")
    with _shared_folder() as folder:
        saves = _Saves(folder, Pairs(), _agreed(pace.stop_rule()))
        _fit(workload, "full_shard", saves)
    return saves.pairs


class _Saves(Callback):
    """Save in the background and in the foreground in turn, and record the time that training waits.

    The first pair of saves is not counted, because it also creates threads and buffers.
    """

    def __init__(self, folder: Path, pairs: Pairs, is_enough: Callable[[Pairs], bool]) -> None:
        self._folder = folder
        self.pairs = pairs
        self._is_enough = is_enough
        self._num_saves = 0
        # The last save in the background, and the seconds that its call took apart from those in `save.stall_s`.
        self._asynchronous: tuple[float, Save] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        checkpoints = trainer.strategy._checkpoints  # type: ignore[attr-defined]
        checkpoints.finish_pending()
        if self._asynchronous is not None:  # By now, the next update of the weights has waited for the copy.
            seconds, save = self._asynchronous
            self._note("ours", seconds + save.stall_s)
            self._asynchronous = None
        if len(self.pairs.ours) == len(self.pairs.theirs) and self._is_enough(self.pairs):
            trainer.should_stop = True
            return
        is_asynchronous = self._num_saves % 2 == 0
        checkpoints._options = replace(checkpoints._options, asynchronous=is_asynchronous)
        path, before = self._folder / f"{self._num_saves}.ckpt", self._folder / f"{self._num_saves - 1}.ckpt"
        if dist.get_rank() == 0:
            shutil.rmtree(before, ignore_errors=True)
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        trainer.save_checkpoint(path)
        seconds = time.perf_counter() - start
        if is_asynchronous:
            save = checkpoints._writer._current
            self._asynchronous = (seconds - save.stall_s, save)
        else:
            self._note("theirs", seconds)
        self._num_saves += 1

    def _note(self, side: str, seconds: float) -> None:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if self._num_saves > 2:
            getattr(self.pairs, side).append(float(slowest))


def compare_transfers(kind: str, ours: str, theirs: str, workload: Workload, pace: Pace) -> Pairs:
    """Measure the seconds to write or to read the same checkpoint in two ways, in turn. This is a collective.

    Args:
        kind: ``"write"``, which includes flushing to the disk, or ``"load"``, which reads from the disk if this process
            may empty the page cache.
        ours: Key of ``TRANSFERS``.
        theirs: Another key of ``TRANSFERS``.
        workload: Model whose weights and optimizer state are saved.
        pace: Rule for the number of pairs.
    """
    dist.init_process_group("gloo")
    with _shared_folder() as folder:
        sides = [partial(_seconds, kind, TRANSFERS[side](workload, folder / side)) for side in (ours, theirs)]
        for side in sides:
            side()
        return alternate(sides[0], sides[1], Pairs(), _agreed(pace.stop_rule()))


def _seconds(kind: str, transfer: Transfer) -> float:
    clear, write, load = transfer
    if dist.get_rank() == 0:
        if kind == "write":
            clear()
        os.sync()
        with suppress(PermissionError):
            Path("/proc/sys/vm/drop_caches").write_text("3" if kind == "load" else "1")
    dist.barrier()
    start = time.perf_counter()
    (write if kind == "write" else load)()
    dist.barrier()
    return time.perf_counter() - start


def _by_trainer(name: str, workload: Workload, folder: Path) -> Transfer:
    trainer, path = _fit(workload, name, Callback(), max_steps=1), folder / "run.ckpt"
    trainer.save_checkpoint(path)
    load = partial(trainer.strategy.load_checkpoint, path)
    return partial(shutil.rmtree, path), partial(trainer.save_checkpoint, path), load


def _plain_dcp(workload: Workload, folder: Path) -> Transfer:
    state = _state(workload)

    def save() -> None:
        dcp.save(state, checkpoint_id=folder / "run")

    def load() -> None:
        empty = {key: torch.empty_like(tensor) for key, tensor in state.items()}
        dcp.load(empty, checkpoint_id=folder / "run")

    save()
    return partial(shutil.rmtree, folder / "run"), save, load


def _raw(workload: Workload, folder: Path) -> Transfer:
    """Write the bytes of each rank to one plain file, flush it to the disk, and read it into new memory."""
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in _state(workload).values()]
    mine = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{dist.get_rank()}.bin"

    def clear() -> None:
        for file in folder.iterdir():
            file.unlink()

    def save() -> None:
        with open(path, "wb", buffering=0) as file:
            rest = memoryview(mine.numpy())  # type: ignore[arg-type]
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def load() -> None:
        buffer = memoryview(torch.empty_like(mine).numpy())  # type: ignore[arg-type]
        with open(path, "rb", buffering=0) as file:
            while buffer:
                buffer = buffer[file.readinto(buffer) :]

    save()
    return clear, save, load


TRANSFERS: dict[str, Callable[[Workload, Path], Transfer]] = {
    "full_shard": partial(_by_trainer, "full_shard"),
    "model_parallel": partial(_by_trainer, "model_parallel"),
    "dcp": _plain_dcp,
    "raw": _raw,
}
"""Functions, by name, that write a checkpoint and return the functions to remove, write and read it."""


def _fit(workload: Workload, name: str, callback: Callback, max_steps: int | None = None) -> Trainer:
    strategy, cls = STRATEGIES[name]
    trainer = make_trainer(strategy(), workload, callback, max_steps)
    trainer.fit(make_module(cls, workload), workload.loader())
    return trainer


def _state(workload: Workload) -> dict[str, torch.Tensor]:
    """Train one step, and return the sharded weights and optimizer state."""
    trainer = _fit(workload, "full_shard", Callback(), max_steps=1)
    names = {param: name for name, param in trainer.lightning_module.named_parameters()}
    state = {name: param.detach() for param, name in names.items()}
    for param, values in trainer.optimizers[0].state.items():
        state |= {f"{names[param]}.{key}": value for key, value in values.items() if isinstance(value, DTensor)}
    return state


def _agreed(is_enough: Callable[[Pairs], bool]) -> Callable[[Pairs], bool]:
    """Let rank 0 decide for all ranks when there are enough pairs, because the ranks' clocks differ."""

    def rank_zero_has_enough(pairs: Pairs) -> bool:
        answer = torch.tensor([is_enough(pairs)])
        dist.broadcast(answer, src=0)
        return bool(answer)

    return rank_zero_has_enough


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Create a temporary folder on this machine's disk that all ranks share, and remove it at the end."""
    folder = [tempfile.mkdtemp(dir="/var/tmp") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        yield Path(folder[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
