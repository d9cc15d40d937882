"""A wait that is taken out of the code of a technique is reported on the simulated accelerator."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist import DataParallelStrategy, FullShardStrategy
from lightning_dist.activation_checkpointing import offload
from lightning_dist.compression import Int8
from tests.accelerator import place
from tests.models import build
from tests.pool import RankFailed, WorkerPool


class Defect(NamedTuple):
    """Describe a call that is left out.

    Args:
        strategy: Function that returns the strategy.
        owner: Name of what has the called method: ``"Stream"``, ``"Tensor"``, ``"accelerator"`` or ``"Operation"``.
        method: Name of the called method.
        file: End of the path of the file from which it is called.
        function: Name of the calling function.
        report: Regular expression that the report has.
    """

    strategy: Callable[[], Any]
    owner: str
    method: str
    file: str
    function: str
    report: str


def _full_shard(**kwargs: Any) -> Callable[[], Any]:
    return lambda: FullShardStrategy(**kwargs)


def _data_parallel(**kwargs: Any) -> Callable[[], Any]:
    return lambda: DataParallelStrategy(**kwargs)


INT8 = Int8(block_size=64, min_numel=64)
OFFLOAD = {"activation_checkpointing": "offload"}
DEFECTS = {
    "sharding, before a reduction": Defect(
        _full_shard(), "Stream", "wait_stream", "_fsdp_collectives.py", "foreach_reduce", r"race .*collective"
    ),
    "sharding, after an all-gather": Defect(
        _full_shard(), "Stream", "wait_event", "_fsdp_collectives.py", "foreach_all_gather_copy_out", r"race .*"
    ),
    "replication": Defect(
        _data_parallel(), "Operation", "wait", "replication/bucket.py", "*", r"race .*collective.*replication"
    ),
    "compression, before": Defect(
        _data_parallel(compression=INT8), "Stream", "wait_stream", "background.py", "_run_on_stream",
        r"race .*compression",
    ),
    "compression, after": Defect(
        _data_parallel(compression=INT8), "Stream", "wait_event", "background.py", "wait", r"race .*compression"
    ),
    "offload of activations, to the host": Defect(
        _full_shard(**OFFLOAD), "Stream", "wait_stream", "copies.py", "__init__", r"race .*copies.py"
    ),
    "offload of activations, to the device": Defect(
        _full_shard(**OFFLOAD), "Stream", "wait_event", "copies.py", "get", r"race .*copies.py"
    ),
    "offload of activations, between both": Defect(
        _full_shard(**OFFLOAD), "Stream", "wait_event", "copies.py", "fetch", r"race .*copies.py"
    ),
    "offload of activations, memory": Defect(
        _full_shard(**OFFLOAD), "Tensor", "record_stream", "copies.py", "__init__", r"reuse of freed memory .*copies.py"
    ),
    "offload of the optimizer": Defect(
        _full_shard(offload="optimizer"), "accelerator", "synchronize", "offloaded_step.py", "_move",
        r"the host has written to pinned memory .*offloaded_step.py",
    ),
}  # fmt: skip


BRIEF = (
    "sharding, after an all-gather",
    "replication",
    "compression, before",
    "offload of the optimizer",
    "checkpoint",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", DEFECTS if metafunc.config.getoption("--matrix") == "full" else BRIEF)


@contextmanager
def _left_out(defect: Defect) -> Iterator[list[None]]:
    """Leave out the calls of a defect in this context, and return a list with an item for each of them."""
    from tests.nccl_rules import memory

    owner: Any = {
        "Stream": torch.get_device_module("simulated").Stream,
        "Tensor": torch.Tensor,
        "accelerator": torch.accelerator,
        "Operation": type(memory.device()),
    }[defect.owner]
    original = getattr(owner, defect.method)
    left_out: list[None] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        for _ in range(4 if defect.owner == "Operation" else 1):
            code = frame.f_code
            if code.co_filename.endswith(defect.file) and defect.function in (code.co_name, "*"):
                left_out.append(None)
                return None
            frame = frame.f_back
        return original(*args, **kwargs)

    setattr(owner, defect.method, call)
    try:
        yield left_out
    finally:
        setattr(owner, defect.method, original)


def _train(strategy: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    offload.MIN_NUMEL = 1  # The tensors of this model are small.
    pl.Trainer(
        **place(),
        strategy=strategy,
        max_steps=3,
        max_epochs=-1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(build("gpt", seed=int(os.environ["RANK"])))


def train(name: str, has_defect: bool) -> None:
    """Train without a defect, or with it, which must be a call that occurs."""
    defect = DEFECTS[name]
    if not has_defect:
        _train(defect.strategy())
        return
    with _left_out(defect) as left_out:
        _train(defect.strategy())
    assert left_out, "nothing was left out"


def test_a_missing_wait_is_reported(simulated: WorkerPool, name: str) -> None:
    simulated.run(train, 2, name, False)
    with pytest.raises(RankFailed, match=r"RaceError: \d+ races:") as error:
        simulated.run(train, 2, name, True)

    assert re.search(DEFECTS[name].report, str(error.value)), str(error.value)
