"""Divide batches among ranks, and give ranks that share layers or a pipeline the same part and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torchmetrics import Metric

from lightning_dist._compat import backend_of
from lightning_dist.mesh.consensus import announce_progress
from lightning_dist.model.same_batch import SameBatch
from lightning_dist.model.same_random_numbers import SameRandomNumbers, agree_on_random_numbers
from lightning_dist.plugins import _compat
from lightning_dist.plugins.global_batch import global_batch, set_global_batch
from lightning_dist.plugins.strategies.data_position import deal_out
from lightning_dist.plugins.strategies.evaluation_batches import EvaluationBatches, SameResults, others_have_batches
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.uneven_batches import POLICIES, TrainingBatches, check_that_all_have_lengths

__all__ = ["BatchOptions", "SharedBatches"]


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class BatchOptions:
    """Say how samples are divided among ranks (see :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`).

    Args:
        global_batch_size: Number of samples in an optimizer step over all ranks; None: training loaders keep their
            batch sizes.
        uneven_batches: What ranks do where they have unequal numbers of batches.
        keep_data_order: Whether all ranks together see training samples in the order of the user's sampler.

    Raises:
        ValueError: If a value is wrong.
    """

    global_batch_size: int | None
    uneven_batches: str
    keep_data_order: bool

    def __post_init__(self) -> None:
        if self.uneven_batches not in POLICIES:
            raise ValueError(
                f"uneven_batches={self.uneven_batches!r} must be 'stop' (all ranks end an epoch when the first one has"
                " no more batches) or 'raise' (an error on all ranks)."
            )
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size} must be at least 1, or None.")


class SharedBatches:
    """Give each rank its part of the batches of a run. Creating an instance is a collective over all processes.

    Ranks with the same part draw the same random numbers. Metrics count each sample once.

    Args:
        host: The strategy, whose processes have been launched.
        options: How samples are divided.
    """

    def __init__(self, host: Host, options: BatchOptions) -> None:
        self._host = host
        self._options = options
        self._training_batches: TrainingBatches | None = None
        self._same_batch: SameBatch | None = None
        self._same_numbers: SameRandomNumbers | None = None
        self._evaluation: EvaluationBatches | None = None
        self._same_results: SameResults | None = None
        self._silenced: list[Callback] = []
        self._restore_metrics: Callable[[], None] = _do_nothing
        group = host.groups.same_batch
        if group is not None:
            self._same_batch = SameBatch(group, host.root_device)
            on_host = group if backend_of(group) == "gloo" else host.layout.build_same_batch_group("gloo")
            self._same_numbers = None if on_host is None else SameRandomNumbers(on_host, host.module)

    @property
    def parts(self) -> list[int]:
        """Return, for each rank, the index of the part of a batch that it has."""
        return [self._host.layout.data_parallel_rank(rank) for rank in range(self._host.world_size)]

    def process_dataloader(self, dataloader: object) -> None:
        """Set the batch size, and let the workers of ranks with the same part of the batch draw the same numbers."""
        trainer, layout = self._host.trainer, self._host.layout
        check_that_all_have_lengths(dataloader, trainer)
        if self._options.global_batch_size is not None and trainer.training:
            set_global_batch(dataloader, self._options.global_batch_size, trainer)
        if layout.shares_batches:
            _compat.seed_workers_by(dataloader, layout.data_parallel_rank(self._host.global_rank))

    def give_metrics_their_group(self, module: LightningModule) -> None:
        """Let torchmetrics gather over the ranks that have a part of the batch, so that each sample counts once."""
        group = self._host.groups.data_parallel
        _compat.let_groups_be_copied()
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = group
        self._restore_metrics()
        if group is not None:  # This covers metrics of callbacks and later ones.
            self._restore_metrics = _compat.gather_metrics_over(group)

    def agree_on_batches(self, sampler_kwargs: dict[str, Any]) -> None:
        """Let ranks with unequal numbers of batches end epochs and evaluations together.

        Call this before Lightning makes the loaders of the run.

        Args:
            sampler_kwargs: The number of parts into which the data are divided, and the index of this rank's part.
        """
        trainer = self._host.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._options.keep_data_order:
            _compat.choose_training_samplers(trainer, partial(deal_out, **sampler_kwargs))
        self._training_batches = None
        if self._host.world_size == 1:
            return
        if is_fitting:
            self._training_batches = TrainingBatches(trainer, self._options.uneven_batches)
        _compat.agree_on_evaluation_batches(trainer, others_have_batches)

    @property
    def agreed_results(self) -> dict[str, Callable[..., Any]]:
        """Return functions that let ranks agree on what hooks return, by the hooks' names."""
        batches = self._training_batches
        return {} if batches is None else {"on_train_batch_start": batches.agreed_response}

    def before_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the batch of the step ``name`` in the background between the ranks that must have the same batch."""
        if self._evaluation is not None and name != "training_step":
            self._evaluation.before_step()
        if self._same_batch is not None:
            self._same_batch.check((args, kwargs), f"the batch of a {name}")

    def on_train_start(self) -> None:
        """Print the global batch, and let ranks with the same part of it draw the same numbers before each batch."""
        trainer, same_numbers = self._host.trainer, self._same_numbers
        batch = global_batch(trainer)
        if batch is not None:
            rank_zero_info(f"{'  batch':<14}{batch.describe()}")
        self._agree_on_random_numbers()
        if same_numbers is not None:
            before = partial(self._before_batch, same_numbers)
            _compat.around_every_batch(trainer, "random numbers", before, same_numbers.begin_comparing)

    def _before_batch(self, same_numbers: SameRandomNumbers) -> None:
        if _compat.is_first_batch(self._host.trainer):
            same_numbers.expect_changes()
        same_numbers.restore()

    def on_train_end(self) -> None:
        """Check that the last batch was the same on all ranks that must have the same batch."""
        announce_progress()
        self._finish_comparing()

    def begin_evaluation(self, agrees_on_buffers: bool = True) -> None:
        """Let ranks evaluate the same model, and unequal numbers of batches, as DDP does. This is a collective."""
        host = self._host
        self._agree_on_random_numbers()
        if agrees_on_buffers:
            host.parallel.states.agree_on_buffers(host.groups.same_stage)
        needs_equal = not host.parallel.holds_whole_model or host.layout.shares_batches
        policy = self._options.uneven_batches
        if needs_equal or policy == "raise":
            self._evaluation = EvaluationBatches(host.trainer, self.parts, policy, self._stay_gathered)
        if not host.trainer.predicting:
            self._same_results = SameResults(host.trainer)

    def end_evaluation(self) -> None:
        """Check the last batch, and free what the evaluation has gathered."""
        self._finish_comparing()
        self._host.parallel.stop_staying_gathered()
        self._forget_evaluation()

    def silence_predictions(self) -> None:
        """Let only one of the ranks with the same samples return predictions."""
        group = self._host.groups.same_batch
        if group is not None and dist.get_rank(group) > 0:
            self._silenced = _compat.silence_predictions(self._host.trainer)

    def give_callbacks_back(self) -> None:
        """Give the Trainer back the callbacks that :meth:`silence_predictions` has removed from it."""
        if self._silenced:
            self._host.trainer.callbacks += self._silenced  # type: ignore[attr-defined]
            self._silenced = []

    def close(self) -> None:
        """Undo what is changed for a run; a failed evaluation has not ended itself."""
        self._restore_metrics()
        self._restore_metrics = _do_nothing
        self._forget_evaluation()
        self.give_callbacks_back()

    def _finish_comparing(self) -> None:
        if self._same_batch is not None:
            self._same_batch.finish()
        if self._same_numbers is not None:
            self._same_numbers.expect_changes()

    def _agree_on_random_numbers(self) -> None:
        """Give ranks with the same part of the batch the same random states, so that they draw the same numbers."""
        group = self._host.groups.same_batch
        if group is not None:
            agree_on_random_numbers(group, self._host.module)

    def _stay_gathered(self, why: str) -> None:
        """Let ranks evaluate unequal numbers of batches. This is a collective if parameters are sharded.

        Args:
            why: Beginning of a sentence that says why they do.
        """
        parallel = self._host.parallel
        if parallel.holds_whole_model:
            return
        rank_zero_warn(
            f"{why}. Every rank holds the whole model until the evaluation ends, since ranks could not gather it"
            " together for each batch. Give all ranks as many batches, by a DistributedSampler, if the model does not"
            " fit."
        )
        parallel.stay_gathered()

    def _forget_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None
        if self._same_results is not None:
            self._same_results.end()
            self._same_results = None
