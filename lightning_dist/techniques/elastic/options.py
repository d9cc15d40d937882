"""Define the option of replicas that leave and join a run while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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

    Raises:
        ValueError: If it is no range of numbers of replicas.
    """

    elastic: str | None = argument(None, only_with="dp_replicate")

    is_for_training = True

    def __post_init__(self) -> None:
        if self.elastic is not None:
            ReplicaRange.parse(str(self.elastic))

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
        """Refuse manual optimization, whose steps need not all be alike."""
        if self.replicas is not None and not fit.is_automatic:
            raise ValueError(
                f"elastic={str(self.replicas)!r} with automatic_optimization = False in {fit.module}: replicas agree"
                " once in each step on whether it counts. Use automatic optimization, or leave elastic out."
            )

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether replicas may leave and join."""
        return self.replicas is not None

    def check_comparison(self) -> None:
        """Refuse a comparison with one process, which has no replicas that leave and join."""
        if self.replicas is not None:
            raise ValueError(
                "With elastic, gradients are those of the replicas that take part in a step: check the strategy"
                " without it."
            )

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the range of the number of replicas."""
        return {"elastic": None if self.replicas is None else str(self.replicas)}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique, if this process has joined a run of several replicas."""
        membership = current_membership()
        if membership is not None and build.copied is None:
            yield ElasticReplicas(membership, build.precision.reduce_dtype)
