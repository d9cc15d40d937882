"""Run the tests of ``tests/parity`` on the devices, in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.accelerator import VARIABLE
from tests.gpu.check import CUDA, Check, Found, devices, package
from tests.gpu.ranks import DEVICES, Ranks

__all__ = ["PARITY_TESTS"]

ROOT = Path(__file__).parents[3]
SECONDS = 1500


def parity_tests(ranks: Ranks, path: str) -> Found:
    """Run a file of tests, and return the summary of pytest; its last lines are the details."""
    ranks.processes.close()  # Their memory on the devices is needed.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "--accelerator=gpu", path]
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, DEVICES)}
    visible = os.environ.get(DEVICES)
    environment |= {DEVICES: visible} if visible else {}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\npytest was ended after {SECONDS} s"
    lines = output.rstrip().splitlines()
    interesting = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")) or "Error" in line]
    return Found(lines[-1].strip("= ") if lines else "no output", process.returncode == 0, tuple(interesting[:60]))


FILES = ("data_parallel", "tensor_parallel", "context_parallel", "pipeline", "expert_parallel", "tiling")

PARITY_TESTS = tuple(
    Check(
        f"pytest/{name}",
        "All tests of tests/parity, with a device for each rank",
        parity_tests,
        (f"tests/parity/test_{name}.py",),
        needs=(CUDA, package("pytest"), devices(2)),
        limit_s=SECONDS,
        is_alone=True,
    )
    for name in FILES
)
