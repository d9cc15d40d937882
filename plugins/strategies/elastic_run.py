"""Let a replica join a run that trains, divide data among all replicas, and let one of them log and save."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_dist.mesh.membership import BehindError, Membership, MembershipOptions, join, leave
from lightning_dist.mesh.replica_range import COORDINATOR, ReplicaRange
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks.noise_scale import GradientNoiseScale
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.logged_runs import continue_logging, runs_of
from lightning_dist.plugins.strategies.run_checkpoints import RunCheckpoints

__all__ = ["RUNNING_REPLICA", "ElasticRun"]

RUNNING_REPLICA = "another replica of this run"
"""What a run resumes from, in place of the path of a checkpoint, if it joins others that train already."""

_GRACE_S = 10.0
"""Seconds for which a reduction waits for another replica before it is repeated, possibly without that one."""


def _do_nothing() -> None:
    pass


class ElasticRun:
    """Take part in a run whose replicas leave and join; do nothing in any other run.

    Args:
        host: The strategy of the run.
        checkpoints: Object that makes the state that another replica is given, and loads it.
    """

    def __init__(self, host: Host, checkpoints: RunCheckpoints) -> None:
        self._host = host
        self._checkpoints = checkpoints
        self._membership: Membership | None = None
        self._was_leader = True
        self._restore_accumulation: Callable[[], None] = _do_nothing
        self.num_taken_over = 0
        """The number of steps whose result this replica has taken over from others."""

    @property
    def is_leader(self) -> bool:
        """Return whether this process's replica logs and writes checkpoints, or did so when it left the run."""
        return self._was_leader if self._membership is None else self._membership.is_leader

    @property
    def members(self) -> tuple[int, ...]:
        """Return the indices of the replicas that take part in the current step; empty in any other run."""
        return () if self._membership is None else self._membership.members

    @property
    def leader(self) -> int:
        """Return the index of the replica that logs and writes checkpoints."""
        return 0 if self._membership is None else self._membership.leader

    @property
    def lost_s(self) -> float:
        """Return the seconds that this rank has lost by replicas that have left."""
        return 0.0 if self._membership is None else self._membership.lost_s

    @property
    def joins_others(self) -> bool:
        """Return whether this replica continues from the state of one that trains already."""
        return self._membership is not None and self._membership.received is not None

    def join(self) -> None:
        """Join the run as the launcher has said, once the ranks of this replica communicate. This is a collective.

        Raises:
            ConnectionError: If the coordinator cannot be reached.
            ModuleNotFoundError: If torchft is not installed.
            ValueError: If no launcher has said which replica this is.
        """
        self.leave()
        leave()  # A fit of another strategy in this process may have joined a run.
        self._was_leader = True
        _compat.set_rank_zero(self._host.global_rank)
        replicas = ReplicaRange.asked(self._host.config.arguments["elastic"])
        if replicas is None or self._host.trainer.state.fn != TrainerFn.FITTING:
            return
        self._refuse_callbacks(self._host.trainer)
        options = MembershipOptions(
            index=replicas.own_index(),
            smallest=replicas.smallest,
            largest=replicas.largest,
            coordinator=os.environ[COORDINATOR],
            timeout=timedelta(seconds=_GRACE_S),
        )
        self._membership = membership = join(
            options, self._host.root_device, self._fingerprint(), self._checkpoints.to_replica, self._say
        )
        membership.on_change = self._follow_leader
        self._set_leader()
        if self._host.config.arguments["elastic_batch"] == "fixed":
            self._restore_accumulation = _compat.change_accumulation(self._host.trainer, self._begin_step)

    def _begin_step(self) -> int:
        """Find out which replicas take part in the coming step, and return how many batches each has in it."""
        membership = self._membership
        if membership is None:
            raise RuntimeError("This run has no other replicas.")
        membership.begin_step()
        replicas = ReplicaRange(membership.options.smallest, membership.options.largest)
        return replicas.num_batches(_compat.configured_accumulation(self._host.trainer), len(membership.members))

    def leave(self) -> None:
        """Leave the run at its end."""
        if self._membership is not None:
            self._was_leader = self._membership.is_leader
            leave()
            self._membership = None
            self._restore_accumulation()
            self._restore_accumulation = _do_nothing

    def check(self) -> None:
        """Refuse schedules that follow a metric, and optimizers whose states cannot be sent to a replica that joins.

        Raises:
            MisconfigurationException: If there is such a schedule or optimizer.
        """
        if self._membership is None:
            return
        if self._checkpoints.has_owners_of_states and self._host.world_size > 1:
            raise MisconfigurationException(
                "elastic with optimizers that step on whole parameters (see optimizer_step): each of their states is on"
                " one rank, and is not sent to a replica that joins. Use optimizer_step='shards' if the optimizer"
                " allows it, or one rank for each replica."
            )
        for config in self._host.trainer.strategy.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                raise MisconfigurationException(
                    "elastic with ReduceLROnPlateau: each replica computes metrics of its own, so that their learning"
                    " rates would differ. Use a schedule over steps."
                )

    def _fingerprint(self) -> dict[str, str]:
        """Return what must be the same on all replicas."""
        arguments = self._host.config.arguments
        return {
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning-dist": version("lightning-dist"),
            "strategy": self._host.strategy_name,
            "layout": str(self._host.layout),
            "seed_everything": os.environ.get("PL_GLOBAL_SEED", "false"),
            **{name: str(arguments[name]) for name in arguments if arguments.is_given(name)},
        }

    def _refuse_callbacks(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, GradientNoiseScale) for callback in callbacks):
            raise MisconfigurationException(
                "elastic with GradientNoiseScale: it sees the gradients of one replica only. Leave the callback out."
            )
        keeps_batch = self._host.config.arguments["elastic_batch"] == "fixed"
        if keeps_batch and any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
            raise MisconfigurationException(
                "elastic_batch='fixed' with StochasticWeightAveraging: both change accumulate_grad_batches. Leave one"
                " of the two out."
            )
        if any(isinstance(callback, EarlyStopping) for callback in callbacks):
            raise MisconfigurationException(
                "elastic with EarlyStopping: each replica computes metrics of its own, so that only some of them would"
                " stop. Leave the callback out, and set max_steps or max_epochs."
            )

    # Data

    def share(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the number of parts of the training data and the index of this rank's part, over all replicas.

        Each replica has parts of its own, whether the others are there or not.

        Args:
            kwargs: The same inside this replica.
        """
        if self._membership is None or not self._host.trainer.training:
            return kwargs
        options, size = self._membership.options, kwargs["num_replicas"]
        return {"num_replicas": size * options.largest, "rank": options.index * size + kwargs["rank"]}

    def on_train_start(self) -> None:
        """Let the other replicas know to which run this one logs, so that they can log to it when it has left."""
        if self._membership is not None and not self._membership.notes and self.is_leader:
            self._membership.notes = runs_of(self._host.trainer)

    def process_dataloader(self, dataloader: object) -> None:
        """Let workers of the loaders of different replicas draw different random numbers.

        Warn if a training loader is not divided among the replicas, as far as this is known.
        """
        if self._membership is None:
            return
        trainer, layout = self._host.trainer, self._host.layout
        first = self._membership.options.index * layout.num_data_parallel
        _compat.seed_workers_by(dataloader, first + layout.data_parallel_rank(self._host.global_rank))
        sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
        parts = layout.num_data_parallel * self._membership.options.largest
        if trainer.training and getattr(sampler, "num_replicas", None) != parts:
            rank_zero_warn(
                f"elastic: the training loader ({type(dataloader).__name__}) divides its samples itself. It must divide"
                f" them into {parts} parts by trainer.distributed_sampler_kwargs, because trainer.world_size counts the"
                " ranks of one replica; otherwise all replicas train on the same samples."
            )

    # The state that a replica is given that joins

    def load(self) -> dict[str, Any]:
        """Return the state that another replica has sent, as the dictionary of a checkpoint that Lightning restores."""
        if self._membership is None:
            raise RuntimeError("This run has no other replicas.")
        return self._checkpoints.from_replica(self._membership.take_received(), self._host.groups.mesh)

    def catch_up(self) -> bool:
        """Take over weights and optimizer states if the others have counted the running step without this replica.

        A replica that was lost in the middle of a reduction can leave some with the means of all gradients, and some
        without. This is a collective over the ranks of this replica.

        Returns:
            Whether the optimizer must not step, because the weights are those after its step.

        Raises:
            BehindError: If the others have counted more steps than the running one.
        """
        if self._membership is None or not self._membership.is_behind:
            return False
        state, next_step = self._membership.take_received(), self._host.trainer.global_step + 1
        if state["checkpoint"]["global_step"] != next_step:
            raise BehindError(
                f"Replica {self._membership.options.index} is at step {next_step}, and the others have counted"
                f" {state['checkpoint']['global_step']}. It must be started again to join them, as lightning-dist"
                " launch --elastic does."
            )
        self._checkpoints.take_over(state, self._host.groups.mesh)
        self.num_taken_over += 1
        if self._host.global_rank == 0:
            index, step = self._membership.options.index, self._host.trainer.global_step + 1
            print(
                f"elastic: Replica {index} takes over the weights after step {step}, which the others have counted, and"
                " which it has not.",
                file=sys.stderr,
                flush=True,
            )
        return True

    # Who logs and saves

    def _follow_leader(self) -> None:
        if self.is_leader != self._was_leader:
            self._set_leader()

    def _set_leader(self) -> None:
        """Let only the replica that leads log, print and write checkpoints."""
        self._was_leader = self.is_leader
        rank = self._host.global_rank
        if not self.is_leader:
            rank += self._host.world_size
        _compat.set_rank_zero(rank)
        if self._membership is not None and self.is_leader:
            continue_logging(self._host.trainer, self._membership.notes, self._host.trainer.global_step)

    def _say(self, text: str) -> None:
        # A replica that waits may have lost the one that leads.
        is_waiting = self._membership is not None and self._membership.is_waiting
        if self._host.global_rank == 0 and (self.is_leader or is_waiting):
            print(f"elastic: {text}", file=sys.stderr, flush=True)
