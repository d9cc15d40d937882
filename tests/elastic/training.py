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
NUM_ACCUMULATED = 2
"""Number of batches of a step that all replicas have together divided by that of the replicas, in a fixed batch."""

_CONFIGURATION = """\
seed_everything: 1
model:
  class_path: tests.elastic.training.Recorded
  init_args: {{folder: {folder}, seconds: {seconds}, failing: {failing}}}
trainer:
  accelerator: cpu
  precision: 64-true
  strategy:
    class_path: {strategy}
    init_args: {{elastic_batch: {batch}}}
  accumulate_grad_batches: {accumulated}
  max_steps: {max_steps}
  logger: {logger}
  log_every_n_steps: 10
  default_root_dir: {folder}
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    {averaging}- class_path: lightning.pytorch.callbacks.ModelCheckpoint
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
        began_with: Indices of the replicas that were there when the step began.
        members: Indices of the replicas that took part in the step, of which some may have left since.
        leader: Index of the replica that logs and writes checkpoints.
        losses: Losses of this rank's batches that the step has accumulated, the last one of which is ``batch``.
        accumulated: Number of batches of a step, if its epoch has as many left.
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
    began_with: tuple[int, ...]
    members: tuple[int, ...]
    leader: int
    losses: tuple[float, ...]
    accumulated: int
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
        self._step, self._losses = 0, list[float]()
        self._began_with: tuple[int, ...] = ()

    def on_train_start(self) -> None:
        self._step, self._losses = self.global_step, []
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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self._losses:
            self._began_with = self.trainer.strategy.elastic.members

    def training_step(self, batch: Any, index: int) -> Tensor:
        time.sleep(self.seconds)
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        elastic = self.trainer.strategy.elastic
        self._losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)
        if self.global_step == self._step:
            return
        self._step = self.global_step
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
            began_with=self._began_with,
            members=elastic.members,
            leader=elastic.leader,
            losses=tuple(self._losses),
            accumulated=self.trainer.accumulate_grad_batches,
            rate=self.trainer.optimizers[0].param_groups[0]["lr"],
            digest=digest.hexdigest()[:16],
            lost_s=elastic.lost_s,
            num_taken_over=elastic.num_taken_over,
        )
        with (self.folder / f"steps_{replica}_{self.global_rank}").open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        self._losses = []

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
    keeps_batch: bool = False,
) -> Path:
    """Write the configuration of a training into an empty folder.

    Args:
        folder: Folder of the training.
        strategy: Name of the strategy's class.
        max_steps: Number of steps.
        seconds: Time that each step takes in addition.
        logs: Whether the training logs to the store of :func:`store_of`.
        failing: Index of a replica whose reductions fail now and then; None: none.
        keeps_batch: Whether each step has the same global batch, which 1 to 3 replicas can divide among them.
    """
    folder.mkdir(parents=True)
    path = folder / "my.yaml"
    options = f"{{tracking_uri: '{store_of(folder)}', save_dir: {folder}/mlruns}}"
    logger = f"{{class_path: lightning_dist.plugins.loggers.MLflowLogger, init_args: {options}}}" if logs else "false"
    path.write_text(
        _CONFIGURATION.format(
            folder=folder,
            strategy=f"lightning_dist.{strategy}",
            batch="fixed" if keeps_batch else "scaled",
            accumulated=NUM_ACCUMULATED if keeps_batch else 1,
            max_steps=max_steps,
            seconds=seconds,
            logger=logger,
            failing="null" if failing is None else failing,
            # A replica must take over the weights of another one, and not their averages.
            averaging="" if failing is None else "- lightning.pytorch.callbacks.EMAWeightAveraging\n    ",
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
                    self._rows.append(
                        Row(**{**values, **{name: tuple(values[name]) for name in ("began_with", "members", "losses")}})
                    )
        self._rows.sort(key=lambda row: row.at)
        return self._rows


def mistakes_in(rows: Sequence[Row], num_replicas: int, num_ranks: int, keeps_batch: bool = False) -> list[str]:
    """Return in which way the steps differ between replicas, or from those of one process with the same members.

    Args:
        rows: What all ranks have written.
        num_replicas: Number of replicas that the data are divided among.
        num_ranks: Number of ranks of a replica.
        keeps_batch: Whether each step has the same global batch.
    """
    by_step: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    found = [f"step {step} is missing" for step in range(1, max(by_step) + 1) if step not in by_step]
    counted = _counted_by_themselves(rows)
    for step, group in by_step.items():
        for name in ("epoch", "batch", "accumulated", "rate", "members", "leader"):
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
    return found or _differences_from_one_process(by_step, counted, num_replicas, num_ranks, keeps_batch)


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
    by_step: dict[int, list[Row]], counted: set[Row], num_replicas: int, num_ranks: int, keeps_batch: bool
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
        members, began_with = next(((row.members, row.began_with) for row in group if row in counted), ((), ()))
        if not members:
            found.append(f"step {step} was counted by nobody")
            continue
        accumulated, num_batches = group[0].accumulated, len(group[0].losses)
        if keeps_batch and accumulated * len(began_with) != NUM_ACCUMULATED * num_replicas:
            found.append(f"step {step}: {len(began_with)} replicas have accumulated {accumulated} batches")
        indices = range(group[0].batch + 1 - num_batches, group[0].batch + 1)
        losses = {
            (replica, rank): [loss_of(net, loaders[replica * num_ranks + rank][index]) for index in indices]
            for replica in members
            for rank in range(num_ranks)
        }
        for row in group:
            of_row = losses.get((row.replica, row.rank))  # A replica that was left out has no part in the step.
            for loss, expected in zip(row.losses, of_row, strict=True) if of_row else ():
                if abs(loss - expected.item()) > 1e-9 * abs(expected.item()):
                    found.append(f"step {step}, replica {row.replica}: the loss is {loss}, and not {expected}")
        optimizer.zero_grad()
        # Lightning divides by this number at the end of an epoch as well, where fewer batches are left.
        total = torch.stack([loss for of_rank in losses.values() for loss in of_rank]).sum()
        (total / (accumulated * len(losses))).backward()
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
