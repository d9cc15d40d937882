"""Test that decisions of DTensor that a worker keeps from earlier runs use the process groups of the current run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, debug, distribute_tensor

from tests.pool import WorkerPool


def summed(num_other_groups: int, flattens: bool) -> tuple[float, list[str], int]:
    """Sum a tensor that is sharded over two axes.

    Returns:
        The sum, the names of the mesh's process groups, and the number of decisions that were not in the cache.
    """
    dist.init_process_group("gloo")
    _, before = debug._get_fast_path_sharding_prop_cache_stats()
    for rank in range(num_other_groups):  # A collective of another group than meant would wait or have another sum.
        dist.new_group([rank])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if flattens:
        mesh._flatten("ab")
    tensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0), Shard(1)])
    total = (tensor + tensor).sum().full_tensor()
    names = [mesh.get_group(axis).group_name for axis in range(2)]
    return float(total), names, debug._get_fast_path_sharding_prop_cache_stats()[1] - before


def test_decisions_are_kept_only_for_meshes_whose_process_groups_have_the_same_names(pool: WorkerPool) -> None:
    runs = ((0, False), (0, False), (3, False), (0, True), (3, True), (0, False))
    names, num_decided = {}, []
    for num_other_groups, flattens in runs:
        ranks = pool.run(summed, 4, num_other_groups, flattens)
        assert [total for total, *_ in ranks] == [2 * sum(range(8))] * 4
        _, names[num_other_groups], decided = ranks[0]
        num_decided.append(decided)
    assert names[0] != names[3]
    assert num_decided[1] == num_decided[-1] == 0
    assert min(num_decided[2:5]) > 0
