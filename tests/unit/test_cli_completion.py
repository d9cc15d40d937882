"""A shell completes the command line, by what the command prints for it."""

import os
import sys
from pathlib import Path

import pytest

from tests.cpu_time import cpu_seconds


@pytest.mark.alone
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("ch", ["check", "checkpoint"]),
        ("fit --trainer.max_s", ["--trainer.max_steps"]),
        ("fit --trainer.strategy=hy", ["hybrid_shard"]),
        ("validate --trainer.sync_batchnorm=", ["true", "false"]),
        ("profile -c con", ["config.yaml"]),
        ("fit --model.dim=3 --help", ["--help", "--help-all"]),
        ("compare --t", ["--target", "--tracking-uri"]),
        ("doctor --accelerator ", ["auto", "cpu", "gpu"]),
        ("checkpoint ", ["--help", "consolidate", "convert", "ls", "verify"]),
        ("checkpoint consolidate --t", ["--trust"]),
    ],
)
def test_a_line_is_completed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, completions: list[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "context.txt").touch()
    output = tmp_path / "completions"
    line = f"lightning-dist {line}"
    os.environ |= {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " =:",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    monkeypatch.chdir(tmp_path)
    seconds, ended = cpu_seconds([sys.executable, "-m", "lightning_dist.cli"])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(dict.fromkeys(output.read_text().replace(" ", "").splitlines())) == completions
    assert seconds < 1
