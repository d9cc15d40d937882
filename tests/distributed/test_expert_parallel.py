"""Test checkpoints, evaluations, unequal loads and errors where experts are distributed over ranks.

That it computes the same as one process is tested in ``tests/parity/test_expert_parallel.py`` as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dist import FullShardStrategy, HybridShardStrategy, NDParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.distributed.test_tensor_parallel import AtStart
from tests.models import build
from tests.pool import WorkerPool

RESUMED = {
    "ep2": lambda: FullShardStrategy(ep_size=2),
    "none": lambda: FullShardStrategy(),
    "ep4": lambda: FullShardStrategy(ep_size=4),
    "2xep2": lambda: HybridShardStrategy(2, 2, ep_size=2),
    "tp2": lambda: NDParallelStrategy(tp_size=2, ep_size=2),
    "pp2": lambda: NDParallelStrategy(pp_size=2, ep_size=2),
}


def resume(folder: Path, first: str, others: list[str]) -> tuple[Weights, list[Weights], list[Weights]]:
    """Save with one layout, and resume for one step with the others, by AdamW.

    Returns:
        The saved weights, and in the order of the layouts the loaded weights and the weights after the step.
    """
    kwargs: dict[str, Any] = {"precision": "64-true", "gradient_clip_val": 0.5}
    model = build("gpt_oss", optimizer="adamw")
    trainer = make_trainer("full_shard", strategy=RESUMED[first](), max_steps=2, **kwargs)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    read: list[Weights] = []
    stepped = []
    for layout in others:
        again = build("gpt_oss", seed=1, optimizer="adamw")
        trainer = make_trainer(
            "full_shard", strategy=RESUMED[layout](), max_steps=3, callbacks=[AtStart(read)], **kwargs
        )
        trainer.fit(again, ckpt_path=folder / "run.ckpt")
        stepped.append(weights_of(again))
    return weights_of(model), read, stepped


@pytest.mark.parametrize(("first", "others"), [("ep2", list(RESUMED)), ("none", ["none", "ep4"]), ("ep4", ["none"])])
def test_any_layout_resumes_the_checkpoint_of_distributed_experts(
    pool: WorkerPool, tmp_path: Path, first: str, others: list[str]
) -> None:
    for saved, read, stepped in pool.run(resume, 4, tmp_path, first, others):
        assert len(read) == len(stepped) == len(others)
        for weights in read:
            assert_same(weights, saved, 0.0)
        for weights in stepped:
            assert_same(weights, stepped[0], 1e-6)
            assert any((weights[name] != saved[name]).any() for name in saved)
