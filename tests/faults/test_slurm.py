"""Test that a SLURM job saves at its requeue signal where Lightning looks, asks to be requeued, and resumes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dist.mesh.preemption import EXIT_STOPPED
from tests.launched import ROOT, Forked, Job, run_script, wait_for

SCRIPT = """
import sys, time
import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import SLURMEnvironment
import lightning_dist
from tests.models import GPT

class Slowly(pl.Callback):
    def on_train_start(self, trainer, *args):
        print("FROM", trainer.global_step, flush=True)
    def on_train_batch_start(self, trainer, *args):
        time.sleep(0.05)
        if trainer.global_step == 3:
            print("READY", flush=True)

folder, max_steps = sys.argv[1], int(sys.argv[2])
pl.Trainer(
    accelerator="cpu", devices=2, num_nodes=1, strategy="full_shard", max_steps=max_steps, logger=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
    default_root_dir=folder, enable_checkpointing=False, callbacks=[Slowly()],
    plugins=[SLURMEnvironment(requeue_signal=10)],
).fit(GPT())
"""


def start(folder: Path, max_steps: int, forked: bool = False) -> list[Job]:
    """Start the job's two tasks as srun would, or as forks, which do not exercise the shutdown of the interpreter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (folder / "train.py").write_text(SCRIPT)
    slurm = {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    tasks: list[Job] = []
    for rank in range(2):
        script, arguments = folder / "train.py", (str(folder), str(max_steps))
        environment = {**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        if forked:
            tasks.append(Forked(run_script, script, *arguments, environment=environment))
        else:
            tasks.append(
                subprocess.Popen(
                    [sys.executable, script, *arguments], text=True, cwd=ROOT, env=environment,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    return tasks


@pytest.mark.thorough
def test_a_requeued_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked.txt\n')
    scontrol.chmod(0o755)
    tasks = start(tmp_path, 1000)
    for task in tasks:
        wait_for(task, "READY", 1)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [EXIT_STOPPED] * 2, outputs
    assert (tmp_path / "asked.txt").read_text() == "requeue 77\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt" / "manifest.json").exists()
    tasks = start(tmp_path, 8, forked=True)
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert all("FROM 0" not in output and "FROM" in output for output in outputs)
