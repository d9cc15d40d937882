"""Test that replicas are checked for differences, get their parts of the data, and are nodes by default."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dist import HybridShardStrategy
from tests.distributed.fit import make_trainer
from tests.models import GPT
from tests.pool import WorkerPool


class Diverges(pl.Callback):
    """Change a weight of the second replica slightly after the third batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank >= 2:
            with torch.no_grad():
                pl_module.model.head.weight.to_local().flatten()[:1] *= 1 + 1e-7


def check_replicas(every: int, diverge: bool) -> str:
    callbacks = [Diverges()] if diverge else []
    trainer = make_trainer("2x2", {"check_replicas_every_n_steps": every}, max_steps=6, callbacks=callbacks)
    try:
        trainer.fit(GPT())
    except Exception as error:
        return f"{trainer.global_step} {type(error).__name__}: {error}"
    return ""


def test_replicas_that_differ_are_found(pool: WorkerPool) -> None:
    assert pool.run(check_replicas, 4, 1, False) == [""] * 4
    for error in pool.run(check_replicas, 4, 2, True):
        assert error.startswith("3 ReplicasDifferError: 1 of ")
        assert "model.embedding.weight" in error  # The changed weight of the head is tied to it.


def sampler_numbers() -> tuple[int, int, int]:
    class Plain(GPT):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.data()), batch_size=4)

    model = Plain()
    trainer = make_trainer("2x2", max_steps=1, use_distributed_sampler=True)
    trainer.fit(model)
    sampler = trainer.train_dataloader.sampler
    return sampler.num_replicas, sampler.rank, trainer.num_training_batches


def test_lightnings_sampler_splits_the_data_over_all_ranks(pool: WorkerPool) -> None:
    assert pool.run(sampler_numbers, 4) == [(4, rank, 4096 // 4 // 4) for rank in range(4)]


def default_sizes() -> dict[str, Any]:
    strategy = HybridShardStrategy()
    trainer = make_trainer("auto", max_steps=1, strategy=strategy, sync_batchnorm=False)
    trainer.fit(GPT())
    return strategy.layout.describe()


def test_by_default_each_node_has_one_replica(pool: WorkerPool) -> None:
    sizes = pool.run(default_sizes, 4, num_nodes=2)[0]
    assert sizes == {"pp_size": 1, "dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 1, "tp_size": 1, "ep_size": 1}


def default_on_one_node() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("auto", strategy="hybrid_shard")
    return [str(warning.message) for warning in caught]


def test_hybrid_shard_on_one_node_warns_that_it_is_the_same_as_full_shard(pool: WorkerPool) -> None:
    assert any("the same as 'full_shard'" in text for text in pool.run(default_on_one_node, 2)[0])
