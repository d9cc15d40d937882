"""Test that auto_parallel chooses a layout that fits, trains as one process does, and resumes on other ranks."""

from __future__ import annotations

import re
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt.model import GPTModule
from examples.huggingface.model import CausalLM
from lightning_dist import AutoParallelStrategy
from lightning_dist.checkpoint import read_manifest
from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.planning.cases import Case, make
from tests.pool import RankFailed, WorkerPool

BATCH = 8
TIMEOUT = timedelta(minutes=2)
PLANNING_S = 400.0
"""Seconds that a run may take which plans first: a plan has a dry run of each layout, of seconds of processor time."""

pytestmark = pytest.mark.timeout(1000)


def gpt() -> pl.LightningModule:
    return GPTModule(dim=64, num_layers=4, num_heads=4, max_len=64, lr=1e-3, warmup_steps=2)


def llama() -> pl.LightningModule:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return CausalLM({"model_type": "llama", "bos_token_id": None, "eos_token_id": None, **sizes, **heads})


MODELS = {"gpt": gpt, "llama": llama}


def loader() -> DataLoader[tuple[Tensor, ...]]:
    tokens = torch.randint(0, 90, (8 * BATCH, 65), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)


class Trained(NamedTuple):
    weights: Weights
    layout: dict[str, int]
    settings: dict[str, Any]


def train(model: str, num_steps: int, folder: str | None, ckpt_path: str | None, **arguments: Any) -> Trained:
    """Train on all ranks of this test. This is a collective."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = MODELS[model]()
    strategy = AutoParallelStrategy(global_batch_size=BATCH, **arguments) if arguments else "auto"
    trainer = make_trainer(
        "auto", strategy=strategy, max_steps=num_steps, precision="64-true", use_distributed_sampler=True
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    if folder is not None:
        trainer.save_checkpoint(Path(folder) / "saved.ckpt")
    layout = getattr(trainer.strategy, "layout", None)
    return Trained(weights_of(module), layout.sizes if layout else {}, getattr(trainer.strategy, "settings", {}))


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_chosen_layout_trains_as_one_process_and_resumes_on_other_ranks(
    pool: WorkerPool, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (alone,) = pool.run(train, 1, model, 4, None, None)
    first = pool.run(train, 2, model, 2, str(tmp_path), None, timeout_s=PLANNING_S, cp_size=1, pp_size=1)
    settings = read_manifest(str(tmp_path / "saved.ckpt")).about["settings"]
    assert settings["planned_layout"] == first[0].settings["planned_layout"]
    assert settings["planned_peak_mib"] > 0
    assert settings["planned_step_ms"] > 0
    ckpt_path = str(tmp_path / "saved.ckpt")
    resumed = pool.run(
        train, 4, model, 4, None, ckpt_path, timeout_s=PLANNING_S, tp_size=2, cp_size=1, pp_size=1, objective="memory"
    )
    assert resumed[0].layout["tp"] == resumed[0].layout["dp_shard"] == 2
    assert all(one.layout == resumed[0].layout for one in resumed)
    # Norms of Hugging Face's Llama compute in float32.
    assert_same(resumed[0].weights, alone.weights, 1e-10 if model == "gpt" else 1e-6)


@pytest.mark.thorough
def test_a_memory_that_no_layout_fits_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.run(train, 2, "gpt", 2, None, None, timeout_s=PLANNING_S, memory="0.1MiB", pp_size=1, tp_size=1, cp_size=1)
    for text in failed.value.errors.values():
        assert "no layout needs at most 90% of 0.1 MiB. The closest is dp_shard 2 with activation_" in text
    assert len(failed.value.errors) == 2


def test_sizes_that_no_layout_has_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    for text in pool.run(no_layout, 2):
        assert "dp_shard_size=3" in text
        assert "does not fit 2 processes" in text


@pytest.mark.thorough
def test_with_little_memory_it_trains_where_full_shard_does_not(pool: WorkerPool) -> None:
    """The limit is one of the kernel, on what each process may allocate in addition to what it has."""
    limit = 900 * 2**20
    texts = pool.run(limited, 2, limit, None)
    assert any("emory" in text for text in texts), texts
    assert pool.run(limited, 2, limit, "700MiB", timeout_s=PLANNING_S) == ["trained", "trained"]


def limited(limit: int, memory: str | None) -> str:
    """Train a model with large activations in little memory, and return the error; ``"trained"``: there was none."""
    torch.set_num_threads(1)
    module, data, arguments = make(Case("GPT", 2, {"dp_shard_size": 2}))
    if memory is not None:
        arguments["strategy"] = AutoParallelStrategy(memory=memory, tp_size=1, cp_size=1, pp_size=1, timeout=TIMEOUT)
    trainer = make_trainer("auto", max_steps=3, **arguments)
    used = int(re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, before[1]))
    try:
        trainer.fit(module, DataLoader(data.dataset, batch_size=64))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return "trained"


def no_layout() -> str:
    arguments = {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_shard_size": 3}
    return refused(gpt(), strategy=AutoParallelStrategy(**arguments), use_distributed_sampler=True)


def test_one_device_is_a_layout(pool: WorkerPool) -> None:
    (only,) = pool.run(train, 1, "gpt", 1, None, None, objective="memory", memory="1GiB")
    assert set(only.layout.values()) == {1}
