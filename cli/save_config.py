"""Keeping a run's resolved configuration with the run."""

import os
from typing import Any

import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from typing_extensions import override

from lightning_dist.plugins.loggers import MLflowLogger


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` once a run: into the run's folder, and into MLflow as parameters and an artifact.

    Lightning's own writes to ``trainer.log_dir``, which is one folder for all runs of an MLflow logger, or none at all.
    A file that is there already is left alone: the next one is called ``config-1.yaml``. Without a logger the file goes
    beside the checkpoints of ``fit``; nothing else of such a run is kept.

    Args:
        parser: The parser of the command that runs.
        config: Its parsed configuration.
        **kwargs: As of Lightning's.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **(kwargs | {"save_to_log_dir": False}))

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration; Lightning calls this once, on rank 0."""
        text = self.parser.dump(self.config, skip_link_targets=False, skip_none=False)
        folder = _run_folder(trainer)
        if folder is not None:
            _write_new(folder, self.config_filename, text)
        config = yaml.safe_load(text)
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_config(config, text)


def _run_folder(trainer: Trainer) -> str | None:
    """Return the folder that belongs to this run alone, or that of its checkpoints."""
    if trainer.loggers:
        logger = trainer.loggers[0]
        if isinstance(logger, (MLflowLogger, TensorBoardLogger, CSVLogger)):
            return logger.log_dir
        return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), str(logger.version))
    if trainer.checkpoint_callback is None or trainer.state.fn != "fit":
        return None
    given = getattr(trainer.checkpoint_callback, "dirpath", None)
    return str(given or os.path.join(trainer.default_root_dir, "checkpoints"))


def _write_new(folder: str, name: str, text: str) -> None:
    """Write a file under its name, or with a number where that is taken."""
    filesystem = get_filesystem(folder)
    filesystem.makedirs(folder, exist_ok=True)
    stem, suffix = os.path.splitext(name)
    path, number = os.path.join(folder, name), 0
    while filesystem.exists(path):
        number += 1
        path = os.path.join(folder, f"{stem}-{number}{suffix}")
    with filesystem.open(path, "w") as file:
        file.write(text)
