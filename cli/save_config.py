"""Save a run's resolved configuration with the run."""

import os
from typing import Any

import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from typing_extensions import override

from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.planning.auto_parallel import AutoParallelStrategy


class SaveRunConfig(SaveConfigCallback):
    """Write ``config.yaml`` once per run: to the run's folder, and to MLflow as parameters and an artifact.

    Lightning's own callback writes to ``trainer.log_dir``, which is one folder for all runs of an MLflow logger, or
    none. An existing file is not overwritten: the next one is called ``config-1.yaml``. Without a logger, ``fit``
    writes the file beside its checkpoints, and other commands write none.

    Args:
        parser: The parser of the command that runs, which formats the configuration as YAML.
        config: The command's parsed configuration.
        **kwargs: Further arguments of Lightning's ``SaveConfigCallback``.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **(kwargs | {"save_to_log_dir": False}))

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration to the loggers' folder and to MLflow; Lightning calls this once, on rank 0."""
        if not trainer.loggers:
            return
        text = self._text(trainer)
        folder = _logger_folder(trainer)
        if folder is not None:
            _write_new(folder, self.config_filename, text)
        config = yaml.safe_load(text)
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_config(config, text)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the configuration beside the checkpoints if there is no logger.

        ``ModelCheckpoint`` warns in ``setup`` if its folder is not empty, so the file is written after that.
        """
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if trainer.is_global_zero and not trainer.loggers and folder is not None:
            _write_new(str(folder), self.config_filename, self._text(trainer))

    def _text(self, trainer: Trainer) -> str:
        """Return the configuration as YAML, with the layout that the strategy has chosen."""
        text: str = self.parser.dump(self.config, skip_link_targets=False, skip_none=False)
        strategy = trainer.strategy
        if not isinstance(strategy, AutoParallelStrategy) or not strategy.chosen_arguments:
            return text
        config = yaml.safe_load(text)
        given = config["trainer"]["strategy"]
        init_args = given.get("init_args", {}) if isinstance(given, dict) else {}
        config["trainer"]["strategy"] = {
            "class_path": "lightning_dist.AutoParallelStrategy",
            "init_args": {**init_args, **strategy.chosen_arguments},
        }
        return yaml.safe_dump(config, sort_keys=False)


def _logger_folder(trainer: Trainer) -> str | None:
    """Return the run's own folder, which its first logger chooses; None if it has none."""
    logger = trainer.loggers[0]
    if isinstance(logger, (MLflowLogger, TensorBoardLogger, CSVLogger)):
        return logger.log_dir
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), str(logger.version))


def _write_new(folder: str, name: str, text: str) -> None:
    """Write a file under ``name``, or, if that name exists, with a number appended to its stem."""
    filesystem = get_filesystem(folder)
    filesystem.makedirs(folder, exist_ok=True)
    stem, suffix = os.path.splitext(name)
    path, number = os.path.join(folder, name), 0
    while filesystem.exists(path):
        number += 1
        path = os.path.join(folder, f"{stem}-{number}{suffix}")
    with filesystem.open(path, "w") as file:
        file.write(text)
