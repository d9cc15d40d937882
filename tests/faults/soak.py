"""Train under torchrun while ranks are killed again and again: the losses must equal those of an undisturbed run."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import random
import signal
import socket
import statistics
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.faults import soak_rank
from tests.faults.saves import forked

__all__ = ["campaign"]

_STEPS_PER_KILL = 14
"""Number of steps to train per kill, which must be more than a kill loses, so that the training makes progress.

A life lasts up to 20 steps, and starts from a checkpoint that is up to 10 steps old.
"""


@dataclass
class Life:
    """Record the steps of one process of a rank, from its start to its end or kill.

    Args:
        pid: Id of the process.
        start: Global step that the process resumed from.
        losses: The loss of each step, as hexadecimal text.
        times: The time in seconds at which each step was done.
    """

    pid: int
    start: int
    losses: dict[int, str]
    times: dict[int, float]


def lives(folder: Path, rank: int) -> list[Life]:
    """Read the records of the processes of a rank so far."""
    path = folder / f"rank{rank}.txt"
    found: list[Life] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, *rest = line.split()
        if kind == "process":
            found.append(Life(int(rest[0]), int(rest[1]), {}, {}))
        elif len(rest) == 3:
            found[-1].losses[int(rest[0])] = rest[1]
            found[-1].times[int(rest[0])] = float(rest[2])
    return found


def start(folder: Path, num_steps: int, num_ranks: int, num_restarts: int, is_forked: bool) -> ForkProcess:
    """Start a training under torchrun, in a fork of this process.

    Args:
        folder: Folder of the run, which must not exist.
        num_steps: Number of steps to train.
        num_ranks: Number of processes that train.
        num_restarts: Number of restarts that torchrun allows.
        is_forked: Whether to run torchrun's agent in the fork, with ranks that are forked too and so need not import
            anything, instead of running the command.
    """
    folder.mkdir(parents=True)
    function = _agent if is_forked else _torchrun
    process = mp.get_context("fork").Process(target=function, args=(folder, num_steps, num_ranks, num_restarts))
    process.start()
    return process


def _torchrun(folder: Path, num_steps: int, num_ranks: int, num_restarts: int) -> None:
    _print_to(folder)
    os.chdir(Path(__file__).parents[2])
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
        *(f"--max-restarts={num_restarts}", "--monitor-interval=0.1", "-m", "tests.faults.soak_rank"),
        *(str(folder), str(num_steps)),
    ]
    os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})


def _agent(folder: Path, num_steps: int, num_ranks: int, num_restarts: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _print_to(folder)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="soak",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=num_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, soak_rank.train)(folder, num_steps)


def _print_to(folder: Path) -> None:
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def undisturbed(folder: Path, num_steps: int, num_ranks: int) -> list[int]:
    """Train without kills in forks of this process, which need not import anything, and return their exit codes."""
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        _print_to(folder)
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "undisturbed",
        }
        os.environ.update({key: str(value) for key, value in env.items()})
        try:
            soak_rank.train(folder, num_steps)
        except BaseException:
            traceback.print_exc()
            raise

    return forked(num_ranks, run)


def disturb(process: ForkProcess, folder: Path, num_kills: int, num_ranks: int, seed: int) -> list[float]:
    """Kill a random rank ``num_kills`` times, a random number of steps after it started.

    Returns:
        The times of the kills, in seconds of the monotonic clock.
    """
    chance = random.Random(seed)
    killed: list[float] = []
    while len(killed) < num_kills:
        victim, num_steps, delay_s = chance.randrange(num_ranks), chance.randint(1, 20), chance.random() * 0.05
        deadline = time.monotonic() + 120
        while True:
            now = lives(folder, victim)
            if len(now) > len(killed) and len(now[-1].losses) >= num_steps:
                break
            assert process.is_alive(), f"torchrun ended with {process.exitcode}: see {folder}/output.txt"
            assert time.monotonic() < deadline, f"no step for two minutes after kill {len(killed)}: see {folder}"
            time.sleep(0.01)
        time.sleep(delay_s)
        killed.append(time.monotonic())
        os.kill(now[-1].pid, signal.SIGKILL)
    return killed


def campaign(folder: Path, num_kills: int, num_ranks: int = 2, seed: int = 1, is_forked: bool = False) -> Counter[str]:
    """Train twice, once with kills, and compare the losses of every step of every life, bit by bit.

    Args:
        folder: Folder to work in.
        num_kills: Number of times that a rank is killed.
        num_ranks: Number of processes that train.
        seed: Seed of the choice of the ranks and of the times of the kills.
        is_forked: Whether to run torchrun's agent in a fork, as in :func:`start`.

    Returns:
        The costs of the kills: the median and largest numbers of lost steps, and of seconds until the next step.

    Raises:
        AssertionError: If a loss differs, a step is missing, or the training failed.
    """
    num_steps = max(_STEPS_PER_KILL * num_kills, 40)
    exits = undisturbed(folder / "undisturbed", num_steps, num_ranks)
    assert exits == [0] * num_ranks, (folder / "undisturbed" / "output.txt").read_text()[-3000:]
    process = start(folder / "killed", num_steps, num_ranks, num_kills, is_forked)
    try:
        killed = disturb(process, folder / "killed", num_kills, num_ranks, seed)
        process.join()
        assert process.exitcode == 0, (folder / "killed" / "output.txt").read_text()[-3000:]
    finally:
        process.kill()
    for rank in range(num_ranks):
        (whole,) = lives(folder / "undisturbed", rank)
        curve: dict[int, str] = {}
        for life in lives(folder / "killed", rank):
            for step, loss in life.losses.items():
                assert loss == whole.losses[step], f"rank {rank}, step {step}: {loss}, undisturbed {whole.losses[step]}"
            curve |= life.losses
        assert curve == whole.losses, f"rank {rank} left out {whole.losses.keys() - curve.keys()}"
    all_lives = lives(folder / "killed", 0)
    lost = [max(before.losses) - after.start for before, after in itertools.pairwise(all_lives)]
    back_s = [life.times[min(life.losses)] - when for when, life in zip(killed, all_lives[1:], strict=False)]
    return Counter(
        {
            "kills": len(killed),
            "steps compared": num_ranks * sum(len(life.losses) for life in all_lives),
            "median steps lost": round(statistics.median(lost)),
            "most steps lost": max(lost),
            "median s to the next step": round(statistics.median(back_s)),
            "most s to the next step": round(max(back_s)),
        }
    )
