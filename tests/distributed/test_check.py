"""Test that ``lightning-dist check`` passes what is right, and names what is planted."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lightning_dist
from lightning_dist import DataParallelStrategy, FullShardStrategy, HybridShardStrategy
from lightning_dist.cli import main
from lightning_dist.techniques.compression import LocalSGD
from tests.accelerator import place
from tests.distributed.fit import make_strategy
from tests.launched import Forked, run_script
from tests.models import GAN, GPT, ResNet, TestModule
from tests.pool import RankFailed, WorkerPool

HERE = __name__
ROOT = Path(__file__).parents[2]


class Net(TestModule):
    """Fit a small network, whose parameters are in float64 from the start."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
        self.double()

    def data(self) -> tuple[Tensor, ...]:
        x = torch.randn(self.num_samples, 6, generator=torch.Generator().manual_seed(5)).double()
        return x, x.prod(1, keepdim=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.mse_loss(self.net(x), y)


# What is planted


class UnreducedOnRank1(DataParallelStrategy):
    """Keep the gradient of rank 1's own part of the batch for one parameter there."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._weight = self.lightning_module.net[2].weight
        self._weight.register_hook(lambda gradient: setattr(self, "_own", gradient.clone()))

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        if self.global_rank == 1:
            self._weight.grad.copy_(self._own)
        return loss


class SumOfRanks(FullShardStrategy):
    """Sum gradients over the ranks where the mean is meant."""

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        for param in self.lightning_module.parameters():
            param.grad.mul_(2)
        return loss


class MaskOfRank(GPT):
    """Mask features before a split layer by a mask that depends on the rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks[1].mlp.register_forward_pre_hook(self.mask)

    def mask(self, module: nn.Module, args: Any) -> Any:
        mask = torch.ones(args[0].size(-1))
        mask[self.global_rank] = 0
        return args[0] * mask


class StaleSGD(torch.optim.SGD):
    """Update tensors that were taken from the parameters before the strategy has replaced them."""

    def __init__(self, params: Any, kept: list[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param, kept in zip(self.param_groups[0]["params"], self.kept, strict=True):
            kept.sub_(0.1 * getattr(param.grad, "_local_tensor", param.grad)[: len(kept)])
        return loss


class StaleOptimizer(Net):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept = [param.detach() for param in self.parameters()]

    def configure_optimizers(self) -> Any:
        kept = self.kept
        if self.trainer.world_size > 1:  # Shards have fewer rows.
            kept = [tensor[: len(param.to_local())] for tensor, param in zip(kept, self.parameters(), strict=True)]
        return StaleSGD(self.parameters(), kept)


class OtherClipping(Net):
    """Clip gradients to another norm on several ranks."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.01 * self.trainer.world_size, "norm")


def command(*arguments: str) -> tuple[int, str, str]:
    """Run ``lightning-dist check`` on this rank, and return its exit code, and what it prints."""
    sys.path.insert(0, str(ROOT))
    flags = [f"--trainer.devices={os.environ['WORLD_SIZE']}", "--trainer.accelerator=cpu",
             "--trainer.use_distributed_sampler=false", "--trainer.max_steps=100"]  # fmt: skip
    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        code = main(["check", *flags, *arguments])
    return code, output.getvalue(), messages.getvalue()


PLANTED = {
    "a gradient that is not reduced on rank 1": (
        "Net",
        f"{HERE}.UnreducedOnRank1",
        "wrong: The reduced gradients of net.2.weight differ between ranks: rank 1 has others than rank 0.",
    ),
    "a wrong divisor": (
        "Net",
        f"{HERE}.SumOfRanks",
        "and 3 more are 2 times those of one process: they are divided by a wrong number",
    ),
    "a mask that differs between ranks that split layers": (
        "MaskOfRank",
        "tensor_parallel",
        "wrong: The reduced gradients of model.blocks.1.norm_2.weight",
    ),
    "gradient clipping that depends on the number of ranks": (
        "OtherClipping",
        "full_shard",
        "and 3 more deviate after the step, by up to 1.0e+00 of their change, although their gradients do not",
    ),
    "an optimizer over stale parameters": (
        "StaleOptimizer",
        "full_shard",
        "wrong: The optimizer step did not change net.0.weight, net.0.bias, net.2.weight and 3 more",
    ),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_what_is_planted_is_named(pool: WorkerPool, defect: str) -> None:
    model, strategy, finding = PLANTED[defect]
    (code, output, messages), (other_code, other_output, _) = pool.run(
        command, 2, f"--model={HERE}.{model}", f"--trainer.strategy={strategy}"
    )
    assert finding in output, output + messages
    assert output.endswith("FAILED\n")
    assert (code, other_code, other_output) == (1, 0, "")


# What is right


class Dropping(GPT):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks[0].drop = nn.Dropout(0.5)
        self.model.blocks[0].register_forward_hook(lambda module, args, output: module.drop(output))


class Weighted(GPT):
    """Return a mean over some of the tokens, with their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        losses = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        chosen = targets.flatten() < 9
        return {"loss": losses[chosen].mean(), "weight": chosen.sum()}


class InFloat32(GPT):
    """Compute in float32 whatever the precision of the run is."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (torch.zeros(2, 20, dtype=torch.float32) @ self.model.position.T).sum()


class NoSampler(Net):
    """Give all ranks the same batches."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.data()), batch_size=4)


class WarmUp(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)]


class NormalizedGAN(GAN):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator[1] = nn.BatchNorm1d(16)


class TakesIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class FailsAlone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.world_size == 1:
            raise RuntimeError("one process fails")
        return super().training_step(batch, batch_idx)


MODELS = {cls.__name__: cls for cls in (
    Net, GPT, ResNet, GAN, WarmUp, Dropping, Weighted, InFloat32, NoSampler, NormalizedGAN, TakesIterator, FailsAlone,
)}  # fmt: skip


def checked(model: str, strategy: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """Run the check on this rank, and return the report as text and as values.

    Args:
        model: Key of :data:`MODELS`.
        strategy: Layout of :func:`tests.distributed.fit.make_strategy`, or keyword arguments of a strategy with two
            replicas.
        options: Arguments of the check, and of the Trainer.
    """
    made = HybridShardStrategy(2, 1, **strategy) if isinstance(strategy, dict) else strategy
    if isinstance(strategy, str) and strategy[-1].isdigit():
        made = make_strategy(strategy)
    seeds = itertools.count(10 * int(os.environ["RANK"]))

    def make_module() -> TestModule:
        torch.manual_seed(next(seeds))  # One process must get the weights of the run, whatever it draws.
        return MODELS[model](optimizer="adamw")

    defaults = {"use_distributed_sampler": False, "max_epochs": -1, **place()}
    report = lightning_dist.check(make_module, strategy=made, **{**defaults, **options})
    return str(report), report.to_dict()


RIGHT: dict[str, tuple[str, str, int, dict[str, Any], str]] = {
    "clipped": ("GPT", "full_shard", 2, {"gradient_clip_val": 0.1, "steps": 2}, "computed in float64"),
    "batch norm": ("ResNet", "2x1", 2, {"accumulate_grad_batches": 2, "steps": 2}, "4 batches of each of 2"),
    "split layers": ("GPT", "tp2-2", 4, {"gradient_clip_val": 0.1}, "1 batch of each of 2 data-parallel ranks"),
    "stages": ("GPT", "pp2-1", 2, {"gradient_clip_val": 0.1}, "1 batch, the same as under the strategy"),
    "batch norm in stages": ("ResNet", "pp2-1", 2, {}, "in 4 microbatches, as in the pipeline, because of BatchNorm"),
    "dropout, repeated": ("Dropping", "full_shard", 2, {}, "one process repeats the random numbers of each rank"),
    "dropout, off": (
        "Dropping",
        "tp2-1",
        2,
        {},
        "dropout is off on both sides (model.blocks.0.drop.p)",
    ),
    "weights of losses": ("Weighted", "full_shard", 2, {"accumulate_grad_batches": 2}, "accumulated gradients"),
    "manual optimization": ("GAN", "full_shard", 2, {"steps": 2}, "of each of 2 data-parallel ranks, joined into one"),
    "a learning rate of 0": (
        "WarmUp",
        "full_shard",
        2,
        {},
        "note: The step changes no weights in one process, since its",
    ),
    "the same data": ("NoSampler", "2x1", 2, {}, "note: Data-parallel ranks were given the same batches."),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes(pool: WorkerPool, case: str) -> None:
    model, strategy, num_ranks, options, text = RIGHT[case]
    results = pool.run(checked, num_ranks, model, strategy, **options)
    printed, values = results[0]
    assert values["passed"], printed
    assert text in printed, printed
    assert all(result == results[0] for result in results)
    trained = {name for name, param in MODELS[model]().named_parameters() if param.requires_grad}
    assert trained <= values["weights"].keys()
    assert set(values["gradients"]) <= trained
    assert len(values["gradients"]) >= 0.9 * len(trained)
    assert max(values["gradients"].values()) < 1e-10
    assert max(values["weights"].values()) < 1e-6
    assert len(values["losses"]) == (0 if model == "GAN" else options.get("steps", 1))
    for own, other in zip(values["losses"], values["reference_losses"], strict=True):
        assert own == pytest.approx(other, rel=1e-10)
        assert own > 0.01


def test_a_module_that_cannot_run_in_float64_is_checked_in_its_own_precision(pool: WorkerPool) -> None:
    printed, values = pool.run(checked, 2, "InFloat32", "full_shard")[0]
    assert values["passed"], printed
    assert "computed in float32 on both sides" in printed
    assert values["tolerances"]["gradients"] == 1e-4
    assert max(values["gradients"].values()) < 1e-5


def test_noise_that_adaptive_optimizers_amplify_is_not_compared(pool: WorkerPool) -> None:
    printed, values = pool.run(checked, 2, "GPT", "tp2-1", float64=False, precision="32-true")[0]
    assert values["passed"], printed
    # A third of these biases is that of keys, whose true gradient is zero.
    assert "model.blocks.0.qkv.bias, model.blocks.1.qkv.bias, are no larger than rounding errors" in printed
    assert 0 < max(values["gradients"].values()) < 1e-5
    assert 0 < max(values["weights"].values()) < 1e-4


def refusal(*args: Any, **options: Any) -> str:
    try:
        return checked(*args, **options)[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusals() -> dict[str, str]:
    return {
        "ddp": refusal("Net", "ddp"),
        "compression": refusal("Net", {"compression": "bf16"}),
        "sync": refusal("Net", {"sync": LocalSGD(2)}),
        "step_in_backward": refusal("Net", {"step_in_backward": True}),
        "iterator": refusal("TakesIterator", "full_shard"),
        "whole_batch": refusal("GAN", "full_shard", whole_batch=False),
        "batch norm": refusal("NormalizedGAN", "full_shard"),
        "data": refusal("Net", "full_shard", max_steps=1, steps=2),
        "steps": refusal("Net", "full_shard", steps=0),
        "tolerance": refusal("Net", "full_shard", tolerance=0.0),
    }


def test_what_cannot_be_compared_is_refused(pool: WorkerPool) -> None:
    (found, other) = pool.run(refusals, 2)
    assert found == other
    for name, start in {
        "ddp": "ValueError: strategy=DDPStrategy is not a strategy of lightning-dist",
        "compression": "ValueError: With compression, gradients differ from those of one process by design",
        "sync": "ValueError: With sync, gradients differ",
        "step_in_backward": "ValueError: step_in_backward=True frees gradients",
        "iterator": "ValueError: TakesIterator.training_step takes dataloader_iter",
        "whole_batch": "ValueError: whole_batch=False with GAN, which sets automatic_optimization = False",
        "batch norm": "ValueError: generator.1 is a BatchNorm1d, which normalises the samples of each rank",
        "data": "ValueError: The run ended after 1 optimizer steps, before the 2",
        "steps": "ValueError: steps=0 must be at least 1.",
        "tolerance": "ValueError: tolerance=0.0 must be positive.",
    }.items():
        assert found[name].startswith(start), found[name]


def test_a_single_process_has_nothing_to_compare(pool: WorkerPool) -> None:
    ((code, output, messages),) = pool.run(command, 1, f"--model={HERE}.Net", "--trainer.strategy=full_shard")
    assert (code, output) == (2, "")
    assert "error: strategy=full_shard runs in one process, so that there is nothing to compare" in messages


def test_an_error_in_one_process_ends_all_ranks(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.run(checked, 2, "FailsAlone", "full_shard")
    assert "RuntimeError: one process fails" in failed.value.errors[0]
    assert "OtherRankError: The computation in one process failed on rank 0" in failed.value.errors[1]


def test_the_command_checks_an_example_with_processes_that_it_launches(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text("import sys\nfrom lightning_dist.cli import main\nsys.exit(main())\n")
    arguments = ["check", "--json"]
    for name in ("base", "hybrid_shard"):
        arguments += ["-c", str(ROOT / "examples" / "gpt" / f"{name}.yaml")]
    arguments += [
        "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.strategy.dp_replicate_size=2",
        "--trainer.strategy.dp_shard_size=1", "--data.init_args.max_bytes=200000", "--data.init_args.val_fraction=0.2",
        "--data.init_args.context=32", "--model.init_args.dim=32", "--model.init_args.num_layers=2",
        "--model.init_args.num_heads=2",
    ]  # fmt: skip
    process = Forked(run_script, script, *arguments, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    values = json.loads(output[output.index("\n{") : output.rindex("}") + 1])
    assert values["passed"]
    assert len(values["gradients"]) == 21
    assert values["facts"]["left out"] == "ModelCheckpoint, LearningRateMonitor, TextReport"
    assert values["facts"]["layout"] == "dp_replicate 2 x dp_shard 1 = 2 processes"


def test_the_help_of_the_command_has_its_options_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in ("--steps N", "--float64 BOOL", "--tolerance X", "--json", "2 the configuration is wrong", "torchrun"):
        assert text in printed
