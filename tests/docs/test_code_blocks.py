"""Run the code blocks of the documentation: Python and YAML as they stand, and commands up to what they would start."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L  # noqa: N812 - The pages write it so.
import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig

from lightning_dist import MeshPrecision, full_parameters
from lightning_dist.cli import checkpoint as checkpoint_command
from lightning_dist.cli import main
from lightning_dist.cli.at_once import answer
from lightning_dist.cli.doctor.command import make_parser
from lightning_dist.plugins.precision import Float8Precision
from tests.distributed.fit import make_trainer
from tests.docs.blocks import Block, find_blocks, pages
from tests.launched import ROOT
from tests.models import GPT
from tests.pool import WorkerPool

PYTHON = {str(block): block for block in find_blocks("python")}
NEEDS_RANKS = {key: 4 for key, block in PYTHON.items() if "lightning_dist.check(" in block.text}
"""Blocks that run a training, by the number of ranks that it needs."""


class MyModule(GPT):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim


class MyDataModule(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*GPT().data()), batch_size=2)


def run_python(text: str) -> dict[str, Any]:
    """Run a block with what it takes for granted, and return its names. Trainers are made, but do not train."""
    module = GPT()
    names: dict[str, Any] = {
        "L": L, "Trainer": L.Trainer, "MeshPrecision": MeshPrecision, "Float8Precision": Float8Precision,
        "YourModule": MyModule, "MyModule": MyModule, "MyDataModule": MyDataModule, "datamodule": MyDataModule(),
        "module": module, "trainer": L.Trainer(accelerator="cpu", devices=1, logger=False),
        "full_parameters": full_parameters,
    }  # fmt: skip
    exec(compile(text, "<documentation>", "exec"), names)
    return names


def run_on_rank(text: str) -> None:
    run_python(text)  # The names cannot be sent back.


def never_fit(trainer: L.Trainer, model: L.LightningModule, data: Any = None, **kwargs: Any) -> None:
    assert isinstance(model, L.LightningModule)


@contextmanager
def never_on_ray() -> Iterator[None]:
    """Let trainers of Ray be made, but not train: they would wait until the cluster has the GPUs that they ask for."""
    try:
        from ray.train.torch import TorchTrainer
    except ImportError:
        yield
        return
    with patch.object(TorchTrainer, "fit", lambda trainer: None):
        yield


class SavingModel(nn.Module):
    def save_pretrained(self, path: str) -> None:
        Path(path).mkdir()


@pytest.mark.parametrize("key", [key for key in PYTHON if key not in NEEDS_RANKS])
def test_python_code_runs(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({name: value.clone() for name, value in GPT().state_dict().items()}, "model.safetensors")
    AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8).save_pretrained(
        "pretrained"
    )
    text = PYTHON[key].text
    if "save_pretrained" in text:
        text = text.replace("module.model.save_pretrained", "SavingModel().save_pretrained")
        text = f"from {__name__} import SavingModel\n{text}"
    registered = dict(StrategyRegistry)
    try:
        with patch.object(L.Trainer, "fit", never_fit), never_on_ray():
            names = run_python(text)
        for check in CHECKS:
            check(names)
    finally:
        for name in StrategyRegistry.keys() - registered:
            StrategyRegistry.remove(name)


@pytest.mark.parametrize("key", NEEDS_RANKS)
def test_python_code_of_several_ranks_runs(pool: WorkerPool, key: str) -> None:
    pool.run(run_on_rank, NEEDS_RANKS[key], PYTHON[key].text)


def saved_weights_are_whole(names: dict[str, Any]) -> None:
    if callback := names.get("SaveWeights"):
        module = names["module"]
        callback().on_train_end(names["trainer"], module)
        saved = torch.load("weights.pt")
        assert saved.keys() == module.state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())


def models_are_built_in_configure_model(names: dict[str, Any]) -> None:
    if module := names.get("LanguageModel"):
        built = module()
        built.configure_model()
        assert len(list(built.parameters())) > 4


def compressors_give_back_what_they_encode(names: dict[str, Any]) -> None:
    if compressor := names.get("Half"):
        rows = torch.randn(2, 100)
        back = compressor().decode(compressor().encode(rows), rows.dtype)
        torch.testing.assert_close(back, rows, rtol=2**-8, atol=0)


def strategies_have_the_name_that_was_registered(names: dict[str, Any]) -> None:
    if strategy := names.get("NodeShardStrategy"):
        trainer = L.Trainer(accelerator="cpu", devices=8, num_nodes=2, strategy="node_shard", logger=False)
        assert isinstance(trainer.strategy, strategy)
        assert trainer.strategy.layout.dp_replicate == 2
        assert trainer.strategy.layout.dp_shard == 8


CHECKS: list[Callable[[dict[str, Any]], None]] = [
    saved_weights_are_whole,
    models_are_built_in_configure_model,
    compressors_give_back_what_they_encode,
    strategies_have_the_name_that_was_registered,
]


@pytest.mark.parametrize("block", find_blocks("yaml"), ids=str)
def test_yaml_is_a_configuration(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = list(yaml.safe_load_all(block.text))
    if "apiVersion" in contents[0]:
        command = contents[1]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[0] == "torchrun"
        return
    (tmp_path / "block.yaml").write_text(block.text)
    files = ["-c", str(ROOT / "examples/gpt/base.yaml"), "-c", str(tmp_path / "block.yaml")]
    with pytest.raises(SystemExit) as ended:
        code = main(["fit", *files, "--trainer.accelerator=cpu", "--print_config"])
        raise SystemExit(code)
    assert ended.value.code == 0, capsys.readouterr()


def commands() -> list[tuple[str, str]]:
    """Return the command lines of all pages, with their places."""
    found = []
    for block in find_blocks("bash", ""):
        if block.language == "" and not block.text.startswith("lightning-dist fit"):
            continue  # It shows what a command prints.
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(f"{block}+{index}", line.partition("  #")[0].strip()) for index, line in enumerate(lines)]
    return [(place, line) for place, line in found if line and not line.startswith("#")]


def save_checkpoint(path: Path) -> None:
    trainer = make_trainer("full_shard", max_steps=1)
    trainer.fit(GPT())
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkpoint that two ranks have written."""
    path = tmp_path_factory.mktemp("saved") / "run.ckpt"
    pool.run(save_checkpoint, 2, path)
    return path


@pytest.mark.parametrize(("place", "line"), commands())
def test_commands_run_or_have_no_unknown_option(
    place: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
) -> None:
    for name in ("epoch=3.ckpt", "step=400.ckpt"):
        shutil.copytree(checkpoint, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    if words[-2:-1] == ["-c"] and "bash" in words:  # A shell in each task of SLURM, which replaces its variables.
        words = shlex.split(re.sub(r"\$\w+", "1", words[-1]))
    if words[0].startswith("head=$("):
        return  # It asks SLURM for the first node of a job.
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pip":
        assert words[2].partition("[")[0] == "lightning-dist"
    else:
        start = next(i for i, word in enumerate(words) if word in ("lightning-dist", "lightning_dist.cli"))
        command, *arguments = words[start + 1 :]
        arguments = [str(existing(word)) if word.endswith(".yaml") else word for word in arguments]
        if command in ("fit", "validate", "test", "predict", "check", "plan", "profile"):
            assert answer(command, arguments) is None, capsys.readouterr()
        elif command == "launch":
            Path("train.py").touch()
            assert main([command, "--dry-run", *arguments]) == 0, capsys.readouterr()
        elif command == "doctor":  # It would measure for some seconds.
            make_parser().parse_args(arguments)
        elif command == "checkpoint" and "pretrained" in arguments:  # The folder of a model that the reader has.
            checkpoint_command.make_parser().parse_args(arguments)
        elif command == "compare":  # The runs of the examples do not exist.
            code = main([command, *arguments])
            assert code in (0, 1) or re.search("has no such|there is no file", capsys.readouterr().err)
        else:
            assert main([command, *arguments]) == 0, capsys.readouterr()


def existing(path: str) -> Path:
    """Return the path of an example's file, or of one in place of a file that the reader has to write."""
    return ROOT / path if path.startswith("examples/") else ROOT / "examples/gpt/base.yaml"


def test_every_block_is_of_a_language_that_is_tested() -> None:
    shown = {"", "{toctree}", "{include}", "{eval-rst}"}
    assert {block.language for block in find_blocks()} <= {"python", "yaml", "bash", *shown}
    assert len(pages()) > 20
