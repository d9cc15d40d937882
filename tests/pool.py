"""Run distributed tests in real processes, which are started once per test session.

Starting Python with torch and Lightning takes seconds; forking a process that has already imported them takes a
fraction of a second. Therefore a fork server imports them once, and the workers are forked from it. The workers live on
from test to test, and are replaced after a test in which a rank failed. A test passes a function, which is pickled by
name and so must be at module level, and gets the return value of each rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing as mp
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

from tests import accelerator_rules, nccl_rules
from tests.accelerator import VARIABLE as ACCELERATOR
from tests.accelerator import on_gpu, variables_of_rank
from tests.nccl_rules.log import FOLDER, find_disorder

__all__ = ["RankFailed", "WorkerPool", "fork_server", "in_parallel"]

_SECONDS_TO_START = 300.0

First, Second = TypeVar("First"), TypeVar("Second")


def fork_server(*modules: str) -> ForkServerContext:
    """Return the context that forks processes from a server that has imported ``tests.preload`` and ``modules``.

    The first call starts the server, and returns before the server has finished its imports. Later calls return the
    same server and cannot add modules to it.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload", *modules])
    forkserver.ensure_running()
    return context


def in_parallel(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Call both functions at the same time, and return both results.

    This saves time if one of them uses a single process and so leaves cores idle. Each function must use its own pool.
    """
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(second)
        return first(), future.result()


MAX_LOOPS_LEFT = 10
"""The number of gloo's threads that a worker may keep after a run; with more, it is replaced.

Each of them wakes 100 times a second, so that the workers of a long campaign would spend half of their time on these.
"""


class RankFailed(AssertionError):  # noqa: N818 - The name reads well in a test report.
    """Report that at least one rank raised, died or hung. ``errors`` maps each failed rank to its traceback."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))


class WorkerPool:
    """Run a function on several ranks, each in a worker process that has torchrun's environment variables.

    Args:
        forks: Whether workers are forked from the fork server. They cannot use CUDA then, because an import has used it
            there. None: unless distributed tests run on GPUs.
        has_nccl_rules: Whether workers communicate under the rules of NCCL (see :mod:`tests.nccl_rules`). None: if
            ``--backend`` says so.
        accelerator: Name of the accelerator on which workers train. None: that of ``--accelerator``.
    """

    def __init__(
        self, forks: bool | None = None, has_nccl_rules: bool | None = None, accelerator: str | None = None
    ) -> None:
        self._accelerator = accelerator or os.environ.get(ACCELERATOR, "cpu")
        self._has_nccl_rules = nccl_rules.is_chosen() if has_nccl_rules is None else has_nccl_rules
        forks = not on_gpu() if forks is None else forks
        self._context: Any = fork_server() if forks else mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._stacks = Path(tempfile.mkdtemp(prefix="stacks-"))

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        num_nodes: int = 1,
        timeout_s: float | None = None,
        grace_s: float = 5.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, with the environment that torchrun would set.

        Args:
            function: Function at module level, since it is pickled by name.
            world_size: Number of ranks.
            args: Positional arguments of the function.
            num_nodes: Number of nodes that the ranks' environment variables pretend to be on.
            timeout_s: Time in seconds that the function may take. None: 120, or 600 on GPUs, which ranks may share.
            grace_s: Time in seconds that the other ranks have to fail or finish by themselves after one rank failed.
            kwargs: Keyword arguments of the function.

        Returns:
            The return values of all ranks, in the order of the ranks.

        Raises:
            RankFailed: If a rank raised, died, or had not finished after ``timeout_s``. For a rank that had not
                finished, the error has the stacks of its threads.
        """
        new = [self._start() for _ in range(world_size - len(self._workers))]
        self._workers += new
        for _, connection in new:  # The time in which they start does not count.
            if connection.poll(_SECONDS_TO_START):
                with contextlib.suppress(EOFError):
                    connection.recv()
        workers = self._workers[:world_size]
        port = _free_port()
        log = tempfile.mkdtemp(prefix="nccl-rules-") if self._has_nccl_rules else ""
        for rank, (_, connection) in enumerate(workers):
            env = {
                **variables_of_rank(rank, world_size, num_nodes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "tests",
                **({FOLDER: log} if log else {}),
            }
            connection.send((function, args, kwargs, env))
        results, errors = self._collect(workers, timeout_s or (600.0 if on_gpu() else 120.0), grace_s)
        if log:
            disorder = find_disorder(Path(log)) if not errors else None
            shutil.rmtree(log)
            if disorder:
                raise RankFailed({0: disorder})
        if errors:
            raise RankFailed(errors)
        if any(_num_loops(process.pid) > MAX_LOOPS_LEFT for process, _ in workers):
            self._replace(workers)
        return [results[rank] for rank in range(world_size)]

    def _collect(
        self, workers: list[tuple[Any, Connection]], timeout_s: float, grace_s: float
    ) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        ranks = {connection: rank for rank, (_, connection) in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while ranks:
            ready = wait(list(ranks), timeout=max(deadline - time.monotonic(), 0))
            for connection in ready:
                rank = ranks.pop(connection)  # type: ignore[arg-type]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    process = workers[rank][0]
                    process.join(5.0)
                    ok, value = False, f"the process died with exit code {process.exitcode}"
                (results if ok else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + grace_s)
            if not ready:
                reason = "was still running when another rank had failed" if errors else f"hung for {timeout_s} s"
                for rank in ranks.values():
                    errors[rank] = f"the rank {reason}:\n{self._stack_of(workers[rank][0].pid)}"
                break
        if errors:
            self._replace(workers)
        return results, errors

    def _stack_of(self, pid: int, seconds: float = 1.0) -> str:
        """Return the Python stacks of all threads of a worker, which the worker writes when it gets SIGUSR1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(seconds)
        path = self._stacks / str(pid)
        return path.read_text() if path.exists() else "its stack is not known"

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        backend = "nccl-rules" if self._has_nccl_rules else "default"
        environment = {**os.environ, nccl_rules.VARIABLE: backend, ACCELERATOR: self._accelerator}
        process = self._context.Process(target=_serve, args=(theirs, environment, str(self._stacks)), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _replace(self, workers: list[tuple[Any, Connection]]) -> None:
        for process, connection in workers:
            process.kill()
            connection.close()
        self._workers = [worker for worker in self._workers if worker not in workers]

    def close(self) -> None:
        """Kill all workers."""
        self._replace(list(self._workers))
        shutil.rmtree(self._stacks, ignore_errors=True)


def _serve(connection: Connection, environment: dict[str, str], stacks: str) -> None:
    os.environ.update(environment)
    # Rank 0 of auto_parallel starts processes, which a process that ends with its parent may not. This one ends when
    # the connection is closed as well.
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    file = open(os.path.join(stacks, str(os.getpid())), "w")  # noqa: SIM115 - it is open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    _connect_once_rank_0_listens()
    watched: Callable[..., Any] = _called
    if accelerator_rules.is_chosen():
        from tests.accelerator_rules import install as simulated

        simulated.install()
        watched = simulated.watched
    elif nccl_rules.is_chosen():
        from tests.nccl_rules.backend import install

        install()
    connection.send("ready")
    while True:
        try:
            function, args, kwargs, env = connection.recv()
        except EOFError:
            return
        before = dict(os.environ)
        os.environ.update(env)
        try:
            answer = (True, watched(function, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        os.environ.clear()  # Otherwise a seed that Lightning keeps there would be that of later tests.
        os.environ.update(before)
        _leave_process_group(destroy=answer[0])
        sys.stdout.flush()
        try:
            connection.send(answer)
        except Exception:
            connection.send((False, f"the result cannot be sent: {traceback.format_exc()}"))


def _connect_once_rank_0_listens() -> None:
    """Let the other ranks of a worker's runs connect to rank 0 as soon as it listens for connections.

    torch waits for half a second or more after an attempt that was refused, because rank 0 did not listen yet. A run
    takes about as long as that altogether.
    """
    # ``import torch.distributed.rendezvous as ...`` gives the function of this name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_later(host: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 20.0
        while rank and time.monotonic() < deadline:
            try:
                socket.create_connection((host, port), timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.005)
        return create(host, port, rank, *args, **kwargs)

    rendezvous._create_c10d_store = create_later


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _leave_process_group(destroy: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    if destroy and dist.is_initialized():
        dist.destroy_process_group()
        # DTensor caches by mesh, and the next test's mesh compares equal to this one although the process groups of
        # this one are destroyed. The caches must therefore be cleared.
        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        # A process group that a reference cycle keeps alive has three threads, one of which wakes 100 times a second.
        gc.collect()
        # What lives on is what modules hold, such as those that the function has imported. Later collections, of which
        # each fit and each run has some, would otherwise traverse it again: that took a sixth of the workers' time.
        gc.freeze()


def _num_loops(pid: int) -> int:
    """Return the number of threads of a process in which gloo waits for messages."""
    names = (path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm"))
    return sum(name == "gloo_tcp_loop" for name in names)


def _free_port() -> int:
    """Return a port on which no process listens, and which no other pool of this process gets.

    It is below the range of ports that the kernel uses for outgoing connections: such a connection could otherwise take
    the port before the worker of rank 0 listens on it.
    """
    while True:
        port = next(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


_FIRST_PORT = random.randrange(10_000, 31_000)
_PORTS = itertools.chain(range(_FIRST_PORT, 32_000), itertools.cycle(range(10_000, 32_000)))
