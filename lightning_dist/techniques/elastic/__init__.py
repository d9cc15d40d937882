"""Let replicas of the model leave a run and join it while it trains.

Each replica is a job of its own, with its own processes, process groups and mesh. A coordinator, torchft's lighthouse,
tells the replicas before each step which of them take part (:mod:`lightning_dist.mesh.membership`).

- ``options``: Defines the argument ``elastic``, and what cannot be combined with it.
- ``elastic``: Averages the gradients of replicas, and repeats what a lost one has spoilt.
"""

from lightning_dist.techniques.elastic.options import ElasticOptions

__all__ = ["ElasticOptions"]
