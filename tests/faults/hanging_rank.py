"""Simulate a rank of a training, which reports steps to the watchdog and then hangs in a given way."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.run.watchdog import Watchdog

__all__ = ["TIMEOUT_S", "run"]

TIMEOUT_S = 2.0


def run(fault: str, rank: int, world_size: int, ranks_per_node: int, folder: Path) -> None:
    """Run five steps, create the file ``trained-<rank>``, and then hang; most faults affect only the last rank.

    Args:
        fault: Name of the fault; with ``none``, ``restart`` and ``beats`` no rank hangs.
        rank: Rank of this process.
        world_size: Number of ranks.
        ranks_per_node: Number of ranks on a simulated node; each node has a watchdog of its own.
        folder: Folder that all ranks share.
    """
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    watchdog = Watchdog(
        folder=folder / "reports",
        timeout_s=TIMEOUT_S,
        rank=rank,
        local_rank=rank % ranks_per_node,
        local_world_size=ranks_per_node,
        name=f"{folder}-{rank // ranks_per_node}",
        on_hang=lambda report: (folder / f"uploaded-{rank}").write_text(report),
    )
    watchdog.start()
    value = torch.ones(4)
    if world_size > 1:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for step in range(5):
        if world_size > 1:
            dist.all_reduce(value)
        watchdog.beat(step)
    groups = [dist.new_group(), dist.new_group()] if fault == "order" else []
    (folder / f"trained-{rank}").touch()
    is_last = rank == world_size - 1

    if fault == "none":
        watchdog.disarm()
        time.sleep(1.5 * TIMEOUT_S)
    elif fault == "restart":
        watchdog.close()
        watchdog.start()
        watchdog.beat(6)
    elif fault == "beats":
        for step in range(20):
            watchdog.beat(step)
            time.sleep(0.1)
    elif fault == "first_killed":
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(int(15 * TIMEOUT_S)):
            watchdog.beat(step)
            time.sleep(0.1)
        time.sleep(1000)
    elif fault == "order":
        for group in groups[::-1] if is_last else groups:
            dist.all_reduce(value, group=group)
    elif not is_last:
        dist.all_reduce(value)
    elif fault == "sleep":
        time.sleep(1000)  # hang: sleep
    elif fault == "busy":
        # The loop is on one line, because its stack may show any of its lines, and the test expects a certain one.
        while True: step += 1  # fmt: skip # noqa: E701 # hang: busy
    elif fault == "gil":
        re.match(r"(a+)+$", "a" * 60 + "b")  # hang: gil
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "left":
        watchdog.close()
        time.sleep(1000)
    elif fault == "mismatch":
        dist.broadcast(value, 0)
    watchdog.close()
