"""Run steps on the stages of a pipeline, and give their results to Lightning on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_dist._compat import tree_leaves
from lightning_dist.mesh.collectives import begin_any_of_flags, group_on_host
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.gradients import are_free_before_forward
from lightning_dist.plugins.strategies.steps.base import Steps, begins_accumulation
from lightning_dist.plugins.strategies.steps.collectives import without_foreign_collectives
from lightning_dist.plugins.strategies.steps.example_step import fake_step, without_updates
from lightning_dist.plugins.strategies.steps.loss_of_microbatches import warn_of_other_losses
from lightning_dist.plugins.strategies.steps.metrics import SharedMetrics
from lightning_dist.plugins.strategies.steps.microbatching import BatchSplitter
from lightning_dist.plugins.strategies.steps.result import StepResult, merge_values, merged_outputs
from lightning_dist.plugins.strategies.steps.results_broadcast import Results, ResultsBroadcast
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.techniques.pipeline import (
    AllStages,
    Attempt,
    PathAgreement,
    Pipeline,
    PreparedStep,
    StepOutcome,
    raise_first,
    raise_together,
    signature,
)
from lightning_dist.tracing.step_graph import LoopByValueError, RepeatedCallsError, StepGraph, TraceError, trace_step

__all__ = ["PipelinedSteps", "logging_whole"]

_READABLE = (
    "current_epoch", "global_step", "max_epochs", "max_steps", "num_training_batches", "is_last_batch",
    "sanity_checking", "training", "validating", "testing", "predicting", "evaluating",
)  # fmt: skip
"""Properties of the Trainer with plain values that are cheap to read, and on which the path of a step may depend."""


class PipelinedSteps(Steps):
    """Run steps on the stages of a pipeline, in microbatches.

    Args:
        module: The user's module, cut into stages.
        parallel: The engine's object for ``module``, which gathers its parameters and reduces its gradients.
        precision: Lightning's precision plugin, in whose contexts steps run and which scales losses.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """

    def __init__(
        self, module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing
    ) -> None:
        super().__init__(module, parallel, precision, tracing)
        pipeline = parallel.get(Pipeline)
        assert pipeline is not None
        self._modules = list(module.modules())
        # These are the parameters of the sharded module. They are listed once, because that takes long.
        self._parameters = list(module.parameters())
        self._pipeline = pipeline
        self._pipeline.readable = {Trainer: _READABLE}
        self._pipeline.differs_between_ranks = (Metric,)
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._splitter = BatchSplitter(module)
        self._metric_names = {
            name for name, part in module.named_modules() if isinstance(part, Metric | MetricCollection)
        }
        self._metrics = SharedMetrics(module, pipeline)
        self._has_tried_loss = False
        self._run_whole: set[str] = set()
        """The names of the steps without a backward that run on the whole model, because they cannot be split."""
        # Errors and what the last stage leaves are exchanged on the host, which does not wait for the device then.
        self._on_host = group_on_host(pipeline.group, "ends of steps")
        self._all_on_host = self._on_host
        if dist.get_world_size() > pipeline.group.size():
            self._all_on_host = group_on_host(None, "errors in steps")
        self._path_agreement = PathAgreement(pipeline.group)
        self._broadcast = ResultsBroadcast(pipeline, self._on_host, module.device)

    @classmethod
    @override
    def can_run(cls, parallel: ParallelModule) -> bool:
        """Return whether the module is cut into stages."""
        return parallel.get(Pipeline) is not None

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run ``training_step`` and its backward, and return its output without its graph. This is a collective."""
        kept: list[tuple[Tensor, Tensor]] = []
        if begins_accumulation(self._module.trainer):
            if not are_free_before_forward(self._module, self._module.trainer):
                kept = [(param, param.grad) for param in self._parameters if param.grad is not None]
            for param in self._parameters:
                param.grad = None
            self._parallel.gradients.drop_unreduced()  # A stopped or failed run may have left some.
        weights, accumulate = self._weights, self._module.trainer.accumulate_grad_batches
        losses: list[Tensor] = []

        def loss_of(num_microbatches: int, result: Any) -> Tensor:
            loss = _loss(result)
            if not loss.requires_grad:
                raise RuntimeError(
                    "training_step returned a loss that does not require a gradient, so that nothing would be trained:"
                    " it is detached, computed under torch.no_grad, or computed from frozen parameters only."
                )
            weights.read(result, loss.device)
            losses.append(loss.detach())
            if isinstance(result, Mapping) and result.get("weight") is not None:
                return self._scale(weights.scale(loss) / accumulate)
            return self._scale(loss / (num_microbatches * accumulate))

        merge = partial(merged_outputs, losses)
        result, ran, told = self._run("training_step", args, kwargs, self._all_on_host, merge, loss_of)
        self._parallel.after_microbatches()
        output = result.apply(told, ran.buffers)
        if not self._pipeline.is_last and isinstance(output, Mapping) and output.get("weight") is not None:
            weights.add(torch.as_tensor(output["weight"], dtype=torch.float64, device=self._module.device))
        # Lightning clears gradients next, before it calls backward(). They are set aside here, and put back there.
        self._gradients = [(param, param.grad) for param in self._parameters if param.grad is not None]
        for updated, _ in self._gradients:
            updated.grad = None
        for cleared, old in kept:
            cleared.grad = old
        return output

    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Put the gradients that the step has computed back on the parameters.

        This is a collective if losses have weights.
        """
        loss = self._precision.pre_backward(loss, self._module)
        for param, gradient in self._gradients:
            param.grad = gradient if param.grad is None else param.grad + gradient
        self._gradients = []
        self._normalize_gradients()
        return self._precision.post_backward(loss, self._module)

    @contextmanager
    def around_hook(self, name: str) -> Iterator[None]:
        """Let a hook read and change the parameters of all stages, and log values that only another stage has."""
        if name.endswith(".optimizer_zero_grad"):  # Each stage clears the gradients of its own parameters.
            yield
            return
        if name.endswith(".optimizer_step"):  # Each stage runs it for its own parameters.
            with self._shards.hook_context(name):
                yield
            return
        all_stages = self._pipeline.all_stages
        with (
            self._parallel.gradients.with_unreduced_cleared(),
            self._shards.hook_context(name),
            all_stages.hook_context(name),
            logging_whole(self._module, all_stages),
        ):
            yield

    @override
    @contextmanager
    def outside_of_hooks(self) -> Iterator[None]:
        """Return a context for an optimizer step within a hook, in which each rank sees its own stages only."""
        with self._shards.paused(), self._pipeline.all_stages.switched_off():
            yield

    def _scale(self, loss: Tensor) -> Tensor:
        scaler = getattr(self._precision, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run a step without a backward, and return its output.

        This is a collective over the pipeline, or over all processes if parameters are gathered in the step. A step
        that calls the model several times, as the generation of text does, runs on every rank, which holds the whole
        model meanwhile: the model's output would have to go back to the first stage.
        """
        if name not in self._run_whole:
            try:
                return self._evaluate_on_stages(name, args, kwargs)
            except (LoopByValueError, RepeatedCallsError):  # The first trace raises them on all ranks.
                self._run_whole.add(name)
                rank_zero_warn(
                    f"{type(self._module).__name__}.{name} calls the model several times, as the generation of text"
                    " does. Stages cannot do that: every rank holds the whole model while the step runs, which is"
                    " gathered for each batch."
                )
        with self._parallel.full_parameters(), self._metrics.in_step(), self._context(name):
            return cast(STEP_OUTPUT, getattr(self._module, name)(*args, **kwargs))

    def _evaluate_on_stages(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        # Replicas of the model may run different numbers of batches, but ranks that gather parameters together may not.
        gathers = not self._parallel.holds_whole_model and not self._parallel.stays_gathered
        group = self._all_on_host if gathers else self._on_host
        result, ran, told = self._run(name, args, kwargs, group, merge_values)
        return result.apply(told, ran.buffers)

    def _key(self, name: str, batch: Any, kwargs: dict[str, Any], number: int) -> object:
        """Return a hashable key of everything that always influences the path of the step ``name`` and its gradients.

        Args:
            name: Name of the step's method, such as ``training_step``.
            batch: The first microbatch of the batch.
            kwargs: Keyword arguments of the step.
            number: Number of microbatches into which the batch is split.
        """
        return (
            name,
            number,
            signature((batch, kwargs)),
            tuple(part.training for part in self._modules),
            tuple(param.requires_grad for param in self._parameters),
        )

    def _trace_both(
        self,
        name: str,
        microbatches: Sequence[Any],
        batch: Any,
        kwargs: dict[str, Any],
        has_backward: bool,
        arguments: Sequence[Any],
    ) -> StepGraph:
        """Trace the step ``name`` on a microbatch, and also on the whole batch if its side effects may differ there.

        The whole batch is left out if code between parts draws random numbers, because on the whole batch it would draw
        other numbers than those from which the microbatches were computed.
        """
        graph = self._trace(name, microbatches[0], arguments, kwargs, has_backward)
        if len(microbatches) == 1 or not graph.may_leave_more:
            return graph
        left = [key for _, key in graph.changed] + sorted(graph.buffers_between)
        step = f"{type(self._module).__name__}.{name}"
        try:
            whole = self._trace(name, batch, arguments, kwargs, has_backward)
        except Exception as error:  # For example, only the module's own split_batch may be able to read the batch.
            rank_zero_warn(
                f"{step} could not be traced on a whole batch ({type(error).__name__}: {error}). What it leaves in"
                f" {', '.join(left) or 'logs and outputs'} is computed from the microbatches instead."
            )
            return graph
        graph = graph.with_fixed_sizes(whole)
        if not graph.end.draws:
            return graph.with_whole_batch(whole)
        if graph.numbers != whole.numbers:
            left.append("plain numbers that it logs or returns")
        if graph.logs_otherwise:
            left.append("values that it logs or returns and that are no means over samples")
        if left:
            rank_zero_warn(
                f"{step} draws random numbers between the model's parts, so that what it leaves in {', '.join(left)} is"
                " that of the last microbatch, or the mean over the microbatches of what is logged. Draw the numbers in"
                " the dataset or inside one block, or log tensors that are means over samples."
            )
        return graph

    def _trace(
        self, name: str, batch: Any, arguments: Sequence[Any], kwargs: dict[str, Any], has_backward: bool
    ) -> StepGraph:
        """Trace the step ``name`` on a microbatch or a whole batch; ``arguments`` follow the batch."""
        module, stages = self._module, self._pipeline.stages
        fake = fake_step(
            module,
            module.trainer,
            name,
            (batch, *arguments),
            kwargs,
            partial(self._tracing.around, self._module),
            uses_loggers=False,
        )
        with self._parallel.original():
            graph = trace_step(module, fake, module.device, stages.parts, stages.blocks, has_backward)
        # The attributes of metrics are left out, because metrics must keep the updates of all microbatches.
        return replace(
            graph, changed=tuple((owner, key) for owner, key in graph.changed if owner not in self._metric_names)
        )

    def _run(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: dist.ProcessGroup,
        merge: Callable[[list[Any], bool], Any],
        loss_of: Callable[[int, Any], Tensor] | None = None,
    ) -> tuple[StepResult, StepOutcome, Results]:
        """Run the step ``name`` on all microbatches. This is a collective over the pipeline and over ``group``.

        An error on any rank is raised on all ranks of ``group``, whose hosts wait for each other after the step.

        Args:
            name: Name of the step's method, such as ``training_step``.
            args: Positional arguments of the step, the batch first.
            kwargs: Keyword arguments of the step.
            group: Process group of the ranks that run a step now, which uses gloo.
            merge: Function that merges the results of the microbatches, given whether integers are counts; it is
                called on the last stage only.
            loss_of: Function that returns a microbatch's part of the loss, given the number of microbatches and the
                result of the step on it; None: there is no backward.

        Returns:
            The object that has recorded the side effects of the step, the outcome of its microbatches, and what the
            last stage has sent.
        """
        prepared, result, microbatches = self._prepare(name, args, kwargs, loss_of is not None)
        steps = [
            partial(self._run_step, result, name, microbatch, index, (args[1:], kwargs))
            for index, microbatch in enumerate(microbatches)
        ]
        with self._parallel.microbatches(with_backward=loss_of is not None) as run_root:
            if loss_of is not None and not self._has_tried_loss:
                self._has_tried_loss = True
                with suppress(Exception):  # The step itself raises the error again, and then on all ranks.
                    self._try_loss(microbatches[0], args[1:], kwargs)
            with self._metrics.in_step(), without_foreign_collectives(self._tracing.peers):
                scaled = None if loss_of is None else partial(loss_of, len(steps))
                with result.logging():
                    ran = self._pipeline.runner.run(prepared, steps, run_root, scaled)
                end = Attempt("the code between parts, on the whole batch")
                if ran.failure is None and self._pipeline.is_last:
                    with end:
                        step = partial(self._run_step, result, name, args[0], len(ran.results) - 1, (args[1:], kwargs))
                        result.run_on_whole_batch(self._pipeline, ran, step)
                changes = Attempt("the microbatches")
                if ran.failure is None and end.failure is None:
                    with changes:
                        self._parallel.write_back()
            failure = ran.failure or end.failure or changes.failure
            left = partial(result.left, partial(merge, ran.results), ran.buffers)
            # The replicas of the pipeline tell each other of errors at the same time.
            has_failed = None if group is self._on_host else begin_any_of_flags([failure is not None], group)
            told = self._broadcast(left, failure is not None)
            others_failed = has_failed is not None and has_failed()[0]
            if told is None or others_failed:
                raise_first(failure, group)
        return result, ran, told

    def _prepare(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], has_backward: bool
    ) -> tuple[PreparedStep, StepResult, list[Any]]:
        """Split the batch, and plan the step by its path, which is traced if it is new.

        This is a collective over the pipeline.

        Args:
            name: Name of the step's method, such as ``training_step``.
            args: Positional arguments of the step, the batch first.
            kwargs: Keyword arguments of the step.
            has_backward: Whether a backward is run for each microbatch, as in training.

        Returns:
            The plan of the step, the object that records the step's side effects, and the microbatches.
        """
        pipeline = self._pipeline
        begin = Attempt("before the first microbatch")
        microbatches: list[Any] = []
        sizes: list[int] = []
        key: object = None
        path = -1
        with begin:
            _refuse_leaves((args[0], kwargs))
            microbatches = self._splitter.split(args[0], pipeline.config.num_microbatches)
            sizes = self._splitter.sizes(microbatches)
            key = self._key(name, microbatches[0], kwargs, len(microbatches))
            path = pipeline.known_path(key, args[1:])
        is_same = begin.failure is None and pipeline.is_same_on_all_ranks(key, path)
        path = self._path_agreement.agree(path, is_same, begin.failure, self._on_host)
        is_known = path >= 0
        if not is_known:  # The step is traced before parameters are gathered, which may change their dtype.
            with begin:
                trace = partial(self._trace_both, name, microbatches, args[0], kwargs, has_backward)
                path = pipeline.trace(key, trace, args[1:])
            path = self._path_agreement.agree(path, False, begin.failure, self._on_host)
        result: StepResult | None = None
        with begin:
            prepared = pipeline.prepare(key, path, not is_known, microbatches, has_backward)
            result = StepResult(self._module, prepared.graph, sizes, self._metrics)
        if not is_known:
            raise_together(begin.failure, self._on_host)
        if result is None:
            assert begin.failure is not None
            raise begin.failure.error
        return prepared, result, microbatches

    def _try_loss(self, batch: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn if the loss is not a mean over samples. Only the last stage of data-parallel rank 0 checks this."""
        is_first = self._module.trainer.strategy.distributed_sampler_kwargs["rank"] == 0  # type: ignore[attr-defined]
        if not self._pipeline.is_last or not is_first:
            return

        def step(batch: Any) -> Any:
            copied = apply_to_collection(batch, Tensor, Tensor.clone)
            with _compat.logging_to(self._module), without_updates(self._module), self._tracing.around(self._module):
                return self._module.training_step(copied, *others, **kwargs)

        def trace(batch: Any) -> StepGraph:
            return self._trace("training_step", batch, others, kwargs, True)

        warn_of_other_losses(self._pipeline, trace, step, batch, type(self._module).__name__)

    def _run_step(
        self, result: StepResult, name: str, batch: Any, index: int, others: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Any:
        """Run the user's step on a microbatch.

        Args:
            result: The object that records the step's side effects.
            name: Name of the step's method, such as ``training_step``.
            batch: The microbatch, or the whole batch.
            index: The index of the microbatch; for the whole batch, that of the last one.
            others: The further positional arguments of the step, and its keyword arguments.
        """
        if result.graph.changes_batch:  # All stages of this rank run on the same batch.
            batch = apply_to_collection(batch, Tensor, Tensor.clone)
        result.microbatch = index
        # The rank of the last stage may have other stages as well. Logs and metrics of the step on these stages are
        # undone.
        result.is_recorded = self._pipeline.runner.runs_last_stage or not self._pipeline.is_last
        with self._context(name), nullcontext() if result.is_recorded else self._metrics.unchanged():
            return getattr(self._module, name)(batch, *others[0], **others[1])


@contextmanager
def logging_whole(module: LightningModule, all_stages: AllStages) -> Iterator[None]:
    """Make ``self.log`` in this context fetch values that only another stage has, so that all ranks log the same."""
    if "log" in vars(module):
        yield
        return

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        type(module).log(module, name, all_stages.broadcast_missing(value), *args, **kwargs)

    # Lightning gives callbacks the module's method as an attribute of their own.
    callbacks: list[Any] = [callback for callback in module.trainer.callbacks if "log" in vars(callback)]  # type: ignore[attr-defined]
    before = [(callback, vars(callback)["log"]) for callback in callbacks]
    for owner in (module, *callbacks):
        vars(owner)["log"] = log
    try:
        yield
    finally:
        vars(module).pop("log", None)
        for callback, own in before:
            vars(callback)["log"] = own


def _refuse_leaves(batch: Any) -> None:
    """Refuse a batch that collects gradients.

    Raises:
        TraceError: If a tensor in ``batch`` requires gradients.
    """
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(batch)):
        raise TraceError(
            "A tensor of the batch requires gradients: under a pipeline its gradient would be known on the first stage"
            " only, and for one microbatch at a time. Use a strategy without stages."
        )


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__} for a microbatch: under a pipeline it must return the"
            " loss, or a dict with 'loss', for every one."
        )
    return loss
