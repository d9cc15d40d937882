"""Run the coordinator of replicas that leave and join (``python -m lightning_dist.cli.launch.coordinator``)."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from lightning_dist.cli.launch.rank import end_with_parent

_SECONDS_TO_JOIN = 600
"""How long the replicas that are there wait for one that is alive, but does not train, for example as it validates."""

_SECONDS_TO_GATHER = 2.0
"""How long the first step after the start waits for replicas that train already to be heard of.

A coordinator that has started again knows no replica. Without this time, the first one that asks would train on alone.
"""

_NOBODY = "no replica, until all were heard of"
"""The name of the replica that does not exist, for which the coordinator waits meanwhile."""


def run(address: str, smallest: int, heartbeat_ms: int) -> None:
    """Run torchft's lighthouse until the launcher ends.

    Args:
        address: Address to listen at, ``HOST:PORT``.
        smallest: Number of replicas without which no step begins.
        heartbeat_ms: Milliseconds after which a replica that sends no sign of life is left out.
    """
    from torchft.coordination import LighthouseServer

    end_with_parent()
    server = LighthouseServer(
        bind=address,
        min_replicas=smallest,
        join_timeout_ms=_SECONDS_TO_JOIN * 1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    let_replicas_gather(f"http://127.0.0.1:{address.rpartition(':')[2]}")
    while server is not None:
        time.sleep(3600)


def let_replicas_gather(address: str) -> None:
    """Let the coordinator wait for a replica that does not exist, until those that do have been heard of.

    Args:
        address: Where the coordinator listens.
    """
    from torchft.coordination import LighthouseClient

    end = time.monotonic() + _SECONDS_TO_GATHER
    try:
        client = LighthouseClient(address, connect_timeout=timedelta(seconds=10))
        while time.monotonic() < end:
            client.heartbeat(_NOBODY)
            time.sleep(0.1)
    except Exception as error:  # Without this time, replicas may have to start again, and train nevertheless.
        print(f"The coordinator does not wait for replicas that train already: {error}", file=sys.stderr)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
