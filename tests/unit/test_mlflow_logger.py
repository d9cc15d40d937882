import os
import pickle
import platform
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from mlflow import MlflowClient

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers import mlflow as logger_module
from lightning_dist.plugins.loggers import sender as sender_module

pytestmark = pytest.mark.usefixtures("workplace")


class Module(BoringModel):
    def __init__(self, lr: float = 0.1, sizes: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("train/loss", output["loss"])
        return output


def fit(logger: MLflowLogger, module: LightningModule | None = None, **kwargs: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 2}
    trainer = Trainer(accelerator="cpu", logger=logger, limit_val_batches=1, **({"max_steps": 4} | quiet | kwargs))
    trainer.fit(module or Module())
    return trainer


def client() -> MlflowClient:
    return MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")


def run_of(logger: MLflowLogger) -> Any:
    logger.flush()
    return client().get_run(logger.run_id)


def files(folder: str | Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_by_default_a_run_is_logged_with_all_its_files_in_one_folder() -> None:
    logger = MLflowLogger()
    assert isinstance(logger, MLFlowLogger)
    fit(logger)
    run = run_of(logger)
    assert run.info.status == "FINISHED"
    assert {key: run.data.params[key] for key in ("lr", "sizes")} == {"lr": "0.1", "sizes": "(1, 2)"}
    assert {key.removeprefix("dist."): value for key, value in run.data.params.items() if key.startswith("dist.")} == {
        "strategy": "single_device",
        "device": platform.machine(),
        "batch_per_rank": "1",
        "accumulate_grad_batches": "1",
        "global_batch": "1",
        "precision": "32-true",
        "accelerator": "cpu",
        "num_devices": "1",
        "num_nodes": "1",
        "world_size": "1",
    }
    history = client().get_metric_history(logger.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 3]
    assert run.data.tags["version.torch"] == torch.__version__
    assert {"version.python", "version.lightning", "version.mlflow"} <= set(run.data.tags)
    folder = Path("mlruns", "lightning_logs", logger.run_id)
    assert Path(logger.log_dir) == folder
    assert files(folder) == {"checkpoints/epoch=0-step=4.ckpt"}
    assert Path(run.info.artifact_uri.removeprefix("file://")) == folder.resolve() / "artifacts"


@pytest.mark.parametrize(
    ("arguments", "environment", "uri", "save_dir"),
    [
        ({}, None, "sqlite:///mlflow.db", "mlruns"),
        ({}, "http://tracker:5000", "http://tracker:5000", "mlruns"),
        ({"tracking_uri": "sqlite:////data/runs.db"}, "http://tracker:5000", "sqlite:////data/runs.db", "/data/mlruns"),
        ({"tracking_uri": "sqlite:///a/b.db?timeout=9"}, None, "sqlite:///a/b.db?timeout=9", "a/mlruns"),
        ({"tracking_uri": "file:./runs"}, None, "file:./runs", "./runs"),
        ({"tracking_uri": "file:///runs"}, None, "file:///runs", "/runs"),
        ({"save_dir": Path("here")}, None, "sqlite:///mlflow.db", "here"),
    ],
)
def test_the_tracking_uri_and_the_save_dir_follow_from_arguments_and_environment(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], environment: str | None, uri: str, save_dir: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", environment)
    logger = MLflowLogger(**arguments)
    assert (logger.tracking_uri, logger.save_dir) == (uri, save_dir)


@pytest.mark.parametrize(
    ("experiment", "name"),
    [("gpt", "gpt"), ("/Users/me/gpt", "_Users_me_gpt"), ("a b/c", "a_b_c"), ("..", "_"), ("v1.2-x", "v1.2-x")],
)
def test_the_name_of_an_experiment_is_made_a_valid_folder_name(experiment: str, name: str) -> None:
    assert MLflowLogger(experiment).name == name


def test_ranks_other_than_0_never_connect_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(sender_module, "connect", refuse)
    logger = MLflowLogger("gpt")
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_hyperparams({"a": 1})
    logger.log_config({"a": 1}, "a: 1")
    logger.log_graph(Module())
    logger.finalize("success")
    assert logger.experiment.anything("goes") is None
    assert (logger.name, logger.save_dir) == ("gpt", "mlruns")
    assert (logger.version, logger.run_id, logger.experiment_id, logger.log_dir) == (None, None, None, None)
    assert MLflowLogger("gpt", run_id="7f").log_dir == "mlruns/gpt/7f"


def test_the_logger_connects_once_and_only_when_something_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []
    connect = sender_module.connect
    monkeypatch.setattr(sender_module, "connect", lambda uri: connections.append(uri) or connect(uri))
    logger = MLflowLogger()
    logger.finalize("success")
    assert connections == []
    logger.log_metrics({"a": 1.0})
    logger.log_metrics({"a": 2.0})
    assert connections == ["sqlite:///mlflow.db"]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"a": {"b": {"c": 1}}}, {"a.b.c": "1"}),
        (Namespace(a=1, b=Namespace(c=None)), {"a": "1"}),
        ({"l": [1, 2]}, {"l": "[1, 2]"}),
        ({"l": [{"x": 1}, 5]}, {"l.0.x": "1", "l.1": "5"}),
        ({"long": "x" * 6000}, {"long": "x" * 6000}),
        ({f"p{i}": i for i in range(250)}, {f"p{i}": str(i) for i in range(250)}),
        ({"_instantiator": "lightning", "a": 1}, {"a": "1"}),
        (None, {}),
    ],
)
def test_hyperparameters_are_flattened_and_logged(params: Any, expected: dict[str, str]) -> None:
    logger = MLflowLogger()
    logger.log_hyperparams(params)
    assert run_of(logger).data.params == expected


@pytest.mark.parametrize(
    ("params", "warning", "expected"),
    [
        ({"a": 2, "b": 3}, r"kept as they were: a \(was 1, now 2\)", {"a": "1", "b": "3"}),
        (
            {"long": "x" * 6001},
            "keeps 6000 characters of a parameter: long has 6001",
            {"a": "1", "long": "x" * 5999 + "…"},
        ),
        ({"a?": 3}, "does not take the name 'a\\?': logged as 'a_'", {"a": "1", "a_": "3"}),
    ],
)
def test_hyperparameters_that_mlflow_does_not_accept_are_adapted_with_a_warning(
    params: dict[str, Any], warning: str, expected: dict[str, str]
) -> None:
    logger = MLflowLogger()
    logger.log_hyperparams({"a": 1})
    with pytest.warns((UserWarning, RuntimeWarning), match=warning):
        logger.log_hyperparams(params)
        logger.flush()
    assert run_of(logger).data.params == expected


def test_metrics_have_prefix_and_step_and_text_is_discarded() -> None:
    logger = MLflowLogger(prefix="run")
    with pytest.warns(UserWarning, match="Discarding the metric note='text'"):
        logger.log_metrics({"a/b": torch.tensor(1.5), "note": "text", "nan": float("nan")}, step=3)  # type: ignore[dict-item]
    assert set(run_of(logger).data.metrics) == {"run-a/b", "run-nan"}
    assert [(m.value, m.step) for m in client().get_metric_history(logger.run_id, "run-a/b")] == [(1.5, 3)]


def test_the_configuration_is_logged_as_an_artifact_and_as_parameters() -> None:
    logger = MLflowLogger()
    logger.log_config({"trainer": {"max_steps": 4}}, "trainer:\n  max_steps: 4\n")
    run = run_of(logger)
    assert run.data.params == {"trainer.max_steps": "4"}
    assert (
        Path(run.info.artifact_uri.removeprefix("file://"), "config.yaml").read_text() == "trainer:\n  max_steps: 4\n"
    )


class Boom(Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (RuntimeError("boom"), RuntimeError, "FAILED"),
        (KeyboardInterrupt(), SystemExit, "KILLED"),
        (SIGTERMException(), SystemExit, "KILLED"),
    ],
)
def test_a_run_that_dies_is_failed_or_killed(error: BaseException, raised: type[BaseException], status: str) -> None:
    logger = MLflowLogger()
    with pytest.raises(raised):
        fit(logger, Boom(error))
    assert run_of(logger).info.status == status


def test_a_run_that_fails_before_its_strategy_is_set_up_says_so_in_its_name() -> None:
    class Refused(Module):
        def configure_model(self) -> None:
            raise ValueError("no such layer")

    logger = MLflowLogger()
    with pytest.raises(ValueError, match="no such layer"):
        fit(logger, Refused(lr=0.1))
    info = run_of(logger).info
    assert (info.status, info.run_name) == ("FAILED", "failed before its first step")


def test_a_run_can_be_continued_by_its_run_id() -> None:
    first = MLflowLogger(run_name="one")
    fit(first)
    again = MLflowLogger(run_id=first.run_id, tags={"part": 2})
    statuses = []

    class Watch(Module):
        def on_train_start(self) -> None:
            statuses.append(run_of(again).info.status)

    fit(again, Watch(lr=0.1))
    assert again.log_dir == first.log_dir
    assert statuses == ["RUNNING"]
    run = run_of(again)
    assert (run.info.status, run.info.run_name, run.data.tags["part"]) == ("FINISHED", "one", "2")


def _delete_experiment() -> None:
    client().delete_experiment(client().create_experiment("gone"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_id": "abc"}, r"run_id='abc'\): sqlite:///mlflow.db has no such run"),
        ({"experiment_name": "gone"}, r"experiment_name='gone'\): this experiment was deleted"),
        ({"tracking_uri": "file:./runs"}, r"tracking_uri='file:./runs'\): The filesystem tracking backend"),
    ],
)
def test_an_unusable_run_experiment_or_store_is_named(arguments: dict[str, Any], message: str) -> None:
    _delete_experiment()
    with pytest.raises(ValueError, match=message):
        _ = MLflowLogger(**arguments).run_id


def test_an_unused_logger_can_be_sent_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(MLflowLogger("gpt")))
    copy.log_metrics({"a": 1.0})
    assert run_of(copy).data.metrics == {"a": 1.0}


def test_an_unknown_value_of_log_model_is_refused() -> None:
    with pytest.raises(ValueError, match="log_model='best'"):
        MLflowLogger(log_model="best")  # type: ignore[arg-type]


def test_without_mlflow_the_logger_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-dist\[cli\]"'):
        MLflowLogger()


def test_run_names_do_not_depend_on_the_seed_and_do_not_advance_the_random_number_generator() -> None:
    names, draws = [], []
    for _ in range(2):
        seed_everything(1)
        logger = MLflowLogger()
        names.append(run_of(logger).info.run_name)
        draws.append(random.random())
    seed_everything(1)
    assert names[0] != names[1]
    assert draws == [random.random()] * 2


@pytest.mark.parametrize("dirty", [False, True])
def test_the_git_commit_is_logged_as_a_tag(dirty: bool) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    Path("train.py").write_text("")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    if dirty:
        Path("train.py").write_text("changed")
    tags = run_of(MLflowLogger()).data.tags
    assert (tags["git.commit"], tags["git.dirty"]) == (head, "true" if dirty else "false")
    assert tags["mlflow.source.git.commit"] == head


def test_outside_of_a_repository_no_commit_is_logged() -> None:
    assert not {"git.commit", "git.dirty", "mlflow.source.git.commit"} & set(run_of(MLflowLogger()).data.tags)


def _checkpoint(path: Path, sharded: bool) -> str:
    if sharded:
        path.mkdir(parents=True)
        (path / "shard_0").write_text("0")
        (path / "shard_1").write_text("1")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("whole")
    return str(path)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("log_model", "save_top_k", "when"), [("all", 1, "now"), (True, -1, "now"), (True, 1, "end")])
def test_checkpoints_are_uploaded_at_once_or_at_the_end(
    sharded: bool, log_model: Any, save_top_k: int, when: str
) -> None:
    logger = MLflowLogger(log_model=log_model)
    for monitor in ("a", "b"):
        callback = ModelCheckpoint(monitor=monitor, save_top_k=save_top_k)
        callback.best_model_path = _checkpoint(Path("ckpt", f"{monitor}.ckpt"), sharded)
        callback.best_model_score = callback.current_score = torch.tensor(0.5)
        logger.after_save_checkpoint(callback)
    logger.log_metrics({"x": 1})
    inside = {"shard_0", "shard_1"} if sharded else {""}
    expected = {f"{m}/{m}.ckpt/{name}".rstrip("/") for m in ("a", "b") for name in inside}
    expected |= {f"{m}/metadata.json" for m in ("a", "b")}
    artifacts = Path(logger.log_dir, "artifacts")
    logger.flush()
    assert files(artifacts) == (expected if when == "now" else set())
    logger.finalize("success")
    assert files(artifacts) == expected


def test_a_checkpoint_is_uploaded_again_only_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MLflowLogger(log_model="all")
    callback = ModelCheckpoint()
    callback.last_model_path = _checkpoint(Path("last.ckpt"), sharded=False)
    uploads = []
    monkeypatch.setattr(logger.experiment, "log_artifact", lambda *args: uploads.append(args[1]))
    for _ in range(2):
        logger.after_save_checkpoint(callback)
    os.utime("last.ckpt", (2e9, 2e9))
    logger.after_save_checkpoint(callback)
    logger.flush()
    assert [path for path in uploads if path.endswith(".ckpt")] == [str(Path("last.ckpt").resolve())] * 2


def test_the_layout_of_a_strategy_is_logged() -> None:
    layout = ParallelLayout(dp_replicate=2, dp_shard=4)
    settings = {"compression": "powersgd (rank=4)", "schedule": None}
    strategy = SimpleNamespace(
        strategy_name="hybrid_shard", layout=layout, settings=settings, root_device=torch.device("cpu")
    )
    trainer = SimpleNamespace(
        strategy=strategy,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        is_global_zero=True,
        precision="bf16-mixed",
        accelerator=object(),
        num_devices=4,
        num_nodes=2,
        world_size=8,
    )
    module = Module()
    module._trainer = trainer  # type: ignore[assignment]
    logger = MLflowLogger()
    logger.log_graph(module)
    run = run_of(logger)
    assert run.info.run_name == run.data.tags["run.strategy"] == "hybrid_shard 2x4 bf16-mixed"
    params = run.data.params
    assert params["dist.strategy"] == "hybrid_shard"
    assert (params["dist.layout.dp_replicate_size"], params["dist.layout.dp_shard_size"]) == ("2", "4")
    assert params["dist.compression"] == "powersgd (rank=4)"
    assert "dist.schedule" not in params
    assert "dist.task" not in params
    assert params["version.torch"] == torch.__version__


@pytest.mark.parametrize("trains_first", [False, True])
def test_a_run_that_only_evaluates_says_so_by_its_name_and_a_parameter(trains_first: bool) -> None:
    logger = MLflowLogger()
    trainer = fit(logger, max_steps=1) if trains_first else Trainer(accelerator="cpu", devices=1, logger=logger)
    trainer.validate(BoringModel(), verbose=False)
    run = run_of(logger)
    assert run.info.run_name == "single_device" + ("" if trains_first else " validate")
    assert run.data.params.get("dist.task") == (None if trains_first else "validate")


def test_creating_a_database_prints_one_line_instead_of_the_migrations(created_mlflow_database: Path) -> None:
    assert (created_mlflow_database / "new" / "runs.db").is_file()
    lines = (created_mlflow_database / "printed").read_text().strip().splitlines()
    assert lines == ["Creating the MLflow database new/runs.db (once, a few seconds)."]


@pytest.mark.slow
def test_mlflow_is_not_imported_before_it_is_used() -> None:
    code = """if True:
        from lightning_dist.plugins.loggers import MLflowLogger
        import sys
        assert not {"mlflow", "jsonargparse"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_relative_path_with_a_dot_is_that_database(mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mlflow_folder)
    before = set(mlflow_folder.iterdir())
    logger = MLflowLogger(tracking_uri="sqlite:///./mlflow.db")
    logger.log_metrics({"a": 1.0})
    logger.finalize("success")
    assert set(mlflow_folder.iterdir()) - before <= {mlflow_folder / "mlruns"}
    assert MlflowClient("sqlite:///mlflow.db").get_run(logger.run_id).data.metrics["a"] == 1.0
