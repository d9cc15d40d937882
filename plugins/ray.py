"""Let the workers of Ray Train be ranks, and run trainings on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from lightning_dist.run.ray_nodes import Nodes, run_nodes

__all__ = ["Nodes", "as_rank", "devices_and_nodes", "run_nodes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_rank(train_func: _Function) -> _Function:
    """Return a function for ``ray.train.torch.TorchTrainer``, in whose workers each Trainer runs as one rank.

    The Trainer finds its ranks and addresses as under torchrun. ``prepare_trainer`` of Ray, which knows only Ray's own
    strategies, must not be called.

    Args:
        train_func: A function that trains, with or without Ray's ``config`` as its argument.

    Returns:
        The function. It raises RuntimeError if Ray has placed other numbers of workers on some nodes than on others.
    """

    @wraps(train_func)
    def run(*config: Any) -> Any:
        context = ray.train.get_context()
        here, first = context.get_local_world_size(), broadcast_from_rank_zero(context.get_local_world_size())
        if here != first:
            raise RuntimeError(
                f"Ray has placed {here} workers on the node of rank {context.get_world_rank()}, and {first} on that of"
                " rank 0. Every node must have as many: choose num_workers, and resources_per_worker, so that they"
                " fill nodes evenly."
            )
        os.environ["GROUP_RANK"] = str(context.get_node_rank())
        os.environ["TORCHELASTIC_RUN_ID"] = "ray"  # Lightning then reads the ranks that Ray has set.
        return train_func(*config)

    return run  # type: ignore[return-value]


def devices_and_nodes() -> dict[str, int]:
    """Return the Trainer's arguments ``devices`` and ``num_nodes`` in a worker of Ray, to be passed by ``**``."""
    context = ray.train.get_context()
    here = context.get_local_world_size()
    return {"devices": here, "num_nodes": context.get_world_size() // here}
