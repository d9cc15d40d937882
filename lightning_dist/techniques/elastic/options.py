"""Define the option of replicas that leave and join a run while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.mesh.membership import current_membership
from lightning_dist.mesh.replica_range import ReplicaRange
from lightning_dist.techniques.elastic.elastic import ElasticReplicas
from lightning_dist.techniques.options import Arguments, Build, Fit, Run, TechniqueOptions, argument
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["ElasticOptions"]


@dataclass(frozen=True)
class ElasticOptions(TechniqueOptions):
    """Choose whether replicas may leave and join the run while it trains.

    Args:
        elastic: Between which numbers of replicas the run trains, such as ``"2:3"``. Each replica is a job of its own,
            and ``lightning-dist launch --elastic 2:3`` starts them. None: as that command says, or all processes train
            from the first step to the last.
        elastic_batch: What the global batch is while replicas are away. ``"scaled"``: that of those that take part.
            ``"fixed"``: always the same, because the others accumulate as many batches more in each step.

    Raises:
        ValueError: If it is no range of numbers of replicas, or no such word.
    """

    elastic: str | None = argument(None, only_with="dp_replicate")
    elastic_batch: Literal["scaled", "fixed"] = argument("scaled", only_with="dp_replicate")

    is_for_training = True

    def __post_init__(self) -> None:
        if self.elastic is not None:
            ReplicaRange.parse(str(self.elastic))
        if self.elastic_batch not in ("scaled", "fixed"):
            raise ValueError(f"elastic_batch={self.elastic_batch!r}: expected 'scaled' or 'fixed'.")

    @property
    def replicas(self) -> ReplicaRange | None:
        """Return between which numbers of replicas the run trains; None: replicas neither leave nor join."""
        return ReplicaRange.asked(self.elastic)

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse what splits the model in other ways than over shards, and what reduces gradients in another way.

        Raises:
            ValueError: If elastic cannot be combined with the layout or with another argument.
        """
        replicas = self.replicas
        if replicas is None:
            if arguments.is_given("elastic_batch"):
                raise ValueError(
                    f"elastic_batch={self.elastic_batch!r} without elastic: no replica is ever away. Leave it out, or"
                    " start the run by lightning-dist launch --elastic MIN:MAX."
                )
            return
        asked = f"elastic={str(replicas)!r} with strategy {run.strategy!r}"
        layout = run.layout
        for axis, what in (("pp", "pipelines"), ("tp", "tensor parallelism"), ("cp", "context parallelism")):
            if getattr(layout, axis) > 1:
                raise ValueError(
                    f"{asked} on {layout}: replicas that leave and join are not supported with {what}. Leave elastic"
                    f" out, or set {axis}_size=1 (data_parallel or hybrid_shard)."
                )
        if layout.ep > 1:
            raise ValueError(
                f"{asked} on {layout}: distributed experts are not supported. Leave elastic out, or use ep_size=1."
            )
        reasons = {
            "compression": "gradients are reduced between replicas as they are",
            "sync": "replicas reduce their gradients in every step",
            "step_in_backward": "gradients are reduced between replicas when the backward has ended",
            "offload": "a replica that joins is given the states of optimizers from the device",
            "check_replicas_every_n_steps": "only the replicas of one job would be compared",
        }
        for name, reason in reasons.items():
            if arguments.is_given(name):
                raise ValueError(f"{asked} and {name}={str(arguments[name])!r}: {reason}. Leave {name} or elastic out.")

    def check_fit(self, run: Run, fit: Fit, arguments: Arguments) -> None:
        """Refuse manual optimization, whose steps need not all be alike, and batches that cannot stay the same."""
        replicas = self.replicas
        if replicas is None:
            return
        if not fit.is_automatic:
            raise ValueError(
                f"elastic={str(replicas)!r} with automatic_optimization = False in {fit.module}: replicas agree"
                " once in each step on whether it counts. Use automatic optimization, or leave elastic out."
            )
        if self.elastic_batch == "fixed":
            self._check_accumulation(replicas, fit)

    def _check_accumulation(self, replicas: ReplicaRange, fit: Fit) -> None:
        asked = f"elastic_batch='fixed' with elastic={str(replicas)!r}"
        if fit.changes_accumulation:
            raise ValueError(
                f"{asked} and a GradientAccumulationScheduler: both change accumulate_grad_batches. Leave one out."
            )
        smallest, largest = replicas
        if fit.accumulate_grad_batches % replicas.divisor:
            raise ValueError(
                f"{asked} and accumulate_grad_batches={fit.accumulate_grad_batches}: the batches of a step cannot be"
                f" divided among {smallest} to {largest} replicas. Use a multiple of {replicas.divisor}, with batches"
                " that are smaller by as much, or elastic_batch='scaled'."
            )

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether replicas may leave and join."""
        return self.replicas is not None

    def memory_traits(self, device: torch.device) -> Mapping[str, bool]:
        """Return that gradients are copied: they are kept until all replicas have agreed on their means."""
        return {"copies_gradients": self.replicas is not None}

    def check_comparison(self) -> None:
        """Refuse a comparison with one process, which has no replicas that leave and join."""
        if self.replicas is not None:
            raise ValueError(
                "With elastic, gradients are those of the replicas that take part in a step: check the strategy"
                " without it."
            )

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the range of the number of replicas, and what the global batch is while some are away."""
        if self.replicas is None:
            return {"elastic": None}
        return {"elastic": str(self.replicas), "elastic_batch": self.elastic_batch}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique, if this process has joined a run of several replicas."""
        membership = current_membership()
        if membership is not None and build.copied is None:
            yield ElasticReplicas(membership, build.precision.reduce_dtype, self.elastic_batch == "fixed")
