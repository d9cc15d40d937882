"""Run ``lightning-dist check``, which compares a step under a strategy with one process."""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.cli.errors import TRAINING_FAILED, report
from lightning_dist.cli.trainer import TrainerCommand, run_command
from lightning_dist.model.randomness import rng_state, set_rng_state
from lightning_dist.model.same_batch import DifferentBatchError
from lightning_dist.plugins.parity_check import check
from lightning_dist.run.parity import ParityError
from lightning_dist.techniques.audit import AuditError
from lightning_dist.techniques.replicas import ReplicasDifferError

DEVIATES = TRAINING_FAILED


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist check``.

    Args:
        arguments: Words of the command line after ``check``.

    Returns:
        The exit code: 0 if the step passes, 1 if it deviates or fails, 2 for a bad configuration. On other ranks than 0
        it is 0 if the step deviates, so that a launcher does not end rank 0 before it has printed the report.
    """
    return run_command(CheckCommand, ["check", *arguments])


class _Options(Trainer):
    """Declare the options of the command for its parser; no instance of it is made."""

    def check(
        self,
        model: LightningModule,
        datamodule: Any = None,
        steps: int = 1,
        float64: bool | None = None,
        tolerance: float | None = None,
        whole_batch: bool | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Compare the first step under the strategy with one process.

        Args:
            model: The module of the configuration.
            datamodule: The datamodule of the configuration.
            steps: Number of optimizer steps.
            float64: Whether to compute in float64.
            tolerance: Largest accepted relative deviation.
            whole_batch: Whether one process computes the batches of all ranks as one batch.
            ckpt_path: Accepted because configurations of a fit may have it; the check starts from initial weights.
            weights_only: Accepted because configurations of a fit may have it; it has no effect.
        """


class CheckCommand(TrainerCommand):
    """Run the check with the classes of the configuration, of which it makes some a second time for one process."""

    _trainer_class = _Options
    _saves_config = False

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {"check": {"model", "datamodule"}}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--json", action="store_true", help="Print the results as JSON.")

    @override
    def read_checkpoint_hparams(self, path: str) -> None:
        """Leave the checkpoint of the configuration unread."""

    @override
    def before_instantiate_classes(self) -> None:
        self._random_state = rng_state()
        trainer = self.config.check.trainer
        self._has_logger = trainer.logger is not False
        trainer.logger = False  # Creating one may begin a run in a database.

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Keep the arguments of the Trainers of the check, and return this command, whose method runs it."""
        self._trainer_arguments = {**self.config_init.check.trainer, "logger": self._has_logger}
        return cast(Trainer, self)

    def check(self, model: LightningModule, datamodule: Any = None, **options: Any) -> None:
        """Run the check, print the report on rank 0, and exit.

        Args:
            model: The module of the configuration.
            datamodule: The datamodule of the configuration.
            options: Further options of the command.

        Raises:
            SystemExit: With the exit code.
        """
        del options["weights_only"]
        if path := options.pop("ckpt_path"):
            rank_zero_info(f"ckpt_path={path} is not read: the check starts from initial weights.")
        as_json: bool = self.config.check.json
        made = [model]
        self.model = None
        strategies = [self._trainer_arguments.pop("strategy")]

        def make_again() -> None:
            set_rng_state(self._random_state)
            self.instantiate_classes()
            self.after_instantiate_classes()

        def make_module() -> LightningModule:
            if not made:
                make_again()
                made.append(self.model)
            return made.pop()

        def make_strategy() -> Any:
            if not strategies:
                make_again()
                strategies.append(self._trainer_arguments.pop("strategy"))
            return strategies.pop()

        stdout = sys.stdout
        try:
            # Whatever the module prints must not mix with JSON.
            with contextlib.redirect_stdout(sys.stderr if as_json else stdout):
                result = check(
                    make_module,
                    datamodule,
                    on_trainer=self._watch,
                    **options,
                    **{**self._trainer_arguments, "strategy": make_strategy},
                )
        except (AuditError, DifferentBatchError, ParityError, ReplicasDifferError) as error:
            code = report(str(error), DEVIATES, prefix="wrong: ")
            self._progress.stop_other_processes()
            raise SystemExit(code) from error
        if self._progress.trainer is None or not self._progress.trainer.is_global_zero:
            raise SystemExit(0)
        print(json.dumps(result.to_dict(), indent=2) if as_json else result)
        raise SystemExit(0 if result.passed else DEVIATES)

    def _watch(self, trainer: Trainer) -> None:
        if self._progress.trainer is None:  # The first one launches the processes.
            self._progress.trainer = trainer
        trainer.callbacks.append(self._progress)  # type: ignore[attr-defined]
