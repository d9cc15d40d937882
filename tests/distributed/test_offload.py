"""Test offloading of parameters and of the states of optimizers, to the memory of the CPU and to files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DataParallelStrategy, FullShardStrategy
from lightning_dist._compat import local_of
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import options_from
from lightning_dist.techniques.offload import MappedFile, OffloadedStep, OffloadOptions, mapped_file
from lightning_dist.techniques.offload.offload import refuse_for_accelerators_only
from tests.arguments import run_of
from tests.distributed.fit import Weights, assert_same, make_strategy, make_trainer, weights_of
from tests.models import GPT, build
from tests.pool import RankFailed, WorkerPool
from tests.thorough import one_in


class Shuffled(GPT):
    """Take batches from a loader whose position is restored when a run is resumed."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2, shuffle=True)


def fit(
    layout: str,
    offload: str | None,
    folder: str | None,
    max_steps: int = 4,
    save: Path | None = None,
    resume: Path | None = None,
    model: str = "gpt",
) -> tuple[Weights, bool, bool]:
    """Train the GPT in float64.

    Returns:
        The weights, whether all shards are in a file in ``folder``, and whether all large states of the optimizer are.
    """
    strategy = layout
    if layout != "auto":
        strategy = make_strategy(layout, offload=offload, offload_folder=folder)
    pl.seed_everything(0, verbose=False)
    trainer = make_trainer(
        "auto",
        strategy=strategy,
        max_steps=max_steps,
        precision="64-true",
        gradient_clip_val=0.5,
        use_distributed_sampler=model == "shuffled",
    )
    module = build("gpt", optimizer="adamw") if model == "gpt" else Shuffled(optimizer="adamw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_file, "SMALLEST_BYTES", 1)  # The model is small.
        trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.wait_for_checkpoints()
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    large = [value for value in states if value.ndim and local_of(value).numel()]
    shards = [param for param in module.parameters() if param.ndim and local_of(param).numel()]
    assert large
    return weights_of(module), _all_in(folder, shards), _all_in(folder, large)


def _all_in(folder: str | None, tensors: list[torch.Tensor]) -> bool:
    """Return whether the memory of all tensors is that of a file in ``folder``."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if f"{folder}/" in line[-2]]
    addresses = [local_of(tensor).data_ptr() for tensor in tensors]
    return all(any(begin <= address < end for begin, end in ranges) for address in addresses)


@pytest.mark.parametrize(
    ("layout", "offload", "in_files"),
    [
        ("full_shard", "params", True),
        ("full_shard", "both", False),
        ("2x2", "both", True),
        ("tp2-2", "optimizer", True),
        ("4x1", "optimizer", True),
    ],
)
def test_weights_are_those_of_one_process(
    pool: WorkerPool, tmp_path: Path, layout: str, offload: str, in_files: bool
) -> None:
    expected, _, _ = pool.run(fit, 1, "auto", None, None)[0]
    folder = str(tmp_path) if in_files else None
    for weights, has_shards, has_states in pool.run(fit, 4, layout, offload, folder):
        assert_same(weights, expected)
        assert has_shards == (in_files and offload in ("params", "both"))
        assert has_states == (in_files and offload in ("optimizer", "both"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("offload", one_in(2, ["optimizer", "both"]))
def test_a_resumed_run_goes_on_bit_by_bit(pool: WorkerPool, tmp_path: Path, offload: str) -> None:
    folder = str(tmp_path / "offload")
    whole, _, _ = pool.run(fit, 4, "full_shard", offload, folder, model="shuffled")[0]
    pool.run(fit, 4, "full_shard", offload, folder, max_steps=2, save=tmp_path / "saved", model="shuffled")
    resumed, _, has_states = pool.run(
        fit, 4, "full_shard", offload, folder, resume=tmp_path / "saved", model="shuffled"
    )[0]
    assert has_states
    assert_same(resumed, whole, tolerance=0)


def step_in_parts(part_bytes: int, folder: Path, has_hook: bool) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sizes: list[int] = []
    if has_hook:
        optimizer.register_step_pre_hook(lambda *args: None)
    file = MappedFile(folder)
    original = optimizer.step

    def counted(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(sum(len(group["params"]) for group in optimizer.param_groups))
        return original(*args, **kwargs)

    before = optimizer.step = MethodType(counted, optimizer)  # type: ignore[method-assign]
    step = OffloadedStep(optimizer, torch.device("cpu"), file, file, part_bytes) if part_bytes else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.step(lambda: model(torch.ones(2, 64)).square().sum().backward())
        optimizer.zero_grad()
        scheduler.step()
    if step is not None:
        step.remove()
        assert optimizer.step == before
    return [param.detach() for param in model.parameters()], sizes


@pytest.mark.parametrize("has_hook", [False, True])
def test_parameters_are_stepped_in_parts_unless_somebody_watches(tmp_path: Path, has_hook: bool) -> None:
    expected, _ = step_in_parts(0, tmp_path, has_hook)
    actual, sizes = step_in_parts(64 * 64 * 4 * 2, tmp_path, has_hook)
    assert all(map(torch.equal, actual, expected))
    assert sizes == [8] * 3 if has_hook else sizes == [2, 2, 2, 2] * 3


def test_released_tensors_keep_their_values(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    value = torch.randn(3000, dtype=torch.float64)
    placed = file.place(value)
    placed += 1
    before = _resident(placed)
    file.release([placed])
    assert _resident(placed) < before
    assert torch.equal(placed, value + 1)
    assert file.holds(placed) and not file.holds(value)


def _resident(tensor: torch.Tensor) -> int:
    """Return how much of the mapping that holds ``tensor`` is in memory, in KiB."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            found = begin <= tensor.data_ptr() < end
        if found and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("There is no such mapping.")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = MappedFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="has no room for 1 MiB more") as caught:
        file.place(torch.zeros(2**18))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"offload": "all"}, "offload='all' must be one of 'params', 'optimizer', 'both'"),
        ({"offload_folder": "/x"}, "offload_folder='/x' without offload"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FullShardStrategy(**kwargs)


def replicated() -> None:
    trainer = make_trainer("auto", strategy=DataParallelStrategy(offload="both"), max_steps=1)
    trainer.fit(build("gpt"))


def test_parameters_that_are_not_sharded_are_refused(pool: WorkerPool) -> None:
    layout, arguments = ParallelLayout(dp_shard=2), options_from({"offload": "both"})
    OffloadOptions("both").check(run_of(layout), arguments)
    with pytest.raises(ValueError, match="Leave float8_all_gather out"):
        OffloadOptions("both").check(run_of(layout, gathers_float8=True), arguments)
    with pytest.raises(RankFailed, match="only sharded parameters can be offloaded"):
        pool.run(replicated, 2)


class OtherAdamW(torch.optim.AdamW):
    """Stand for an optimizer of another library."""


@pytest.mark.parametrize(("cls", "option"), [(torch.optim.AdamW, "capturable"), (OtherAdamW, "fused")])
def test_optimizers_for_accelerators_only_are_refused(cls: type[torch.optim.Optimizer], option: str) -> None:
    optimizer = cls([nn.Parameter(torch.zeros(2))], **{option: True})
    with pytest.raises(ValueError, match=rf"offload='both' with \w+\({option}=True\).*Leave {option} out"):
        refuse_for_accelerators_only(optimizer, "both")
    refuse_for_accelerators_only(torch.optim.AdamW([nn.Parameter(torch.zeros(2))], fused=True), "both")


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_only_a_fused_step_takes_the_number_of_steps_to_its_device(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([param], **options)
    optimizer.step()
    ((_, stand_in),) = OffloadedStep(optimizer, torch.device("meta"), None, None)._move([param])
    assert optimizer.state[stand_in]["exp_avg"].device.type == "meta"
    assert optimizer.state[stand_in]["step"].device.type == ("meta" if "fused" in options else "cpu")


@pytest.mark.parametrize(
    ("what", "backend", "device", "expected"),
    [
        ("params", None, "cpu", None),
        ("optimizer", "nccl", "cuda", "nccl"),
        ("params", "nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("both", "cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_shards_on_the_cpu_get_a_backend(what: Any, backend: str | None, device: str, expected: str | None) -> None:
    assert OffloadOptions(what).backend(backend, torch.device(device)) == expected
