"""Run functions on the ranks of a check, in processes that live on from check to check."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests import nccl_rules
from tests.accelerator import VARIABLE
from tests.gpu.machine import Machine
from tests.pool import RankFailed, WorkerPool

__all__ = ["KINDS", "Processes", "Ranks"]

KINDS = {"cuda": "gpu", "simulated": "simulated", "cpu": "cpu"}
"""The value of the environment variable of ``tests.accelerator`` by the kind of machine."""

DEVICES = "CUDA_VISIBLE_DEVICES"

LOG = "LIGHTNING_DIST_GPU_LOG"
"""Environment variable with the path of the file to which ranks print."""


class Processes:
    """Keep the processes of two placements: all ranks on the first device, and each rank on its own.

    Args:
        kind: ``"cuda"``, ``"simulated"`` or ``"cpu"``.
        log: Path of a file to which what ranks print is added; None: it is printed.
    """

    def __init__(self, kind: str, log: Path | None = None) -> None:
        os.environ[VARIABLE] = KINDS[kind]
        if kind == "simulated":
            from tests.accelerator_rules.build import compiled

            os.environ[nccl_rules.VARIABLE] = "nccl-rules"
            compiled()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            os.environ[LOG] = str(log.absolute())
        # Small models are compiled in the rank itself, since a pool of compilers would outlive it.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        # More threads than cores would slow ranks down.
        os.environ.setdefault("OMP_NUM_THREADS", "1" if kind == "cpu" else "4")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # This process counts the devices without initializing CUDA.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self.kind = kind
        self.backend: str | None = None
        """Backend of ranks that share a device; None: not known yet."""
        self._pools: dict[bool, WorkerPool] = {}

    def pool(self, spreads: bool) -> WorkerPool:
        """Return the processes of a placement, which are started when ranks are run."""
        if spreads not in self._pools:
            self._pools[spreads] = self.new_pool()
        return self._pools[spreads]

    def new_pool(self) -> WorkerPool:
        """Return processes that no other check uses."""
        return WorkerPool()

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class Ranks:
    """Run the functions of one check.

    Args:
        machine: The machine, by which checks choose their sizes.
        processes: The processes that checks share.
        limit_s: Time in seconds that all calls of :meth:`run` may take together.
        is_alone: Whether the check has its own processes, which :meth:`close` ends.
        spreads: Whether each rank has a device of its own.
    """

    def __init__(
        self, machine: Machine, processes: Processes, limit_s: float, is_alone: bool = False, spreads: bool = False
    ) -> None:
        self.machine = machine
        self.is_cuda = machine.kind == "cuda"
        self.processes = processes
        self._spreads = spreads
        self._deadline = time.monotonic() + limit_s
        self._own = processes.new_pool() if is_alone else None

    def run(self, function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Call ``function(*args)`` on each rank, and return the results in the order of the ranks.

        Raises:
            RankFailed: If a rank raised, died, or had not finished when the check's time was over.
        """
        return self.run_over(self.backend(num_ranks), function, num_ranks, *args)

    def run_over(self, backend: str | None, function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Do the same over a backend; None: the default of the device."""
        pool = self._own or self.processes.pool(self._spreads)
        seconds = max(round(self._deadline - time.monotonic(), 1), 1.0)
        with self._visible_devices():
            return pool.run(_on_rank, num_ranks, backend, function, args, timeout_s=seconds)

    def backend(self, num_ranks: int) -> str | None:
        """Return the backend of ranks that share a device, and try once whether it can be NCCL; else None."""
        if num_ranks == 1 or self._spreads or not self.is_cuda:
            return None
        if self.processes.backend is None:
            self.try_nccl()
        return self.processes.backend

    def try_nccl(self) -> str:
        """Let two ranks on the first device communicate over NCCL; otherwise later checks use gloo.

        Returns:
            Why NCCL cannot be used; empty if it can.
        """
        try:
            self.run_over("nccl", sum_of_ranks, 2)
        except RankFailed as error:
            self.processes.backend = "gloo"
            return str(error)
        self.processes.backend = "nccl"
        return ""

    def close(self) -> None:
        """End the processes that only this check has used."""
        if self._own is not None:
            self._own.close()

    @contextmanager
    def _visible_devices(self) -> Iterator[None]:
        """Let processes that are started in this context see the devices of the placement."""
        visible = os.environ.get(DEVICES)
        first = visible.split(",")[0] if visible else "0"
        with nullcontext() if self._spreads or not self.is_cuda else mock.patch.dict(os.environ, {DEVICES: first}):
            yield


def sum_of_ranks() -> float:
    """Return the sum of all ranks, by an all-reduce on the device."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    number = torch.tensor(float(dist.get_rank()), device="cuda")
    dist.all_reduce(number)
    return float(number)


def _on_rank(backend: str | None, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``function`` without messages and without TF32, and give cached memory back afterwards."""
    import torch
    import torch.distributed as dist

    from lightning_dist.plugins._compat import processes

    if log := os.environ.get(LOG):
        with open(log, "a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with ExitStack() as patches:
            for module, name in (
                (processes, "default_backend"),
                (dist, "get_default_backend_for_device"),
            ):
                if backend is not None:
                    patches.enter_context(mock.patch.object(module, name, lambda device: backend))
            return function(*args)
    finally:
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            with suppress(RuntimeError):  # After an error in a kernel, each call fails, and would hide that error.
                torch.cuda.empty_cache()
