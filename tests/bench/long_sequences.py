"""Measure the memory of long sequences: what a step keeps for its backward, and the longest sequence under a limit.

The model is the examples' GPT with a vocabulary of 8,192 entries. Run ``python -m tests.bench.long_sequences``: it
prints two tables.

1. What a step keeps of a sequence of 8,192 tokens for its backward (the tensors that autograd saves, without
   parameters), for each rank, with ``cp_size`` 1, 2 and 4. With 4, it must be a quarter of that with 1, plus the
   constant that is stated, up to 10 percent.
2. The longest sequence of a step under a limit of the kernel (``RLIMIT_DATA``) on the memory of each process: what it
   has after two steps of a short sequence, and ``LIMIT_MIB`` more. Steps get longer until the memory is full.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from examples.gpt.model import GPT
from lightning_dist import ContextParallelStrategy, DataParallelStrategy
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from tests.bench.cases import M_MMAP_THRESHOLD
from tests.pool import RankFailed, WorkerPool

VOCABULARY = 8192
DIM, NUM_LAYERS, NUM_HEADS = 128, 2, 4
LENGTH = 8192
LIMIT_MIB = 96
LENGTHS = [512 * factor for factor in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)]
WARM_UP = [256, 256]
CONSTANT_MIB = 0.125
"""What each rank has of the whole sequence: its tokens and labels."""
TOLERANCE = 0.10

CP_SIZES = (1, 2, 4)
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tiles": {"tiled_mlp": 512, "tiled_loss": 512},
    "checkpointing": {"activation_checkpointing": "full"},
    "tiles and checkpointing": {"tiled_mlp": 512, "tiled_loss": 512, "activation_checkpointing": "full"},
}


class Tokens(Dataset[Tensor]):
    """Hold random sequences of given lengths, each with the label of its last token."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (self.lengths[index] + 1,), generator=torch.Generator().manual_seed(0))


class LanguageModel(LightningModule):
    """Train the examples' GPT with a larger vocabulary, on one sequence in a step.

    Args:
        lengths: Numbers of tokens in the sequences.
        counts: Whether to count what a step keeps for its backward.
    """

    def __init__(self, lengths: Sequence[int], counts: bool = False) -> None:
        super().__init__()
        self.lengths = lengths
        self.model = GPT(DIM, NUM_LAYERS, NUM_HEADS, max_len=max(lengths))
        self.model.embedding = nn.Embedding(VOCABULARY, DIM)
        self.model.head = nn.Linear(DIM, VOCABULARY, bias=False)  # type: ignore[assignment]
        self.counts = counts
        self.kept_mib = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy."""
        if not self.counts:
            return self.loss(batch)
        sizes = dict[int, int]()
        own = {part.untyped_storage().data_ptr() for part in map(local, (*self.parameters(), *self.buffers()))}
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)  # Its address must not be used again.
            storage = local(tensor).untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss(batch)
        self.kept_mib = sum(sizes.values()) / 2**20
        return loss

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross entropy of each next token."""
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the loader of the sequences, one in a batch."""
        return DataLoader(Tokens(self.lengths), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer without states."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def make_strategy(cp_size: int, way: str) -> MeshStrategy:
    """Make the strategy that splits a sequence over ``cp_size`` ranks."""
    return DataParallelStrategy(**WAYS[way]) if cp_size == 1 else ContextParallelStrategy(cp_size, **WAYS[way])


def fit(cp_size: int, way: str, module: LanguageModel, *callbacks: Callback) -> None:
    """Train for a step on each sequence."""
    trainer = Trainer(
        accelerator="cpu", devices=cp_size, strategy=make_strategy(cp_size, way), max_epochs=1, logger=False,
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module)


def kept_mib(cp_size: int, way: str) -> float:
    """Return the MiB that a step of this rank keeps for its backward."""
    module = LanguageModel([LENGTH], counts=True)
    fit(cp_size, way, module)
    return module.kept_mib


class Limit(Callback):
    """Limit the memory of the process after two steps, and write the length of each later one that fits to a file.

    Args:
        limit_mib: What the process may have more than at the time.
        file: Path of the file.
    """

    def __init__(self, limit_mib: int, file: str) -> None:
        self.limit_mib = limit_mib
        self.file = Path(file)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Set the limit before the third step."""
        if batch_idx == len(WARM_UP):
            found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert found is not None
            limit = int(found[1]) * 1024 + self.limit_mib * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        """Write the length."""
        if batch_idx >= len(WARM_UP) and trainer.is_global_zero:
            self.file.write_text(str(batch.size(1) - 1))


def try_lengths(cp_size: int, way: str, limit_mib: int, file: str) -> None:
    """Train with longer and longer sequences until the memory is full, and write each that was short enough to a file.

    Raises:
        Exception: When the memory is full, in the form that the code raises which needs it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    fit(cp_size, way, LanguageModel([*WARM_UP, *LENGTHS]), Limit(limit_mib, file))


def in_pool(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call a function on all ranks of new processes."""
    pool = WorkerPool()
    try:
        return pool.run(function, num_ranks, *args, timeout_s=1800)
    finally:
        pool.close()


def print_kept() -> bool:
    """Print the first table, and return whether its bound is met."""
    print(f"kept for the backward of {LENGTH:,} tokens, MiB a rank")
    print(f"{'':<26}" + "".join(f"{f'cp {size}':>10}" for size in CP_SIZES) + f"{'cp 4 / (cp 1 / 4)':>20}", flush=True)
    is_met = True
    for way in WAYS:
        kept = [max(in_pool(kept_mib, size, size, way)) for size in CP_SIZES]
        ratio = (kept[-1] - CONSTANT_MIB) / (kept[0] / CP_SIZES[-1])
        is_met &= ratio <= 1 + TOLERANCE
        print(f"{way:<26}" + "".join(f"{mib:>10.1f}" for mib in kept) + f"{ratio:>20.3f}", flush=True)
    verdict = "met" if is_met else "NOT MET"
    print(f"The last column is computed without {CONSTANT_MIB:g} MiB of tokens and labels: {verdict}.")
    return is_met


def print_longest(limit_mib: int) -> None:
    """Print the second table."""
    print(f"\nlongest sequence with {limit_mib} MiB a rank, of {LENGTHS[0]:,} to {LENGTHS[-1]:,} tokens")
    print(f"{'':<26}" + "".join(f"{f'cp {size}':>10}" for size in CP_SIZES), flush=True)
    for way in WAYS:
        longest = []
        for size in CP_SIZES:
            with tempfile.NamedTemporaryFile("r") as file:
                try:
                    in_pool(try_lengths, size, size, way, limit_mib, file.name)
                except RankFailed as error:
                    if os.environ.get("SHOW_ERRORS"):
                        print(error, file=sys.stderr)
                longest.append(int(file.read() or 0))
        print(f"{way:<26}" + "".join(f"{length:>10,}" for length in longest), flush=True)


def main() -> None:
    """Measure, print the tables, and exit with 1 if the bound of the first is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB, help="limit of the second table")
    arguments = parser.parse_args()
    is_met = print_kept()
    print_longest(arguments.limit_mib)
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
