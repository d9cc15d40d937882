"""Know which replicas of a run take part in a step, and reduce tensors over them."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist._compat.replicas import forget_error
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.mesh.replica_group import make_replica_group

if TYPE_CHECKING:
    from torchft import Manager

__all__ = [
    "BehindError",
    "Membership",
    "MembershipOptions",
    "current_membership",
    "join",
    "leave",
]

_REMINDER_S = 60.0
"""Seconds after which a replica says that it still waits for others."""

_CONNECT_S = 10.0
"""Seconds for which a replica tries to reach the coordinator."""

_RETRIES = 1_000_000
"""How often torchft connects again to a coordinator that has ended; otherwise it uses the lost connection for ever."""

_TRANSFER_S = 600.0
"""Seconds that the state of a run may take to a replica that joins."""

_SENDER_S = 60.0
"""Seconds for which a replica waits for one that is to send its state, and sends nothing."""

_SHRINK_S = 10.0
"""Seconds after which a replica whose reduction has failed also goes on with others than those of that reduction.

The coordinator may have forgotten them, and would otherwise never let this replica take part again.
"""

_NOTES_BYTES = 4096

_POLL_S = 0.1
"""Seconds between two questions for the replicas that are there, before the run begins."""


class BehindError(RuntimeError):
    """Report that the other replicas have counted a step that this one has not, so that it must join them again."""


@dataclass(frozen=True)
class MembershipOptions:
    """Say which replica this process belongs to, and which replicas there are.

    Args:
        index: Index of this replica, from 0.
        smallest: The number of replicas below which the run waits.
        largest: The number of replicas that the data are divided among.
        coordinator: Address of torchft's lighthouse, such as ``"http://node1:29510"``.
        timeout: Time for which a reduction waits for another replica that neither answers nor has ended.
    """

    index: int
    smallest: int
    largest: int
    coordinator: str
    timeout: timedelta = timedelta(seconds=10)


class _QuietRequestHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Membership:
    """Take part in a run of several replicas. Creating an instance is a collective over the ranks of the replica.

    Every rank of a replica communicates with those ranks of the other replicas that have the same number.

    Args:
        options: Which replica this is.
        device: The device on which tensors are reduced.
        fingerprint: What must be the same on all replicas, by names for an error.
        state: Function that returns the state of this rank, which a replica that joins is given. It is called by
            another thread while :meth:`begin_step` waits, and no collective.
        say: Function that prints a sentence.
    """

    def __init__(
        self,
        options: MembershipOptions,
        device: torch.device,
        fingerprint: Mapping[str, str],
        state: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # Otherwise torchft writes several lines in each step.
        # Torchft logs each reduction that fails with its traceback; what has happened is said in one sentence below.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        self.options = options
        self._fingerprint = dict(fingerprint)
        self.device = device
        """The device on which tensors are reduced."""
        self.members: tuple[int, ...] = ()
        """The indices of the replicas that take part in this step."""
        self.leader = 0
        """The index of the replica that logs and writes checkpoints."""
        self.lost_s = 0.0
        """Seconds that this rank has spent on reductions which failed, and on steps that waited for a replica."""
        self.received: dict[str, Any] | None = None
        """The state that another replica has sent when this one joined; None: all begin together."""
        self.notes: dict[str, str] = {}
        """What the leader lets the others know about the run."""
        self.is_waiting = False
        """Whether this replica waits for others, or for the coordinator."""
        self.has_joined = False
        """Whether :meth:`join` has ended."""
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called when other replicas take part than in the step before."""
        self._say = say
        self._state = state
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._fingerprint_of_leader: dict[str, str] = {}
        self._is_in_quorum = self._has_received_again = False
        self._group = make_replica_group(device, options.timeout)
        self._manager = self._make_manager()

    def _make_manager(self) -> Manager:
        """Connect to the coordinator. This is a collective over the ranks of this replica.

        Raises:
            ConnectionError: If it cannot be reached.
        """
        from torchft import Manager
        from torchft.checkpointing import http_transport

        # Otherwise torchft prints a line for each replica that it sends a state to.
        http_transport.BaseHTTPRequestHandler = _QuietRequestHandler
        host, port, self._store = _make_store(self._rank)

        base: Any = http_transport.HTTPTransport

        class StateTransport(base):  # type: ignore[misc]
            """Give up a replica that does not begin to send its state, or stops, because others may have it as well."""

            def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
                """Receive the state of another replica."""
                return super().recv_checkpoint(src_rank, metadata, step, timedelta(seconds=_SENDER_S))

        try:
            return Manager(
                pg=self._group,
                load_state_dict=self._receive,
                state_dict=self._send,
                min_replica_size=1,  # The coordinator knows how many there must be.
                use_async_quorum=False,  # Parameters are not gathered while another replica reads them.
                timeout=timedelta(seconds=_TRANSFER_S),
                quorum_timeout=timedelta(seconds=_REMINDER_S),
                connect_timeout=timedelta(seconds=_CONNECT_S),
                rank=self._rank,
                world_size=self._num_ranks,
                store_addr=host,
                store_port=port,
                lighthouse_addr=self.options.coordinator,
                replica_id=str(self.options.index),
                hostname=host,
                init_sync=False,
                quorum_retries=_RETRIES,
                checkpoint_transport=StateTransport(timeout=timedelta(seconds=_TRANSFER_S), num_chunks=0),
            )
        except Exception as error:
            raise ConnectionError(
                f"The coordinator at {self.options.coordinator} cannot be reached: {error}. lightning-dist launch"
                " --elastic starts it; check that it runs, and that this node reaches its port."
            ) from error

    # Joining and leaving

    def join(self) -> None:
        """Wait until all replicas are there, or receive the state of the run if it has begun without this one.

        Raises:
            ValueError: If this replica runs other code, or with other settings, than the one that leads.
        """
        self._find_members()
        while self._manager.errored():  # The replica that was to send its state has left.
            self._find_members()
        while self.received is None and len(self.members) < self.options.largest:
            time.sleep(_POLL_S)
            self._find_members()
        theirs = self._fingerprint_of_leader if self.received is not None else self._share_json(self._fingerprint)
        for name, value in self._fingerprint.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"Replica {self.options.index} has {name}={value}, and replica {self.leader}, which leads, has"
                    f" {theirs.get(name)}. Start all replicas with the same code and settings."
                )
        self.has_joined = True

    def begin_step(self) -> None:
        """Find out which replicas take part in the coming step.

        Raises:
            BehindError: If the others have counted a step that this replica has not.
        """
        if self._is_in_quorum:  # This is the first step, or the last one was not reduced, as in manual accumulation.
            return
        begin, before = time.perf_counter(), self.members
        self._find_members()
        if set(before) - set(self.members):
            self.lost_s += time.perf_counter() - begin
        self._refuse_to_fall_behind()

    def _refuse_to_fall_behind(self) -> None:
        if self._has_received_again:
            raise BehindError(
                f"Replica {self.options.index} has missed a step that the others have counted. It must be started again"
                " to join them, as lightning-dist launch --elastic does."
            )

    @property
    def is_behind(self) -> bool:
        """Return whether the others have counted a step that this replica has not, and have sent their state."""
        return self._has_received_again

    def take_received(self) -> dict[str, Any]:
        """Return the state that another replica has sent, once.

        Raises:
            RuntimeError: If none has been sent.
        """
        if self.received is None:
            raise RuntimeError("No other replica has sent the state of the run.")
        state, self.received = self.received, {}
        self._has_received_again = False
        return state

    def close(self) -> None:
        """Leave the run."""
        self._manager.shutdown(wait=False)
        self._group.abort()

    @property
    def is_leader(self) -> bool:
        """Return whether this replica logs and writes checkpoints."""
        return self.leader == self.options.index

    # Reductions

    def average(self, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return means over the replicas that take part; if one is lost meanwhile, those over the remaining ones.

        This is a collective over the ranks of this replica, and over the same ranks of the others.

        Args:
            make: Function that returns new tensors of floating point numbers, which are overwritten.

        Raises:
            BehindError: If another replica had all means before one was lost, and this one had not. The state that the
                other one has with them has been received.
        """
        return self._reduce(make, dist.ReduceOp.AVG)

    def share(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors of the leader on all replicas. This is a collective like :meth:`average`.

        Args:
            tensors: This replica's tensors, of the same shapes on all replicas.
        """

        def make() -> list[Tensor]:
            return [_as_bytes(tensor) if self.is_leader else torch.zeros_like(_as_bytes(tensor)) for tensor in tensors]

        shared = self._reduce(make, dist.ReduceOp.SUM)
        return [_from_bytes(found, tensor) for found, tensor in zip(shared, tensors, strict=True)]

    def share_notes(self) -> None:
        """Give all replicas the notes of the leader. This is a collective like :meth:`average`."""
        self.notes = self._share_json(self.notes)

    def _share_json(self, values: Mapping[str, str]) -> dict[str, str]:
        text = json.dumps(values).encode().ljust(_NOTES_BYTES)
        (shared,) = self.share([torch.tensor(list(text), dtype=torch.uint8, device=self.device)])
        found: dict[str, str] = json.loads(bytes(shared.tolist()))
        return found

    def _reduce(self, make: Callable[[], Sequence[Tensor]], operation: Any) -> Sequence[Tensor]:
        while True:
            begin = time.perf_counter()
            tensors = make()
            running = [self._manager.allreduce(tensor, reduce_op=operation) for tensor in tensors]
            while running:
                running.pop(0).wait()
                if (error := self._manager.errored()) is not None:
                    # Replicas that wait for this one, and not for the lost one, fail once the connections are closed,
                    # which they are when nothing holds the reductions any more.
                    error.original_exception.with_traceback(None)
                    running.clear()
                    self._group.abort()
            is_counted = self._manager.should_commit()
            self._is_in_quorum = False
            if is_counted:
                return tensors
            before = self.members
            self._find_members(may_grow=False)
            self._refuse_to_fall_behind()
            self.lost_s += time.perf_counter() - begin
            if self.members != before:
                self._say("The gradients of this step are reduced again, so that it is not lost.")

    def _find_members(self, may_grow: bool = True) -> None:
        """Ask the coordinator which replicas take part, and let the process group be made again if they are others."""
        before, begin, next_reminder_s = self.members, time.monotonic(), 0.0
        self.is_waiting = True
        while True:
            try:
                with warnings.catch_warnings():  # Torch reads the state of another replica without a copy.
                    warnings.filterwarnings("ignore", "The given buffer is not writable")
                    self._manager.start_quorum(
                        shrink_only=not may_grow, timeout=timedelta(seconds=_REMINDER_S if may_grow else _SHRINK_S)
                    )
                break
            except (TimeoutError, RuntimeError) as error:  # Too few replicas are there, or nobody answers.
                forget_error(self._manager)
                if not may_grow:
                    may_grow = True
                    continue
                waited_s = time.monotonic() - begin
                if waited_s >= next_reminder_s:
                    next_reminder_s = waited_s + _REMINDER_S
                    self._say(
                        f"Replica {self.options.index} has waited for {waited_s:.0f} s until at least"
                        f" {self.options.smallest} of {self.options.largest} replicas are there ({_first_line(error)})."
                    )
                time.sleep(_POLL_S)
        self.is_waiting = False
        self._is_in_quorum = True
        self.members = tuple(sorted({rank // self._num_ranks for rank in self._group.ranks}))
        if self._manager.num_participants() != len(self.members) and self._manager.errored() is None:
            # A coordinator that was started again gives the numbers of earlier groups to others, which torchft takes
            # for the same groups.
            self._manager.report_error(RuntimeError("The group is one of other replicas."))
        is_founding = not self.has_joined and self.received is None
        if is_founding or self.leader not in self.members:
            self.leader = self.members[0]
        if before and self.members != before and self.has_joined:
            self.on_change()
            self._announce(before)

    def _announce(self, before: tuple[int, ...]) -> None:
        new, lost = sorted(set(self.members) - set(before)), sorted(set(before) - set(self.members))
        changes = [f"{_replicas(some)} {verb}" for some, verb in ((new, "joined"), (lost, "left")) if some]
        self._say(
            f"{' and '.join(changes)}: {len(self.members)} of {self.options.largest} replicas train on, and replica"
            f" {self.leader} logs and writes checkpoints."
        )

    # The state of a run

    def _send(self) -> dict[str, Any]:
        about = {"leader": self.leader, "notes": self.notes, "fingerprint": self._fingerprint}
        return {**about, "run": self._state()}

    def _receive(self, state: dict[str, Any]) -> None:
        self._has_received_again = self.has_joined
        self.leader, self.notes = state["leader"], state["notes"]
        self._fingerprint_of_leader = state["fingerprint"]
        self.received = state["run"]


_current: Membership | None = None


def join(
    options: MembershipOptions,
    device: torch.device,
    fingerprint: Mapping[str, str],
    state: Callable[[], dict[str, Any]],
    say: Callable[[str], None],
) -> Membership:
    """Join the run of which ``options`` speaks, and return this process's part in it (see :class:`Membership`).

    A process that runs a second fit leaves the run of the first one.

    Raises:
        ConnectionError: If the coordinator cannot be reached.
        ModuleNotFoundError: If torchft is not installed; the text says how to install it.
    """
    global _current
    leave()
    try:
        _current = Membership(options, device, fingerprint, state, say)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Replicas that leave and join need torchft, which is not installed: pip install 'lightning-dist[elastic]'.",
            name=error.name,
        ) from error
    _current.join()
    return _current


def leave() -> None:
    """Leave the run that this process has joined, if there is one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def current_membership() -> Membership | None:
    """Return this process's part in a run of several replicas; None: it has joined none."""
    return _current


def _replicas(indices: Sequence[int]) -> str:
    names = [str(index) for index in indices]
    return f"Replica {names[0]}" if len(names) == 1 else f"Replicas {', '.join(names[:-1])} and {names[-1]}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _make_store(rank: int) -> tuple[str, int, object]:
    """Return the address of a store for the ranks of this replica, and on rank 0 the store. This is a collective."""
    store, address = None, ("", 0)
    if rank == 0:
        host = socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = host, store.port
    if dist.is_initialized():
        address = broadcast_object(address, source=0)
    return *address, store


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes, whose sum with zeros is exact in every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def _from_bytes(found: Tensor, like: Tensor) -> Tensor:
    return found.view(like.dtype).view(like.shape)
