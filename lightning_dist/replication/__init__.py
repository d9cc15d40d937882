"""Data parallelism where nothing is sharded; also of layers that are split over ``tp``.

- ``bucket``: gradients are all-reduced in buckets;
- ``group``: what manages the parameters of a unit;
- ``replicated``: the technique.
"""

from lightning_dist.replication.replicated import Replication

__all__ = ["Replication"]
