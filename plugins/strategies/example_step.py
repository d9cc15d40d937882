"""A step of a module on a batch of its own data, to be run on fake tensors before the module is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric, MetricCollection

from lightning_dist.pipeline import TraceError
from lightning_dist.plugins import _compat

__all__ = ["FakeStep", "example_args", "example_step", "fake_step", "parameters_unchanged", "without_updates"]

FakeStep = Callable[..., Any]
"""Runs a step on what its first argument makes of each tensor; what is logged goes to its second, if it is given."""


def example_step(module: LightningModule, trainer: Trainer, is_in_run: bool = False) -> tuple[FakeStep | None, str]:
    """Return the step that ``trainer`` is about to run, with a batch as its loader gives; or None, and why not.

    Args:
        module: The user's module.
        trainer: Its Trainer.
        is_in_run: As of :func:`fake_step`.
    """
    args, why_not = example_args(trainer)
    if why_not:
        return None, why_not
    return fake_step(module, trainer, _compat.step_name(trainer), args, {}, is_in_run=is_in_run), ""


def example_args(trainer: Trainer) -> tuple[tuple[Any, ...], str]:
    """Return the arguments of the first step of the run that begins; or why no batch could be made.

    The loader is made for this alone. No worker is started, and random numbers are as before. The batch is rank 0's on
    all ranks, and has gone through the hooks that Lightning gives each batch to.

    Args:
        trainer: The Trainer whose run begins.

    Returns:
        The batch, the batch's index and, where the step is given it, the loader's index; empty if there is none. Then
        the reason, empty if there is a batch.
    """
    args: tuple[Any, ...] = ()
    why_not = ""
    try:
        with isolate_rng():
            args = apply_to_collection(_first_args(trainer), Tensor, Tensor.cpu)
    except Exception as error:  # whatever the user's data raise, they will raise again where it is expected
        text = str(error).strip().split("\n")[0]
        why_not = f"no batch could be made: {type(error).__name__}: {text}"
    # All ranks must come to the same plan.
    args, why_not = trainer.strategy.broadcast((args, why_not))
    if why_not:
        return (), why_not
    batch, *indices = apply_to_collection(args, Tensor, Tensor.clone)  # a hook may change what belongs to the dataset
    with isolate_rng():
        return (_compat.transferred(trainer, batch, *indices[1:]), *indices), ""


def _first_args(trainer: Trainer) -> tuple[Any, ...]:
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
) -> FakeStep:
    """Return the step ``name`` of ``module``, to be run on fakes of the tensors in ``args`` and ``kwargs``.

    Args:
        module: The user's module.
        trainer: Its Trainer.
        name: The name of the step.
        args: Positional arguments of the step, the batch first.
        kwargs: Keyword arguments of the step.
        around: Makes a context to run the step in.
        is_in_run: Whether the hooks of the module that come before the step run first: they may set what it reads.
    """

    def step(fake: Callable[[Tensor], Tensor], on_log: Callable[..., None] | None = None) -> Any:
        given_args, given_kwargs = apply_to_collection((args, kwargs), Tensor, fake)
        with ExitStack() as inside:
            inside.enter_context(isolate_rng())
            inside.enter_context(_compat.logging_to(module, on_log or _ignore))
            inside.enter_context(without_updates(module, on_log or _ignore))
            inside.enter_context(trainer.precision_plugin.forward_context())
            inside.enter_context(around())
            if is_in_run:
                inside.enter_context(_as_in_a_run(module, name, given_args))
            result = getattr(module, name)(*given_args, **given_kwargs)
            if on_log is not None and name == "training_step":
                _compat.check_output_of_training_step(result)
            return result

    return step


@contextmanager
def _as_in_a_run(module: LightningModule, name: str, args: tuple[Any, ...]) -> Iterator[None]:
    """Let the module's own hooks that come before the step ``name`` run, and let it have optimizers.

    Args:
        module: The module, on fakes.
        name: The name of the step.
        args: Of the step.
    """
    kind = name.removesuffix("_step").replace("training", "train")
    before = ["on_fit_start"] if kind == "train" else []
    hooks: list[tuple[str, tuple[Any, ...]]] = [(hook, ()) for hook in (*before, f"on_{kind}_start")]
    hooks += [(f"on_{kind}_epoch_start", ()), (f"on_{kind}_batch_start", args)]
    own = vars(module).get("optimizers")
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
    """Refuse a step of a pipeline, run on fakes inside, that changes parameters.

    Embeddings with ``max_norm`` do so as well, within the part that they are.

    Raises:
        TraceError: If one was changed.
    """
    renormed = {id(p) for part in module.modules() if getattr(part, "max_norm", None) for p in part.parameters()}
    params = {name: param for name, param in module.named_parameters() if id(param) not in renormed}

    def state_of(param: Any) -> tuple[int, int]:
        # A parameter that is gathered where it is used stands for its shards; to ask it itself would gather it.
        with torch._C.DisableTorchFunctionSubclass():
            held = getattr(param, "_sharded", param)
            return held._version, held.untyped_storage()._cdata

    before = {name: state_of(param) for name, param in params.items()}
    yield
    for name, param in params.items():
        if state_of(param) != before[name]:
            raise TraceError(
                f"The step changes the parameter {name!r}. Under a pipeline a step runs once a microbatch, and not on"
                " every rank to its end: change parameters in on_train_batch_start or on_train_batch_end, where every"
                " rank sees the parameters of all stages."
            )


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Nothing is made of what is logged."""


@contextmanager
def without_updates(module: LightningModule, on_log: Callable[..., None] = _ignore) -> Iterator[None]:
    """Let metrics, inside, only say what they are given: they look at values, of which fakes have none.

    Args:
        module: The module whose metrics these are.
        on_log: Is told what a metric is given.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    collections = [found for found in module.modules() if isinstance(found, MetricCollection)]
    before = [(changed, dict(vars(changed))) for changed in (*metrics, *collections)]

    def update(*args: Any, **kwargs: Any) -> None:
        on_log("metric", [args, kwargs])

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        update(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return sum((tensor.double().mean() for tensor in tensors), torch.zeros(()))

    for metric in metrics:
        vars(metric).update(update=update, forward=forward, compute=lambda: torch.zeros(()))
    for collection in collections:
        _compat.update_metrics_apart(collection)
    try:
        yield
    finally:
        for changed, attributes in before:
            vars(changed).clear()
            vars(changed).update(attributes)


def _batch(loaders: Any) -> Any:
    """The first batch of a loader, or one of each of several in the form in which they are given."""
    if isinstance(loaders, Mapping):
        return {key: _batch(loader) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return type(loaders)(_batch(loader) for loader in loaders)
    if not isinstance(loaders, DataLoader):
        return next(_fresh(loaders))
    dataset = loaders.dataset
    if isinstance(dataset, IterableDataset):
        samples = list(islice(_fresh(dataset), loaders.batch_size or 1))
    else:
        with _generators_unchanged(loaders):
            indices = next(iter(loaders.batch_sampler)) if loaders.batch_sampler is not None else [0]
        fetch = getattr(dataset, "__getitems__", None)
        samples = fetch(indices) if fetch is not None else [dataset[index] for index in indices]
    return loaders.collate_fn(samples if loaders.batch_size is not None or loaders.batch_sampler else samples[0])


@contextmanager
def _generators_unchanged(loader: DataLoader[Any]) -> Iterator[None]:
    """Put back, afterwards, the states of the generators of ``loader`` and of its samplers."""
    samplers = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = (getattr(sampler, "generator", None) for sampler in samplers)
    generators = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    states = [generator.get_state() for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in zip(generators.values(), states, strict=True):
            generator.set_state(state)


def _fresh(data: Any) -> Iterator[Any]:
    """An iterator that takes nothing away from the next one."""
    iterator = iter(data)
    if iterator is data:
        raise TypeError(f"{type(data).__name__} can be iterated only once")
    return iterator
