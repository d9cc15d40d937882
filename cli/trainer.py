"""Run ``lightning-dist fit|validate|test|predict``, a LightningCLI for any LightningModule."""

import logging
import os
import sys
import traceback
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from types import MethodType
from typing import Any, NoReturn

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.cli._compat import (
    CommandLine,
    active_parser,
    install_print_config_action,
    install_strategy_actions,
    names_class,
    parameters_of,
)
from lightning_dist.cli.errors import (
    BAD_CONFIGURATION,
    SHOW_TRACEBACK,
    TRAINING_FAILED,
    closest,
    print_error,
    report,
    users_line,
)
from lightning_dist.cli.failures import Progress, report_failure
from lightning_dist.cli.messages import shorten
from lightning_dist.cli.mlflow_pages import how_to_open, run_page, runs_page
from lightning_dist.cli.origins import with_origins
from lightning_dist.cli.save_config import SaveRunConfig
from lightning_dist.mesh.replica_range import RANGE
from lightning_dist.plugins.callbacks import RunProgressBar, StepTelemetry
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.loggers.provenance import versions
from lightning_dist.plugins.strategies import MeshStrategy

_DEFAULT_LOGGER = {"class_path": "lightning_dist.plugins.loggers.MLflowLogger"}
_SYMBOLIC_PATHS = ("last", "best", "hpc", "auto")


def run(arguments: Sequence[str]) -> int:
    """Run a command of the Trainer.

    Args:
        arguments: The command's name and its options.

    Returns:
        The exit code: 0 for success, 1 if training failed, 2 for a bad configuration.
    """
    return run_command(TrainerCommand, arguments)


def run_command(command: "type[TrainerCommand]", arguments: Sequence[str]) -> int:
    """Run a command that is configured like those of the Trainer.

    Args:
        command: Class of the command, which runs when it is created.
        arguments: The command's name and its options.

    Returns:
        The exit code: that of the command if it exits, 0 for success, 1 if training failed, 2 for a bad configuration.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _silence_known_warnings()
    progress = Progress()
    try:
        command(progress, list(arguments) if sys.argv[1:] != list(arguments) else None)
    except SIGTERMException:
        return TRAINING_FAILED
    except SystemExit as stop:
        if isinstance(stop.code, str):  # Python prints the text, and exits with code 1.
            print_error(stop.code)
            progress.stop_other_processes()
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else TRAINING_FAILED
    except Exception as error:
        code = report_failure(error, progress)
        progress.stop_other_processes()
        return code
    return 0


def _silence_known_warnings() -> None:
    """Suppress messages that Lightning prints on every start and that its user cannot act on."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: not record.getMessage().startswith("💡 Tip: For seamless cloud"))


class _Parser(LightningArgumentParser):
    """Report a mistake in the arguments by one short message, and say where the values of a configuration are from."""

    arguments: Sequence[str] = ()
    """The command line after the command, in the parser of the command."""

    shows_origins = False

    @override
    def dump(self, cfg: Any, **kwargs: Any) -> str:
        text: str = super().dump(cfg, **kwargs)
        return with_origins(text, self.arguments) if self.shows_origins else text

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        if ex is not None and os.environ.get(SHOW_TRACEBACK):
            traceback.print_exception(ex)
        text = shorten(message, active_parser(self, ex), getattr(self, "args", []))
        self.exit(report(text + ("" if ex is None else users_line(ex)), BAD_CONFIGURATION))
        raise AssertionError


class TrainerCommand(CommandLine):
    """Extend LightningCLI by strategies with arguments, late optimizers, default callbacks and a saved configuration.

    Args:
        progress: Callback that records whether the run has reached its first batch.
        args: The command line; None: that of the process.
    """

    _trainer_class: type[Trainer] = Trainer
    _saves_config = True

    def __init__(self, progress: Progress, args: list[str] | None = None) -> None:
        self._progress = progress
        self._command, *self._arguments = args or sys.argv[1:]
        # This lets ${trainer.max_steps} refer to this command's option, which is stored under the command's name.
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        header: dict[str, Any] = {"dump_header": [f"{name}=={version}" for name, version in versions().items()]}
        super().__init__(
            save_config_callback=SaveRunConfig if self._saves_config else None,
            trainer_class=self._trainer_class,
            trainer_defaults={"logger": _DEFAULT_LOGGER},
            parser_class=_Parser,
            parser_kwargs={
                "prog": "lightning-dist",
                "allow_abbrev": False,
                # This mode resolves interpolations, such as ${model.init_args.dim}, after all files and flags are read.
                "parser_mode": "omegaconf+",
                **header,
                self._command: header,
            },
            # LightningCLI would create the optimizer before the strategy has sharded the parameters.
            auto_configure_optimizers=False,
            args=args,
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the requested command, because creating the parsers of all commands takes three times as long."""
        return {self._command: LightningCLI.subcommands()[self._command]}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, _Parser)
        parser.arguments = self._arguments
        install_print_config_action(parser)
        install_strategy_actions(parser, "trainer.strategy")
        parser.add_optimizer_args((Optimizer,))
        parser.add_lr_scheduler_args()
        parser.add_argument(
            "--telemetry",
            type=bool,
            default=True,
            help="Add the callbacks StepTelemetry and LearningRateMonitor, where trainer.callbacks does not list them.",
        )

    @override
    def read_checkpoint_hparams(self, path: str) -> None:
        """Take the model's hyperparameters from a checkpoint file, and warn if they differ from the given ones.

        A sharded checkpoint, which is a folder, is left to the strategy, as are URLs and symbolic paths such as "last".

        Raises:
            FileNotFoundError: If ``path`` does not exist.
            ValueError: If the file is not a checkpoint of Lightning, or has more than tensors and plain values and is
                not trusted.
        """
        if path in _SYMBOLIC_PATHS or "://" in path or path.startswith("registry"):
            return
        file = Path(path)
        if not file.exists():
            siblings = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
            raise FileNotFoundError(f"ckpt_path={path!r} does not exist{closest(file.name, siblings)}")
        if file.is_dir():
            return
        if not zipfile.is_zipfile(file):
            raise ValueError(f"ckpt_path={path!r} is not a checkpoint of Lightning: it was not written by torch.save.")
        given = self.config[self.config.subcommand].get("model")
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True).get("hyper_parameters") or {}
            if names_class(saved):
                super().read_checkpoint_hparams(path)
            elif saved:
                self._take_hparams_of_script(path, saved)
        except UnpicklingError as error:
            if self.config[self.config.subcommand].get("weights_only") is not False:
                raise ValueError(
                    f"ckpt_path={path!r} has more than tensors and plain values; if you trust it: --weights_only=false"
                ) from error
            rank_zero_warn(f"The hyperparameters in {path} are not read: it holds more than tensors and plain values.")
            return
        except (RuntimeError, AttributeError) as error:
            raise ValueError(f"ckpt_path={path!r} is not a checkpoint of Lightning: {error}") from error
        restored = self.config[self.config.subcommand].get("model")
        if given is not None and restored != given:
            rank_zero_warn(f"The model's hyperparameters are those of {path}, not those given: {restored.init_args}")

    def _take_hparams_of_script(self, path: str, saved: dict[str, Any]) -> None:
        """Give the model the hyperparameters that a script has saved, in which its class is not named.

        Args:
            path: Path of the checkpoint.
            saved: The hyperparameters. Those that the model's class does not take are left out.

        Raises:
            ValueError: If no model is given.
        """
        command = self.config.subcommand
        class_path = (self.config[command].get("model") or {}).get("class_path")
        if class_path is None:
            raise ValueError(
                f"ckpt_path={path!r} was saved by a script, and does not name the class of its model. Give it by"
                " --model=CLASS, or in a configuration."
            )
        taken = {name: value for name, value in saved.items() if name in parameters_of(class_path)}
        model = {"class_path": class_path, "init_args": taken}
        self.config = self.parser.parse_object({command: {"model": model}}, self.config)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand]
        callbacks = config.trainer.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        trains = self.subcommand in ("fit", "profile")
        if trains and config.telemetry and not config.trainer.barebones:
            _add_missing(callbacks, StepTelemetry())
            if config.trainer.logger is not False:
                _add_missing(callbacks, LearningRateMonitor(logging_interval="step"))
        if trains and not config.trainer.barebones and config.trainer.enable_progress_bar is not False:
            _add_missing(callbacks, RunProgressBar(), ProgressBar)
        trainer = super().instantiate_trainer(callbacks=[*callbacks, self._progress], **kwargs)
        if RANGE in os.environ and not isinstance(trainer.strategy, MeshStrategy):
            raise ValueError(
                f"lightning-dist launch --elastic with the strategy {type(trainer.strategy).__name__}, whose replicas"
                " do not leave and join. Use strategy='data_parallel' or 'hybrid_shard', or leave --elastic out."
            )
        self._progress.trainer = trainer
        return trainer

    @override
    def after_instantiate_classes(self) -> None:
        config = self.config_init[self.subcommand]
        if config.get("optimizer"):
            _configure_optimizers_late(self.model, config.optimizer, config.get("lr_scheduler"))
        elif config.get("lr_scheduler"):
            raise ValueError("lr_scheduler is set, but no optimizer that it can schedule: set --optimizer too.")

    def before_predict(self) -> None:
        """Warn if no callback writes the predictions, which are lost when the command ends."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, BasePredictionWriter) for callback in callbacks):
            rank_zero_warn(
                "No callback writes the predictions: they are lost when the command ends. Add one to trainer.callbacks"
                " that derives from lightning.pytorch.callbacks.BasePredictionWriter."
            )

    def after_fit(self) -> None:
        """Print where the run's results are."""
        callback = self.trainer.checkpoint_callback
        checkpoint = getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", "")
        if checkpoint:
            rank_zero_info(f"Checkpoint: {os.path.relpath(checkpoint)}")
        for logger in self.trainer.loggers:
            if isinstance(logger, MLflowLogger) and self.trainer.is_global_zero and logger.run_id is not None:
                experiment = str(logger.experiment_id)
                page = run_page(experiment, logger.run_id)
                rank_zero_info(how_to_open(logger.tracking_uri, page, runs_page(experiment)))


def _add_missing(callbacks: list[Callback], default: Callback, kind: type[Callback] | None = None) -> None:
    """Add ``default``, unless there is a callback of its class, or of the class ``kind``."""
    if not any(isinstance(callback, kind or type(default)) for callback in callbacks):
        callbacks.append(default)


def _configure_optimizers_late(model: LightningModule, optimizer_config: Any, scheduler_config: Any) -> None:
    """Make ``model.configure_optimizers`` create the optimizer from the parameters that exist when it is called.

    Args:
        model: The module, whose own method is replaced.
        optimizer_config: Configuration of an optimizer, with ``class_path`` and ``init_args``.
        scheduler_config: Configuration of a learning rate scheduler in the same form, or None.
    """

    def configure_optimizers(module: LightningModule) -> Any:
        optimizer = instantiate_class(module.parameters(), _spec(optimizer_config))
        scheduler = instantiate_class(optimizer, _spec(scheduler_config)) if scheduler_config else None
        return LightningCLI.configure_optimizers(module, optimizer, scheduler)

    if type(model).configure_optimizers is not LightningModule.configure_optimizers:
        rank_zero_info(f"--optimizer replaces {type(model).__name__}.configure_optimizers.")
    model.configure_optimizers = MethodType(configure_optimizers, model)  # type: ignore[method-assign]


def _spec(config: Any) -> dict[str, Any]:
    init_args = config.get("init_args")
    arguments = init_args.as_dict() if init_args is not None else {}
    return {"class_path": config.class_path, "init_args": arguments | dict(config.get("dict_kwargs") or {})}
