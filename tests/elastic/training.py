"""Train a module that writes what each step has computed, and compute the same steps in one process."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist._compat import local_of
from lightning_dist.mesh.membership import current_membership

BATCH_SIZE = 4
NUM_SAMPLES = 1200

_CONFIGURATION = """\
seed_everything: 1
model:
  class_path: tests.elastic.training.Recorded
  init_args: {{folder: {folder}, seconds: {seconds}, failing: {failing}}}
trainer:
  accelerator: cpu
  precision: 64-true
  strategy: {strategy}
  max_steps: {max_steps}
  logger: {logger}
  log_every_n_steps: 10
  default_root_dir: {folder}
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}/checkpoints, every_n_train_steps: 50, save_top_k: -1}}
"""


@dataclass(frozen=True)
class Row:
    """Hold what a rank has written after a step.

    Args:
        replica: Index of the replica.
        rank: Number of the rank in the replica.
        pid: Number of its process.
        at: Time of day.
        step: Number of optimizer steps so far.
        epoch: Index of the epoch.
        batch: Index of the batch in the epoch.
        members: Indices of the replicas that took part in the step.
        leader: Index of the replica that logs and writes checkpoints.
        loss: Loss of this rank's batch.
        rate: Learning rate that the next step will have.
        digest: Digest of this rank's parameters after the step.
        lost_s: Seconds that this rank has lost so far by replicas that have left.
        num_taken_over: Number of steps so far whose result the replica has taken over from others.
    """

    replica: int
    rank: int
    pid: int
    at: float
    step: int
    epoch: int
    batch: int
    members: tuple[int, ...]
    leader: int
    loss: float
    rate: float
    digest: str
    lost_s: float
    num_taken_over: int


class Recorded(pl.LightningModule):
    """Train a small network, and write each step into a file of the rank.

    Args:
        folder: Folder of the files.
        seconds: Time that each step takes in addition.
        failing: Index of a replica for which every 50th reduction fails, although it has succeeded for the others.
    """

    def __init__(self, folder: str, seconds: float = 0.0, failing: int | None = None) -> None:
        super().__init__()
        self.failing = failing
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.folder, self.seconds = Path(folder), seconds

    def on_train_start(self) -> None:
        if self.failing != int(os.environ["LIGHTNING_DIST_REPLICA"]):
            return
        membership = current_membership()
        assert membership is not None
        manager = membership._manager
        should_commit = manager.should_commit

        def fails_now_and_then() -> bool:
            if self.global_step % 50 == 30:
                manager.report_error(RuntimeError("planted"))
            return should_commit()

        manager.should_commit = fails_now_and_then  # type: ignore[method-assign]

    def training_step(self, batch: Any, index: int) -> Tensor:
        time.sleep(self.seconds)
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        elastic = self.trainer.strategy.elastic
        digest = hashlib.sha256()
        for param in self.parameters():
            digest.update(local_of(param.detach()).contiguous().numpy().tobytes())
        replica = int(os.environ["LIGHTNING_DIST_REPLICA"])
        row = Row(
            replica=replica,
            rank=self.global_rank,
            pid=os.getpid(),
            at=time.time(),
            step=self.global_step,
            epoch=self.current_epoch,
            batch=batch_idx,
            members=elastic.members,
            leader=elastic.leader,
            loss=float(outputs["loss"]),
            rate=self.trainer.optimizers[0].param_groups[0]["lr"],
            digest=digest.hexdigest()[:16],
            lost_s=elastic.lost_s,
            num_taken_over=elastic.num_taken_over,
        )
        with (self.folder / f"steps_{replica}_{self.global_rank}").open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": schedule_of(optimizer), "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), BATCH_SIZE)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule with another learning rate in each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    inputs, labels = batch
    return nn.functional.cross_entropy(net(inputs), labels)


def samples() -> TensorDataset:
    """Return the dataset of the training."""
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, 0].gt(inputs[:, 1]).long())


def store_of(folder: Path) -> str:
    """Return the URI of the MLflow store of a training in ``folder``."""
    return f"sqlite:///{folder}/mlflow.db"


def configure(
    folder: Path,
    strategy: str,
    max_steps: int,
    seconds: float = 0.0,
    logs: bool = False,
    failing: int | None = None,
) -> Path:
    """Write the configuration of a training into an empty folder.

    Args:
        folder: Folder of the training.
        strategy: Name of the strategy.
        max_steps: Number of steps.
        seconds: Time that each step takes in addition.
        logs: Whether the training logs to the store of :func:`store_of`.
        failing: Index of a replica whose reductions fail now and then; None: none.
    """
    folder.mkdir(parents=True)
    path = folder / "my.yaml"
    options = f"{{tracking_uri: '{store_of(folder)}', save_dir: {folder}/mlruns}}"
    logger = f"{{class_path: lightning_dist.plugins.loggers.MLflowLogger, init_args: {options}}}" if logs else "false"
    path.write_text(
        _CONFIGURATION.format(
            folder=folder,
            strategy=strategy,
            max_steps=max_steps,
            seconds=seconds,
            logger=logger,
            failing="null" if failing is None else failing,
        )
    )
    return path


class Rows:
    """Read what all ranks write, each line once, because a long training writes many.

    Args:
        folder: Folder of the training.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, int] = {}
        self._rows: list[Row] = []

    def read(self) -> list[Row]:
        """Return what has been written so far, in the order of time."""
        for path in self._folder.glob("steps_*"):
            with path.open() as file:
                file.seek(self._ends.get(path, 0))
                while (line := file.readline()).endswith("\n"):  # A rank that was killed may have written a part.
                    self._ends[path] = file.tell()
                    values = json.loads(line)
                    self._rows.append(Row(**{**values, "members": tuple(values["members"])}))
        self._rows.sort(key=lambda row: row.at)
        return self._rows


def mistakes_in(rows: Sequence[Row], num_replicas: int, num_ranks: int) -> list[str]:
    """Return in which way the steps differ between replicas, or from those of one process with the same members.

    Args:
        rows: What all ranks have written.
        num_replicas: Number of replicas that the data are divided among.
        num_ranks: Number of ranks of a replica.
    """
    by_step: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    found = [f"step {step} is missing" for step in range(1, max(by_step) + 1) if step not in by_step]
    counted = _counted_by_themselves(rows)
    for step, group in by_step.items():
        for name in ("epoch", "batch", "rate", "members", "leader"):
            # A replica that has taken over a step knows its members and its leader no more.
            of = [row for row in group if row in counted] if name in ("members", "leader") else group
            values = {getattr(row, name) for row in of}
            if len(values) > 1:
                found.append(f"step {step}: {name} is {values}")
        for rank in range(num_ranks):
            digests = {row.digest for row in group if row.rank == rank}
            if len(digests) > 1:
                found.append(f"step {step}: rank {rank} of the replicas has other weights")
        ranks = [(row.replica, row.rank) for row in group]
        if len(set(ranks)) < len(ranks):
            found.append(f"step {step} was written twice")
    return found or _differences_from_one_process(by_step, counted, num_replicas, num_ranks)


def _counted_by_themselves(rows: Sequence[Row]) -> set[Row]:
    """Return the rows of the steps that a replica has counted itself, and not taken over from others."""
    last: dict[tuple[int, int, int], int] = {}
    counted = set()
    for row in rows:
        process = row.replica, row.rank, row.pid
        if row.num_taken_over == last.get(process, 0):
            counted.add(row)
        last[process] = row.num_taken_over
    return counted


def _differences_from_one_process(
    by_step: dict[int, list[Row]], counted: set[Row], num_replicas: int, num_ranks: int
) -> list[str]:
    """Train in one process with the members that each step had, and compare the losses and the learning rates."""
    pl.seed_everything(1, verbose=False)
    net = Recorded("").double().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule, found = schedule_of(optimizer), []
    num_parts, epoch = num_replicas * num_ranks, -1
    loaders: dict[int, list[Any]] = {}
    for step in sorted(by_step):
        group = by_step[step]
        if group[0].epoch != epoch:
            epoch = group[0].epoch
            loaders = {part: _batches(part, num_parts, epoch) for part in range(num_parts)}
        losses = {}
        members = next((row.members for row in group if row in counted), ())
        if not members:
            found.append(f"step {step} was counted by nobody")
        for replica in members:
            for rank in range(num_ranks):
                part = replica * num_ranks + rank
                losses[replica, rank] = loss_of(net, loaders[part][group[0].batch])
        for row in group:
            expected = losses[row.replica, row.rank].item() if row.replica in members else row.loss
            if abs(row.loss - expected) > 1e-9 * abs(expected):
                found.append(f"step {step}, replica {row.replica}: the loss is {row.loss}, and not {expected}")
        optimizer.zero_grad()
        torch.stack(list(losses.values())).mean().backward()
        optimizer.step()
        schedule.step()
        if abs(group[0].rate - optimizer.param_groups[0]["lr"]) > 1e-12:
            found.append(f"step {step}: the learning rate is {group[0].rate}")
        if len(found) > 5:
            break
    return found


def _batches(part: int, num_parts: int, epoch: int) -> list[Any]:
    sampler: Any = DistributedSampler(samples(), num_parts, part, shuffle=False)
    sampler.set_epoch(epoch)
    return list(DataLoader(samples(), BATCH_SIZE, sampler=sampler))
