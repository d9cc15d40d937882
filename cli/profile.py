"""Run ``lightning-dist profile``, which trains for some steps and records them with torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_dist.cli.trainer import TrainerCommand, run_command
from lightning_dist.plugins.callbacks import ProfileSteps


def run(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: Words of the command line after ``profile``.

    Returns:
        The exit code: 0 for success, 1 if training failed, 2 for a bad configuration.
    """
    return run_command(ProfileCommand, ["profile", *arguments])


class ProfilingTrainer(Trainer):
    """Add a method with the name of the command, which LightningCLI calls."""

    def profile(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Record some training steps.

        Args:
            model: The module to train.
            train_dataloaders: Loaders of the training data, if there is no ``datamodule``.
            val_dataloaders: Ignored, because nothing is validated.
            datamodule: The datamodule with the training data; None: ``train_dataloaders`` are given.
            ckpt_path: Checkpoint from which the training continues; the steps count from the start of its run.
            weights_only: Whether to refuse to load pickled objects other than tensors and plain values.
        """
        self.fit(model, train_dataloaders, None, datamodule, ckpt_path, weights_only)


class ProfileCommand(TrainerCommand):
    """Train for some steps, and record the last of them with torch's profiler."""

    _trainer_class = ProfilingTrainer

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command with the arguments of the Trainer's method that are not options."""
        return {"profile": LightningCLI.subcommands()["fit"]}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults(telemetry=False)  # Its work would be recorded as well.
        parser.add_argument(
            "--steps",
            type=str,
            default=None,
            metavar="FIRST:END",
            help="The optimizer steps to record, counted from 0; END is not recorded: 10:13 records 10, 11 and 12.",
        )
        parser.add_argument(
            "--output", type=str, default=None, help="Folder of the traces; by default profile/ in the run's folder."
        )

    @override
    def before_instantiate_classes(self) -> None:
        """Let the run end after the last recorded step.

        Raises:
            ValueError: If ``--steps`` is missing, is no range, or is beyond the end of the run.
        """
        config = self.config.profile
        self._first, self._end = parse_steps(config.steps)
        max_steps = config.trainer.max_steps
        if 0 <= max_steps < self._end:
            raise ValueError(
                f"--steps={config.steps}: trainer.max_steps={max_steps} ends the run before step {self._end}: choose"
                f" steps up to {max_steps}, or set --trainer.max_steps={self._end}."
            )
        config.trainer.max_steps = self._end
        if max_steps < 0 and config.trainer.max_epochs is None:
            config.trainer.max_epochs = -1
        config.trainer.limit_val_batches = 0
        config.trainer.enable_checkpointing = False

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init.profile
        callbacks = config.trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        # They may need values from a validation, or save checkpoints of a run that is only profiled.
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint | EarlyStopping)]
        config.trainer.callbacks = [*callbacks, ProfileSteps(self._first, self._end, config.output)]
        return super().instantiate_trainer(**kwargs)


def parse_steps(text: str | None) -> tuple[int, int]:
    """Return the first step and the step after the last one of ``text``, such as ``10:13``.

    Raises:
        ValueError: If the text is missing, or is no range of at least one step.
    """
    if text is None:
        raise ValueError("--steps is missing: name the steps to record, such as --steps 10:13 for 10, 11 and 12.")
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if found is None:
        raise ValueError(f"--steps={text} is no range FIRST:END of steps: write, for example, --steps 10:13.")
    first, end = int(found[1]), int(found[2])
    if first >= end:
        hint = f"--steps {end}:{first}" if end < first else f"--steps {first}:{first + 1}"
        raise ValueError(f"--steps={text} has no step, because END is not recorded: write, for example, {hint}.")
    return first, end
