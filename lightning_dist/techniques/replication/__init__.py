"""Run data parallelism without sharding, also for layers that are split over ``tp``.

- ``bucket``: All-reduces gradients in buckets.
- ``group``: Manages the parameters of a unit.
- ``replicated``: Implements the technique.
"""

from lightning_dist.techniques.replication.replicated import Replication

__all__ = ["Replication"]
