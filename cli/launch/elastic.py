"""Start the replicas of a run that leave and join it while it trains, and start each that fails again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dist.cli.errors import TRAINING_FAILED, print_error
from lightning_dist.cli.launch.failure import Failure, attempt_folder, first_error
from lightning_dist.cli.launch.job import Job, endpoint_of, mistake_of_head, python_words
from lightning_dist.cli.launch.output import print_new
from lightning_dist.cli.launch.rank import FINAL, FOLDER, STOPPED
from lightning_dist.mesh.replica_range import COORDINATOR, RANGE, REPLICA, ReplicaRange

DEFAULT_PORT = 29510
_POLL_S = 0.02
_SECONDS_TO_STOP = 300
"""Time that ranks have to save a checkpoint after a signal, before they are killed."""

_SECONDS_TO_LISTEN = 20
"""A coordinator that fails sooner than so long after its start would fail again."""


class _CoordinatorError(RuntimeError):
    """Report that the coordinator cannot be started."""


@dataclass
class _Replica:
    """Hold the processes of a replica's newest start.

    Args:
        index: Index of the replica.
        ranks: Its processes, in the order of their ranks.
        attempt: Number of the start, from 0.
        end: Exit code of the replica for good; None: it runs.
    """

    index: int
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    attempt: int = -1
    end: int | None = None


def mistake(job: Job, replicas: ReplicaRange, here: tuple[int, ...] | None) -> str | None:
    """Return what is wrong with a job whose replicas leave and join, and how to mend it; None: nothing.

    Args:
        job: The job that is to be started.
        replicas: Number of replicas without which no step begins, and of all replicas.
        here: Indices of those of this node; None: all are here.
    """
    if job.words and not job.is_script and job.words[0] != "fit":
        return f"--elastic={replicas} with {job.words[0]!r}: only a fit has replicas that leave and join. Leave it out."
    if here is not None and max(here) >= replicas.largest:
        return (
            f"--replicas={_listed(here)} with --elastic={replicas}: expected indices from 0 to {replicas.largest - 1}."
        )
    is_part = here is not None and len(here) < replicas.largest
    if is_part and not job.head:
        return (
            f"--replicas={_listed(here or ())} with --elastic={replicas}: the other replicas are on other nodes. Give"
            " --head HOST, the name or address of the node that starts replica 0, on each node."
        )
    return mistake_of_head(job)


def describe(job: Job, replicas: ReplicaRange, heartbeat_s: float, here: tuple[int, ...] | None) -> str:
    """Return what is started on this node, for ``--dry-run``.

    Args:
        job: The job that would be started.
        replicas: Number of replicas without which no step begins, and of all replicas.
        heartbeat_s: Seconds after which a replica that sends no sign of life is left out.
        here: Indices of the replicas of this node; None: all are here.
    """
    indices = range(replicas.largest) if here is None else here
    address = endpoint_of(job.head, DEFAULT_PORT) if job.head else "127.0.0.1:PORT"
    listens = f"0.0.0.0:{address.rpartition(':')[2]}" if job.head else address
    coordinator = ["python", "-m", "lightning_dist.cli.launch.coordinator", listens, str(replicas.smallest)]
    parts = []
    if 0 in indices:
        parts = [
            f"# The coordinator, which leaves a replica out after {heartbeat_s:g} s without a sign of life:",
            shlex.join([*coordinator, str(round(heartbeat_s * 1000))]),
        ]
    which = f"{replicas.largest} replicas" if here is None else f"the replicas {_listed(here)}"
    return "\n".join(
        [
            *parts,
            f"# Each of {job.num_devices} ranks of each of {which}, with their numbers in the environment:",
            f"{RANGE}={replicas} {REPLICA}=INDEX {COORDINATOR}=http://{address} {FOLDER}={job.logs}/replica_INDEX"
            f" {shlex.join(['python', *python_words(job)])}",
        ]
    )


def _listed(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


class ElasticLaunch:
    """Run the replicas of a job that belong to this node, until all of them have ended.

    Args:
        job: The job; its devices are those of one replica.
        replicas: Number of replicas without which no step begins, and of all replicas.
        heartbeat_s: Seconds after which a replica that sends no sign of life is left out.
        here: Indices of the replicas of this node; None: all are here. The coordinator is where replica 0 is.
    """

    def __init__(
        self, job: Job, replicas: ReplicaRange, heartbeat_s: float, here: tuple[int, ...] | None = None
    ) -> None:
        self._job = job
        self._range = replicas
        self._heartbeat_s = heartbeat_s
        self._restarts_left = job.max_restarts
        self._replicas = [_Replica(index) for index in (range(replicas.largest) if here is None else here)]
        self._spares: list[subprocess.Popen[str]] = []
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinated_at = 0.0
        self._address = endpoint_of(job.head, DEFAULT_PORT) if job.head else f"127.0.0.1:{_free_port()}"
        self._listens_at = f"0.0.0.0:{self._address.rpartition(':')[2]}" if job.head else self._address
        self._signal: int | None = None
        self._signalled_at: float | None = None
        self._shown = _Shown(job.logs)
        job.logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Start the replicas, wait for their end, and return the exit code of the run."""
        with self._signals_noted():
            try:
                self._start_coordinator()
                for replica in self._replicas:
                    self._start(replica)
                self._prepare_spares()
                while any(replica.end is None for replica in self._replicas):
                    self._look()
                    time.sleep(_POLL_S)
            except _CoordinatorError as error:
                print_error(f"lightning-dist launch: {error}")
                return TRAINING_FAILED
            finally:
                self._shown.show()
                for process in self._everything():
                    process.kill()
                    process.wait()
        return self._code()

    def _look(self) -> None:
        """Look once after everything that runs."""
        self._shown.show()
        self._start_coordinator()
        if self._signal is not None:
            self._stop()
        for replica in self._replicas:
            if replica.end is None:
                self._look_after(replica)

    # Replicas

    def _start(self, replica: _Replica) -> None:
        """Start the processes of a replica, from spare ones."""
        replica.attempt += 1
        folder = attempt_folder(self._job.logs / f"replica_{replica.index}", replica.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        port, size = _free_port(), self._job.num_devices
        self._prepare_spares()
        replica.ranks, self._spares = self._spares[:size], self._spares[size:]
        for rank, process in enumerate(replica.ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": f"replica_{replica.index}",
                "TORCHELASTIC_RESTART_COUNT": str(replica.attempt),
                FOLDER: str(self._job.logs / f"replica_{replica.index}"),
                RANGE: str(self._range),
                REPLICA: str(replica.index),
                COORDINATOR: f"http://{self._address}",
            }
            if self._job.on_gpu:
                first = self._replicas.index(replica) * size
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + local) for local in range(size))
            files = {"out": str(folder / f"rank_{rank}.out"), "err": str(folder / f"rank_{rank}.err")}
            words = python_words(self._job)[2:]
            _write(process, json.dumps({"environment": environment, "words": words, **files}))
        self._shown.follow(replica.index, folder)

    def _prepare_spares(self) -> None:
        """Start as many processes as a replica has, which import what every training imports, and then wait."""
        while len(self._spares) < self._job.num_devices:
            words = [sys.executable, "-m", "lightning_dist.cli.launch.spare"]
            environment = {"OMP_NUM_THREADS": str(self._num_threads), "PYTHONUNBUFFERED": "1", **os.environ}
            self._spares.append(subprocess.Popen(words, stdin=subprocess.PIPE, text=True, env=environment))

    @property
    def _num_threads(self) -> int:
        return max((os.cpu_count() or 1) // (self._job.num_devices * len(self._replicas)), 1)

    def _look_after(self, replica: _Replica) -> None:
        """End a replica of which a process has failed, and start it again if it may be."""
        codes = [process.poll() for process in replica.ranks]
        if all(code == 0 for code in codes):
            replica.end = 0
            return
        failed = [Failure(rank, code) for rank, code in enumerate(codes) if code]
        if not failed:
            return
        if self._signal is not None and any(code is None for code in codes):
            return  # The others are saving a checkpoint.
        if self._signal is not None and all(failure.code == -self._signal for failure in failed):
            replica.end = STOPPED  # It had not begun to train.
            return
        final = next((failure.code for failure in failed if failure.code in FINAL), None)
        for process in replica.ranks:
            process.kill()
            process.wait()
        self._shown.show()
        if final is not None:
            self._end(replica, final, failed)
            if self._signal is None:
                self._end_others(final)
        elif self._restarts_left and self._signal is None and not any(one.end == 0 for one in self._replicas):
            self._restarts_left -= 1
            self._say_failure(replica, failed, f"it starts again ({self._restarts_left} restarts are left)")
            self._start(replica)
            self._prepare_spares()
        else:
            self._end(replica, TRAINING_FAILED, failed)
            running = sum(one.end is None for one in self._replicas)
            is_whole = len(self._replicas) == self._range.largest
            if is_whole and running < self._range.smallest and not any(one.end == 0 for one in self._replicas):
                print_error(
                    f"{running} of {self._range.largest} replicas are left, and at least {self._range.smallest} must"
                    " train. All are ended.",
                    prefix="launch: ",
                )
                self._end_others(TRAINING_FAILED)

    def _end(self, replica: _Replica, code: int, failed: list[Failure]) -> None:
        replica.end = code
        if code != STOPPED:
            self._say_failure(replica, failed, "it does not start again", with_text=True)

    def _end_others(self, code: int) -> None:
        for replica in self._replicas:
            if replica.end is None:
                replica.end = code
                for process in replica.ranks:
                    process.kill()

    def _say_failure(self, replica: _Replica, failed: list[Failure], then: str, with_text: bool = False) -> None:
        folder = attempt_folder(self._job.logs / f"replica_{replica.index}", replica.attempt)
        first, text = first_error(folder, failed)
        if with_text and text:
            print(text, file=sys.stderr)
        print_error(f"Replica {replica.index}: {first.how()}; {then}. Its output is in {folder}.", prefix="launch: ")

    # The coordinator

    def _start_coordinator(self) -> None:
        """Start the coordinator, also after it has ended; replicas wait for it meanwhile."""
        if all(replica.index for replica in self._replicas):
            return
        if self._coordinator is not None and self._coordinator.poll() is None:
            return
        if self._coordinator is not None:
            code, lived_s = self._coordinator.returncode, time.monotonic() - self._coordinated_at
            if code > 0 and lived_s < _SECONDS_TO_LISTEN:
                raise _CoordinatorError(
                    f"the coordinator of --elastic cannot listen at {self._listens_at}, or has failed otherwise (exit"
                    f" code {code}): see {self._job.logs / 'coordinator.err'}. Give another port by --head HOST:PORT."
                )
            print_error("The coordinator has ended, and starts again.", prefix="launch: ")
        self._coordinated_at = time.monotonic()
        module = "lightning_dist.cli.launch.coordinator"
        heartbeat = str(round(self._heartbeat_s * 1000))
        with (self._job.logs / "coordinator.err").open("a") as output:
            self._coordinator = subprocess.Popen(
                [sys.executable, "-m", module, self._listens_at, str(self._range.smallest), heartbeat],
                stdout=output,
                stderr=output,
                env={"RUST_LOG": "warn", **os.environ},
            )

    # Signals

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self._signal = self._signal or number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        """Pass a signal on to all ranks once, and kill those that have not ended in time."""
        ranks = [process for replica in self._replicas for process in replica.ranks if process.poll() is None]
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            for process in ranks:
                process.send_signal(self._signal or signal.SIGTERM)
        elif time.monotonic() > self._signalled_at + _SECONDS_TO_STOP:
            for process in ranks:
                process.kill()

    def _everything(self) -> Iterator[subprocess.Popen[str] | subprocess.Popen[bytes]]:
        for replica in self._replicas:
            yield from replica.ranks
        yield from self._spares
        if self._coordinator is not None:
            yield self._coordinator

    def _code(self) -> int:
        ends = [replica.end for replica in self._replicas if replica.end is not None]
        for code in (*FINAL, 0):  # A run that some replicas have ended is done, also if others were lost.
            if code in ends and (code != 0 or self._signal is None):
                return code
        if self._signal is not None:
            return STOPPED if STOPPED in ends else 128 + self._signal
        return ends[0] if ends else TRAINING_FAILED


class _Shown:
    """Print what the first rank of each replica writes; those of replicas that do not lead write nothing.

    Args:
        logs: Folder of the logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._files: dict[tuple[int, str], tuple[Path, int]] = {}

    def follow(self, replica: int, folder: Path) -> None:
        """Print what the first rank in ``folder`` writes from now on."""
        self.show()
        for ending in ("out", "err"):
            self._files[replica, ending] = folder / f"rank_0.{ending}", 0

    def show(self) -> None:
        """Print what is new."""
        for (replica, ending), (path, begin) in list(self._files.items()):
            stream = sys.stdout if ending == "out" else sys.stderr
            self._files[replica, ending] = path, print_new(path, begin, stream)


def _write(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is None:
        raise RuntimeError("A spare process is given its rank by its standard input.")
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
