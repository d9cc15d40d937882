"""Test the dtypes of mixed precision that MeshPrecision lets a user choose."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import DataParallelStrategy, FullShardStrategy, MeshPrecision
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins.precision import precision_policy
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.run.parity import whole_gradients
from tests.distributed.fit import make_strategy, make_trainer, refused
from tests.distributed.float32_masters import LowPrecision
from tests.distributed.test_master_weights import assert_like_masters, fits, resumed
from tests.models import GPT, VOCAB, Block
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

KEPT = ["LayerNorm", "Spy", "blocks.*.out", "model.head"]
"""Patterns of classes, of ends of names, and of a whole name."""
LOW = ("mlp", "embedding", "position")
"""Parts of the names of all other parameters, except one without dimensions."""


class Spy(nn.Linear):
    """Record the dtypes in which the layer computes."""

    seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        Spy.seen |= {x.dtype, self.weight.dtype, y.dtype}
        return y


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        Spy.seen |= {x.dtype, self.weight.dtype}
        return super().forward(x)


class Partly(GPT):
    """Train on float32 layers, whose weights bfloat16 cannot represent, and on others, whose weights it can."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        for block in self.model.blocks:
            block.qkv.__class__ = Spy
            block.norm_1.__class__ = block.norm_2.__class__ = LayerNorm
        self.model.head.weight = nn.Parameter(torch.randn(VOCAB, 20) / 5)
        for name, param in self.named_parameters():
            if any(part in name for part in LOW):
                param.data = param.data.bfloat16().float()
            else:
                param.data += 1e-3 * torch.rand_like(param)


class ByHand(Partly):
    """Compute what ``keep_fp32=KEPT`` with bfloat16 means, in one process and without autocast.

    Args:
        lowers: Whether blocks are given hidden states in bfloat16, as they are where parameters are sharded.
    """

    def __init__(self, lowers: bool) -> None:
        super().__init__()
        self.lowers = lowers

    def loss(self, batch: Any) -> Tensor:
        def low(layer: nn.Linear, x: Tensor) -> Tensor:
            return functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

        def block(layer: Block, x: Tensor) -> Tensor:
            x = x.bfloat16() if self.lowers else x
            q, k, v = layer.qkv(layer.norm_1(x.float())).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.out(attended.transpose(1, 2).flatten(2).float())
            return x + low(layer.mlp[2], layer.mlp[1](low(layer.mlp[0], layer.norm_2(x))))

        tokens, targets = batch
        x = self.model.embedding(tokens) + self.model.position
        for layer in self.model.blocks:
            x = block(layer, x)
        logits = self.model.head(self.model.norm(x.float())) * self.temperature
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Gradients(pl.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        Spy.seen.clear()  # The search for a plan of tensor parallelism has run the layers in float64.

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.found = whole_gradients(pl_module)


def gradients(
    layout: str, by_hand: bool = False, lowers: bool = False, reduce_dtype: Any = None, **strategy: Any
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Return the gradients of the first step, and the dtypes that layers of :class:`Partly` have computed in.

    Args:
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        by_hand: Whether :class:`ByHand` computes them.
        lowers: Argument of :class:`ByHand`.
        reduce_dtype: Argument of MeshPrecision.
        strategy: Arguments of the strategy.
    """
    model, callback = ByHand(lowers) if by_hand else Partly(), Gradients()
    plugins = [] if by_hand else [MeshPrecision(param_dtype="bfloat16", reduce_dtype=reduce_dtype, keep_fp32=KEPT)]
    made = make_strategy(layout, check_replicas_every_n_steps=1, **strategy)
    make_trainer("auto", strategy=made, max_steps=1, plugins=plugins, callbacks=[callback]).fit(model)
    return callback.found, set(Spy.seen)


def error(found: dict[str, Tensor], expected: dict[str, Tensor], is_kept: bool) -> float:
    """Return the largest relative error of the gradient of a parameter that is kept in float32, or is not."""
    total = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    return max(
        float((found[name] - grad).norm() / max(float(grad.norm()), 1e-3 * total))
        for name, grad in expected.items()
        if is_kept != any(part in name for part in LOW)
    )


@functools.cache
def by_hand(pool: WorkerPool, lowers: bool) -> dict[str, Tensor]:
    expected: dict[str, Tensor] = pool.run(gradients, 1, "auto", True, lowers=lowers)[0][0]
    return expected


# If matrix products in bfloat16 were split as well, their parts would be rounded one by one.
@pytest.mark.parametrize(
    ("num_ranks", "layout", "strategy"),
    one_in(
        2,
        [
            (2, "1x2", {"compile": "aot_eager"}),
            (4, "2x2", {"activation_checkpointing": "full"}),
            (2, "2x1", {}),
            (2, "tp2-1", {"plan": {"model.blocks.*.mlp.0": "replicate", "model.blocks.*.mlp.2": "replicate"}}),
            (2, "pp2-1", {}),
        ],
    ),
)
def test_kept_modules_compute_in_float32(
    pool: WorkerPool, reference_pool: WorkerPool, num_ranks: int, layout: str, strategy: dict[str, Any]
) -> None:
    ranks, expected = in_parallel(
        lambda: pool.run(gradients, num_ranks, layout, **strategy),
        lambda: by_hand(reference_pool, layout in ("1x2", "2x2")),
    )
    found: dict[str, Tensor] = {}
    for own, seen in ranks:
        found |= own
        assert seen == {torch.float32}
    assert found.keys() == expected.keys()
    assert error(found, expected, True) < 1e-5
    assert error(found, expected, False) < 5e-3


def test_gradients_in_two_dtypes_are_reduced_in_the_one_that_is_asked_for(
    pool: WorkerPool, reference_pool: WorkerPool
) -> None:
    found, seen = pool.run(gradients, 2, "1x2", reduce_dtype="bfloat16")[0]
    assert seen == {torch.float32}
    assert 1e-4 < error(found, by_hand(reference_pool, True), True) < 1e-2


@pytest.mark.parametrize("layout", ["1x2", "2x1"])
def test_without_further_options_it_is_lightnings_mixed_precision(pool: WorkerPool, layout: str) -> None:
    (expected, *_), (found, *_) = pool.run(fits, 2, layout, ["bf16-mixed", {"param_dtype": "bfloat16"}], 2)[0]
    assert all((found[name] == expected[name]).all() for name in expected)


def test_training_is_that_of_plain_torch_with_float32_masters(pool: WorkerPool) -> None:
    kept = ("keep_fp32", ("LayerNorm",))
    references: dict[Any, LowPrecision] = {
        (("param_dtype", "bfloat16"), kept): "bf16-mixed",
        (("param_dtype", "float16"), kept): "16-mixed",
    }
    assert_like_masters(pool, 2, "1x2", references)


def test_a_resumed_run_goes_on_bit_by_bit(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"param_dtype": "float16", "keep_fp32": ["LayerNorm", "head"]}
    assert all(has_same_bits for has_same_bits, _ in pool.run(resumed, 2, "1x2", options, tmp_path))


class Buffered(GPT):
    """Scale logits by a buffer, and return logits from the step of a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        logits = self.model(batch[0])
        return logits, logits.argmax(-1) * self.scale.numel()


def outputs(strategy: Any, **options: Any) -> tuple[str, list[torch.dtype], torch.dtype, str]:
    """Train and predict, and return the table, the dtypes of outputs and of a buffer, and the error of another fit."""
    model = Buffered()
    trainer = make_trainer("auto", strategy=strategy(), max_steps=1, plugins=[MeshPrecision(**options)])
    trainer.fit(model)
    parallel = parallelized(model)
    assert parallel is not None
    table = startup_table(trainer.strategy, parallel)
    plugin = MeshPrecision(**options)
    predicted = make_trainer("auto", strategy=strategy(), limit_predict_batches=1, plugins=[plugin]).predict(model)
    assert predicted is not None
    error = refused(model, strategy=strategy(), precision="bf16-mixed")
    return table, [tensor.dtype for tensor in predicted[0]], model.scale.dtype, error


@pytest.mark.parametrize("strategy", [FullShardStrategy, DataParallelStrategy])
def test_outputs_and_buffers_have_the_dtypes_that_are_asked_for(pool: WorkerPool, strategy: Any) -> None:
    options = {"output_dtype": "float32", "buffer_dtype": "bfloat16", "keep_fp32": ["LayerNorm"]}
    for table, dtypes, buffer, error in pool.run(outputs, 2, strategy, **options):
        assert dtypes == [torch.float32, torch.int64]
        assert buffer == torch.bfloat16
        assert "stored in float32, computed in bfloat16, gradients reduced in float32, buffers in bfloat16" in table
        assert "2 x Block (block): 3,420 parameters each, of which 80 are computed in float32" in table
        assert "5 modules that match LayerNorm" in table
        assert "keep_fp32=['LayerNorm'], which cannot be changed to []" in error


def refused_for(keep_fp32: list[str]) -> str:
    return refused(GPT(), strategy=DataParallelStrategy(), plugins=[MeshPrecision(keep_fp32=keep_fp32)])


def refused_by_lightning() -> str:
    return refused(GPT(), strategy="auto", plugins=[MeshPrecision(keep_fp32=["LayerNorm"])])


def test_what_cannot_be_kept_is_refused(pool: WorkerPool) -> None:
    (message,) = pool.run(refused_for, 1, ["LayerNom"])
    assert "keep_fp32=['LayerNom']: 'LayerNom' matches no module with parameters; did you mean 'LayerNorm'?" in message
    (message,) = pool.run(refused_by_lightning, 1)
    assert "MeshPrecision(keep_fp32=('LayerNorm',)) needs a strategy of lightning_dist" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_dtype": "float8"}, "param_dtype='float8' must be one of 'bfloat16', 'float16', 'float32'."),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8' must be one of 'float32', 'float64', 'bfloat16'."),
        ({"keep_fp32": "LayerNorm"}, "keep_fp32='LayerNorm' must be a list of patterns: write ['LayerNorm']."),
        ({"master_weights": "kahan", "param_dtype": "float16"}, "param_dtype='float16' with master_weights='kahan'"),
        ({"master_weights": "fp32", "keep_fp32": ["a"]}, "keep_fp32=['a'] with master_weights='fp32'"),
        ({"param_dtype": "float32", "keep_fp32": ["a"]}, "keep_fp32=['a'] with param_dtype='float32'"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MeshPrecision(**options)


def test_another_dtype_for_reductions_in_the_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_dtype='float32' of the strategy contradicts MeshPrecision"):
        precision_policy(MeshPrecision(reduce_dtype="bfloat16"), "float32")
