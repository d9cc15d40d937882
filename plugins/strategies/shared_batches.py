"""Define a strategy that handles ranks with the same part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from typing_extensions import override

from lightning_dist.mesh.consensus import announce_progress
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.same_batch import SameBatch
from lightning_dist.model.same_random_numbers import SameRandomNumbers, agree_on_random_numbers
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins import _compat
from lightning_dist.plugins.global_batch import global_batch, set_global_batch
from lightning_dist.plugins.strategies.data_position import deal_out
from lightning_dist.plugins.strategies.evaluation_batches import EvaluationBatches, SameResults, others_have_batches
from lightning_dist.plugins.strategies.processes import ProcessStrategy
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.uneven_batches import POLICIES, TrainingBatches, check_that_all_have_lengths

__all__ = ["SharedBatchStrategy"]


class SharedBatchStrategy(ProcessStrategy):
    """Divide the batch among the data-parallel ranks, and give ranks that share layers or a pipeline the same part.

    Ranks with the same part draw the same random numbers. Metrics count each sample once.

    Args:
        args: Arguments of :class:`~lightning_dist.plugins.strategies.processes.ProcessStrategy`.
        global_batch_size: Number of samples in an optimizer step over all ranks; None: training loaders keep their
            batch sizes.
        uneven_batches: What ranks do where they have unequal numbers of batches (see
            :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`).
        keep_data_order: Whether all ranks together see training samples in the order of the user's sampler.
    """

    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        uneven_batches: str = "stop",
        keep_data_order: bool = True,
    ) -> None:
        super().__init__(*args)
        if uneven_batches not in POLICIES:
            raise ValueError(
                f"uneven_batches={uneven_batches!r} must be 'stop' (all ranks end an epoch when the first one has no"
                " more batches) or 'raise' (an error on all ranks)."
            )
        self._uneven_batches = uneven_batches
        self._training_batches: TrainingBatches | None = None
        self._keep_data_order = keep_data_order
        if global_batch_size is not None and global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} must be at least 1, or None.")
        self._global_batch_size = global_batch_size
        self._layout: ParallelLayout | None = None
        self._mesh: DeviceMesh | None = None
        self._parallel: ParallelModule | None = None
        self._data_parallel_group: dist.ProcessGroup | None = None
        self._same_stage_group: dist.ProcessGroup | None = None
        self._stage_to_stage_group: dist.ProcessGroup | None = None
        self._context_group: dist.ProcessGroup | None = None
        self._same_batch_group: dist.ProcessGroup | None = None
        self._same_batch: SameBatch | None = None
        self._same_numbers: SameRandomNumbers | None = None
        self._tracing: StepTracing | None = None
        self._evaluation: EvaluationBatches | None = None
        self._same_results: SameResults | None = None
        self._silenced: list[Callback] = []
        self._restore_metrics: Callable[[], None] = lambda: None

    def _requested_sizes(self) -> dict[str, int]:
        """Return the requested size of each axis, of which at most one is -1. The named strategies override this."""
        raise NotImplementedError(f"{type(self).__name__} chooses no mesh; use one of the named strategies.")

    @override
    def configure_launcher(self) -> None:
        """Resolve the layout as well."""
        super().configure_launcher()
        # The layout is resolved here, so that sizes that do not fit are found before any process is launched.
        self._layout = ParallelLayout.resolve(self.num_nodes * self.num_processes, **self._requested_sizes())

    @property
    def layout(self) -> ParallelLayout:
        """Return the sizes of the mesh's axes."""
        if self._layout is None:
            raise RuntimeError("The layout is known once the Trainer has been created.")
        return self._layout

    @property
    def mesh(self) -> DeviceMesh:
        """Return the device mesh, with one dimension for each axis of the layout."""
        if self._mesh is None:
            raise RuntimeError("The mesh exists once the processes have been launched.")
        return self._mesh

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def parallel(self) -> ParallelModule:
        """Return the parallel module, which exists once the strategy is set up."""
        assert self._parallel is not None
        return self._parallel

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of parts into which the data are divided, and the index of this rank's part."""
        return {
            "num_replicas": self.layout.num_data_parallel,
            "rank": self.layout.data_parallel_rank(self.global_rank),
        }

    @override
    def setup_environment(self) -> None:
        """Start the process group, and build the mesh and the groups of ranks."""
        super().setup_environment()
        assert self.lightning_module is not None
        self._mesh = self.layout.build_mesh(self.root_device.type)
        _compat.set_device_mesh(self.lightning_module, self._mesh)
        self._data_parallel_group = self.layout.build_data_parallel_group()
        self._same_batch_group = self.layout.build_same_batch_group()
        self._same_stage_group = self.layout.build_same_stage_group()
        self._stage_to_stage_group = self.layout.build_stage_to_stage_group()
        self._context_group = self.layout.build_context_group()
        _compat.set_timeout(self._timeout)
        peers = dist.get_process_group_ranks(self._same_stage_group)
        self._tracing = StepTracing(self.layout.num_data_parallel, peers)
        if self._same_batch_group is not None:
            self._same_batch = SameBatch(self._same_batch_group, self.root_device)
            is_on_host = dist.get_backend(self._same_batch_group) == "gloo"
            on_host = self._same_batch_group if is_on_host else self.layout.build_same_batch_group("gloo")
            assert on_host is not None
            self._same_numbers = SameRandomNumbers(on_host, self.lightning_module)

    def _give_metrics_their_group(self, module: LightningModule) -> None:
        """Let torchmetrics gather over the ranks that have a part of the batch, so that each sample counts once."""
        _compat.let_groups_be_copied()
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self._data_parallel_group
        self._restore_metrics()
        if self._data_parallel_group is not None:  # This covers metrics of callbacks and later ones.
            self._restore_metrics = _compat.gather_metrics_over(self._data_parallel_group)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a metric over the ranks that have a part of the batch."""
        if self._tracing is not None and self._tracing.is_active:
            return self._tracing.reduce(tensor)
        return super().reduce(tensor, self._data_parallel_group if group is None else group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks that have a part of the batch, each part once.

        Args:
            tensor: This rank's tensor, of the same shape on all ranks.
            group: Process group to gather over; None, or the group of all processes, which
                ``LightningModule.all_gather`` passes by default: the ranks that have a part of the batch.
            sync_grads: Whether the gradient of the result flows back to every rank's ``tensor``.

        Returns:
            The tensors of all ranks, stacked along a new first dimension.
        """
        if self._tracing is not None and self._tracing.is_active:
            return self._tracing.all_gather(tensor, sync_grads)
        of_batch = group is None or group is dist.group.WORLD
        return super().all_gather(tensor, self._data_parallel_group if of_batch else group, sync_grads)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Set the batch size, and let the workers of ranks with the same part of the batch draw the same numbers."""
        check_that_all_have_lengths(dataloader, self._trainer)
        if self._global_batch_size is not None and self._trainer.training:
            set_global_batch(dataloader, self._global_batch_size, self._trainer)
        if self.layout.shares_batches:
            _compat.seed_workers_by(dataloader, self.layout.data_parallel_rank(self.global_rank))
        return dataloader

    def _check_batch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the batch of the step ``name`` in the background between the ranks that must have the same batch."""
        if self._evaluation is not None and name != "training_step":
            self._evaluation.before_step()
        if self._same_batch is not None:
            self._same_batch.check((args, kwargs), f"the batch of a {name}")

    def _agree_on_batches(self) -> None:
        """Let ranks with unequal numbers of batches end epochs and evaluations together.

        Call this before Lightning makes the loaders of the run.
        """
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._keep_data_order:
            _compat.choose_training_samplers(self._trainer, partial(deal_out, **self.distributed_sampler_kwargs))
        if self.world_size == 1:
            return
        if is_fitting:
            self._training_batches = TrainingBatches(self._trainer, self._uneven_batches)
        _compat.agree_on_evaluation_batches(self._trainer, others_have_batches)

    def _finish_comparing(self) -> None:
        if self._same_batch is not None:
            self._same_batch.finish()
        if self._same_numbers is not None:
            self._same_numbers.expect_changes()

    def _agree_on_random_numbers(self) -> None:
        """Give ranks with the same part of the batch the same random states, so that they draw the same numbers."""
        if self._same_batch_group is not None:
            assert self.lightning_module is not None
            agree_on_random_numbers(self._same_batch_group, self.lightning_module)

    @override
    def on_train_start(self) -> None:
        """Print the global batch, and let ranks with the same part of it draw the same numbers before each batch."""
        batch = global_batch(self._trainer)
        if batch is not None:
            rank_zero_info(f"{'  batch':<14}{batch.describe()}")
        self._agree_on_random_numbers()
        if self._same_numbers is not None:
            _compat.around_every_batch(
                self._trainer, "random numbers", self._before_batch, self._same_numbers.begin_comparing
            )

    def _before_batch(self) -> None:
        assert self._same_numbers is not None
        if _compat.is_first_batch(self._trainer):
            self._same_numbers.expect_changes()
        self._same_numbers.restore()

    @override
    def on_train_end(self) -> None:
        """Check that the last batch was the same on all ranks that must have the same batch."""
        announce_progress()
        self._finish_comparing()

    @override
    def on_validation_start(self) -> None:
        """Give every rank the same buffers, as DDP does, so that all evaluate the same model."""
        announce_progress()
        # The sanity check leaves buffers as they are, because making them equal would change a resumed run.
        self._begin_evaluation(agrees_on_buffers=not self._trainer.sanity_checking)

    @override
    def on_validation_end(self) -> None:
        """Check the last batch, and free what the evaluation has gathered."""
        self._end_evaluation()

    @override
    def on_test_start(self) -> None:
        """Give every rank the same buffers."""
        self._begin_evaluation()

    @override
    def on_test_end(self) -> None:
        """Check the last batch, and free what the evaluation has gathered."""
        self._end_evaluation()

    @override
    def on_predict_start(self) -> None:
        """Give every rank the same buffers, and let only one of the ranks with the same samples return predictions."""
        self._begin_evaluation()
        if self._same_batch_group is not None and dist.get_rank(self._same_batch_group) > 0:
            self._silenced = _compat.silence_predictions(self._trainer)

    @override
    def on_predict_end(self) -> None:
        """Give the Trainer back the callbacks that :meth:`on_predict_start` has removed from it."""
        self._end_evaluation()
        self._give_callbacks_back()

    def _give_callbacks_back(self) -> None:
        if self._silenced:
            self._trainer.callbacks += self._silenced  # type: ignore[attr-defined]
            self._silenced = []

    def _begin_evaluation(self, agrees_on_buffers: bool = True) -> None:
        """Let ranks evaluate the same model, and unequal numbers of batches, as DDP does. This is a collective."""
        self._agree_on_random_numbers()
        if agrees_on_buffers:
            self.parallel.states.agree_on_buffers(self._same_stage_group)
        needs_equal = not self.parallel.holds_whole_model or self.layout.shares_batches
        if needs_equal or self._uneven_batches == "raise":
            self._evaluation = EvaluationBatches(
                self._trainer, self._parts_of_batch, self._uneven_batches, self._stay_gathered
            )
        if not self._trainer.predicting:
            self._same_results = SameResults(self._trainer)

    def _stay_gathered(self, why: str) -> None:
        """Let ranks evaluate unequal numbers of batches. This is a collective if parameters are sharded.

        Args:
            why: Beginning of a sentence that says why they do.
        """
        if self.parallel.holds_whole_model:
            return
        rank_zero_warn(
            f"{why}. Every rank holds the whole model until the evaluation ends, since ranks could not gather it"
            " together for each batch. Give all ranks as many batches, by a DistributedSampler, if the model does not"
            " fit."
        )
        self.parallel.stay_gathered()

    @property
    def _parts_of_batch(self) -> list[int]:
        """Return, for each rank, the index of the part of a batch that it has."""
        return [self.layout.data_parallel_rank(rank) for rank in range(self.world_size)]

    def _end_evaluation(self) -> None:
        self._finish_comparing()
        self.parallel.stop_staying_gathered()
        self._forget_evaluation()

    def _forget_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None
        if self._same_results is not None:
            self._same_results.end()
            self._same_results = None
