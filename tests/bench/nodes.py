"""Emulate nodes by network namespaces whose only connection is a link with a limited rate."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["TwoNodes", "why_not"]


def why_not() -> str | None:
    """Return why this machine cannot emulate nodes; None if it can."""
    if os.geteuid() != 0:
        return "not root: only root can make network namespaces"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"{' and '.join(missing)} not found: install the package iproute2" if missing else None


class TwoNodes:
    """Two network namespaces that are connected by a link, whose rate can be changed while it is used.

    The kernel's token bucket filter (``tbf``) limits the rate of each direction. Processes in the same namespace
    communicate without limit. Latency is not emulated.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self._names = [f"node{index}-{os.getpid()}" for index in range(2)]
        self._links = [f"ld{index}x{os.getpid()}" for index in range(2)]

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[TwoNodes]:
        """Make the namespaces, and remove them at the end of the context."""
        nodes = cls()
        try:
            first, second = nodes._links
            for name in nodes._names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
            for name, link, address in zip(nodes._names, nodes._links, cls.addresses, strict=True):
                _run("ip", "link", "set", link, "netns", name)
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
                _run("ip", "-n", name, "link", "set", link, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
            yield nodes
        finally:
            for name in nodes._names:  # The links are removed with their namespaces.
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def set_rate(self, gbit_per_s: float | None) -> None:
        """Limit the rate of each direction of the link; None: do not limit it."""
        for name, link in zip(self._names, self._links, strict=True):
            if gbit_per_s is None:
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "delete", "dev", link, "root"], capture_output=True, check=False
                )
            else:
                rate = f"{gbit_per_s * 1000:.0f}mbit"
                limit = ("burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", "rate", rate, *limit)

    def command(self, node: int) -> list[str]:
        """Return the beginning of a command that runs in the namespace of a node."""
        return ["ip", "netns", "exec", self._names[node]]

    def environment(self, node: int) -> dict[str, str]:
        """Return environment variables by which gloo on this node finds the link, and the first rank."""
        return {"GLOO_SOCKET_IFNAME": self._links[node], "MASTER_ADDR": self.addresses[0]}


def sent_to_other_node() -> int:
    """Return the number of bytes that this namespace has sent over its link, including the headers of packets."""
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.strip().partition(":")
        if name != "lo":
            return int(numbers.split()[8])
    raise RuntimeError("There is no link in /proc/net/dev.")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
