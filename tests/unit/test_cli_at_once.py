"""The command answers --help and misspelt names without importing torch and Lightning."""

import sys
from pathlib import Path

import pytest

from lightning_dist.cli import at_once, options
from lightning_dist.cli.describe import describe
from lightning_dist.cli.help import all_options, common_options
from lightning_dist.cli.keys import find_mistake
from lightning_dist.cli.options import DESCRIBED, PATH, Command, stored, to_json
from tests.command import run_command
from tests.cpu_time import cpu_seconds

pytestmark = pytest.mark.usefixtures("workplace")

NET = "--model=lightning.pytorch.demos.boring_classes.BoringModel"


def described(name: str) -> Command:
    command = stored(name)
    assert command is not None, f"{PATH} is of other versions: run `python -m lightning_dist.cli.describe`"
    return command


def test_the_stored_options_are_those_of_the_parsers() -> None:
    commands = list(map(describe, DESCRIBED))
    assert PATH.read_text() == to_json(commands), "run `python -m lightning_dist.cli.describe`"
    for command in commands:
        assert set(described(command.name).options) == set(command.options)


MISTAKES = [
    (["fit", NET, "--trainer.max_stepz=3"], "did you mean '--trainer.max_steps'?"),
    (["fit", NET, "--trainer.max_stepz", "3"], "did you mean '--trainer.max_steps'?"),
    (["fit", NET, "--trainr.max_steps=3", "--zzz"], "did you mean '--trainer.max_steps'?"),
    (["fit", NET, "--trainer.callback+=EarlyStopping"], "did you mean '--trainer.callbacks'?"),
    (["validate", NET, "--zzzzz=3"], "lightning-dist validate --help lists the options."),
    (["profile", NET, "--step=10:13"], "did you mean '--steps'?"),
    (["check", NET, "--float32=true"], "did you mean '--float64'?"),
    (["test", "base.yaml"], "unexpected argument 'base.yaml': options are written --name=value."),
    (["fit", "--trainer.max_steps=3"], "no model: give --model=my_module.MyModel, or"),
    (["fit", NET, "-c", "missing.yaml"], "--config: there is no file 'missing.yaml'"),
    (["fit", NET, "--config=x.yml"], "there is no file 'x.yml'; did you mean 'x.yaml'?"),
]

FILES = [
    ("trainer: {max_stepz: 3, max_epochz: 4}", "x.yaml: no option is named 'trainer.max_stepz'; did you mean"),
    (
        "trainr: {max_steps: 3, max_epochs: 4}",
        "named 'trainr.max_steps'; did you mean 'trainer.max_steps'?",
    ),
    ("trainer.max_stepz: 3", "no option is named 'trainer.max_stepz'"),
    ("trainer: {callback+: [EarlyStopping]}", "did you mean 'trainer.callbacks'?"),
    ("fit: {trainer: {max_steps: 3}}", "no option is named 'fit.trainer.max_steps'"),
    ("modle: {class_path: Net, init_args: {dim: 3}}", "did you mean 'model'?"),
    ("max_steps: 3\ntrainer: {max_epochz: 3}", "no option is named 'trainer.max_epochz'"),
]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        *((arguments, "", message) for arguments, message in MISTAKES),
        *((["fit", NET, "-c", "x.yaml"], text, message) for text, message in FILES),
    ],
)
def test_a_misspelt_name_is_answered_at_once_as_the_parser_would(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
    message: str,
) -> None:
    Path("x.yaml").write_text(text)
    mistake = find_mistake(arguments[1:], described(arguments[0]).names, f"lightning-dist {arguments[0]}")
    assert mistake is not None
    assert message in mistake
    monkeypatch.setattr(at_once, "stored", lambda name: None)
    assert run_command(monkeypatch, *arguments) == 2
    assert f"error: {mistake}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model=my.Net", "--model.dim=3", "--data.init_args.path", "x", "--optimizer.lr=1"], None),
        (
            [
                NET,
                "--trainer.callbacks+=EarlyStopping",
                "--trainer.callbacks.monitor=x",
                "--trainer.strategy.units=[A]",
            ],
            None,
        ),
        (["--trainer.max_time.days=1", "--trainer=trainer.yaml", '--trainer={"max_steps": 1}', "-c=x.yaml"], ""),
        (["--print_config=skip_default", "--model.help", "my.Net", "--trainer.strategy.help=full_shard"], None),
        (["-c", "s3://bucket/x.yaml", "-c", "{trainer: {max_steps: 3}}", "-c", "~/x.yaml"], None),
        (["-c", "x.yaml"], "model: {class_path: my.Net, init_args: {zzz: {a: 1}}}\nckpt_path: auto\ntrainer: null"),
        (["-c", "x.yaml"], "trainer: {callbacks+: [{class_path: A}], max_time: {days: 1}, plugins: {zzz: 1}}"),
        (["-c", "x.yaml"], "trainer.max_steps: 3\ntrainer.strategy: {zzz: 1}\nmodel.zzz: 1"),
        (["-c", "x.yaml"], "trainer: [no YAML"),
        (["-c", "x.yaml"], "[3, 4]"),
        (["-c"], None),
        ([NET, "--", "--zzz"], None),
    ],
)
def test_what_only_the_parser_can_judge_is_left_to_it(arguments: list[str], text: str | None) -> None:
    if text is not None:
        Path("x.yaml").write_text(text)
    assert find_mistake(arguments, described("fit").names, "lightning-dist fit") is None


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_help_is_readable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # The width of the terminal
    command = described(name)
    common, everything = common_options(command), all_options(command)
    assert len(common.splitlines()) <= 67
    for text in (common, everything):
        assert max(map(len, text.splitlines())) <= 120
        assert not [mark for mark in (":class:", "``", "_instantiator", "<class") if mark in text]
    for option in command.options:
        assert f"--{option.name}" in everything
    if name == "fit":
        assert "--trainer.max_steps=N               number of optimizer steps; -1: no limit (-1)\n" in common
        assert "hybrid_shard                        shard the model inside a node" in common
        assert "--trainer.enable_progress_bar=bool | null\n        Whether to enable" in everything
    assert ("--optimizer=" in common) == (name in ("fit", "profile"))
    assert ("--steps" in common) == (name in ("profile", "check"))


def test_with_another_version_of_lightning_the_parser_is_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "version", lambda name: "0.0")
    assert stored("fit") is None
    assert run_command(monkeypatch, "fit", "--help") == 0
    assert "--trainer.max_steps=N" in capfd.readouterr().out
    assert run_command(monkeypatch, "fit", NET, "--trainer.max_stepz=3") == 2
    assert "did you mean '--trainer.max_steps'?" in capfd.readouterr().err


@pytest.mark.alone
@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "commands:"),
        (["fit", "--help"], 0, "hybrid_shard"),
        (["fit", "--help-all"], 0, "--trainer.sync_batchnorm"),
        (["check", "--help"], 0, "--tolerance"),
        (["compare", "--help"], 0, "--baseline"),
        (["doctor", "--help"], 0, "--checkpoint-folder"),
        (["sync", "--help"], 0, "--tracking-uri"),
        (["launch", "--help"], 0, "--max-restarts"),
        (["new", "--help"], 0, "must not exist, or be empty"),
        (["checkpoint", "--help"], 0, "consolidate"),
        (["fti"], 2, "did you mean 'fit'?"),
        (["fit", "--trainer.max_stepz=3"], 2, "did you mean '--trainer.max_steps'?"),
        (["fit", "-c", "x.yaml"], 2, "did you mean 'trainer.max_steps'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_answer_needs_no_seconds(arguments: list[str], code: int, printed: str) -> None:
    Path("x.yaml").write_text("trainer: {max_stepz: 3}")
    seconds, ended = cpu_seconds([sys.executable, "-m", "lightning_dist.cli", *arguments])
    assert ended.returncode == code
    assert printed in ended.stdout + ended.stderr
    assert seconds < 1
