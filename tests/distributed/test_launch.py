"""Test that a user's script runs with every launcher, and ends when a rank fails."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lightning_dist import NDParallelStrategy
from lightning_dist._compat import process_groups
from tests.distributed.fit import make_trainer
from tests.launched import Forked, run_script
from tests.models import build
from tests.pool import RankFailed, WorkerPool

SCRIPT = """
import sys
import time
import lightning as L
import torch
import lightning_dist

class Last(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += type(x) is torch.Tensor  # not a tensor without values, on which the step is traced
        if "fail_in_stage" in sys.argv and self.calls == 9:
            raise RuntimeError("the last layer fails")
        return super().forward(x)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), Last(8, 1))
    def training_step(self, batch, batch_idx):
        x, y = batch
        if "fail" in sys.argv and batch_idx == 2 and self.global_rank == int(sys.argv[-1]):
            raise RuntimeError(f"rank {self.global_rank} fails")
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    x = torch.randn(64, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    strategy = lightning_dist.HybridShardStrategy(3, 2) if "sizes" in sys.argv else "hybrid_shard"
    strategy = "pipeline_parallel" if "fail_in_stage" in sys.argv else strategy
    nodes = 2 if "two_nodes" in sys.argv else 1
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2 // nodes, num_nodes=nodes, max_epochs=8,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Net(), data)
    if "fail_late" in sys.argv and trainer.global_rank == 1:
        time.sleep(2)
        raise RuntimeError("rank 1 fails late")
    if "late" in sys.argv and trainer.global_rank == 1:
        time.sleep(1.5)
    loss = float(trainer.callback_metrics["train/loss"])
    sys.stdout.write(f"RANK {trainer.global_rank} {trainer.world_size} {trainer.strategy.layout} {loss}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment(**extra: object) -> dict[str, str]:
    """Return the environment without the variables of launchers, and with ``extra`` variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PMI", "TORCHELASTIC"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        kept.pop(name, None)
    return {**kept, **{key: str(value) for key, value in extra.items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ranks_of(output: str) -> list[tuple[str, str, str]]:
    """Return (rank, world size, layout) of each rank from the script's output, and check that all have a small loss."""
    lines = [line.split(" ", 3) for line in output.splitlines() if line.startswith("RANK")]
    losses = {line[3].rsplit(" ", 1)[1] for line in lines}
    assert len(losses) == 1, output
    assert float(losses.pop()) < 1.0
    return sorted((rank, world, rest.rsplit(" ", 1)[0]) for _, rank, world, rest in lines)


@pytest.mark.thorough
def test_a_script_runs_with_lightnings_own_launcher(script: Path) -> None:
    done = subprocess.run([sys.executable, script], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ranks_of(done.stdout) == [(str(rank), "2", "dp_replicate 1 x dp_shard 2") for rank in range(2)]
    assert "dp_replicate 1 x dp_shard 2 = 2 processes (gloo)" in done.stderr
    assert "the same as 'full_shard'" in done.stderr


NOTEBOOK = """
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_dist.plugins._compat import processes
processes.IS_INTERACTIVE = True  # as in a notebook, where this process would not have been forked after the imports

data = torch.utils.data.TensorDataset(*(lambda x: (x, x.sum(1, keepdim=True)))(torch.randn(64, 4)))
def fit(strategy, devices, **kwargs):
    module = Net()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=8, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, **kwargs)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    x, y = data.tensors
    loss = float(torch.nn.functional.mse_loss(module.layers(x), y))
    print("LOSS", devices, f"{loss:.6f}", float(trainer.callback_metrics["train/loss"]) < 1, flush=True)

for strategy, devices in (("full_shard", 2), ("pipeline_parallel", 2), ("full_shard", 1), ("full_shard", 1)):
    fit(strategy, devices)
for kwargs in ({}, {"num_nodes": 2}):
    try:
        fit("full_shard", 2, **kwargs)
    except MisconfigurationException as error:
        print("REFUSED", error, flush=True)
"""


def test_a_notebook_forks_its_ranks_and_needs_no_fork_for_one_device(tmp_path: Path) -> None:
    path = tmp_path / "notebook.py"
    path.write_text(SCRIPT.partition("if __name__")[0] + NOTEBOOK)
    process = Forked(run_script, path, environment=environment(), is_parent=True)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    fits = [line.split() for line in output.splitlines() if line.startswith("LOSS")]
    assert [int(devices) for _, devices, _, _ in fits] == [2, 2, 1, 1], output
    # The whole weights of the trained model are in the notebook's module.
    assert all(float(loss) < 1.0 and logged == "True" for _, _, loss, logged in fits), fits
    refused = [line for line in output.splitlines() if line.startswith("REFUSED")]
    assert "has run a Trainer with one device, and cannot be forked now" in refused[0]
    assert "num_nodes=2 cannot be started from a notebook. Put the code into a script, and run it by" in refused[1]


def test_a_script_runs_with_torchrun(script: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        script,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ranks_of(done.stdout) == [(str(rank), "2", "dp_replicate 1 x dp_shard 2") for rank in range(2)]


def run_script_to_its_exit(script: Path, *arguments: str) -> None:
    run_script(script, *arguments)
    atexit._run_exitfuncs()


def test_a_script_runs_with_slurm(script: Path) -> None:
    """Check the training of two tasks with the variables that srun sets for two nodes; they are forked.

    The second task ends later than the first one, which hosts the store of both.
    """
    port = free_port()
    tasks = [
        Forked(
            run_script_to_its_exit, script, "two_nodes", "late",
            environment=environment(
                SLURM_JOB_ID=1, SLURM_JOB_NAME="train", SLURM_NTASKS=2, SLURM_NTASKS_PER_NODE=1, SLURM_PROCID=rank,
                SLURM_LOCALID=0, SLURM_NODEID=rank, SLURM_JOB_NODELIST="127.0.0.1", MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    output = ""
    for task in tasks:
        printed, _ = task.communicate(timeout=120)
        assert task.returncode == 0, printed
        output += printed
    assert "Broken pipe" not in output and "TCPStore" not in output
    # By default, each node has one replica.
    assert ranks_of(output) == [(str(rank), "2", "dp_replicate 2 x dp_shard 1") for rank in range(2)]


def test_wrong_sizes_are_an_error_before_any_process_is_launched(script: Path) -> None:
    began = time.monotonic()
    process = Forked(run_script, script, "sizes", environment=environment())
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "dp_replicate_size=3 x dp_shard_size=2 does not fit 2 processes" in output.splitlines()[-1]
    assert "MEMBER" not in output
    assert time.monotonic() - began < 30


@pytest.mark.thorough
def test_the_run_ends_when_rank_0_fails(script: Path) -> None:
    """Check that rank 1, which rank 0 launches in a new interpreter, ends as well: it keeps the output open."""
    first = Forked(run_script, script, "fail", "0", environment=environment())
    output, _ = first.communicate(timeout=60)
    assert first.returncode != 0, output
    assert "RuntimeError: rank 0 fails" in output


def test_the_run_ends_when_a_launched_rank_fails(script: Path) -> None:
    """Check that rank 0, which is forked here and launches rank 1 in a new interpreter, ends when that fails."""
    first = Forked(run_script, script, "fail", "1", environment=environment())
    output, _ = first.communicate(timeout=60)
    assert first.returncode != 0, output
    assert "RuntimeError: rank 1 fails" in output


@pytest.mark.thorough
def test_the_exit_code_is_that_of_a_rank_which_fails_after_rank_0_has_ended(script: Path) -> None:
    first = Forked(run_script_to_its_exit, script, "fail_late", environment=environment())
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 1, output
    assert "RuntimeError: rank 1 fails late" in output
    assert "Rank 1 has ended with exit code 1, which ends the run." in output


@pytest.mark.thorough
def test_the_run_ends_when_a_pipeline_stage_fails(script: Path) -> None:
    """Check that the run ends while the first stage waits for a gradient of the second, which raised an error."""
    began = time.monotonic()
    first = Forked(run_script, script, "fail_in_stage", environment=environment())
    output, _ = first.communicate(timeout=60)
    assert first.returncode != 0, output
    assert "RuntimeError: the last layer fails" in output
    assert "in forward" in output  # The traceback is shown.
    assert time.monotonic() - began < 40


def other_devices() -> None:
    make_trainer("full_shard", devices=1, num_nodes=1)


def more_nodes() -> int:
    return make_trainer("full_shard", num_nodes=3).num_nodes


def test_the_numbers_of_devices_and_nodes_are_those_of_torchrun(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="torchrun started 2 processes on this node"):
        pool.run(other_devices, 2)
    assert pool.run(more_nodes, 2, num_nodes=2) == [2, 2]


def timeouts_of_groups(seconds: float = 77) -> dict[str, timedelta]:
    strategy = NDParallelStrategy(2, tp_size=2, timeout=timedelta(seconds=seconds))
    make_trainer("auto", strategy=strategy, max_steps=1).fit(build("gpt"))
    cpu = torch.device("cpu")
    return {group.group_desc: group._get_backend(cpu).options._timeout for group in process_groups()}


@pytest.mark.thorough
def test_the_timeout_of_the_strategy_applies_to_all_process_groups(pool: WorkerPool) -> None:
    (timeouts,) = {tuple(sorted(of_rank.items())) for of_rank in pool.run(timeouts_of_groups, 4)}
    assert {"default_pg", "mesh_pp", "mesh_tp", "same batch", "stage to stage"} <= dict(timeouts).keys()
    waiting = {name: of_group for name, of_group in timeouts if not name.startswith("background")}
    assert set(waiting.values()) == {timedelta(seconds=77)}, waiting
    # Ranks may exchange requests to stop more slowly, because checkpoints are saved between two of these exchanges.
    assert dict(timeouts)["background: stop requests"] == timedelta(minutes=30)
    longer = pool.run(timeouts_of_groups, 4, 7200)[0]
    assert set(longer.values()) == {timedelta(hours=2)}, longer
