"""Test that blocks with activation checkpointing or compilation have the same gradients, and keep fewer activations."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import FullShardStrategy, HybridShardStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_dist.techniques.activation_checkpointing import offload
from tests.distributed.fit import assert_same, make_trainer, refused, weights_of
from tests.models import build
from tests.parity.run import SPLIT_MODELS, Recorder
from tests.pool import WorkerPool
from tests.thorough import one_in

STRATEGIES: dict[str, Any] = {
    "full": lambda **kwargs: FullShardStrategy(**kwargs),
    "hybrid": lambda **kwargs: HybridShardStrategy(2, 2, **kwargs),
    "tp": lambda **kwargs: TensorParallelStrategy(2, **kwargs),
    "pp": lambda **kwargs: PipelineParallelStrategy(2, num_microbatches=2, **kwargs),
    "tp whole": lambda **kwargs: TensorParallelStrategy(2, sequence_parallel=False, **kwargs),
}


def fit(name: str, model: str, kwargs: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    module, recorder = build(model), Recorder()
    trainer = make_trainer(
        "2x2", strategy=STRATEGIES[name](**kwargs), max_steps=3, precision="64-true", callbacks=[recorder]
    )
    trainer.fit(module)
    return recorder.gradients[0], weights_of(module)


def fit_each(name: str, model: str, options: list[dict[str, Any]]) -> list[Any]:
    return [fit(name, model, kwargs) for kwargs in options]


@pytest.mark.parametrize(
    ("name", "model"),
    one_in(4, [("full", "example_gpt"), ("hybrid", "gpt2"), ("tp", "gpt2"), ("tp whole", "example_gpt")]),
)
def test_recomputed_blocks_have_the_same_gradients(pool: WorkerPool, name: str, model: str) -> None:
    (gradients, weights), actual = pool.run(fit_each, 4, name, model, [{}, {"activation_checkpointing": True}])[0]
    assert_same(actual[0], gradients, 1e-12)
    assert_same(actual[1], weights, 1e-12)


MODES: list[Any] = ["full", "selective", "offload", {"every": 2}, {"budget": 0.3}]


class DropoutGPT(SPLIT_MODELS["example_gpt"]):  # type: ignore[misc]
    """Draw random numbers in the blocks."""

    def make_model(self) -> Any:
        model = super().make_model()
        for block in model.blocks:
            block.feed_forward.down = nn.Sequential(block.feed_forward.down, nn.Dropout(0.2))
        return model


def bits(name: str, mode: Any) -> dict[str, np.ndarray]:
    """Return the gradients of the second step in float32."""
    torch.manual_seed(0)
    recorder = Recorder()
    strategy = STRATEGIES[name](activation_checkpointing=mode)
    with patch.object(offload, "MIN_NUMEL", 1):
        make_trainer("2x2", strategy=strategy, max_steps=2, callbacks=[recorder]).fit(DropoutGPT())
    return recorder.gradients[1]


def bits_of_each(name: str, modes: list[Any]) -> list[dict[str, np.ndarray]]:
    return [bits(name, mode) for mode in modes]


@pytest.mark.parametrize(("name", "modes"), one_in(3, [("hybrid", MODES), ("tp", MODES[:3]), ("pp", MODES[:3])]))
def test_every_mode_of_checkpointing_has_the_same_bits(pool: WorkerPool, name: str, modes: list[Any]) -> None:
    expected, *results = pool.run(bits_of_each, 4, name, ["none", *modes])[0]
    assert any(gradient.any() for gradient in expected.values())
    for mode, actual in zip(modes, results, strict=True):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert (actual[key] == expected[key]).all(), (mode, key)


@pytest.mark.parametrize(("name", "num_ranks", "recomputes"), one_in(2, [("tp", 2, False), ("hybrid", 4, True)]))
def test_compiled_blocks_have_the_same_gradients(pool: WorkerPool, name: str, num_ranks: int, recomputes: bool) -> None:
    """Compiled blocks have the same gradients, in particular of a split embedding before them, which once got none."""
    compiled = {"compile": "aot_eager", "activation_checkpointing": recomputes}
    ranks = pool.run(fit_each, num_ranks, name, "example_gpt", [{}, compiled], timeout_s=200)
    (gradients, weights), actual = ranks[0]
    assert np.linalg.norm(actual[0]["model.embedding.weight"]) > 0.01
    assert_same(actual[0], gradients, 1e-10)
    assert_same(actual[1], weights, 1e-10)


class TwoLengths(SPLIT_MODELS["example_gpt"]):  # type: ignore[misc]
    """Call the model on sequences that ranks can split, and on a shorter one that they cannot."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        losses = [
            functional.cross_entropy(self.model(tokens[:, :length]).flatten(0, 1), targets[:, :length].flatten())
            for length in (8, 7, 8)
        ]
        return torch.stack(losses).sum()


class CheckpointsItself(SPLIT_MODELS["llama3"]):  # type: ignore[misc]
    """Use Hugging Face's own activation checkpointing."""

    def make_model(self) -> Any:
        model = super().make_model()
        model.gradient_checkpointing_enable()
        return model


def fit_one(module: Any, kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    module, recorder = module(), Recorder()
    strategy = TensorParallelStrategy(2, **kwargs) if kwargs is not None else "auto"
    devices = {} if kwargs is not None else {"devices": 1, "num_nodes": 1}
    make_trainer("auto", strategy=strategy, max_steps=1, precision="64-true", callbacks=[recorder], **devices).fit(
        module
    )
    return recorder.gradients[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "kwargs"), [(TwoLengths, {}), (TwoLengths, {"activation_checkpointing": True}), (CheckpointsItself, {})]
)
def test_several_sequence_lengths_and_the_models_own_checkpointing_give_the_same_gradients(
    pool: WorkerPool, module: Any, kwargs: dict[str, Any]
) -> None:
    expected = pool.run(fit_one, 1, module, None)[0]
    assert_same(pool.run(fit_one, 4, module, kwargs)[0], expected, 1e-10)


def num_saved(kwargs: dict[str, Any]) -> int:
    """Return the number of elements that one step keeps for its backward."""
    module, saved = build("example_gpt"), [0]
    step = module.training_step

    def counting(batch: Any, batch_idx: int) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            saved[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return step(batch, batch_idx)

    module.training_step = counting  # type: ignore[method-assign]
    make_trainer("2x2", strategy=FullShardStrategy(**kwargs), max_steps=1).fit(module)
    return saved[0]


def num_saved_of_each(modes: list[Any]) -> list[int]:
    return [num_saved({"activation_checkpointing": mode}) for mode in modes]


def test_the_modes_keep_fewer_activations(pool: WorkerPool) -> None:
    modes = ["none", {"budget": 0.5}, "full"]
    everything, half, nothing = pool.run(num_saved_of_each, 4, modes)[0]
    assert nothing < 0.5 * everything
    assert half == pytest.approx((everything + nothing) / 2, rel=0.1)


def refusal(kwargs: dict[str, Any]) -> str:
    return refused(build("example_gpt"), strategy=FullShardStrategy(**kwargs))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"activation_checkpointing": "selective", "compile": "aot_eager"}, "'selective' with compile"),
        ({"compile": {"mode": "reduce-overhead"}}, "compile={'mode': 'reduce-overhead'} "),
        ({"activation_checkpointing": {"every": 3}}, "{'every': 3} chooses none of the model's 2 blocks"),
    ],
)
def test_modes_that_blocks_cannot_honour_are_refused(pool: WorkerPool, kwargs: dict[str, Any], text: str) -> None:
    for error in pool.run(refusal, 2, kwargs):
        assert text in error


def without_blocks() -> str:
    class Plain(type(build("gpt"))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 8)

    return refused(Plain(), strategy=FullShardStrategy(activation_checkpointing=True))


def test_activation_checkpointing_of_a_model_without_blocks_is_refused(pool: WorkerPool) -> None:
    for error in pool.run(without_blocks, 4):
        assert "activation_checkpointing works on the model's repeated blocks, and Plain has none" in error
