"""Run a module under a strategy and in one process, and compare the two."""

from __future__ import annotations

import gc
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.randomness import rng_state, set_rng_state
from lightning_dist.model.same_batch import digest
from lightning_dist.plugins.parity_check.randomness import switch_off_dropout
from lightning_dist.plugins.parity_check.recording import Recorder, Recording
from lightning_dist.plugins.parity_check.reference import Reference, batch_norms, join_batches, one_process, repeat
from lightning_dist.plugins.parity_check.refusals import (
    comparable_strategy,
    refuse_batch_norm,
    refuse_what_differs_by_design,
    uses_whole_batch,
)
from lightning_dist.plugins.parity_check.report import Report, compare, tolerances
from lightning_dist.plugins.parity_check.settings import Settings
from lightning_dist.plugins.parity_check.verdict import on_first_rank
from lightning_dist.plugins.strategies import MeshStrategy
from lightning_dist.techniques.audit import FirstStepAudit
from lightning_dist.techniques.pipeline import Pipeline

__all__ = ["check"]

_ABOUT_DTYPES = re.compile(r"double|float|dtype|half|bf16|fp16|scalar type|precision", re.IGNORECASE)


def check(
    make_module: Callable[[], LightningModule],
    data: Any = None,
    *,
    tolerance: float | None = None,
    steps: int = 1,
    float64: bool | None = None,
    whole_batch: bool | None = None,
    on_trainer: Callable[[Trainer], None] | None = None,
    **trainer: Any,
) -> Report:
    """Compare the first steps of a module under a strategy with the same steps in one process.

    The loss, the gradient of every parameter, and the change of every weight by the optimizer are compared. Nothing is
    logged or saved, and no validation runs. Every process of the run calls this, as it would call ``Trainer.fit``, and
    gets the same report. One device must be able to hold the whole model, because rank 0 computes the reference.

    Args:
        make_module: Function that makes the module. It is called for the run under the strategy, and again on rank 0
            for one process, which starts from the initial weights of the run.
        data: LightningDataModule, or train dataloaders, as for ``Trainer.fit``. None: the module's own.
        tolerance: Largest accepted relative deviation. None: 1e-10 for the loss and gradients and 1e-6 for changes of
            weights, if everything was computed in float64; 1e-4 and 1e-2 if something was computed in float32; 0.1 and
            0.5 if something was computed in bfloat16, float16 or TF32.
        steps: Number of optimizer steps; with manual optimization, of batches. Gradients are those of the first one,
            and weights are compared after the last one.
        float64: Whether both runs compute in float64, in which rounding hides no mistake, instead of the Trainer's
            precision. None: they do, unless the module raises an error about dtypes; the Trainer's precision is tried
            then, if ``strategy`` is not an instance, which cannot be used twice.
        whole_batch: Whether one process computes the batches of all ranks as one batch, instead of one after the other
            with accumulated gradients, which is what DDP computes. None: with manual optimization and with
            ``sync_batchnorm``.
        on_trainer: Function that is called with the Trainer of the run under the strategy before it starts.
        trainer: Arguments of the Trainer, such as ``strategy``, ``devices`` and ``precision``. ``strategy`` may also be
            a function that makes the strategy.

    Raises:
        ValueError: If there is nothing to compare, or the comparison cannot be meaningful.
        AuditError: If the strategy itself finds that a parameter would be trained wrongly.
    """
    if tolerance is not None and tolerance <= 0:
        raise ValueError(f"tolerance={tolerance} must be positive.")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1.")
    one = _Check(make_module, data, tolerance, steps, whole_batch, on_trainer)
    if float64 is not None:
        return one.run(trainer, float64)
    try:
        return one.run(trainer, float64=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if isinstance(error, OtherRankError) or not _ABOUT_DTYPES.search(str(error)):
            raise
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if isinstance(trainer.get("strategy"), Strategy):
            error.add_note("If the module cannot run in float64, which check tries first, set float64 to False.")
            raise
    gc.collect()  # The traceback has held the module.
    rank_zero_info(f"The module does not run in float64 ({text}), and is checked in the Trainer's precision.")
    return one.run(trainer, float64=False)


@dataclass
class _Run:
    """Hold what remains of the run under the strategy.

    Args:
        recording: Record of the run, complete on rank 0.
        title: The heading of the report, which names what is compared.
        layout: Layout of the ranks.
        device: Device of this rank.
        precision: Precision of the Trainer.
        dtypes: Dtypes in which parameters were gathered and gradients reduced, where they are not the stored one.
        calls_per_step: Number of calls of ``training_step`` on a rank for each step.
        joins_batches: Whether one process computes the batches of all ranks as one batch.
        adapted: Adaptations with which one process can compute the same.
    """

    recording: Recording
    title: str
    layout: ParallelLayout
    device: torch.device
    precision: str
    dtypes: set[torch.dtype]
    calls_per_step: int
    joins_batches: bool
    adapted: _Adaptation


@dataclass
class _Adaptation:
    """Hold what was adapted so that one process can compute the same as the ranks.

    Args:
        without_dropout: Names of probabilities of dropout that were set to 0; None if dropout was left as it is.
        num_parts: Number of microbatches into which one process splits each batch, as a pipeline does.
    """

    without_dropout: list[str] | None
    num_parts: int = 1


class _Check:
    """Hold the arguments of :func:`check`."""

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        data: Any,
        tolerance: float | None,
        steps: int,
        whole_batch: bool | None,
        on_trainer: Callable[[Trainer], None] | None,
    ) -> None:
        self._make_module = make_module
        self._datamodule = data if isinstance(data, LightningDataModule) else None
        self._loaders = None if self._datamodule is not None else data
        self._tolerance = tolerance
        self._num_steps = steps
        self._whole_batch = whole_batch
        self._on_trainer = on_trainer

    def run(self, arguments: dict[str, Any], float64: bool) -> Report:
        """Run the module under the strategy and in one process, and return the report."""
        settings = Settings(arguments, float64)
        callbacks = settings.copies_for_one_process()
        random_state = rng_state()
        run = self._under_strategy(settings)
        gc.collect()  # The reference needs the memory of the run's module and optimizers.

        def report() -> Report:
            try:
                return compared()
            except torch.OutOfMemoryError as error:
                error.add_note("One process holds the whole model on the device of rank 0: check a smaller model.")
                raise

        def compared() -> Report:
            set_rng_state(random_state)  # The module draws the same again, for tensors that are no parameters.
            module = self._make_module()
            module.configure_callbacks = list  # type: ignore[method-assign]
            recording = join_batches(run.recording) if run.joins_batches else run.recording
            with one_process(), _quietly():
                reference = repeat(
                    module, recording, self._num_steps, run.adapted.num_parts, run.device, self._datamodule,
                    run.adapted.without_dropout is not None, callbacks, **settings.in_one_process(run.precision),
                )  # fmt: skip
            return self._report(run, reference, settings.callbacks_left_out)

        return on_first_rank(report)

    def _under_strategy(self, settings: Settings) -> _Run:
        """Run the first steps under the strategy, and return what was recorded.

        Raises:
            ValueError: If there is nothing to compare, or the run ends too early.
        """
        trainer = Trainer(**settings.under_strategy())
        strategy = comparable_strategy(trainer)
        recorder = Recorder(self._num_steps, strategy.layout, strategy.root_device)
        # It comes first, to see gradients and weights before others change them.
        trainer.callbacks.insert(0, recorder)  # type: ignore[attr-defined]
        if self._on_trainer is not None:
            self._on_trainer(trainer)
        module = self._make_module()
        module.configure_callbacks = list  # type: ignore[method-assign]
        refuse_what_differs_by_design(module)
        joins_batches = uses_whole_batch(module, trainer, self._whole_batch)
        adapted = _adapt_at_setup(strategy, joins_batches)
        trainer.fit(module, self._loaders, datamodule=self._datamodule)
        if not recorder.is_complete:
            raise ValueError(
                f"The run ended after {trainer.global_step} optimizer steps, before the {self._num_steps} that are to"
                " be compared, because of its data or of limits of the Trainer: give more data, raise max_steps, or"
                " compare fewer steps."
            )
        if module.automatic_optimization and recorder.num_calls != self._num_steps * trainer.accumulate_grad_batches:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} is more than the batches of an epoch, whose"
                " end has ended an optimizer step early: give more data, or accumulate fewer batches."
            )
        policy = strategy.precision_policy
        return _Run(
            recording=recorder.recording,
            title=f"{type(module).__name__} under {strategy.strategy_name}, against one process",
            layout=strategy.layout,
            device=strategy.root_device,
            precision=str(trainer.precision),
            dtypes={dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype is not None},
            calls_per_step=trainer.accumulate_grad_batches,
            joins_batches=joins_batches,
            adapted=adapted,
        )

    def _report(self, run: _Run, reference: Reference, callbacks_left_out: list[str]) -> Report:
        recording = run.recording
        stored = {weight.dtype for weight in recording.initial.values() if weight.is_floating_point()}
        dtypes = stored | run.dtypes | reference.dtypes
        report = Report(run.title, [], tolerances(dtypes, self._tolerance))
        report.facts = [
            ("layout", f"{run.layout} = {run.layout.world_size} processes"),
            ("one process", _batches(run)),
            (
                "precision",
                f"computed in {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))} on both sides",
            ),
            (
                "accepted",
                f"{report.tolerances.gradients:.0e} of the loss and of gradients,"
                f" {report.tolerances.weights:.0e} of the change of weights",
            ),
        ]
        if random := _random_numbers(run, reference.has_drawn):
            report.facts.append(("random", random))
        if callbacks_left_out:
            report.facts.append(("left out", ", ".join(callbacks_left_out)))
        compare(report, recording, reference, run.calls_per_step)
        batches = {int(digest([call.batch for call in calls])) for calls in recording.batches}
        if len(batches) < run.layout.num_data_parallel:
            report.notes.append("Data-parallel ranks were given the same batches. Are the data divided among them?")
        if report.findings:
            report.notes += _possible_reasons(run, reference.has_drawn)
        return report


def _adapt_at_setup(strategy: MeshStrategy, joins_batches: bool) -> _Adaptation:
    """Adapt the module when the strategy is set up, which is when ``configure_model`` has made its layers."""
    layout, is_compiled = strategy.layout, strategy.config.arguments.is_given("compile")
    draws_alike = layout.tp == layout.cp == layout.pp == 1 and not is_compiled and not joins_batches
    adapted = _Adaptation(None if draws_alike else [])
    set_up = strategy.setup

    def setup(trainer: Trainer) -> None:
        module = trainer.lightning_module
        if adapted.without_dropout is not None:
            adapted.without_dropout.extend(switch_off_dropout(module))
        set_up(trainer)
        if joins_batches:
            refuse_batch_norm(module)
        pipeline = strategy.parallel.get(Pipeline)
        if pipeline is not None and any(batch_norms(module)):
            adapted.num_parts = pipeline.config.num_microbatches
        audit = strategy.parallel.get(FirstStepAudit)
        assert audit is not None
        audit.compares_weights = False  # The recorder compares them, and more.

    strategy.setup = setup  # type: ignore[method-assign]
    return adapted


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the messages of a second Trainer, which repeat those of the first one."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _batches(run: _Run) -> str:
    number, ranks = len(run.recording.batches[0]), run.layout.num_data_parallel
    text = f"{number} batch{'es' if number > 1 else ''}"
    if ranks > 1:
        how = "joined into one" if run.joins_batches else "one after the other, with accumulated gradients"
        text += f" of each of {ranks} data-parallel ranks, {how}"
    else:
        text += ", the same as under the strategy"
    if run.adapted.num_parts > 1:
        text += f"; in {run.adapted.num_parts} microbatches, as in the pipeline, because of BatchNorm"
    return text


def _random_numbers(run: _Run, draws: bool) -> str:
    """Return a text on how the check handles random numbers; "" if there are none."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    seeded = f"; the seed is {seed}" if seed else "; no seed was set"
    names = run.adapted.without_dropout
    if names is None:
        return f"one process repeats the random numbers of each rank{seeded}" if draws else ""
    texts = []
    if names:
        others = f" and {len(names) - 2} more" if len(names) > 2 else ""
        texts.append(
            f"dropout is off on both sides ({', '.join(names[:2])}{others}), since the shapes of the masks differ"
        )
    if draws:
        texts.append(f"the step draws random numbers, from the same state on both sides{seeded}")
    return "; ".join(texts)


def _possible_reasons(run: _Run, draws: bool) -> list[str]:
    """Return sentences on why a run may differ from one process by design, as far as they may apply."""
    reasons = []
    if run.layout.pp > 1:
        reasons.append(
            "A pipeline computes losses that are a sum, or that compare samples, for each microbatch by itself:"
            " docs/strategies/pipeline_parallel.md."
        )
    if run.layout.num_data_parallel > 1 and not run.joins_batches:
        reasons.append(
            "If the step compares samples of several ranks (self.all_gather), compare with whole_batch=true."
        )
    if run.adapted.without_dropout is not None and draws:
        reasons.append("The step draws random numbers, which may not be equal under this layout.")
    return reasons
