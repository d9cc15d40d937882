"""Submit a run as a job of SLURM."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from lightning_dist.cli.errors import BAD_CONFIGURATION, TRAINING_FAILED, print_error
from lightning_dist.cli.launch.job import Job, Launcher, python_words
from lightning_dist.cli.launch.rank import FINAL, FOLDER, STOPPED

_SECONDS_BEFORE_THE_LIMIT = 90
"""How long before the end of its time SLURM signals the job, which then saves a checkpoint and asks to be requeued."""


def script(job: Job, options: tuple[str, ...], python: str) -> str:
    """Return the script that ``sbatch`` gets.

    Each task is a rank, whose rank and addresses Lightning reads from SLURM's environment variables. After a failure,
    the job asks to be requeued until it has been restarted ``max_restarts`` times. So does a job that has saved a
    checkpoint because SLURM has preempted it.

    Args:
        job: The job that the script starts on its nodes.
        options: Further options of ``sbatch`` without their two hyphens, such as ``partition=gpu``.
        python: Path of the Python that runs the ranks on the nodes.
    """
    name = Path(job.words[0]).stem if job.is_script else job.words[0]
    directives = {
        "job-name": f"lightning-dist-{name}",
        "nodes": str(job.num_nodes),
        "ntasks-per-node": str(job.num_devices),
        "gpus-per-node": str(job.num_devices) if job.on_gpu else None,
        "signal": f"SIGUSR1@{_SECONDS_BEFORE_THE_LIMIT}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{job.logs}/slurm_%j.out",
    }
    for option in options:
        key, _, value = option.partition("=")
        directives[key] = value
    head = "\n".join(
        f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"
        for key, value in directives.items()
        if value is not None
    )
    final = " ".join(f'[ "$code" -ne {code} ] &&' for code in (0, *FINAL))
    return f"""\
#!/bin/bash
{head}

restarts=${{SLURM_RESTART_COUNT:-0}}
logs={shlex.quote(str(job.logs))}/$SLURM_JOB_ID/attempt_$restarts
export {FOLDER}=$logs PYTHONUNBUFFERED=1
mkdir -p "$logs"

srun --kill-on-bad-exit=1 --output="$logs/rank_%t.out" --error="$logs/rank_%t.err" \\
    {shlex.join([python, *python_words(job)])}
code=$?
# The code of srun may be that of a rank which srun has ended after another one had failed.
[ -f "$logs/end" ] && code=$(head -n 1 "$logs/end")

[ "$code" -ne 0 ] && {shlex.quote(python)} -m lightning_dist.cli.launch.failure "$logs"
if {final} [ "$restarts" -lt {job.max_restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq {STOPPED} ] && ! scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=None; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def start(job: Job, options: argparse.Namespace) -> int:
    """Submit the job, print its number and where its output goes, and return an exit code."""
    if shutil.which("sbatch") is None:
        print_error(
            "lightning-dist launch: --on=slurm, but there is no sbatch on this machine. Run the command on a login node"
            " of the cluster, or with --dry-run to see the script."
        )
        return BAD_CONFIGURATION
    job.logs.mkdir(parents=True, exist_ok=True)
    found = subprocess.run(
        ["sbatch", "--parsable"], input=_describe(job, options), capture_output=True, text=True, check=False
    )
    if found.returncode:
        print_error(f"lightning-dist launch: sbatch refused the job: {found.stderr.strip()}")
        return TRAINING_FAILED
    number = found.stdout.strip().partition(";")[0]
    print(
        f"Job {number} is submitted. Its ranks write to {job.logs}/{number}/attempt_*/, and its first error appears in"
        f" {job.logs}/slurm_{number}.out.\nsqueue --job={number} shows its state, and scancel {number} ends it."
    )
    return 0


def _describe(job: Job, options: argparse.Namespace) -> str:
    return script(job, tuple(options.sbatch), sys.executable)


def _mistake(job: Job, options: argparse.Namespace) -> str | None:
    if job.min_nodes is not None:
        return f"--nodes={job.nodes}: a job of SLURM has a fixed number of nodes. Give --nodes {job.num_nodes}."
    if any(character.isspace() for character in str(job.logs)):
        return f"--logs={str(job.logs)!r}: SLURM reads no spaces in the names of folders. Give another folder."
    for option in options.sbatch:
        if option.startswith("-") or any(character.isspace() for character in option.partition("=")[0]):
            return f"--sbatch={option!r}: expected NAME=VALUE without hyphens before it, such as time=8:00:00."
    return None


SLURM = Launcher(start, _describe, _mistake, uses=("sbatch", "accelerator"))
