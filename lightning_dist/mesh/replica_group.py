"""Make a process group over the replicas of a run, which is made again when other replicas take part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch

__all__ = ["make_replica_group"]

_NAME = "name of the group"
"""The key of the store under which the first rank of a group writes its name."""


def make_replica_group(device: torch.device, timeout: timedelta) -> Any:
    """Return a process group over replicas, which can be made again for others.

    Its attribute ``ranks`` has the ranks in it.
    """
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, create_store_client

    base: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo

    class ReplicaGroup(base):  # type: ignore[misc]
        """Keep the ranks over which the group communicates, and give each group a name of its own."""

        ranks: Sequence[int] = ()
        first: Any = None

        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *others: Any) -> None:
            """Make the group again over the replicas that take part now."""
            self.ranks = others[-1]
            address = f"{store_addr}/{self.name_of(store_addr, rank)}"
            super().configure(address, replica_id, rank, world_size, *others)

        def name_of(self, store_addr: str, rank: int) -> str:
            """Return a name that the ranks have used for no group before, which the first of them chooses.

            Torchft numbers the groups. A coordinator that was started again begins with the first number, under which
            the store still has the addresses of an earlier group.
            """
            if self.first is not None:
                with suppress(Exception):  # The store may be gone with its replica.
                    self.first.delete_key(_NAME)
            self.first = None
            store = create_store_client(store_addr, timeout=timeout)
            if rank:
                return str(store.get(_NAME).decode())
            self.first, name = store, uuid4().hex
            store.set(_NAME, name)
            return name

    return ReplicaGroup(timeout=timeout)
