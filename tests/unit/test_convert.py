"""Checkpoints are converted between all formats with the same bits, in little memory, and safely."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from itertools import permutations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_dist.checkpoint import CheckpointError, read_whole
from lightning_dist.run.convert import FORMATS, Options, convert
from lightning_dist.run.convert.dcp import _member
from lightning_dist.run.convert.formats import with_bookkeeping

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    ),
    "bert": lambda: transformers.BertConfig(**SMALL, intermediate_size=48, architectures=["BertForMaskedLM"]),
}


def suffix(name: str) -> str:
    return {"lightning": ".ckpt", "safetensors": ".safetensors"}.get(name, "")


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    return kind.from_config(config)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_through_all_formats_and_back_with_the_same_bits(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path / "begin")
    names = [name for name in FORMATS if name != "huggingface"]
    before = str(tmp_path / "begin")
    for name in [*names, "huggingface"]:  # Each format is read, and written from another one.
        after = str(tmp_path / f"as_{name}{suffix(name)}")
        done = convert(before, after, name, Options(config=tmp_path / "begin"))
        assert (done.written, done.left_out) == (name, () if name != "safetensors" else done.left_out)
        before = after
    convert(before, str(tmp_path / "end.ckpt"))
    found = torch.load(tmp_path / "end.ckpt")["state_dict"]
    expected = weights_of(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    loaded = type(model).from_pretrained(before)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    theirs = {file.name for file in (tmp_path / "begin").glob("*.safetensors")}
    assert theirs == {file.name for file in Path(before).glob("*.safetensors")}


class Trained(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trained(path: Path) -> Path:
    """Train by Lightning alone, and return its checkpoint."""
    trainer = pl.Trainer(max_steps=3, logger=False, enable_progress_bar=False, default_root_dir=path, accelerator="cpu")
    trainer.fit(Trained())
    trainer.save_checkpoint(path / "begin.ckpt")
    return path / "begin.ckpt"


@pytest.mark.parametrize(("first", "second"), list(permutations(["lightning", "lightning-dist", "dcp"], 2)))
def test_a_whole_checkpoint_is_resumed_after_two_conversions(tmp_path: Path, first: str, second: str) -> None:
    begin = trained(tmp_path)
    for index, name in enumerate((first, second, "lightning")):
        after = tmp_path / f"{index}{suffix(name)}"
        assert convert(str(begin), str(after), name).left_out == ()
        begin = after
    found, expected = torch.load(begin), torch.load(tmp_path / "begin.ckpt")
    assert found["loops"] == expected["loops"] and found["global_step"] == 3
    states, expected_states = found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"]
    assert states.keys() == expected_states.keys()
    for index, state in expected_states.items():
        for key, value in state.items():
            assert torch.equal(states[index][key], value)
    trainer = pl.Trainer(max_steps=5, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(Trained(), ckpt_path=str(begin))
    assert trainer.global_step == 5


def test_directories_of_lightnings_sharded_strategies_are_read_and_written(tmp_path: Path) -> None:
    content = torch.load(trained(tmp_path))
    names = [name for name, _ in Trained().named_parameters()]
    (state,) = content.pop("optimizer_states")
    of_optimizer = {
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [{**group, "params": names} for group in state["param_groups"]],
    }
    theirs = tmp_path / "theirs"
    _distributed_checkpoint_save({"state_dict": content.pop("state_dict"), "optimizer_0": of_optimizer}, theirs)
    torch.save(content, theirs / "meta.pt")
    convert(str(theirs), str(tmp_path / "ours"), "lightning-dist")
    convert(str(tmp_path / "ours"), str(tmp_path / "again"), "dcp")
    found, expected = (_load_distributed_checkpoint(tmp_path / name) for name in ("again", "theirs"))
    assert found.keys() == expected.keys() >= {"state_dict", "optimizer_0", "loops"}
    for index, name in enumerate(names):
        assert torch.equal(found["state_dict"][name], expected["state_dict"][name])
        for key, value in found["optimizer_0"]["state"][name].items():
            assert torch.equal(value, state["state"][index][key])
    convert(str(tmp_path / "ours"), str(tmp_path / "end.ckpt"))
    trainer = pl.Trainer(max_steps=5, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(Trained(), ckpt_path=tmp_path / "end.ckpt")
    assert trainer.global_step == 5


class Color(Enum):
    RED = 1


class Evil:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("kind", ["lightning", "dcp", "dcp metadata"])
def test_a_pickle_that_could_run_code_is_refused_with_its_names(tmp_path: Path, kind: str) -> None:
    source, ran = tmp_path / "in.ckpt", tmp_path / "ran"
    content = {**with_bookkeeping({"weight": torch.ones(2)}), "extra": Evil(str(ran))}
    if kind == "lightning":
        torch.save(content, source)
    else:
        plain = tmp_path / "plain.ckpt"
        torch.save(with_bookkeeping({"weight": torch.ones(2)}), plain)
        source = tmp_path / "in"
        convert(str(plain), str(source), "dcp")
        if kind == "dcp":
            torch.save({"extra": Evil(str(ran))}, source / "meta.pt")
        else:
            (source / ".metadata").write_bytes(pickle.dumps(Evil(str(ran))))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir|os\.mkdir") as error:
        convert(str(source), str(tmp_path / "out"), "lightning-dist")
    assert "can run any code" in str(error.value) and "--trust" in str(error.value)
    assert not ran.exists() and not (tmp_path / "out").exists()


def test_only_members_of_enumerations_are_read_by_getattr() -> None:
    assert _member(Color, "RED") is Color.RED
    with pytest.raises(pickle.UnpicklingError, match="getattr"):
        _member(os, "mkdir")
    with pytest.raises(KeyError):
        _member(Color, "__class__")


def test_a_damaged_conversion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(with_bookkeeping({"weight": torch.ones(2)}), tmp_path / "in.ckpt")
    save = torch.save

    def damaged(content: Any, *args: Any, **kwargs: Any) -> None:
        save({**content, "state_dict": {"weight": torch.tensor([1.0, 1.0000001])}}, *args, **kwargs)

    monkeypatch.setattr(torch, "save", damaged)
    with pytest.raises(CheckpointError, match="state_dict/weight is not what was read"):
        convert(str(tmp_path / "in.ckpt"), str(tmp_path / "out.ckpt"))


@pytest.mark.parametrize(
    ("source", "destination", "to", "config", "text"),
    [
        ("missing.ckpt", "out.ckpt", None, None, "There is no checkpoint at"),
        ("empty", "out.ckpt", None, None, "has none of the formats that can be read: lightning-dist"),
        ("in.ckpt", "out", None, None, "does not say which format to write: add --to with lightning-dist"),
        ("in.ckpt", "out", "hugginface", None, "--to='hugginface' is no format: use lightning-dist"),
        ("in.ckpt", "in.ckpt", None, None, "exists: remove it, or name another path"),
        ("in.ckpt", "out", "huggingface", None, "needs its configuration: add --config"),
        ("in.ckpt", "out", "huggingface", "empty", "There is no config.json at"),
        ("in.ckpt", "out", "huggingface", "begin", r"set --prefix \(now 'model\.'\)"),
        ("list.pt", "out.ckpt", None, None, "holds a list, and no dictionary of weights"),
        ("other.pt", "out.ckpt", None, None, "is neither a checkpoint of Lightning"),
        ("damaged.ckpt", "out.ckpt", None, None, "cannot be read"),
    ],
)
def test_mistakes_are_refused(
    tmp_path: Path, source: str, destination: str, to: str | None, config: str | None, text: str
) -> None:
    (tmp_path / "empty").mkdir()
    torch.save(with_bookkeeping({"weight": torch.ones(2)}), tmp_path / "in.ckpt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    (tmp_path / "damaged.ckpt").write_bytes((tmp_path / "in.ckpt").read_bytes()[:300])
    if config == "begin":
        model_of("llama").config.save_pretrained(tmp_path / config)
    options = Options(config=None if config is None else tmp_path / config)
    with pytest.raises((CheckpointError, ValueError, OSError), match=text):
        convert(str(tmp_path / source), str(tmp_path / destination), to, options)


_MEASURED = """
import sys, threading, time
from pathlib import Path
import torch, transformers
from lightning_dist.run.convert import Options, convert

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

before, configuration, *conversions = sys.argv[1:]
for name, after in zip(conversions[::2], conversions[1::2]):
    peak, done = [0], threading.Event()
    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    begin = anonymous()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    convert(before, after, name, Options(config=Path(configuration)))
    done.set()
    thread.join()
    print("grown", name, peak[0] - begin)
    before = after
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_memory_is_that_of_less_than_two_of_the_largest_tensors(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=100_000, hidden_size=320, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "begin")
    largest, begin = 100_000 * 320 * 4, str(tmp_path / "begin")
    names = ("lightning-dist", "dcp", "lightning", "safetensors", "huggingface")
    conversions = [word for name in names for word in (name, str(tmp_path / f"as_{name}{suffix(name)}"))]
    words = [sys.executable, "-c", _MEASURED, begin, begin, *conversions]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    grown = dict(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("grown"))
    assert grown.keys() == set(names)
    for name, num_bytes in grown.items():
        assert int(num_bytes) < 2 * largest, f"to {name}: {int(num_bytes) / largest:.2f} of the largest tensor"


def test_read_whole_still_reads_into_memory(tmp_path: Path) -> None:
    torch.save(with_bookkeeping({"weight": torch.arange(4.0)}), tmp_path / "in.ckpt")
    convert(str(tmp_path / "in.ckpt"), str(tmp_path / "out"), "lightning-dist")
    assert torch.equal(read_whole(tmp_path / "out")["state_dict"]["weight"], torch.arange(4.0))
