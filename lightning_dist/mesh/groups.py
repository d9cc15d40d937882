"""Hold the device mesh of a run and the process groups that follow from its layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.mesh.layout import ParallelLayout

__all__ = ["MeshGroups"]


@dataclass(frozen=True)
class MeshGroups:
    """Hold the mesh and the groups of ranks that communicate with each other.

    Args:
        mesh: The device mesh, with one dimension for each axis of the layout.
        data_parallel: The ranks with different parts of the batch, one for each part; None: all ranks.
        same_batch: The ranks with the same part of the batch as this one; None: there are no others.
        same_stage: The ranks with the same stages of a pipeline as this one; None: all ranks.
        stage_to_stage: The ranks of a pipeline, for sends between its stages; None: there is no pipeline.
        context: The ranks that share the sequences of a batch; None: sequences are not split.
    """

    mesh: DeviceMesh
    data_parallel: dist.ProcessGroup | None
    same_batch: dist.ProcessGroup | None
    same_stage: dist.ProcessGroup | None
    stage_to_stage: dist.ProcessGroup | None
    context: dist.ProcessGroup | None

    @classmethod
    def build(cls, layout: ParallelLayout, device_type: str) -> MeshGroups:
        """Build the mesh and the groups of ``layout``. This is a collective over all processes.

        Args:
            layout: The sizes of the mesh's axes.
            device_type: Type of the device of each rank.
        """
        return cls(
            mesh=layout.build_mesh(device_type),
            data_parallel=layout.build_data_parallel_group(),
            same_batch=layout.build_same_batch_group(),
            same_stage=layout.build_same_stage_group(),
            stage_to_stage=layout.build_stage_to_stage_group(),
            context=layout.build_context_group(),
        )
