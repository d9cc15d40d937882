"""The noise scale is computed from the gradients of single ranks, under every strategy that has them."""

from __future__ import annotations

import logging
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshPrecision, PipelineParallelStrategy, TensorParallelStrategy
from lightning_dist.plugins.callbacks import GradientNoiseScale
from lightning_dist.run.telemetry import NoiseScaleEstimator
from tests.distributed.fit import make_trainer
from tests.distributed.test_global_batch import Texts
from tests.distributed.test_step_times import Recording
from tests.models import build
from tests.pool import WorkerPool, in_parallel
from tests.split_models import Example  # noqa: F401 - It adds the models that can be split.

Step = tuple[float, float, int, int]
"""The arguments of :meth:`NoiseScaleEstimator.add`."""

NUM_STEPS = 3
SHARDED: dict[str, Any] = {"tensor_parallel": TensorParallelStrategy, "pipeline_parallel": PipelineParallelStrategy}
"""Strategies that shard the parts of layers, or the stages, over the remaining ranks."""


def observed(layout: str, options: dict[str, Any], model: str, **kwargs: Any) -> list[Step]:
    """Train, and return what the callback has computed of each step."""
    seen: list[Step] = []
    add = NoiseScaleEstimator.add

    def recorded(self: NoiseScaleEstimator, *args: Any) -> None:
        seen.append(args)  # type: ignore[arg-type]
        add(self, *args)

    NoiseScaleEstimator.add = recorded  # type: ignore[method-assign]
    callback = GradientNoiseScale(log_every_n_steps=2)
    defaults = {"max_steps": NUM_STEPS, "precision": "64-true", "gradient_clip_val": 0.1, "callbacks": [callback]}
    if layout in SHARDED:
        layout, defaults["strategy"] = "auto", SHARDED[layout](2, **options)
    try:
        options = {} if layout == "auto" else options
        make_trainer(layout, options, **{**defaults, **kwargs}).fit(build(model, optimizer="adamw"))
    finally:
        NoiseScaleEstimator.add = add  # type: ignore[method-assign]
    return seen


def direct(model: str, num_ranks: int, accumulate: int = 1, global_batch: int = 8) -> list[Step]:
    """Compute the same from the gradient of each rank's samples, one after another in this process."""
    module: Any = build(model, optimizer="adamw").double()
    optimizer, tensors = module.configure_optimizers(), module.data()
    params = [param for param in module.parameters() if param.requires_grad]
    steps: list[Step] = []
    for step in range(NUM_STEPS):
        ranks = []
        for rank in range(num_ranks):
            for part in range(accumulate):
                begin = (step * accumulate + part) * global_batch
                own = slice(begin + rank, begin + global_batch, num_ranks)
                (module.training_step(tuple(tensor[own] for tensor in tensors), 0) / accumulate).backward()
            ranks.append(torch.cat([param.grad.flatten() for param in params]))
            module.zero_grad()
        mean = torch.stack(ranks).mean(0)
        squares = torch.stack(ranks).square().sum(-1)
        samples = accumulate * global_batch // num_ranks
        steps.append((float(squares.mean()), float(mean.square().sum()), samples, num_ranks))
        for param, value in zip(params, mean.split([param.numel() for param in params]), strict=True):
            param.grad = value.view_as(param)
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        module.zero_grad()
    return steps


@pytest.mark.parametrize(
    ("layout", "options", "world_size", "model", "num_ranks", "accumulate"),
    [
        ("2x1", {}, 2, "gpt", 2, 1),  # This is data_parallel.
        ("full_shard", {}, 4, "example_gpt", 4, 2),
        ("2x2", {}, 4, "gpt", 4, 1),  # This is hybrid_shard.
        ("tp2-2", {}, 4, "example_gpt", 2, 1),
        ("tensor_parallel", {}, 4, "example_gpt", 2, 2),
        ("pp2-2", {"num_microbatches": 2}, 4, "example_gpt", 2, 2),
        pytest.param("2x1", {}, 2, "example_gpt", 2, 2, marks=pytest.mark.thorough),
        pytest.param("full_shard", {"direct_collectives": False}, 2, "gpt", 2, 1, marks=pytest.mark.thorough),
        pytest.param("full_shard", {"offload": "both"}, 2, "gpt", 2, 2, marks=pytest.mark.thorough),
        pytest.param("full_shard", {"zero_stage": 1}, 2, "gpt", 2, 2, marks=pytest.mark.thorough),
        pytest.param("pipeline_parallel", {"num_microbatches": 2}, 4, "example_gpt", 2, 1, marks=pytest.mark.thorough),
        pytest.param("2x2", {}, 4, "example_gpt", 4, 2, marks=pytest.mark.thorough),
    ],
)
def test_norms_are_those_of_each_ranks_samples_in_one_process(
    pool: WorkerPool,
    layout: str,
    options: dict[str, Any],
    world_size: int,
    model: str,
    num_ranks: int,
    accumulate: int,
) -> None:
    ranks, expected = in_parallel(
        lambda: pool.run(observed, world_size, layout, options, model, accumulate_grad_batches=accumulate),
        lambda: direct(model, num_ranks, accumulate),
    )
    for steps in ranks:
        assert len(steps) == NUM_STEPS
        for actual, wanted in zip(steps, expected, strict=True):
            assert actual == (pytest.approx(wanted[0], rel=1e-9), pytest.approx(wanted[1], rel=1e-9), *wanted[2:])


class Quadratic(pl.LightningModule):
    """Minimize the squared distance of a vector to samples, with a learning rate of zero."""

    def __init__(self, num_samples: int = 4 * 8 * 60) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)
        self.samples = torch.randn(num_samples, 20, generator=torch.Generator().manual_seed(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer.weight - batch[0]).square().sum(1).mean() / 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.samples), batch_size=8)


def logged(layout: str) -> tuple[list[dict[str, float]], list[str]]:
    texts, lightning = Texts(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger = Recording()
    trainer = make_trainer(
        layout, max_epochs=1, use_distributed_sampler=True, logger=logger,
        callbacks=[GradientNoiseScale(window=200, log_every_n_steps=25)],
    )  # fmt: skip
    lightning.addHandler(texts)
    lightning.setLevel(logging.INFO)
    try:
        trainer.fit(Quadratic())
    finally:
        lightning.removeHandler(texts)
        lightning.setLevel(logging.ERROR)
    metrics = [metrics for metrics in logger.logged if "noise/scale" in metrics]
    return metrics, [text for text in texts.texts if text.startswith("Gradient noise scale")]


def test_the_scale_is_logged_with_its_interval_and_the_end_of_the_fit_tells_it(pool: WorkerPool) -> None:
    samples = Quadratic().samples.double()
    truth = float(samples.var(0).sum() / (0.5 - samples.mean(0)).square().sum())
    (metrics, texts), *others = pool.run(logged, 2, "full_shard")
    assert [len(found) for found, _ in others] == [len(metrics)] == [5]  # Steps 25, 50, 75 and 100, and the end.
    for found in metrics:
        assert found["noise/scale_low"] < truth < found["noise/scale_high"]
    assert metrics[-1]["noise/scale"] == pytest.approx(truth, rel=0.1)
    (text,) = texts
    assert text.startswith(f"Gradient noise scale over the last 120 steps: {metrics[-1]['noise/scale']:,.3g} samples")
    assert "With 16 samples in a step" in text
    assert others[0][1] == []


class Outside(pl.LightningModule):
    """Use a block's weight outside of its forward, for a penalty."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.weighs = weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        return {"loss": loss, "weight": 2} if self.weighs else loss + self.blocks[0][0].weight.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=2)


def refusal(
    layout: str, options: dict[str, Any], model: str, num: int = 1, param_dtype: str = "", **kwargs: Any
) -> str:
    module = {"outside": Outside, "weighs": lambda: Outside(weighs=True)}.get(model, lambda: build(model))()
    callbacks = [GradientNoiseScale() for _ in range(num)]
    if param_dtype:
        kwargs["plugins"] = [MeshPrecision(param_dtype=param_dtype)]
    try:
        make_trainer(layout, options, **{"max_steps": 2, "callbacks": callbacks, **kwargs}).fit(module)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("layout", "options", "model", "kwargs", "text"),
    [
        ("ddp", {}, "gpt", {}, "with DDPStrategy: only the strategies of lightning_dist"),
        ("tp2-1", {}, "example_gpt", {}, "there is one data-parallel rank"),
        ("pp2-2", {"num_microbatches": 2}, "gpt", {}, "pp_size=2: stages share the parameter 'model.embedding.weight'"),
        ("cp2-2", {}, "example_gpt", {}, "cp_size=2: ranks have gradients of parts of a sample"),
        ("2x1", {"compression": "bf16"}, "gpt", {}, "compression=bf16.*: the mean of the gradients is not exact"),
        ("2x1", {"sync": "diloco"}, "gpt", {}, "sync=DiLoCo.*: gradients are not averaged over the replicas"),
        ("full_shard", {"zero_stage": 2}, "gpt", {"accumulate_grad_batches": 2}, "zero_stage=2 and accumulate"),
        ("full_shard", {"step_in_backward": True}, "gpt", {}, "with GradientNoiseScale.on_after_backward"),
        ("full_shard", {"ep_size": 2}, "mixtral", {}, "ep_size=2: experts have gradients of other ranks"),
        ("2x1", {}, "gan", {}, "automatic_optimization = False"),
        ("2x1", {}, "gpt", {"num": 2}, "with another GradientNoiseScale"),
        ("2x1", {}, "gpt", {"param_dtype": "float16"}, "precision=.*: gradients are multiplied by a scale"),
        ("2x1", {}, "weighs", {}, "with a training_step that returns"),
        ("full_shard", {}, "outside", {}, "uses the parameter 'blocks.0.0.weight' outside of the forward of its block"),
    ],
)
def test_runs_that_do_not_tell_the_noise_are_refused_by_name(
    pool: WorkerPool, layout: str, options: dict[str, Any], model: str, kwargs: dict[str, Any], text: str
) -> None:
    num_ranks = 4 if layout.endswith("-2") else 2
    for error in pool.run(refusal, num_ranks, layout, options, model, **kwargs):
        assert re.search(text, error)
