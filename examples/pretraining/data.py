"""Read text files as an endless stream of shuffled windows of bytes, whose position can be saved and restored."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

Window = tuple[Tensor, Tensor]


def read_windows(files: list[Path], context: int) -> Tensor:
    """Return the text of files as consecutive windows, of shape (number, context + 1) and dtype uint8.

    The last byte of a window is the first one of the next. The end of the text that fills no window is left out.
    """
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text.unfold(0, context + 1, context) if len(text) > context else text.new_empty(0, context + 1)


def as_sample(window: Tensor) -> Window:
    """Return the bytes of a window without the last one, and those without the first one, as int64."""
    window = window.long()
    return window[:-1], window[1:]


class TextStream(IterableDataset[Window]):
    """Yield windows of text files without an end: in each epoch in another order, and on each rank others.

    Some files are read at a time, and their windows are shuffled together, so that the text need not fit into memory.
    The order depends on the seed alone. Three numbers are the whole position.

    Args:
        files: Files to read.
        context: Length of each window, in bytes.
        seed: Seed of the order.
        rank: Number of this process among those that read different windows.
        num_ranks: Number of processes that read different windows.
        files_at_once: Number of files whose windows are shuffled together.
    """

    def __init__(
        self, files: list[Path], context: int, seed: int, rank: int = 0, num_ranks: int = 1, files_at_once: int = 8
    ) -> None:
        self.files = files
        self.context = context
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.files_at_once = files_at_once
        self.position = {"epoch": 0, "group": 0, "window": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next window."""
        return dict(self.position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position that `state_dict` has returned."""
        self.position = dict(state_dict)

    def __iter__(self) -> Iterator[Window]:
        position = self.position
        while True:
            order = torch.randperm(len(self.files), generator=self._generator(0)).tolist()
            while position["group"] * self.files_at_once < len(order):
                first = position["group"] * self.files_at_once
                windows = self._shuffled([self.files[index] for index in order[first : first + self.files_at_once]])
                while position["window"] < len(windows):
                    position["window"] += 1  # The state that is saved after this window begins with the next one.
                    yield as_sample(windows[position["window"] - 1])
                position["group"] += 1
                position["window"] = 0
            position["epoch"] += 1
            position["group"] = 0

    def _shuffled(self, files: list[Path]) -> Tensor:
        """Return this process's part of the shuffled windows of some files; all parts are equally long."""
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        windows = read_windows(files, self.context)
        order = torch.randperm(len(windows), generator=self._generator(1 + self.position["group"]))
        num_parts = self.num_ranks * num_workers
        order = order[: len(order) // num_parts * num_parts]
        return windows[order[self.rank * num_workers + worker_id :: num_parts]]

    def _generator(self, number: int) -> torch.Generator:
        """Return a generator for one of the draws of this epoch."""
        seed = (self.seed * 1_000_003 + self.position["epoch"]) * 1_000_003 + number
        return torch.Generator().manual_seed(seed % 2**63)


class StreamDataModule(LightningDataModule):
    """Provide a stream of text for training, and hold out every 20th file for validation.

    Args:
        path: Folder to read; None means the source of Python's standard library.
        pattern: Pattern of the files, as in ``Path.glob``.
        context: Length of each window, in bytes.
        batch_size: Number of windows in a step of one rank.
        val_windows: Greatest number of held-out windows.
        seed: Seed of the order.
        num_workers: Number of DataLoader workers on each rank.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str = "*.py",
        context: int = 128,
        batch_size: int = 8,
        val_windows: int = 1024,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Find the files, and read those that are held out.

        Raises:
            FileNotFoundError: If there are fewer than 20 files.
        """
        root = Path(self.hparams.path or sysconfig.get_paths()["stdlib"]).expanduser()
        files = sorted(root.glob(self.hparams.pattern))
        if len(files) < 20:
            raise FileNotFoundError(f"{root} has {len(files)} files {self.hparams.pattern!r}: give at least 20.")
        self.train_files = [file for index, file in enumerate(files) if index % 20]
        windows = read_windows(files[::20], self.hparams.context)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[: self.hparams.val_windows]
        inputs, targets = zip(*(as_sample(window) for window in windows[order]), strict=True)
        self.held_out = TensorDataset(torch.stack(inputs), torch.stack(targets))

    def train_dataloader(self) -> StatefulDataLoader:
        """Return a loader whose state, which Lightning saves in checkpoints, is the position in the stream."""
        hparams = self.hparams
        # Ranks that share a batch, such as those that split a layer, have the same number.
        part = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        stream = TextStream(self.train_files, hparams.context, hparams.seed, part["rank"], part["num_replicas"])
        return StatefulDataLoader(stream, batch_size=hparams.batch_size, num_workers=hparams.num_workers)

    def val_dataloader(self) -> DataLoader:
        """Return a loader of the held-out windows; Lightning divides them among the ranks."""
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)
