"""Build the step that is run on fake tensors before a module is split, with a batch of the run's own data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MaxMetric, Metric, MetricCollection, MinMetric, RunningMean, RunningSum, SumMetric

from lightning_dist._compat import DispatchMode, tree_leaves, version_of, written_arguments
from lightning_dist.model.own_generators import GENERATORS, get_state, set_state
from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.steps.step_loggers import without_loggers
from lightning_dist.tracing.step_graph import TraceError

__all__ = ["FakeStep", "example_args", "fake_step", "first_args", "parameters_unchanged", "without_updates"]

_MOST_OWNERS = 20
"""The largest number of objects whose generators are restored after a batch was taken."""

FakeStep = Callable[..., Any]
"""Function that runs a step on fakes.

Its first argument makes a fake of a tensor. The optional argument ``on_log`` is called with everything that the step
logs; with ``is_in_run=True``, the hooks that precede the step run first, and the module has optimizers."""


def example_args(trainer: Trainer) -> tuple[tuple[Any, ...], str]:
    """Return the arguments of the first step of the run that begins. This is a collective over all processes.

    No worker is started, and random states are unchanged. All ranks use rank 0's batch, which has gone through
    Lightning's hooks for batches.

    Args:
        trainer: The Trainer whose run begins.

    Returns:
        A pair: a tuple with the batch, the batch's index and, if the step takes it, the loader's index; and an empty
        text. If no batch could be made, an empty tuple, and the reason.
    """
    args: tuple[Any, ...] = ()
    why_not = ""
    try:
        with unchanged_random_numbers():
            args = apply_to_collection(first_args(trainer), Tensor, Tensor.cpu)
    except Exception as error:  # An error of the user's data will be raised again when the run fetches its batches.
        text = str(error).strip().split("\n")[0]
        why_not = f"no batch could be made: {type(error).__name__}: {text}"
    # All ranks must use the same batch, because all must derive the same plan from it.
    args, why_not = trainer.strategy.broadcast((args, why_not))
    if why_not:
        return (), why_not
    batch, *indices = apply_to_collection(args, Tensor, Tensor.clone)  # A hook may change it in place.
    with unchanged_random_numbers():
        return (_compat.transferred(trainer, batch, *indices[1:]), *indices), ""


def first_args(trainer: Trainer) -> tuple[Any, ...]:
    """Fetch a batch of the run that begins, and return it with its index, and that of its loader if there are several.

    Args:
        trainer: The Trainer whose run begins.
    """
    loaders = _compat.make_dataloader(trainer)
    if trainer.state.fn != TrainerFn.FITTING and _compat.are_sequential(loaders):
        first, *others = tree_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)
        return (_batch(first), 0, 0) if others else (_batch(first), 0)
    return _batch(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders), 0


def fake_step(
    module: LightningModule,
    trainer: Trainer,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    is_in_run: bool = False,
    uses_loggers: bool = True,
) -> FakeStep:
    """Return a function that runs the step ``name`` of ``module`` on fakes of the tensors in ``args`` and ``kwargs``.

    Args:
        module: The user's module; its tensors are fakes when the returned function is called.
        trainer: The module's Trainer, whose loggers write nothing while the step runs.
        name: Name of the step's method, such as ``training_step``.
        args: Positional arguments of the step, the batch first.
        kwargs: Keyword arguments of the step.
        around: Function that makes a context in which the step runs.
        is_in_run: Whether the module's hooks that precede the step run first, since they may set what the step reads.
        uses_loggers: Whether the step may write to loggers itself, which it does not do on fakes.
    """

    def step(
        fake: Callable[[Tensor], Tensor], on_log: Callable[..., None] | None = None, is_in_run: bool = is_in_run
    ) -> Any:
        given_args, given_kwargs = apply_to_collection((args, kwargs), Tensor, fake)
        with ExitStack() as inside:
            inside.enter_context(unchanged_random_numbers())
            inside.enter_context(_compat.logging_to(module, on_log or _ignore))
            inside.enter_context(without_updates(module, on_log or _ignore))
            silent = inside.enter_context(without_loggers(trainer))
            inside.enter_context(trainer.precision_plugin.forward_context())
            inside.enter_context(around())
            if is_in_run:
                inside.enter_context(_as_in_a_run(module, name, given_args))
            silent.refuses = not uses_loggers
            result = getattr(module, name)(*given_args, **given_kwargs)
            if on_log is not None and name == "training_step":
                _compat.check_output_of_training_step(result)
            return result

    return step


@contextmanager
def _as_in_a_run(module: LightningModule, name: str, args: tuple[Any, ...]) -> Iterator[None]:
    """Run the module's own hooks that precede the step ``name``, and give the module optimizers.

    Args:
        module: The module, whose tensors are fakes.
        name: Name of the step's method, such as ``training_step``.
        args: Positional arguments of the step, with fakes; the hook for the start of a batch is given them as well.
    """
    kind = name.removesuffix("_step").replace("training", "train")
    before = ["on_fit_start"] if kind == "train" else []
    hooks: list[tuple[str, tuple[Any, ...]]] = [(hook, ()) for hook in (*before, f"on_{kind}_start")]
    hooks += [(f"on_{kind}_epoch_start", ()), (f"on_{kind}_batch_start", args)]
    own = vars(module).get("optimizers")
    if own is None:
        with suppress(Exception):
            made = _compat.made_optimizers(module)
            vars(module)["optimizers"] = lambda use_pl_optimizer=True: made[0] if len(made) == 1 else made
    try:
        for hook, given in hooks:
            if is_overridden(hook, module):
                getattr(module, hook)(*given)
        yield
    finally:
        vars(module).pop("optimizers", None)
        if own is not None:
            vars(module)["optimizers"] = own


@contextmanager
def parameters_unchanged(module: LightningModule) -> Iterator[None]:
    """Refuse a pipeline's step that changes parameters while it runs on fakes in this context.

    Embeddings with ``max_norm`` are exempt: they renormalize their weights within one part of the model.

    Raises:
        TraceError: If the step has changed a parameter.
    """
    renormed = {id(p) for part in module.modules() if getattr(part, "max_norm", None) for p in part.parameters()}
    params = {name: param for name, param in module.named_parameters() if id(param) not in renormed}

    def state_of(param: Any) -> tuple[int, StorageWeakRef]:
        # A parameter that gathers its shards on use would do so if it were asked for its own version.
        with torch.DisableTorchFunctionSubclass():
            held = getattr(param, "_sharded", param)
            return version_of(held), StorageWeakRef(held.untyped_storage())

    before = {name: state_of(param) for name, param in params.items()}
    with _Writes() as writes:  # A change through ``param.data`` leaves the parameter's version as it is.
        yield
    for name, param in params.items():
        if state_of(param) != before[name] or before[name][1] in writes.storages:
            raise TraceError(
                f"The step changes the parameter {name!r}. Under a pipeline, a step runs once per microbatch, and only"
                " the last stage runs it to its end: change parameters in on_train_batch_start or on_train_batch_end,"
                " where every rank sees the parameters of all stages."
            )


class _Writes(DispatchMode):
    """Record the memory that operations in this mode change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and record the tensors that its schema says it changes."""
        changed = tree_leaves(written_arguments(func, args, kwargs))
        self.storages |= {StorageWeakRef(leaf.untyped_storage()) for leaf in changed if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Ignore the arguments of a call of ``self.log``."""


def _value_of_batch(value_of: Callable[[Metric], Any], metric: Metric, *args: Any, **kwargs: Any) -> Any:
    """Return the value of ``metric`` for a batch with which it was updated."""
    return value_of(metric)


@contextmanager
def without_updates(
    module: LightningModule, on_log: Callable[..., None] = _ignore, value_of: Callable[[Metric], Any] | None = None
) -> Iterator[None]:
    """Keep metrics from updating in this context, because they read values, and fakes have none.

    Args:
        module: The module that has the metrics.
        on_log: Function that is called with ``"metric"`` and the arguments of each update.
        value_of: Function that returns the value of a metric for the batch, for a step on real tensors whose metrics
            have been updated already; None: metrics return made-up values.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    collections = [found for found in module.modules() if isinstance(found, MetricCollection)]
    before = [(changed, dict(vars(changed))) for changed in (*metrics, *collections)]

    def update(metric: Metric, *args: Any, **kwargs: Any) -> None:
        on_log("metric", [args, kwargs], takes=_takes(metric))

    def forward(metric: Metric, *args: Any, **kwargs: Any) -> Tensor:
        # The forward of a RunningMean returns the mean over the microbatches, as in one process.
        on_log("metric", [args, kwargs], takes=None if isinstance(metric, RunningMean) else _takes(metric))
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return sum((tensor.double().mean() for tensor in tensors), torch.zeros(()))

    for metric in metrics:
        if value_of is None:
            own = {"update": partial(update, metric), "forward": partial(forward, metric)}
            vars(metric).update(**own, compute=lambda: torch.zeros(()))
        else:
            vars(metric).update(update=partial(update, metric), forward=partial(_value_of_batch, value_of, metric))
    for collection in collections:
        _compat.update_metrics_apart(collection)
    try:
        yield
    finally:
        for changed, attributes in before:
            vars(changed).clear()
            vars(changed).update(attributes)


def _takes(metric: Metric) -> str | None:
    """Return the way in which ``metric`` combines values that it is updated with and that may concern a whole batch.

    Returns:
        ``"sums"`` if it adds the values up, ``"values"`` if it looks at each of them, and None for metrics of samples.
    """
    if isinstance(metric, SumMetric):
        return "sums"
    return "values" if isinstance(metric, CatMetric | MaxMetric | MinMetric | RunningMean | RunningSum) else None


def _batch(loaders: Any) -> Any:
    """Return the first batch of a loader, or of each loader of a container, in a container of the same form."""
    if isinstance(loaders, Mapping):
        return {key: _batch(loader) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return type(loaders)(_batch(loader) for loader in loaders)
    if not isinstance(loaders, DataLoader):
        return next(_fresh(loaders))
    dataset = loaders.dataset
    if isinstance(dataset, IterableDataset):
        samples = list(islice(_fresh(_copied(dataset)), loaders.batch_size or 1))
    else:
        with _generators_unchanged(loaders):
            indices = next(iter(loaders.batch_sampler)) if loaders.batch_sampler is not None else [0]
            fetch = getattr(dataset, "__getitems__", None)
            samples = fetch(indices) if fetch is not None else [dataset[index] for index in indices]
    return loaders.collate_fn(samples if loaders.batch_size is not None or loaders.batch_sampler else samples[0])


@contextmanager
def _generators_unchanged(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the states of the generators of ``loader``, its samplers and its dataset when the context ends."""
    owners: list[Any] = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    dataset: Any = loader.dataset
    while dataset is not None and len(owners) < _MOST_OWNERS:  # A dataset may be a view of another one.
        owners.append(dataset)
        dataset = getattr(dataset, "dataset", None)
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    generators = {id(value): value for value in values if isinstance(value, (torch.Generator, *GENERATORS))}
    states = [get_state(generator) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in zip(generators.values(), states, strict=True):
            set_state(generator, state)


def _copied(dataset: Any) -> Any:
    """Return a copy of ``dataset``, whose iteration leaves the state of the original as it is."""
    shared = [v for v in vars(dataset).values() if isinstance(v, Tensor | np.ndarray | nn.Module) or callable(v)]
    try:
        return copy.deepcopy(dataset, {id(value): value for value in shared})
    except Exception as error:  # The dataset has an open file or a connection.
        rank_zero_warn(
            f"A batch is taken from the {type(dataset).__name__} before the run, to trace a step of the model. The"
            f" dataset cannot be copied for that ({error}): if its iterators share a position, the run begins behind"
            " this batch. Open files and connections in __iter__."
        )
        return dataset


def _fresh(data: Any) -> Iterator[Any]:
    """Return an iterator over ``data`` that does not consume it.

    Raises:
        TypeError: If ``data`` can be iterated only once.
    """
    iterator = iter(data)
    if iterator is data:
        raise TypeError(f"{type(data).__name__} can be iterated only once")
    return iterator
