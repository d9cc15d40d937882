"""``--print_config=origins`` says behind each value where it came from."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dist.cli import main

pytestmark = pytest.mark.usefixtures("workplace")

HERE = __name__

BASE = f"""\
seed_everything: 7
model:
  class_path: {HERE}.Net
  init_args:
    text: |
      two
      lines
    dims: [3, 4]
    steps: ${{trainer.max_steps}}
trainer:
  max_steps: 10
  devices: 1
  strategy:
    class_path: hybrid_shard
    init_args: {{dp_shard_size: 2}}
  callbacks:
  - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    init_args:
      logging_interval: step
"""
OVERLAY = """\
trainer:
  devices: 2
  callbacks+:
  - class_path: lightning.pytorch.callbacks.Timer
    init_args: {interval: epoch}
"""


class Net(BoringModel):
    def __init__(
        self, text: str = "", dims: list[int] | None = None, steps: int = 0, note: str = "a # b" + " and more words" * 9
    ) -> None:
        super().__init__()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    Path("base.yaml").write_text(BASE)
    Path("overlay.yaml").write_text(OVERLAY)
    Path("sub.yaml").write_text("max_steps: 30\ndevices: auto\n")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lightning-dist", "fit", *arguments])
        assert main() == 0
        return capfd.readouterr().out

    return run


FLAGS = (
    "--trainer.max_steps=20",
    "--trainer.strategy=full_shard",
    "--trainer.callbacks+=EarlyStopping",
    "--trainer.callbacks.monitor",
    "val/loss",
    "--optimizer=Adam",
    "--optimizer.lr=0.1",
    '--trainer.logger={"class_path": "CSVLogger", "init_args": {"save_dir": "here"}}',
)


def test_each_value_has_its_origin(printed: Any) -> None:
    text = printed("-c", "base.yaml", "--config=overlay.yaml", *FLAGS, "--print_config=origins")
    lines = [line.strip() for line in text.splitlines()]
    for line in (
        "seed_everything: 7  # base.yaml:1",
        f"class_path: {HERE}.Net  # base.yaml:3",
        "'  # base.yaml:5",  # The text is printed with quotation marks.
        "- 4  # base.yaml:8",
        "steps: 20  # base.yaml:9, ${trainer.max_steps}",
        "max_steps: 20  # --trainer.max_steps",
        "devices: 2  # overlay.yaml:2",
        "accelerator: auto  # default",
        "class_path: lightning_dist.FullShardStrategy  # --trainer.strategy",
        "dp_shard_size: null  # default",
        "- class_path: lightning.pytorch.callbacks.LearningRateMonitor  # base.yaml:17",
        "logging_interval: step  # base.yaml:19",
        "- class_path: lightning.pytorch.callbacks.Timer  # overlay.yaml:4",
        "interval: epoch  # overlay.yaml:5",
        "- class_path: lightning.pytorch.callbacks.EarlyStopping  # --trainer.callbacks+",
        "monitor: val/loss  # --trainer.callbacks.monitor",
        "patience: 3  # default",
        "class_path: torch.optim.Adam  # --optimizer",
        "lr: 0.1  # --optimizer.lr",
        "class_path: lightning.pytorch.loggers.CSVLogger  # --trainer.logger",
        "save_dir: here  # --trainer.logger",
    ):
        assert line in lines, line
    assert len([line for line in lines if line.endswith("# default")]) > 60


def test_the_configuration_with_origins_is_the_same_and_is_accepted_as_a_file(printed: Any) -> None:
    arguments = ("-c", "base.yaml", "-c", "overlay.yaml", *FLAGS)
    plain = printed(*arguments, "--print_config")
    assert "# default" not in plain
    text = printed(*arguments, "--print_config=origins")
    assert yaml.safe_load(text) == yaml.safe_load(plain)
    Path("whole.yaml").write_text(text)
    assert printed("-c", "whole.yaml", "--print_config") == plain


def test_origins_are_combined_with_the_flags_of_the_parser(printed: Any) -> None:
    text = printed("-c", "base.yaml", "--trainer=sub.yaml", "--print_config=skip_default,origins")
    assert "devices" not in text
    assert "max_steps: 30  # sub.yaml:1\n" in text
