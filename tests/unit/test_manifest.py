"""The manifest of a checkpoint describes the parts of sharded tensors by a rule, and still reads lists of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from lightning_dist.checkpoint import CheckpointError, Manifest, read, read_manifest, take_snapshot, verify, write
from lightning_dist.checkpoint.manifest import FileEntry
from lightning_dist.checkpoint.parts import OfRank, Written, merged_sections
from lightning_dist.checkpoint.sections import Chunk, Cut, Layout, Section
from tests.growth.manifests import manifest_of_8b

WEIGHT = Layout((6, 4), "float32", (Cut(0, 0),), 0)


def chunks(section: Section, name: str) -> dict[str, Sequence[object]]:
    """Return where a tensor of a section is: by file, the position, the first indices and the sizes of each chunk."""
    manifest = Manifest({}, {}, 8, 0.0, sections=[section], prefix="run/")
    return {
        chunk.file: (chunk.start, chunk.offsets, chunk.sizes)
        for chunk in Manifest.decode(manifest.encode()).tensors[name].chunks
    }


def test_the_rule_gives_the_chunks_of_uneven_shards() -> None:
    layouts = (Layout((7, 3), "bfloat16", (Cut(0, 0),), 0), Layout((5,), "float64", (Cut(0, 0),), 0))
    section = Section((4,), ((2, 3, 4, 5),), layouts, {"a": 1, "b": 0, "c": 1})
    assert chunks(section, "a") == {
        "run/rank_2.bin": (0, (0,), (2,)),
        "run/rank_3.bin": (0, (2,), (2,)),
        "run/rank_4.bin": (0, (4,), (1,)),
    }
    assert chunks(section, "c") == {
        "run/rank_2.bin": (128, (0,), (2,)),
        "run/rank_3.bin": (128, (2,), (2,)),
        "run/rank_4.bin": (128, (4,), (1,)),
    }
    assert chunks(section, "b") == {
        "run/rank_2.bin": (64, (0, 0), (2, 3)),
        "run/rank_3.bin": (64, (2, 0), (2, 3)),
        "run/rank_4.bin": (64, (4, 0), (2, 3)),
        "run/rank_5.bin": (0, (6, 0), (1, 3)),
    }


def test_the_rule_gives_the_chunks_of_replicas_and_of_packed_layers() -> None:
    packed = Layout((12, 2), "float32", (Cut(0, 1, num_packed=3),), 1)
    entry = Manifest({}, {}, 4, 0.0, sections=[Section((2, 2), (tuple(range(4)),), (packed,), {"qkv": 0})])
    assert list(entry.tensors["qkv"].chunks) == [
        *(Chunk("rank_2.bin", 64 * index, (4 * index, 0), (2, 2)) for index in range(3)),
        *(Chunk("rank_3.bin", 64 * index, (4 * index + 2, 0), (2, 2)) for index in range(3)),
    ]
    of_block = entry.tensors["qkv"].chunks_within((10, 0), (1, 2))
    assert {chunk.file for chunk in of_block} == {"rank_3.bin"}


def old_checkpoint(folder: Path) -> None:
    """Write a checkpoint as version 1 of the format had it: a list of the chunks of every tensor."""
    weight = torch.arange(24.0).view(6, 4)
    write(folder, take_snapshot({"state_dict": {"weight": weight}}))
    entries, listed = {}, []
    for rank, rows in enumerate((weight[:4], weight[4:])):
        content = rows.contiguous().numpy().tobytes()
        (folder / f"rank_{rank}.bin").write_bytes(content)
        entries[f"rank_{rank}.bin"] = {"size": len(content), "digest": xxhash.xxh3_128(content).hexdigest()}
        listed.append({"file": f"rank_{rank}.bin", "start": 0, "offsets": [4 * rank, 0], "sizes": [len(rows), 4]})
    fields = {
        "format": "lightning-dist checkpoint",
        "version": 1,
        "files": {"state.pt": vars(read_manifest(folder).files["state.pt"]), **entries},
        "tensors": {"state_dict/weight": {"shape": [6, 4], "dtype": "float32", "chunks": listed}},
        "world_size": 2,
        "saved_at": 1.5,
        "about": {"global_step": 3},
    }
    content = json.dumps(fields).encode()
    (folder / "manifest.json").write_bytes(content + b"\n" + xxhash.xxh3_128(content).hexdigest().encode())


def test_checkpoints_of_version_1_load(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "old.ckpt")
    manifest = verify(tmp_path / "old.ckpt")
    assert (manifest.world_size, manifest.saved_at, manifest.about) == (2, 1.5, {"global_step": 3})
    state = read(tmp_path / "old.ckpt", lambda info: torch.empty(info.shape, dtype=info.dtype))
    assert torch.equal(state["state_dict"]["weight"], torch.arange(24.0).view(6, 4))


def of_ranks(*sections: Section) -> list[OfRank]:
    """Return what ranks gather that have each written a part of the section with the same index."""
    written = [Written({}, [section]) for section in sections]
    return [OfRank({}, {}, own.keys(), own.to_send(rank)) for rank, own in enumerate(written)]


def test_replicas_without_a_common_mesh_are_described_once() -> None:
    first, second = (Section((2,), (ranks,), (WEIGHT,), {"weight": 0}) for ranks in ((0, 1), (2, 3)))
    (section,) = merged_sections(of_ranks(first, first, second, second))
    assert section == replace(first, meshes=((0, 1), (2, 3)))
    assert [chunk.file for chunk in Manifest({}, {}, 4, 0.0, sections=[section]).tensors["weight"].chunks] == [
        "rank_0.bin", "rank_1.bin"
    ]  # fmt: skip


def test_a_save_in_which_a_rank_has_other_tensors_is_refused() -> None:
    section = Section((2,), ((0, 1),), (WEIGHT,), {"weight": 0})
    other = replace(section, tensors={"bias": 0})
    with pytest.raises(CheckpointError, match="rank 1 has not written its part of weight"):
        merged_sections(of_ranks(section, other))
    with pytest.raises(CheckpointError, match="rank 1 has other sharded tensors than the first rank of their mesh"):
        merged_sections([OfRank({}, {}, [], b""), of_ranks(section, section)[1]])


@pytest.mark.alone
def test_the_manifest_of_a_large_model_is_small_at_thousands_of_ranks() -> None:
    manifest = manifest_of_8b(4096)
    content = manifest.encode()
    assert len(content) <= 2**20  # It was 314 MiB, and took 89 s to decode, when it listed all chunks.
    start = time.process_time()
    decoded = Manifest.decode(content)
    assert len(decoded.tensors) == 873
    assert time.process_time() - start <= 1.0
    assert decoded.sections == manifest.sections
    start = time.process_time()
    entry = decoded.tensors["state_dict/model.embed_tokens.weight"]
    numbers = [math.prod(chunk.sizes) for chunk in entry.chunks]
    assert (len(numbers), sum(numbers)) == (4008, 128_256 * 4096)
    assert time.process_time() - start <= 5.0
    assert decoded.files["rank_4095.bin"] == FileEntry(123_456_789, "0" * 32)
