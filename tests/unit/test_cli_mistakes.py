"""The command answers a mistake of the user by a short message with the nearest known name, and exit code 2."""

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dist import cli
from lightning_dist.cli import errors
from tests.command import run_command

pytestmark = pytest.mark.usefixtures("workplace")

HERE = __name__


class Net(BoringModel):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        if dim < 0:
            raise ValueError(f"dim={dim} must not be negative.")
        if dim == 0:
            raise RuntimeError("a bug in the constructor")

    def setup(self, stage: str) -> None:
        raise ValueError("the data are gone")


class Exits(BoringModel):
    def setup(self, stage: str) -> None:
        sys.exit("run prepare.py first")


class Needy(BoringModel):
    def __init__(self, depth: int) -> None:
        super().__init__()


NET = f"--model={HERE}.Net"
FINE = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
ONE_STEP = [
    "--trainer.strategy=full_shard",
    "--trainer.devices=1",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=1",
]


MISTAKES: list[tuple[list[str] | str, str]] = [
    (["fitt"], "no command is named 'fitt'; did you mean 'fit'?"),
    (["--trainer.max_steps=3", "fit"], "no command is named '--trainer.max_steps=3'."),
    (["fit"], "no model: give --model=my_module.MyModel, or model.class_path in a YAML file"),
    (["fit", NET, "word"], "unexpected argument 'word'"),
    (
        ["fit", NET, "--trainer.plugins=lightning_dist.MeshPrecision", "--trainer.plugins.master_weights=kahn"],
        "'kahn' is none of fp32, kahan, stochastic; did you mean 'kahan'?",
    ),
    (
        ["fit", NET, "--trainer.max_step=3"],
        "no option is named --trainer.max_step; did you mean '--trainer.max_steps'?",
    ),
    (
        ["fit", NET, "--trainr.max_steps=3"],
        "no option is named --trainr.max_steps; did you mean '--trainer.max_steps'?",
    ),
    (["fit", NET, "--zzzzz=3"], "no option is named --zzzzz: lightning-dist fit --help lists the options."),
    (["fit", NET, "--trainer.max_steps"], "--trainer.max_steps needs a value"),
    (["fit", NET, "--trainer.max_steps=abc"], "trainer.max_steps: expected int, got 'abc'."),
    (["fit", NET, "--trainer.precision=bf17-mixed"], "; did you mean 'bf16-mixed'?"),
    (["fit", NET, "--trainer.devices=abc"], "`devices` selected with `CPUAccelerator` should be an int > 0"),
    (["fit", "--model=Nett"], "model: no known class is named 'Nett'; did you mean 'Net'?"),
    (["fit", f"--model={HERE}.Nett"], f"model: module '{HERE}' has no 'Nett'; did you mean 'Net'?"),
    (
        ["fit", "--model=tests.unit.test_cli_mistake.Net"],
        "'tests.unit' has no 'test_cli_mistake'; did you mean 'test_cli_mistakes'?",
    ),
    (["fit", "--model=zzzzz.Net"], "there is no module 'zzzzz', neither in the working directory nor installed."),
    (["fit", "--model=torch.nn.Linear"], "model: torch.nn.Linear is not a LightningModule."),
    (["fit", NET, "--model.dimm=3"], "model: Net has no argument 'dimm'; did you mean 'dim'?"),
    (["fit", NET, "--model.dim=abc"], "model.dim: expected int, got 'abc'."),
    (["fit", f"--model={HERE}.Needy"], "model: Needy needs depth: set --model.depth=VALUE."),
    (["fit", NET, "--model.dim=-1"], "dim=-1 must not be negative."),
    (["fit", NET, "--optimizer=Adamm"], "optimizer: no known class is named 'Adamm'; did you mean 'Adam'?"),
    (["fit", NET, "--optimizer=AdamW", "--optimizer.lrr=1"], "AdamW has no argument 'lrr'; did you mean 'lr'?"),
    (["fit", NET, "--optimizer=AdamW", "--optimizer.lr=abc"], "optimizer.lr: expected float or Tensor, got 'abc'."),
    (["fit", NET, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"], "lr_scheduler is set, but no optimizer"),
    (["fit", NET, "--trainer.callbacks+=EarlyStoping"], "'EarlyStoping'; did you mean 'EarlyStopping'?"),
    (["fit", NET, "--trainer.logger=MLflowLoger"], "'MLflowLoger'; did you mean 'MLflowLogger'?"),
    (
        ["fit", NET, "--trainer.logger.run_nam=x"],
        "MLflowLogger has no argument 'run_nam'; did you mean 'run_name'?",
    ),
    (
        ["fit", NET, "--trainer.logger.run_id=abc"],
        "MLflowLogger(run_id='abc'): sqlite:///mlflow.db has no such run",
    ),
    (
        ["fit", NET, "--trainer.strategy=hybird_shard"],
        "strategy is named 'hybird_shard'; did you mean 'hybrid_shard'?",
    ),
    (["fit", NET, "--trainer.strategy=FulShardStrategy"], "did you mean 'FullShardStrategy'?"),
    (["fit", NET, "--trainer.strategy=lightning_dist.FulShardStrategy"], "did you mean 'FullShardStrategy'?"),
    (["fit", NET, f"--trainer.strategy={HERE}.Net"], f"trainer.strategy: {HERE}.Net is not a Strategy."),
    (["fit", NET, "--trainer.strategy.dp_shard_size=2"], "'auto' takes no argument 'dp_shard_size'"),
    (
        ["fit", NET, "--trainer.strategy=hybrid_shard", "--trainer.strategy.dp_shard_sise=2"],
        "trainer.strategy: HybridShardStrategy has no argument 'dp_shard_sise'; did you mean 'dp_shard_size'?",
    ),
    (
        ["fit", NET, "--trainer.strategy=hybrid_shard", "--trainer.strategy.dp_shard_size=abc"],
        "trainer.strategy.dp_shard_size: expected int or null, got 'abc'.",
    ),
    (
        ["fit", NET, "--trainer.strategy=hybrid_shard", "--trainer.strategy.check_replicas_every_n_steps=0"],
        "check_replicas_every_n_steps=0 must be at least 1",
    ),
    (["fit", NET, "--trainer.strategy=fsdp2"], "'fsdp2': lightning-dist's strategy for this is 'full_shard'."),
    (["fit", NET, "--trainer.strategy=zero_2"], "this is 'full_shard' with zero_stage=2."),
    (["fit", NET, "--trainer.strategy=tp"], "lightning-dist's strategy for this is 'tensor_parallel'."),
    (["fit", NET, "--trainer.strategy=pp"], "lightning-dist's strategy for this is 'pipeline_parallel'."),
    (
        ["fit", NET, "--trainer.strategy=fsdp", "--trainer.accelerator=cpu"],
        "lightning-dist's strategy for this is 'full_shard'.",
    ),
    (
        ["fit", NET, "--trainer.strategy=full_shard", "--trainer.strategy.reduce_dtype=fp16"],
        "reduce_dtype='fp16' must be one of 'float32', 'float64', 'bfloat16', or None.",
    ),
    (
        ["fit", NET, "--trainer.strategy=full_shard", "--trainer.strategy.checkpoint.verify=maybe"],
        "verify: 'maybe' is none of full, size, off.",
    ),
    (
        ["fit", NET, "-c", "good.yaml", "--model.init_args.dim=abc"],
        "error: model.dim: expected int, got 'abc'.",
    ),
    (["fit", NET, "--trainer.strategy.help=hybird_shard"], "did you mean 'hybrid_shard'?"),
    (
        ["fit", NET, "--trainer.strategy.help"],
        "expected the name of a strategy: auto_parallel, context_parallel, data_parallel, ddp, ",
    ),
    (["fit", NET, "-c", "missing.yaml"], "--config: there is no file 'missing.yaml'."),
    (["fit", NET, "-c", "good.yml"], "--config: there is no file 'good.yml'; did you mean 'good.yaml'?"),
    (["fit", NET, "--ckpt_path=missing.ckpt"], "ckpt_path='missing.ckpt' does not exist."),
    (["fit", NET, "--ckpt_path=goood.yaml"], "ckpt_path='goood.yaml' does not exist; did you mean 'good.yaml'?"),
    (["fit", NET, "--ckpt_path=good.yaml"], "ckpt_path='good.yaml' is not a checkpoint of Lightning"),
    (["fit", NET], "the data are gone"),
    (["checkpoint"], "expected an action: consolidate"),
    (["checkpoint", "consoldate"], "no action is named 'consoldate'; did you mean 'consolidate'?"),
    (["checkpoint", "consolidate", "here"], "the following arguments are required: OUT"),
    (["checkpoint", "consolidate", "here", "x.bin"], "OUT='x.bin' must end in .ckpt or .safetensors."),
    (["checkpoint", "consolidate", "here", "s3://bucket/x.ckpt"], "OUT='s3://bucket/x.ckpt' must be a local file."),
    (["checkpoint", "ls", "nowhere://x"], "nowhere"),
    (["checkpoint", "verify", "nowhere://x"], "nowhere"),
    (["checkpoint", "consolidate", "missing", "x.ckpt"], "There is no checkpoint at missing."),
    (["checkpoint", "convert", "missing", "x.ckpt"], "There is no checkpoint at missing."),
    (["checkpoint", "convert", "good.yaml", "x.ckpt"], "good.yaml has none of the formats that can be read: "),
    (["checkpoint", "convert", "good.yaml", "s3://x"], "OUT='s3://x' must be a local path."),
    (
        ["checkpoint", "convert", "good.yaml", "x", "--to=hugging"],
        "--to='hugging' is no format: use lightning-dist, dcp",
    ),
    ("trainer: {max_step: 3}", "x.yaml: no option is named 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
    ("trainr: {max_steps: 3}", "x.yaml: no option is named 'trainr.max_steps'; did you mean 'trainer.max_steps'?"),
    ("modle: {class_path: Net}", "no option is named 'modle.class_path'; did you mean 'model'?"),
    ("model: {init_args: {dimm: 3}}", "x.yaml: model: Net has no argument 'dimm'; did you mean 'dim'?"),
    ("model: {init_args: {dim: [1]}}", "x.yaml: model.dim: expected int, got '[1]'."),
    (
        "trainer:\n  strategy: hybird_shard",
        "x.yaml: trainer.strategy: no strategy is named 'hybird_shard'; did you",
    ),
    ("trainer: {strategy: {class_path: full_shrad}}", "'full_shrad'; did you mean 'full_shard'?"),
    ("trainer: {strategy: {class_path: auto}}", "the strategy 'auto' is no class_path"),
    (
        "trainer: {strategy: {class_path: full_shard, init_args: {unit: [A]}}}",
        "x.yaml: trainer.strategy: FullShardStrategy has no argument 'unit'; did you mean 'units'?",
    ),
    (
        "model: {init_arg: {dim: 3}}",
        "x.yaml: model: no key is named 'init_arg' beside class_path; did you mean 'ini",
    ),
    (
        "trainer: {strategy: {class_path: full_shard, init_arg: {units: [A]}}}",
        "x.yaml: trainer.strategy: no key is named 'init_arg' beside class_path; did you mean 'init_args'?",
    ),
    ("trainer: [\n  max_steps: 3", "x.yaml:2 is not valid YAML: expected ',' or ']', but got '<stream end>'."),
    ("model: {init_args: {dim: '${trainer.max_stepz}'}}", "model.init_args.dim: there is no 'trainer.max_stepz'"),
    ("model: {init_args: {dim: '${trainer'}}", "model.init_args.dim: "),
    (["fit", "--model=broken_1.Net"], "invalid syntax (broken_1.py, line 1)"),
    (
        ["fit", "--model=broken_2.Net"],
        "importing broken_2.Net fails: there is no module 'zzzzz'.\n  at broken_2.py:2, in <module>",
    ),
    (["fit", "--model=broken_3.Net"], "broken_3.Net: no disk\n  at broken_3.py:1, in <module>"),
    (
        ["fit", FINE, "--trainer.strategy=hybrid_shard", "--trainer.strategy.sync=dilocoo"],
        "sync='dilocoo': there is no such method. The names are diloco, localsgd;",
    ),
    (
        ["fit", FINE, "--trainer.strategy=hybrid_shard", "--trainer.strategy.compression=zip"],
        "compression='zip': there is no such compressor. The names are bf16, ",
    ),
    (
        ["fit", FINE, *ONE_STEP, "--trainer.strategy.global_batch_size=15", "--trainer.accumulate_grad_batches=2"],
        "global_batch_size=15 cannot be split evenly over 1 data-parallel rank(s) with accumulate_grad_batches=2: use"
        " 14 or 16.",
    ),
    (
        ["fit", FINE, *ONE_STEP, "--trainer.logger=false", "--trainer.callbacks=LearningRateMonitor"],
        "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger.",
    ),
    (
        [
            "fit",
            FINE,
            *ONE_STEP,
            "--trainer.strategy.offload=optimizer",
            "--trainer.strategy.offload_folder=good.yaml/x",
        ],
        "good.yaml/x': no file can be created there (Not a directory). Name a folder in which this process may write.",
    ),
    (["compare", "--tracking_uri=x"], "no option is named --tracking_uri; did you mean '--tracking-uri'?"),
    (["doctor", "--pair"], "no option is named --pair; did you mean '--pairs'?"),
    (["sync", "--tracking_uri", "x"], "no option is named --tracking_uri; did you mean '--tracking-uri'?"),
    (["checkpoint", "consolidate", "here", "x.ckpt", "--trst"], "no option is named --trst; did you mean '--trust'?"),
    (["checkpoint", "verify", "missing"], "There is no checkpoint at missing."),
]
"""The arguments of the command, or the text of a YAML file, and a part of the answer."""

MODULES = {"broken_1": "def broken(:", "broken_2": "\nimport zzzzz", "broken_3": "raise OSError('no disk')"}


@pytest.mark.parametrize(
    ("given", "message"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_answered_by_one_short_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: list[str] | str, message: str
) -> None:
    Path("good.yaml").write_text(
        f"trainer: {{max_steps: 1}}\nmodel: {{class_path: {HERE}.Net, init_args: {{dim: 3}}}}\n"
    )
    Path("model.yaml").write_text(f"model: {{class_path: {HERE}.Net}}")
    for name, source in MODULES.items():
        Path(f"{name}.py").write_text(source)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if isinstance(given, str):
        Path("x.yaml").write_text(given)
        given = ["fit", "-c", "model.yaml", "-c", "x.yaml"]
    assert run_command(monkeypatch, *given) == 2
    printed = capfd.readouterr().err
    answer = printed[printed.index("error: ") :]
    assert message in answer
    assert len(answer.splitlines()) <= 5
    assert "usage" not in answer
    assert "Traceback" not in printed


def test_the_line_of_a_users_error_is_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "fit", NET) == 2
    place = capfd.readouterr().err.splitlines()[-1]
    assert "test_cli_mistakes.py:" in place
    assert ", in setup" in place


def test_the_text_of_an_exit_in_the_users_code_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "fit", f"--model={HERE}.Exits") == 1
    assert "run prepare.py first" in capfd.readouterr().err


def test_an_environment_variable_shows_the_traceback_of_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(errors.SHOW_TRACEBACK, "1")
    assert run_command(monkeypatch, "fit", NET) == 2
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert printed.rstrip().endswith("ValueError: the data are gone")


def test_an_error_that_is_no_mistake_of_the_user_is_printed_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "fit", NET, "--model.dim=0") == 1
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert printed.rstrip().endswith("RuntimeError: a bug in the constructor")


def test_without_its_optional_packages_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("omegaconf", "mlflow") else object())
    assert run_command(monkeypatch, "fit", NET) == 2
    assert capfd.readouterr().err == 'error: fit needs omegaconf and mlflow: pip install "lightning-dist[cli]"\n'


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "validate run one validation epoch"),
        (["-h"], 0, "lightning-dist COMMAND [options]"),
        (["--version"], 0, "lightning-dist 0."),
        (["fit", "--help-all"], 0, "hybrid_shard(dp_replicate_size, dp_shard_size, "),
        (["fit", "--trainer.strategy.help", "hybrid_shard"], 0, "Number of replicas."),
        (["fit", "--trainer.strategy.help=FullShardStrategy"], 0, "Number of processes to shard over"),
        (["checkpoint", "consolidate", "--help"], 0, "file to write: .ckpt or .safetensors"),
    ],
)
def test_help_and_version_are_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, printed: str
) -> None:
    assert run_command(monkeypatch, *arguments) == code
    assert printed in " ".join(capfd.readouterr().out.split())


def test_a_call_without_a_command_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch) == 2
    assert "COMMAND [options]" in capfd.readouterr().err


def test_consolidate_gets_its_paths_and_prints_the_size_of_the_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def consolidate(source: str, destination: Path, trust: bool) -> None:
        calls.append((source, destination, trust))
        destination.write_bytes(bytes(3 * 2**20))

    monkeypatch.setattr("lightning_dist.checkpoint.consolidate", consolidate)
    assert run_command(monkeypatch, "checkpoint", "consolidate", "in", "out.ckpt") == 0
    assert calls == [("in", Path("out.ckpt"), False)]
    assert capfd.readouterr().out == "out.ckpt (3,145,728 bytes)\n"
