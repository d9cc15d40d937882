"""Read text files, and split them into windows of bytes."""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from examples.gpt.model import VOCAB_SIZE
from lightning_dist import per_rank_batch_size

# These folders inside the standard library's folder are left out, because they hold packages, tests and tables.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Split a text into consecutive windows of bytes, and pair each window with the window that starts one byte later.

    Args:
        text: All bytes of the text, of shape (length,) and dtype uint8.
        context: Length of each window, in bytes.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class TextDataModule(LightningDataModule):
    """Provide the bytes of text files, and hold out some of the files for validation.

    A hash of their relative names decides which files are read and which are held out, so that every rank and every run
    sees the same split, whatever order the file system lists the files in. Of a single file, the end is held out.
    Validation, testing and prediction read the same held-out windows in one fixed shuffled order, so that
    ``limit_val_batches`` takes a fair sample of them.

    Args:
        path: Folder or file to read; None means the source of Python's standard library.
        pattern: Pattern of the files to read in a folder, as in ``Path.glob``.
        context: Length of each window, in bytes.
        global_batch_size: Number of windows in one step over all ranks; each window is on one rank.
        val_fraction: Fraction to hold out, between 0 and 1: of the files, or of the bytes of a single file.
        max_bytes: Greatest number of bytes to read in total.
        min_file_bytes: Number of bytes that a file must have to be read; with ``context``, most windows are then parts
            of one file.
        num_workers: Number of DataLoader workers on each rank.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str = "**/*.py",
        context: int = 128,
        global_batch_size: int = 32,
        val_fraction: float = 0.05,
        max_bytes: int = 8_000_000,
        min_file_bytes: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be a fraction between 0 and 1, such as 0.05.")
        self.path = path
        self.pattern = pattern
        self.context = context
        self.global_batch_size = global_batch_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.min_file_bytes = min_file_bytes
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Read the text, and split it into windows.

        Raises:
            FileNotFoundError: If ``path`` does not exist, or has no file that matches ``pattern``.
            ValueError: If there is too little text, or the batch cannot be split evenly over the ranks.
        """
        self.batch_size = per_rank_batch_size(self.global_batch_size, self.trainer)
        train_text, held_out_text = self._read()
        self.train_text, self.held_out_text = _as_tensor(train_text), _as_tensor(held_out_text)
        self.train_windows = ByteWindows(self.train_text, self.context)
        held_out = ByteWindows(self.held_out_text, self.context)
        if len(self.train_windows) < self.global_batch_size or not len(held_out):
            raise ValueError(
                f"path={self.path!r} gives {len(train_text)} bytes to train on and {len(held_out_text)} held out; "
                f"context={self.context} and global_batch_size={self.global_batch_size} need at least "
                f"{self.context * self.global_batch_size + 1} and {self.context + 1}: give more text, lower context or "
                f"global_batch_size, or change val_fraction={self.val_fraction} or max_bytes={self.max_bytes}."
            )
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
        self.held_out_windows = Subset(held_out, order.tolist())

    def train_dataloader(self) -> DataLoader:
        """Return a loader of shuffled windows, without the last incomplete batch.

        The order is the same for every number of processes.
        """
        order = DistributedSampler(self.train_windows, 1, 0, seed=int(os.environ.get("PL_GLOBAL_SEED", 0)))
        return DataLoader(
            self.train_windows,
            batch_size=self.batch_size,
            # With several processes, Lightning gives each process its part of the same order.
            **({"sampler": order} if self.trainer.world_size == 1 else {"shuffle": True}),
            drop_last=True,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> DataLoader:
        """Return a loader of the held-out windows."""
        return DataLoader(self.held_out_windows, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """Return a loader of the held-out windows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        """Return a loader of the held-out windows."""
        return self.val_dataloader()

    @property
    def uniform_loss(self) -> float:
        """Return the cross entropy of a uniform guess, ln 256, in nats per byte."""
        return math.log(VOCAB_SIZE)

    @property
    def unigram_loss(self) -> float:
        """Return the cross entropy of the held-out bytes under the frequencies of the training bytes, in nats per byte.

        Each count is increased by one, so that no byte has probability zero.
        """
        counts = torch.bincount(self.train_text, minlength=VOCAB_SIZE).double() + 1
        held_out_counts = torch.bincount(self.held_out_text, minlength=VOCAB_SIZE).double()
        log_probabilities = (counts / counts.sum()).log()
        return float(-(held_out_counts * log_probabilities).sum() / held_out_counts.sum())

    def _read(self) -> tuple[bytes, bytes]:
        root, files = self._find_files()
        if len(files) == 1:
            text = _read_bytes(files[0], self.max_bytes)
            num_train = len(text) - int(len(text) * self.val_fraction)
            return text[:num_train], text[num_train:]

        digests = {file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest() for file in files}
        # The order and the split use separate parts of the hash, so that the files that max_bytes leaves out do not
        # depend on the split.
        files.sort(key=lambda file: digests[file][8:])
        texts: dict[Path, bytes] = {}
        num_left = self.max_bytes
        while files and num_left > 0:
            file = files.pop(0)
            if text := _read_bytes(file, num_left):
                texts[file] = text
                num_left -= len(text)

        shares = {file: int.from_bytes(digests[file][:8]) / 2**64 for file in texts}
        # If no share is below val_fraction, the file with the smallest share is held out, so that there is always one.
        threshold = max(self.val_fraction, min(shares.values(), default=0.0))
        train = [text for file, text in texts.items() if shares[file] > threshold]
        held_out = [text for file, text in texts.items() if shares[file] <= threshold]
        return b"\n".join(train), b"\n".join(held_out)

    def _find_files(self) -> tuple[Path, list[Path]]:
        root = Path(self.path or sysconfig.get_paths()["stdlib"]).expanduser()
        if root.is_file():
            return root.parent, [root]
        if not root.is_dir():
            raise FileNotFoundError(f"path={self.path!r} does not exist: name a folder or a file of text.")
        leave_out = NOT_LIBRARY if self.path is None else set()
        found = {file for file in _glob(root, self.pattern, leave_out) if file.is_file()}
        files = sorted(file for file in found if file.stat().st_size >= self.min_file_bytes)
        if found and not files:
            raise FileNotFoundError(
                f"min_file_bytes={self.min_file_bytes}: none of the {len(found)} files under {str(root)!r} is as long."
                f" Lower it, or name another path."
            )
        if not files:
            raise FileNotFoundError(
                f"pattern={self.pattern!r} matches no file under {str(root)!r}: name another path, or a pattern such "
                f"as '**/*.txt'."
            )
        return root, files


def _glob(root: Path, pattern: str, leave_out: set[str]) -> Iterator[Path]:
    """Yield the files of ``root.glob(pattern)`` that are in no folder with a name in ``leave_out``.

    If the pattern starts with ``**/``, these folders are not entered: installed packages are often ten times as large
    as the library.
    """
    if not (leave_out and pattern.startswith("**/")):
        found = root.glob(pattern)
    else:
        folders = []
        for folder, children, _ in os.walk(root):
            children[:] = [name for name in children if name not in leave_out]
            folders.append(Path(folder))
        found = (file for folder in folders for file in folder.glob(pattern.removeprefix("**/")))
    return (file for file in found if leave_out.isdisjoint(file.relative_to(root).parts))


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
