"""The commands fit, validate, test and predict, run to their end in this process or on two ranks."""

import contextlib
import logging
import os
import sys
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, RichProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from mlflow import MlflowClient
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist.cli import main
from lightning_dist.plugins.callbacks import RunProgressBar, StepTelemetry

pytestmark = pytest.mark.usefixtures("workplace")

HERE = __name__


class Net(LightningModule):
    trainers: ClassVar[list[Trainer]] = []

    def __init__(self, dim: int = 4, fail_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(dim, 1)
        self.fail_at = fail_at

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layer(batch) - 1).square().mean()
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise ValueError("the loss exploded")
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.layer(batch)
        return output

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def setup(self, stage: str) -> None:
        self.trainers.append(self.trainer)


class Data(LightningDataModule):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(torch.rand(16, self.dim, generator=generator), batch_size=2)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Net, "trainers", [])

    def run(name: str, *arguments: str, **trainer: Any) -> int:
        defaults = {"accelerator": "cpu", "enable_progress_bar": "false", "enable_model_summary": "false"}
        if name == "fit":
            defaults |= {"max_steps": "4", "log_every_n_steps": "2", "limit_val_batches": "1"}
        flags = [f"--trainer.{key}={value}" for key, value in (defaults | trainer).items()]
        argv = [name, f"--model={HERE}.Net", f"--data={HERE}.Data", *flags, *arguments]
        monkeypatch.setattr(sys, "argv", ["lightning-dist", *argv])
        try:
            return main()
        except SystemExit as stop:
            return int(stop.code)  # type: ignore[arg-type]

    return run


def the_run() -> Any:
    """Return the only run in the MLflow database."""
    (run,) = all_runs()
    return run


def all_runs() -> list[Any]:
    """Return all runs in the MLflow database."""
    client = MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def files(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_fit_logs_its_configuration_metrics_and_checkpoints(command: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert command("fit", "--model.dim=3", "--data.dim=3", "--seed_everything=7", val_check_interval="2") == 0
    run = the_run()
    assert run.info.status == "FINISHED"
    assert {"train/loss", "val/loss", "lr-SGD", "perf/step_ms", "perf/samples_per_s", "memory/peak_mib"} <= set(
        run.data.metrics
    )
    params = run.data.params
    assert (params["model.init_args.dim"], params["dim"], params["seed_everything"]) == ("3", "3", "7")
    assert (params["trainer.max_steps"], params["trainer.strategy"]) == ("4", "auto")
    assert "_instantiator" not in params
    folder = f"mlruns/lightning_logs/{run.info.run_id}"
    assert files(folder) == {"config.yaml", "artifacts/config.yaml", "checkpoints/epoch=0-step=4.ckpt"}
    assert f"Checkpoint: {folder}/checkpoints/epoch=0-step=4.ckpt" in caplog.text
    assert f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}" in caplog.text
    assert "mlflow server --backend-store-uri sqlite:///mlflow.db" in caplog.text


def test_dtypes_are_chosen_in_yaml(command: Any) -> None:
    dtypes = "{param_dtype: float16, keep_fp32: [Linear], output_dtype: float32}"
    plugins = f"[{{class_path: lightning_dist.MeshPrecision, init_args: {dtypes}}}]"
    Path("x.yaml").write_text(f"trainer: {{strategy: data_parallel, devices: 1, plugins: {plugins}}}")
    assert command("fit", "-c", "x.yaml", max_steps="1") == 0
    plugin: Any = Net.trainers[-1].precision_plugin
    assert (plugin.precision, plugin.keep_fp32, plugin.output_dtype) == ("16-mixed", ("Linear",), "float32")
    assert plugin.scaler.get_scale() == 2.0**16


def test_the_saved_configuration_repeats_the_run(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = f"{{class_path: {HERE}.Resharding, init_args: {{note: '${{trainer.max_steps}}'}}}}"
    Path("x.yaml").write_text(f"trainer: {{strategy: {strategy}}}")
    assert command("fit", "-c", "x.yaml", "--optimizer=Adam", "--optimizer.lr=0.01") == 0
    first = Path("mlruns/lightning_logs", the_run().info.run_id, "config.yaml")
    saved = yaml.safe_load(first.read_text())
    assert saved["trainer"]["strategy"]["init_args"]["note"] == 4
    assert saved["optimizer"]["init_args"]["lr"] == 0.01
    capfd.readouterr()
    sys.argv = ["lightning-dist", "fit", "-c", str(first)]
    assert main() == 0
    assert len(all_runs()) == 2
    for run in all_runs():
        assert yaml.safe_load(Path("mlruns/lightning_logs", run.info.run_id, "config.yaml").read_text()) == saved


class Resharding(SingleDeviceStrategy):
    """Replace the parameters of the module in the setup, as a sharding strategy does."""

    def __init__(self, note: int = 0) -> None:
        super().__init__()

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        super().setup(trainer)


@pytest.mark.parametrize(
    ("flags", "optimizer", "lr"),
    [
        (["--optimizer=SGD", "--optimizer.lr=0.5"], torch.optim.SGD, 0.5),
        (["--optimizer=torch.optim.AdamW", "--optimizer.init_args.lr=0.5"], torch.optim.AdamW, 0.5),
        (
            ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=ConstantLR", "--lr_scheduler.factor=0.1"],
            torch.optim.SGD,
            0.05,
        ),
        ([], torch.optim.SGD, 0.0),
    ],
)
def test_an_optimizer_from_flags_trains_the_parameters_that_the_strategy_made(
    command: Any, flags: list[str], optimizer: type[torch.optim.Optimizer], lr: float
) -> None:
    assert command("fit", *flags, "--seed_everything=3", strategy=f"{HERE}.Resharding") == 0
    (trainer,) = Net.trainers
    (made,) = trainer.optimizers
    module = trainer.lightning_module
    assert type(made) is optimizer
    assert made.param_groups[0]["lr"] == pytest.approx(lr)
    assert {id(p) for p in made.param_groups[0]["params"]} == {id(p) for p in module.parameters()}
    seed_everything(3)
    assert torch.equal(Net().layer.weight, module.layer.weight) == (lr == 0)


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_every_command_finishes_its_run_and_saves_the_configuration(command: Any, name: str) -> None:
    assert command(name) == 0
    assert the_run().info.status == "FINISHED"
    assert "config.yaml" in files(f"mlruns/lightning_logs/{the_run().info.run_id}")


def test_predictions_that_no_callback_writes_are_warned_of(command: Any) -> None:
    with pytest.warns(UserWarning, match="No callback writes the predictions"):
        assert command("predict") == 0


def test_two_runs_write_to_different_folders(command: Any) -> None:
    assert command("fit") == command("fit") == 0
    assert sorted(files("mlruns/lightning_logs")) == sorted(
        f"{run.info.run_id}/{name}"
        for run in all_runs()
        for name in ("config.yaml", "artifacts/config.yaml", "checkpoints/epoch=0-step=4.ckpt")
    )


def test_without_a_logger_the_configuration_is_saved_next_to_the_checkpoints(
    command: Any, recwarn: pytest.WarningsRecorder
) -> None:
    Path("config.yaml").write_text("mine")
    assert command("fit", logger="false") == 0
    assert not [warning for warning in recwarn if "is not empty" in str(warning.message)]
    assert command("fit", logger="false") == 0
    assert all_runs() == []
    assert {"config.yaml", "config-1.yaml"} <= files("checkpoints")
    assert Path("config.yaml").read_text() == "mine"
    os.remove("checkpoints/config.yaml")
    assert command("validate", logger="false") == 0
    assert not Path("checkpoints/config.yaml").exists()


def test_a_logger_of_lightning_gets_the_configuration(command: Any) -> None:
    assert command("fit", logger="CSVLogger", **{"logger.save_dir": "csv"}) == 0
    assert "lightning_logs/version_0/config.yaml" in files("csv")
    assert all_runs() == []


@pytest.mark.parametrize(
    ("flags", "telemetry", "rates", "bars"),
    [
        ([], [None], ["step"], []),
        (["--telemetry=false"], [], [], []),
        (["--trainer.logger=false"], [None], [], []),
        (["--trainer.callbacks+=StepTelemetry", "--trainer.callbacks.log_every_n_steps=3"], [3], ["step"], []),
        (
            ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=epoch"],
            [None],
            ["epoch"],
            [],
        ),
        (["--trainer.enable_progress_bar=true"], [None], ["step"], [RunProgressBar]),
        (
            ["--trainer.callbacks=RichProgressBar", "--trainer.enable_progress_bar=true"],
            [None],
            ["step"],
            [RichProgressBar],
        ),
    ],
)
def test_default_callbacks_are_added_unless_the_user_gives_or_disables_them(
    command: Any, flags: list[str], telemetry: list[Any], rates: list[str], bars: list[type]
) -> None:
    assert command("fit", *flags) == 0
    callbacks = Net.trainers[0].callbacks  # type: ignore[attr-defined]
    assert [c.log_every_n_steps for c in callbacks if isinstance(c, StepTelemetry)] == telemetry
    assert [c.logging_interval for c in callbacks if isinstance(c, LearningRateMonitor)] == rates
    assert [type(c) for c in callbacks if isinstance(c, ProgressBar)] == bars


def test_an_error_in_training_prints_its_traceback_and_fails_the_run(
    command: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("fit", "--model.fail_at=2") == 1
    printed = capfd.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert printed.rstrip().endswith("ValueError: the loss exploded")
    assert the_run().info.status == "FAILED"


def test_resuming_from_a_file_warns_if_its_hyperparameters_override_those_given(command: Any) -> None:
    assert command("fit") == 0
    (checkpoint,) = Path("mlruns").rglob("*.ckpt")
    with pytest.warns(UserWarning, match="hyperparameters are those of .*not those given"):
        assert command("fit", f"--ckpt_path={checkpoint}", "--model.dim=5", max_steps=6) == 0
    assert Net.trainers[1].lightning_module.layer.in_features == 4
    assert Net.trainers[1].global_step == 6


def test_strategies_of_lightning_are_not_elastic(
    command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_DIST_ELASTIC", "1:2")
    assert command("fit", strategy="ddp", devices=1) == 2
    assert "--elastic with the strategy DDPStrategy, whose replicas do not leave and join." in capfd.readouterr().err


def test_a_fit_goes_on_from_the_checkpoint_of_a_script(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    trainer.fit(Net(dim=5), Data(dim=5))
    trainer.save_checkpoint("script.ckpt")
    saved = torch.load("script.ckpt", weights_only=False)
    assert saved["hyper_parameters"] == {"dim": 5, "fail_at": -1}
    saved["hyper_parameters"]["comment"] = "an argument that the class does not take"
    torch.save(saved, "script.ckpt")
    with pytest.warns(UserWarning, match="hyperparameters are those of script.ckpt, not those given"):
        assert command("fit", "--ckpt_path=script.ckpt", "--data.dim=5", max_steps=6) == 0
    assert Net.trainers[-1].lightning_module.layer.in_features == 5
    assert Net.trainers[-1].global_step == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is not a checkpoint of Lightning: 'list' object has no attribute 'get'"),
        (
            {"state_dict": {}, "since": timedelta(1)},
            "has more than tensors and plain values; if you trust it: --weights_only=false",
        ),
        (None, "is not a checkpoint of Lightning: "),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_with_the_reason(
    command: Any, capfd: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    if content is None:
        with zipfile.ZipFile("odd.ckpt", "w") as archive:
            archive.writestr("readme", "hello")
    else:
        torch.save(content, "odd.ckpt")
    assert command("fit", "--ckpt_path=odd.ckpt") == 2
    assert message in capfd.readouterr().err


def test_a_checkpoint_folder_is_loaded_by_the_strategy(
    command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def load(self: Any, path: str, **kwargs: Any) -> None:
        asked.append(Path(path).name)
        raise ValueError("no strategy here reads folders")

    monkeypatch.setattr(SingleDeviceStrategy, "load_checkpoint", load)
    Path("sharded.ckpt").mkdir()
    assert command("fit", "--ckpt_path=sharded.ckpt") == 2
    assert asked == ["sharded.ckpt"]
    assert "no strategy here reads folders" in capfd.readouterr().err


def _fit_hybrid(folder: str) -> dict[str, Any]:
    with contextlib.chdir(folder):
        return _fit_hybrid_here()


def _fit_hybrid_here() -> dict[str, Any]:
    Net.trainers.clear()
    flags = [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.max_steps=4",
        "--trainer.log_every_n_steps=2",
    ]
    flags += [
        "--trainer.strategy=hybrid_shard",
        "--trainer.strategy.dp_shard_size=2",
        "--trainer.logger.log_model=true",
    ]
    flags += ["--trainer.strategy.min_num_params=1", "--optimizer=SGD", "--optimizer.lr=0.1", "--seed_everything=3"]
    flags += ["--trainer.enable_progress_bar=false"]
    sys.argv = ["lightning-dist", "fit", f"--model={HERE}.Net", f"--data={HERE}.Data", *flags]
    code = main()
    (trainer,) = Net.trainers
    module = trainer.lightning_module
    (optimizer,) = trainer.optimizers
    return {
        "code": code,
        "owns": {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in module.parameters()},
        "run_id": trainer.logger.version,
        "connected": trainer.logger._run is not None,
        "weight": module.layer.weight.full_tensor().flatten().tolist(),  # type: ignore[operator]
    }


def test_two_sharded_ranks_with_an_optimizer_from_flags_train_as_one_process(pool: Any, workplace: Path) -> None:
    ranks = pool.run(_fit_hybrid, 2, str(workplace))
    assert [rank["code"] for rank in ranks] == [0, 0]
    assert [rank["owns"] for rank in ranks] == [True, True]
    run = the_run()
    assert [rank["run_id"] for rank in ranks] == [run.info.run_id, None]
    assert [rank["connected"] for rank in ranks] == [True, False]
    assert run.info.status == "FINISHED"
    params = run.data.params
    assert params["dist.strategy"] == "hybrid_shard"
    assert params["dist.layout.dp_shard_size"] == "2"
    assert {"memory/peak_mib_rank0", "memory/peak_mib_rank1"} <= set(run.data.metrics)
    uploaded = files(f"mlruns/lightning_logs/{run.info.run_id}/artifacts")
    assert "config.yaml" in uploaded
    assert len([name for name in uploaded if name.endswith(".bin")]) == 2
    assert ranks[0]["weight"] == ranks[1]["weight"] == pytest.approx(_by_hand(), abs=1e-6)


def _by_hand() -> list[float]:
    """Return the weights after the same steps in one process, on the batches of both ranks together."""
    seed_everything(3)
    net, data = Net(), Data().train_dataloader().dataset
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        indices = range(4 * step, 4 * step + 4)  # The loader does not shuffle, and its order is dealt out to the ranks.
        optimizer.zero_grad()
        net.loss(torch.stack([data[index] for index in indices])).backward()
        optimizer.step()
    weights: list[float] = net.layer.weight.flatten().tolist()
    return weights
