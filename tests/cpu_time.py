"""Measure the time that a command needs, in a way that does not depend on what else the machine does."""

import resource
import subprocess


def cpu_seconds(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a command, and return the time that it has computed, in user and system mode, and how it has ended.

    Args:
        command: The program and its arguments. No other child of this process may end meanwhile.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended
