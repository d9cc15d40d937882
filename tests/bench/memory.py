"""Compare the peak memory of a rank with the formulas, for stages of ZeRO, offloading and activation checkpointing.

The model is a GPT of 107 million parameters on four ranks, created in ``configure_model``. A small model is trained
first, so that libraries have the memory that they need in any case. The measured figure is the growth of the peak of
the resident memory over the moment before the model is built. Freed memory goes back to the system.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.nn import functional

from examples.gpt.model import GPT
from lightning_dist import DataParallelStrategy, FullShardStrategy
from lightning_dist.parameters.memory_use import RunSize, predict
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.run.telemetry import bytes_in_use, peak_bytes_since, reset_peak
from tests.bench.cases import M_MMAP_THRESHOLD
from tests.bench.sides import UnloggedGPT, make_loader, make_module, make_trainer
from tests.bench.workload import Workload
from tests.pool import WorkerPool

NUM_RANKS = 4
TOLERANCE = 0.05
SMALL = Workload(dim=64, num_layers=2, num_heads=2, global_batch_size=8)
LARGE = Workload(dim=768, num_layers=15, num_heads=12, global_batch_size=8)
CPU = torch.device("cpu")

WAYS: dict[str, dict[str, Any]] = {
    "zero_stage=1": {"zero_stage": 1},
    "zero_stage=2": {"zero_stage": 2},
    "zero_stage=3": {"zero_stage": 3},
    "offload=optimizer": {"offload": "optimizer"},
    "offload=params": {"offload": "params"},
    "offload=both": {"offload": "both"},
    "activation_checkpointing=full": {"activation_checkpointing": "full"},
    "activation_checkpointing=selective": {"activation_checkpointing": "selective"},
    "activation_checkpointing=budget 0.5": {"activation_checkpointing": {"budget": 0.5}},
    "step_in_backward": {"step_in_backward": True},
    "data_parallel": {},
}


class BuiltLate(UnloggedGPT):
    """Create the model in ``configure_model``, so that no rank ever holds the whole model."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(**SMALL.model)
        self.workload = workload
        del self.model

    def configure_model(self) -> None:
        """Create the model, on the meta device."""
        if not hasattr(self, "model"):
            self.model = GPT(**self.workload.model)


class Stop(Callback):
    """Stop after a number of steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Count the step."""
        self.num_left -= 1
        trainer.should_stop = self.num_left <= 0


def make_strategy(way: str, folder: str) -> MeshStrategy:
    """Make the strategy of a way."""
    if way == "data_parallel":
        return DataParallelStrategy()
    kwargs = WAYS[way]
    return FullShardStrategy(**kwargs, **({"offload_folder": folder} if "offload" in kwargs else {}))


def measure(way: str, folder: str) -> float:
    """Return the growth of this rank's peak, in MiB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    dist.init_process_group("gloo")
    trainer = make_trainer(make_strategy(way, folder), SMALL, Stop(3))
    trainer.fit(make_module(UnloggedGPT, SMALL), make_loader(trainer, SMALL))
    del trainer
    trainer = make_trainer(make_strategy(way, folder), LARGE, Stop(3))
    loader = make_loader(trainer, LARGE)
    before = bytes_in_use(CPU)
    assert before is not None
    reset_peak(CPU)
    trainer.fit(BuiltLate(LARGE), loader)
    return (peak_bytes_since(CPU) - before) / 2**20


def saved_bytes(workload: Workload) -> int:
    """Return the bytes of the tensors that a forward of a rank's part of the batch saves for the backward."""
    model, sizes = GPT(**workload.model), dict[int, int]()
    own = {param.untyped_storage().data_ptr() for param in (*model.parameters(), *model.buffers())}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # Its address must not be used again.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(workload.global_batch_size // NUM_RANKS, workload.context, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return sum(sizes.values())


def run_size(way: str) -> RunSize:
    """Return the sizes of the formulas, without building the model."""
    with torch.device("meta"):
        model = GPT(**LARGE.model)
    block = 4 * sum(param.numel() for param in model.blocks[0].parameters())
    whole = 4 * sum(param.numel() for param in model.parameters())
    in_block = saved_bytes(replace(LARGE, num_layers=2)) - saved_bytes(replace(LARGE, num_layers=1))
    others = saved_bytes(replace(LARGE, num_layers=1)) - in_block
    count, row = LARGE.num_layers, 4 * LARGE.context * LARGE.global_batch_size // NUM_RANKS
    hidden_dim = next(
        m.out_features for m in model.blocks[0].modules() if isinstance(m, nn.Linear) and m.out_features > LARGE.dim
    )
    # A block keeps its input; with "selective" also the results of attention and of four of its seven products.
    kept = {
        "activation_checkpointing=full": row * LARGE.dim,
        "activation_checkpointing=selective": row * (5 * LARGE.dim + hidden_dim),
    }
    activations = others + count * kept.get(way, in_block)
    rerun = in_block if way in kept else 0
    if "budget" in way:
        num_kept = count // 2
        activations = others + num_kept * in_block + (count - num_kept) * row * LARGE.dim
        rerun = in_block
    size = RunSize(
        parameters=whole, trainable=whole, elements=whole // 4, state_bytes=8, num_shards=NUM_RANKS,
        outer=whole - count * block, block=block, blocks=count * block, num_blocks=count,
        activations=activations, rerun=rerun,
    )  # fmt: skip
    changes: dict[str, Callable[[], RunSize]] = {
        "zero_stage=1": lambda: replace(size, frees_blocks=False),
        "zero_stage=2": lambda: replace(size, frees_blocks=False),
        "offload=optimizer": lambda: replace(size, offloads_states=True),
        "offload=params": lambda: replace(size, offloads_params=True),
        "offload=both": lambda: replace(size, offloads_params=True, offloads_states=True),
        "step_in_backward": lambda: replace(size, steps_in_backward=True),
        "data_parallel": lambda: replace(size, num_shards=1, outer=0, block=0, blocks=0),
    }
    return changes.get(way, lambda: size)()


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder for offloading")
    arguments = parser.parse_args()
    print(f"{'way':<40}{'measured':>10}{'formula':>10}{'ratio':>8}   MiB, {NUM_RANKS} ranks", flush=True)
    has_failed = False
    for way in arguments.ways or WAYS:
        pool = WorkerPool()
        try:
            measured = max(pool.run(measure, NUM_RANKS, way, str(arguments.folder), timeout_s=600))
        finally:
            pool.close()
        formula = predict(run_size(way)).peak / 2**20
        is_met = abs(measured / formula - 1) <= TOLERANCE
        has_failed |= not is_met
        print(
            f"{way:<40}{measured:>10.1f}{formula:>10.1f}{measured / formula:>8.3f}   {'met' if is_met else 'NOT MET'}",
            flush=True,
        )
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
