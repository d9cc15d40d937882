"""Test that tensors written in one layout are read in any other, and that the ranks share the writing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_dist.checkpoint import CheckpointError, read_for_rank, read_manifest, take_snapshot, write
from lightning_dist.checkpoint.manifest import TensorEntry
from lightning_dist.checkpoint.parts import merged
from tests.pool import WorkerPool

SHAPES = {"large": (40, 33), "uneven": (7, 3), "few": (2, 5), "empty": (0, 4), "one": (), "long": (1001,)}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "both": ((2, 2), (Shard(0), Shard(1))),
    "columns": ((4,), (Shard(1),)),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "whole": ((4,), (Replicate(),)),
}


def content() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def distributed(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, DTensor]:
    sizes, wanted = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes)
    placements = {
        name: [Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in wanted]
        for name, tensor in tensors.items()
    }
    return {
        name: distribute_tensor(tensor, mesh, placements[name], src_data_rank=None) for name, tensor in tensors.items()
    }


def read_in_all_layouts(folder: Path, saved_as: str) -> list[str]:
    """Write tensors in one layout, read them in all layouts, and return a line for each tensor that differs."""
    expected = content()
    write(folder / "run.ckpt", take_snapshot({"state": distributed(content(), saved_as)}))
    wrong = []
    for layout in LAYOUTS:
        targets = distributed({name: torch.zeros(shape) for name, shape in SHAPES.items()}, layout)
        for check in ("full", "off"):
            part = read_for_rank(
                folder / "run.ckpt",
                dist.get_rank(),
                dist.get_world_size(),
                lambda info, targets=targets: torch.full_like(targets[str(info.path[1])], torch.nan),
                check=check,
            )
            for name, tensor in expected.items():
                if not torch.equal(part.state["state"][name].full_tensor(), tensor):
                    wrong.append(f"{name} read as {layout}, check={check}")
    return wrong


@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_tensors_that_any_layout_wrote_are_read_in_every_layout(
    pool: WorkerPool, tmp_path: Path, saved_as: str
) -> None:
    assert pool.run(read_in_all_layouts, 4, tmp_path, saved_as) == [[]] * 4
    manifest = read_manifest(tmp_path / "run.ckpt")
    entries = manifest.tensors
    # No rule describes what two axes split unevenly.
    assert manifest.listed.keys() == ({"state/uneven", "state/long"} if saved_as == "rows twice" else set())
    written = {name: sum(_numel(chunk.sizes) for chunk in entries[f"state/{name}"].chunks) for name in SHAPES}
    assert written == {name: _numel(shape) for name, shape in SHAPES.items()}  # Each element was written once.


def save_replicas(folder: Path) -> None:
    tensors = {f"layer{i}.{name}": torch.ones(n, 256) for i in range(8) for name, n in (("big", 64), ("small", 8))}
    write(folder / "run.ckpt", take_snapshot({"state": distributed(tensors, "hybrid")}))


def test_replicas_write_equal_shares_of_a_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_replicas, 4, tmp_path)
    files = read_manifest(tmp_path / "run.ckpt").files
    sizes = [files[f"rank_{rank}.bin"].size for rank in range(4)]
    assert max(sizes) <= 1.15 * min(sizes)
    assert sum(sizes) == pytest.approx(8 * 72 * 256 * 4, rel=0.01)


@dataclass
class Holder:
    weight: torch.Tensor


def save_in_containers(folder: Path) -> str:
    """Save and read sharded tensors in an OrderedDict, and return the error for sharded tensors in another object."""
    tensors = distributed({"weight": torch.arange(8.0)}, "rows")
    write(folder / "run.ckpt", take_snapshot({"average": OrderedDict(tensors)}))
    part = read_for_rank(folder / "run.ckpt", dist.get_rank(), 4, lambda info: torch.empty(info.shape))
    assert type(part.state["average"]) is OrderedDict
    assert torch.equal(part.state["average"]["weight"], torch.arange(8.0))
    try:
        take_snapshot({"mine": [Holder(tensors["weight"])]})
    except TypeError as error:
        return str(error)
    return ""


def test_objects_that_hold_sharded_tensors_are_refused_instead_of_pickling_one_shard(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for error in pool.run(save_in_containers, 4, tmp_path):
        assert error.startswith("mine/0 of the checkpoint is a Holder that holds sharded tensors")


def test_a_save_that_lacks_a_part_of_a_tensor_is_refused() -> None:
    entries: list[dict[str, Any]] = [{"weight": TensorEntry((4, 2), "float32", ())}]
    with pytest.raises(CheckpointError, match="the ranks have written 0 of the 8 elements of weight"):
        merged(entries)


def _numel(sizes: tuple[int, ...]) -> int:
    return int(torch.Size(sizes).numel())
