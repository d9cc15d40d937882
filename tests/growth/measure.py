"""Measure one thing at one number of ranks, in a process of its own, and print the figures as JSON.

The other ranks are imagined: torch's fake backend answers collectives at once, so that what is measured is what this
rank computes and keeps, and not what the ranks wait for each other or send.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.gpt.model import GPTModule
from lightning_dist._compat import process_groups
from lightning_dist.checkpoint import Manifest
from lightning_dist.mesh.groups import MeshGroups
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.mesh.preemption import StopRequest
from lightning_dist.parallelize import ParallelConfig, parallelize
from lightning_dist.run.sampler import ResumableSampler
from lightning_dist.run.telemetry import bytes_in_use, peak_bytes_since, reset_peak
from lightning_dist.techniques.options import PrecisionPolicy
from tests.growth.manifests import merged_manifest, of_ranks_of_8b

LAYOUTS = {"full_shard": {"dp_shard": -1}, "hybrid_shard": {"dp_shard": 8, "dp_replicate": -1}}
NUM_SAMPLES = 10_000_000
CPU = torch.device("cpu")


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Let this process be rank 0 of ``num_ranks`` in this context; all process groups are fake, also those of gloo."""
    real = dist.new_group

    def fake(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return real(ranks, timeout, "fake", **kwargs)

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with mock.patch.object(dist, "new_group", fake):
            yield
    finally:
        dist.destroy_process_group()


def set_up(num_ranks: int, layout: str) -> dict[str, float]:
    """Build the process groups of a layout, and make a GPT of 8 blocks of 256 features parallel over them.

    Args:
        num_ranks: Number of ranks.
        layout: A key of :data:`LAYOUTS`; ``hybrid_shard`` shards over 8 ranks.

    Returns:
        The seconds of this process, the growth of its memory in MiB, and the number of process groups that it is in.
    """
    module = GPTModule(dim=256, num_layers=8, num_heads=8, max_len=128, lr=3e-3, warmup_steps=30)
    with fake_ranks(num_ranks):
        before, start = bytes_in_use(CPU), time.process_time()
        resolved = ParallelLayout.resolve(num_ranks, **LAYOUTS[layout])
        groups = MeshGroups.build(resolved, "cpu")
        parallel = parallelize(
            module,
            resolved,
            groups,
            ParallelConfig(),
            None,  # type: ignore[arg-type]  # no technique of these layouts needs a step
            precision=PrecisionPolicy(),
            scales_losses=False,
            is_automatic=True,
            copied=None,
        )
        seconds, after = time.process_time() - start, bytes_in_use(CPU)
        assert before is not None and after is not None and parallel.module is module
        return {"seconds": seconds, "mib": max(after - before, 0) / 2**20, "groups": len(process_groups())}


def manifest(num_ranks: int) -> dict[str, float]:
    """Merge, encode and decode the manifest of Llama 3 8B with AdamW, sharded over ``num_ranks`` ranks.

    Returns:
        The size of the manifest in MiB, of which ``files_mib`` are the sizes and digests of files; the seconds of this
        process to merge what the ranks have sent and to encode the result, to decode it, and to find the parts that one
        of 8 ranks needs of a weight; and the peak of the memory that a rank needs to decode it, in MiB.
    """
    of_ranks = of_ranks_of_8b(num_ranks)
    start = time.process_time()
    merged = merged_manifest(of_ranks)
    content = merged.encode()
    encode_s = time.process_time() - start
    files = len(json.dumps({name: vars(entry) for name, entry in merged.files.items()}))
    del of_ranks, merged
    reset_peak(CPU)
    before, start = bytes_in_use(CPU), time.process_time()
    decoded = Manifest.decode(content)
    entry = decoded.tensors["state_dict/lm_head.weight"]
    decode_s, start = time.process_time() - start, time.process_time()
    assert before is not None and len(decoded.tensors) == 873
    peak = peak_bytes_since(CPU) - before
    found = list(entry.chunks_within((0, 0), (128256 // 8, 4096)))
    assert sum(chunk.sizes[0] for chunk in found) >= 128256 // 8
    return {
        "mib": len(content) / 2**20, "files_mib": files / 2**20, "encode_s": encode_s, "decode_s": decode_s,
        "find_s": time.process_time() - start, "peak_mib": max(peak, 0) / 2**20,
    }  # fmt: skip


def sampler(num_ranks: int) -> dict[str, float]:
    """Begin a shuffled epoch of ten million samples, and return the seconds, and the peak of bytes for each sample."""
    reset_peak(CPU)
    before, start = bytes_in_use(CPU), time.process_time()
    indices = iter(ResumableSampler(range(NUM_SAMPLES), num_ranks, rank=0))
    next(indices)
    assert before is not None
    return {"seconds": time.process_time() - start, "bytes": (peak_bytes_since(CPU) - before) / NUM_SAMPLES}


def stop_requests(num_ranks: int) -> dict[str, float]:
    """Return the number of collectives and their bytes, by which a rank asks in a step whether a run should stop."""
    with fake_ranks(num_ranks):
        request = StopRequest()
        request.agreed()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            request.agreed()
            tensors = [call.args[0] for call in all_reduce.call_args_list]
        request.close()
    return {"messages": len(tensors), "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors)}


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "set_up": set_up, "manifest": manifest, "sampler": sampler, "stop_requests": stop_requests
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, num_ranks, *rest = sys.argv[1:]
    print(json.dumps(MEASURES[name](int(num_ranks), *rest)))
