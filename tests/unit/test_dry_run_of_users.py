"""Test that a dry run does with a user's module and data what a real run on other devices does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import NDParallelStrategy
from lightning_dist.plugins.planning import Layout, dry_run, plan
from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.figures import Links

NUM_FEATURES = 64
MIB = 2**20


class Automatic(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Loader:
    """Make the loader in the dry run, as the hooks of users do."""

    def __init__(self, num_samples: int = 512) -> None:
        self.num_samples = num_samples

    def __call__(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.num_samples, NUM_FEATURES)), batch_size=4)


def made(make_module: Any, make_loader: Any, arguments: Mapping[str, Any]) -> Any:
    module = make_module()
    module.train_dataloader = make_loader
    return module, None, {"strategy": NDParallelStrategy(dp_shard_size=2), **arguments}


def run(module: Any, num_samples: int = 512, backend: str = "gloo", **arguments: Any) -> DryRun:
    return dry_run(partial(made, module, Loader(num_samples), arguments), 1, 2, backend=backend)


def test_gpus_that_this_process_uses_are_left_alone() -> None:
    broken = RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_rng_state_all", side_effect=broken),
    ):
        assert run(Automatic, backend="nccl").peak > 0


class TwoOptimizers(Automatic):
    """Step the second optimizer with each batch, and the first one with each fourth."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for index, optimizer in enumerate(self.optimizers()):
            if index == 0 and (batch_idx + 1) % self.every:
                continue
            optimizer.zero_grad()
            self.manual_backward(self.layers(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters()) for layer in self.layers]


@pytest.mark.parametrize("every", [1, 4])
def test_a_step_lasts_until_each_optimizer_has_made_one(every: int) -> None:
    one, manual = run(Automatic), run(partial(TwoOptimizers, every))
    assert manual.num_batches == every and manual.batch.samples == 4 * every
    # All states are there when it begins, and gradients of layers that this module does not set to None.
    gradients = 2 * (NUM_FEATURES + 1) * NUM_FEATURES * 4
    assert one.resident <= manual.resident <= one.resident + gradients


class NeverSteps(TwoOptimizers):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.layers(batch[0]).square().mean())


def test_a_training_that_ends_before_two_steps_is_named() -> None:
    with pytest.raises(RuntimeError, match="The training ended before each optimizer had made two steps"):
        run(NeverSteps, 16, max_epochs=2)


def test_an_accumulation_that_the_end_of_an_epoch_cuts_short_is_a_step() -> None:
    assert run(Automatic, 16, accumulate_grad_batches=32).num_batches == 2


class Scheduled(Automatic):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("loss", 0.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        num_steps = self.trainer.estimated_stepping_batches
        assert num_steps == 3 * 64 == self.trainer.max_epochs * 64
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num_steps)]


def test_schedules_see_the_length_of_the_training_and_steps_a_logger() -> None:
    assert run(Scheduled, max_epochs=3).peak > 0


class FailsAtTheEnd(Automatic):
    def on_train_epoch_end(self) -> None:
        raise KeyError("what a metric needs")


def test_what_happens_after_the_measured_step_does_not_count() -> None:
    assert run(FailsAtTheEnd).peak > 0


def test_data_are_not_in_the_memory_of_a_gpu() -> None:
    num_samples = 2**14
    data = num_samples * NUM_FEATURES * 4
    on_host, on_gpu = run(Automatic, num_samples), run(Automatic, num_samples, "nccl")
    assert on_host.resident > data > 4 * MIB - 1
    assert on_gpu.peak < MIB / 2
    assert on_gpu.peak == run(Automatic, 64, "nccl").peak


@pytest.mark.parametrize("given", ["loader", "hook"])
def test_data_are_not_in_the_memory_of_a_gpu_where_a_plan_needs_the_first_batch(given: str) -> None:
    """Tensor parallelism traces the first step while the strategy is set up."""
    peaks = []
    for num_samples in (64, 2**14):
        make = partial(split, given, num_samples)
        peaks.append(dry_run(make, 1, 2, backend="nccl").peak)
    assert peaks[0] == peaks[1]


def split(given: str, num_samples: int) -> Any:
    strategy = NDParallelStrategy(tp_size=2, strict_plan=False)
    loader = Loader(num_samples)
    if given == "loader":
        return Automatic(), loader(), {"strategy": strategy}
    return made(Automatic, loader, {"strategy": strategy})


def test_mixed_precision_of_a_gpu_is_simulated() -> None:
    arguments = {"plugins": [MixedPrecision("bf16-mixed", "cuda")], "strategy": NDParallelStrategy(dp_replicate_size=2)}
    found = run(Automatic, backend="nccl", **arguments)
    products = {operation.dtype for operation in found.work.operations if operation.flops}
    assert products == {torch.bfloat16}


class Data(pl.LightningDataModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        count = len(list(self.folder.iterdir()))
        torch.save(torch.arange(1000).reshape(10, 100) * 2, self.folder / f"{count}.pt")

    def train_dataloader(self) -> DataLoader[Any]:
        return Loader()()


def with_data(folder: Path, layout: Layout) -> Any:
    return Automatic(), Data(folder), {"strategy": NDParallelStrategy(**layout.arguments)}


def test_data_are_prepared_once_and_with_values(tmp_path: Path) -> None:
    found = plan(partial(with_data, tmp_path), [Layout(dp_shard=2), Layout(dp_replicate=2)], None, "gloo")
    assert all(one.peak for one in found)
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.arange(1000).reshape(10, 100) * 2)


class ReadsValues(Automatic):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        weight = float(self.layers[0].weight.detach().numpy().mean())
        return super().training_step(batch, batch_idx) * weight


def that_reads(layout: Layout) -> Any:
    return made(ReadsValues, Loader(), {"strategy": NDParallelStrategy(**layout.arguments)})


def test_a_model_that_cannot_be_simulated_is_listed_with_the_reason() -> None:
    (found,) = plan(that_reads, [Layout(dp_shard=2)], None, "gloo")
    assert found.peak is None
    assert "numpy()" in found.why_not


class AsksForDevices(Automatic):
    def on_fit_start(self) -> None:
        assert (self.trainer.num_nodes, self.trainer.num_devices) == (4, 2), "other nodes"


def on_nodes(layout: Layout) -> Any:
    return made(AsksForDevices, Loader(), {"strategy": NDParallelStrategy(**layout.arguments)})


def test_the_trainer_of_a_dry_run_knows_nodes_and_devices() -> None:
    found = plan(on_nodes, [Layout(dp_shard=8)], None, "nccl", num_devices=2)
    assert found[0].peak, found[0].why_not


@pytest.mark.parametrize(
    ("name", "gb_per_s"), [("h100", 360), ("NVIDIA H100 80GB HBM3", 360), ("NVIDIA H100 PCIe", 26), ("Other", 26)]
)
def test_links_of_a_device_are_known_by_its_full_name(name: str, gb_per_s: int) -> None:
    assert f"{gb_per_s} GB/s in a node" in Links.assumed(name, "nccl").name
