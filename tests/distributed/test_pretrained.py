"""Test that Hugging Face's files load into every layout, that each rank reads its part, and misfits are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import FullShardStrategy, NDParallelStrategy, TensorParallelStrategy
from lightning_dist.plugins.callbacks import LoadPretrained
from lightning_dist.run.pretrained import load_safetensors
from tests.distributed.fit import Weights, make_trainer, weights_of
from tests.pool import WorkerPool
from tests.thorough import one_in

VOCAB, CONTEXT = 64, 8
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    # The head is tied, and query, key and value are packed in one layer.
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}  # fmt: skip
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "tp2": lambda: TensorParallelStrategy(2),
    "tp4": lambda: TensorParallelStrategy(4),
    "pp2": lambda: NDParallelStrategy(pp_size=2),
    "ep2": lambda: NDParallelStrategy(ep_size=2),
    "ep4": lambda: FullShardStrategy(ep_size=4),
}
SPLIT = ("full_shard", "2x2", "tp2", "tp4", "pp2")
LAYOUTS = {"llama": SPLIT, "gpt2": SPLIT, "mixtral": ("full_shard", "ep2", "ep4", "tp2", "tp4")}


def build(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]), dtype=torch.float32)


class LanguageModel(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model: nn.Module | None = None
        self.scale = nn.Parameter(torch.full((3,), 2.0))  # This parameter is in no file.

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss * self.scale.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randint(VOCAB, (8, CONTEXT), generator=generator)), batch_size=2)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # Training must not change the loaded weights.


def trainer_of(layout: str, callback: pl.Callback, **kwargs: Any) -> pl.Trainer:
    if layout in STRATEGIES:
        layout, kwargs["strategy"] = "auto", STRATEGIES[layout]()
    return make_trainer(layout, max_steps=1, limit_val_batches=1, callbacks=[callback], **kwargs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save each model in several files, and return the folders by name."""
    result = {}
    for seed, name in enumerate(CONFIGS):
        torch.manual_seed(seed)
        result[name] = tmp_path_factory.mktemp(name)
        model = build(name)
        for param in model.parameters():  # Norms and biases, too, must differ from their initial values.
            nn.init.normal_(param, std=0.1)
        model.save_pretrained(result[name], max_shard_size="20KB")
        assert len(list(result[name].glob("*.safetensors"))) > 2
    return result


def stored(folder: Path) -> Weights:
    """Read all tensors of the files in a folder."""
    result: Weights = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="numpy") as tensors:
            result |= {f"model.{name}": tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return result


def loaded_by_transformers(folder: Path) -> Weights:
    """Return the parameters of the model that ``from_pretrained`` loads, by their names in the LightningModule."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {f"model.{name}": param.detach().numpy() for name, param in model.named_parameters()}


def assert_are_stored(weights: Weights, folder: Path) -> None:
    expected = loaded_by_transformers(folder)
    np.testing.assert_array_equal(weights.pop("scale"), 2.0)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[name], name)


class CountingSlice:
    """Wrap a slice of a safetensors file, and count the elements that are read."""

    num_read = 0

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_

    def __getitem__(self, where: Any) -> Tensor:
        result: Tensor = self._slice[where]
        CountingSlice.num_read += result.numel()
        return result

    def get_shape(self) -> list[int]:
        shape: list[int] = self._slice.get_shape()
        return shape


class CountingFile:
    """Wrap a safetensors file, and allow reading slices only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = REAL_OPEN(*args, **kwargs)

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def keys(self) -> list[str]:
        names: list[str] = self._file.keys()
        return names

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name))


REAL_OPEN = safetensors.safe_open


def fit(layout: str, name: str, folder: Path, **kwargs: Any) -> tuple[Weights, int]:
    """Load and train, and return the weights and the number of elements that this rank has read from the files."""
    CountingSlice.num_read = 0
    model = LanguageModel(name)
    with patch("safetensors.safe_open", CountingFile):
        trainer_of(layout, LoadPretrained(folder), **kwargs).fit(model)
    return weights_of(model), CountingSlice.num_read


def fit_in_layouts(name: str, folder: Path) -> list[tuple[Weights, int]]:
    return [fit(layout, name, folder) for layout in LAYOUTS[name]]


@pytest.mark.parametrize("name", one_in(4, CONFIGS))
def test_every_layout_loads_the_files_and_each_rank_reads_little_more_than_its_part(
    pool: WorkerPool, folders: dict[str, Path], name: str
) -> None:
    (single,) = pool.run(fit, 1, "auto", name, folders[name])
    results = pool.run(fit_in_layouts, 4, name, folders[name])
    numel = sum(weight.size for weight in stored(folders[name]).values())
    assert_are_stored(single[0], folders[name])
    assert single[1] == numel
    for i, layout in enumerate(LAYOUTS[name]):
        num_read = [results[rank][i][1] for rank in range(4)]
        for of_rank in results:
            assert_are_stored(of_rank[i][0], folders[name])
        # Each replica reads all files once. With tensor parallelism, several ranks read the small replicated tensors,
        # and under pipelines, two stages read a tied embedding.
        num_replicas = 2 if layout == "2x2" else 1
        twice = {"tp4": 0.2, "pp2": 0.1}.get(layout, 0.05)
        assert num_replicas * numel <= sum(num_read) <= num_replicas * numel * (1 + twice)
        assert max(num_read) < (0.6 if layout == "2x2" else 0.35) * numel


def validate_and_resume(folder: Path, work: Path) -> tuple[Weights, Weights, int, Weights]:
    """Validate, train, save and resume with LoadPretrained.

    Returns:
        The weights after the first validation and after training, the number of elements that the resume read from the
        files, and the resumed weights.
    """
    model, callback = LanguageModel("llama"), LoadPretrained(folder)
    trainer = trainer_of("full_shard", callback)
    trainer.validate(model, verbose=False)
    loaded = weights_of(model)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1.0)  # type: ignore[method-assign]
    trainer.fit(model)
    trained = weights_of(model)
    trainer.validate(model, verbose=False)  # This must not load the files again.
    assert all((weight == trained[name]).all() for name, weight in weights_of(model).items())
    trainer.save_checkpoint(work / "run.ckpt")
    CountingSlice.num_read = 0
    resumed = LanguageModel("llama")
    with patch("safetensors.safe_open", CountingFile):
        trainer_of("2x2", LoadPretrained(folder)).fit(resumed, ckpt_path=work / "run.ckpt")
    return loaded, trained, CountingSlice.num_read, weights_of(resumed)


def test_trained_and_resumed_weights_are_not_overwritten_by_the_files(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    for loaded, trained, num_read, resumed in pool.run(validate_and_resume, 4, folders["llama"], tmp_path):
        assert_are_stored(loaded, folders["llama"])
        assert any((weight != stored(folders["llama"])[name]).any() for name, weight in trained.items() if "." in name)
        assert num_read == 0
        for name, weight in resumed.items():
            np.testing.assert_array_equal(weight, trained[name], name)


def fit_wrong(folder: Path) -> tuple[str, bool]:
    """Load files that do not fit, and return the error on this rank, and whether any weight was changed."""
    model = LanguageModel("llama")
    before: Weights = {}

    class Look(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            before.update(weights_of(model))

    try:
        trainer = make_trainer("full_shard", max_steps=1, callbacks=[Look(), LoadPretrained(folder)])
        trainer.fit(model)
    except Exception as error:
        after = weights_of(model)
        assert before
        return f"{type(error).__name__}: {error}", any((before[name] != after[name]).any() for name in before)
    return "no error", False


def test_all_ranks_refuse_files_that_do_not_fit_and_change_no_weight(
    pool: WorkerPool, folders: dict[str, Path]
) -> None:
    results = pool.run(fit_wrong, 4, folders["gpt2"])
    assert len(set(results)) == 1
    error, is_changed = results[0]
    assert error.startswith("ValueError: ") and "are not those of this module" in error
    assert not is_changed


def resaved(folder: Path, work: Path, change: Any) -> Path:
    """Copy a saved model to one file, after ``change`` was called with its tensors."""
    from safetensors.torch import save_file

    tensors = {name.removeprefix("model."): torch.from_numpy(weight) for name, weight in stored(folder).items()}
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, work / "model.safetensors")
    return work


def test_the_error_names_the_tensors_and_files_that_do_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    model = build("llama")
    inner = model.model  # Its names have no "model." at the beginning, like those of resaved().
    before = weights_of(model)

    def refused(folder: Path, prefix: str = "", module: Any = inner) -> str:
        with pytest.raises(ValueError) as caught:
            load_safetensors(module, folder, prefix)
        for name, weight in weights_of(model).items():
            np.testing.assert_array_equal(weight, before[name])
        return str(caught.value)

    def case(name: str, change: Any) -> Path:
        (tmp_path / name).mkdir()
        return resaved(
            folders["llama"], tmp_path / name, lambda tensors: (tensors.pop("lm_head.weight"), change(tensors))
        )

    assert f"{tmp_path}/nowhere is not a folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path / "empty")
    assert "The files lack norm.weight. Build" in refused(case("missing", lambda tensors: tensors.pop("norm.weight")))
    unknown = refused(case("unknown", lambda tensors: tensors.update({"new.weight": torch.ones(2)})))
    assert "The module lacks new.weight. Build" in unknown
    shape = refused(case("shape", lambda tensors: tensors.update({"norm.weight": torch.ones(31)})))
    assert f"norm.weight has shape [31] in {tmp_path}/shape/model.safetensors, but [32] in the module" in shape
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no tensors at all")
    assert f"{tmp_path}/damaged/model.safetensors is not a complete safetensors file" in refused(tmp_path / "damaged")
    prefix = refused(folders["llama"], "net.", model)
    assert "prefix='net.': the module has no parameter" in prefix
    many = refused(folders["llama"], "model.", model)
    assert "The files lack 20 tensors (embed_tokens.weight, layers.0.input_layernorm.weight, " in many
    assert "The module lacks 21 tensors (lm_head.weight, " in many
    part = shutil.copytree(folders["llama"], tmp_path / "part")
    files = sorted(set(json.loads((part / "model.safetensors.index.json").read_text())["weight_map"].values()))
    (part / files[1]).unlink()
    assert f"lists {files[1]}, missing from the folder" in refused(part, module=model)
    (part / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of safetensors files" in refused(part, module=model)
    with torch.device("meta"):
        meta = build("llama")
    assert "is on the meta device" in refused(folders["llama"], module=meta)


def test_the_error_names_experts_that_do_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    experts = "layers.0.block_sparse_moe.experts"

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"], tensors[f"{experts}.3.w1.weight"]

    folder = resaved(folders["mixtral"], tmp_path, change)
    with pytest.raises(ValueError) as caught:
        load_safetensors(build("mixtral").model, folder)
    assert f"{experts}.0.w3.weight in {folder}/model.safetensors has shape [4, 48, 32]" in str(caught.value)
    assert f"does not fit [3, 48, 32] of {experts}.0.w1.weight" in str(caught.value)


def test_weights_that_transformers_would_compute_otherwise_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter, WeightRenaming

    def mapping(model: nn.Module) -> list[Any]:
        return [
            WeightRenaming(".block_sparse_moe.", ".mlp."),
            WeightConverter(".experts.*.w2.weight", ".experts.down_proj", operations=[MergeModulelist(), Transpose()]),
        ]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    with pytest.raises(ValueError, match=r"down_proj would be computed of .* by MergeModulelist, Transpose of transf"):
        load_safetensors(build("mixtral"), folders["mixtral"])


class Tied(nn.Module):
    """Hold a tied weight, a persistent and a non-persistent buffer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_loading_keeps_ties_and_dtypes_and_loads_persistent_buffers(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    weight = torch.arange(12.0).reshape(4, 3)
    tensors = {name: weight, "scale": torch.tensor(5.0), "mean": torch.ones(3), "table": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    module = Tied().to(torch.bfloat16)
    load_safetensors(module, tmp_path)
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.dtype == torch.bfloat16
    assert torch.equal(module.head.weight, weight.to(torch.bfloat16))
    assert module.scale == 5 and module.mean.eq(1).all() and module.table.eq(0).all()
