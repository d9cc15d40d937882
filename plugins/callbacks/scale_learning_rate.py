"""Scale learning rates with the global batch, so that more devices need no new search for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins._compat import changes_accumulation, logging_step
from lightning_dist.plugins.global_batch import global_batch

__all__ = ["ScaleLearningRate"]

_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}


class ScaleLearningRate(Callback):
    """Multiply the learning rates of all optimizers by the global batch over ``base_batch``, or by its square root.

    The learning rates in the configuration are those for ``base_batch`` samples in an optimizer step. The linear rule
    with a warm-up is that of Goyal et al., 2017 (https://arxiv.org/abs/1706.02677, sections 2.1 and 2.2), for SGD; the
    square root suits optimizers that divide by the size of gradients, such as Adam (Malladi et al., 2022,
    https://arxiv.org/abs/2205.10287). In optimizer step ``t`` of the run, counted from 0, rates are multiplied by
    ``1 + (factor - 1) * min(t / warmup_steps, 1)``. It works with any strategy of this package, and with Lightning's.

    Rates are scaled in the optimizers' updates, and while a ``LearningRateMonitor`` reads them. Learning rate
    schedulers, checkpoints and your own code see the rates of the configuration, so that every scheduler keeps its
    course, and a run that resumes, also with another global batch, scales once.

    Args:
        base_batch: Number of samples in an optimizer step for which the learning rates were chosen.
        rule: ``"linear"`` multiplies rates by the global batch over ``base_batch``, and ``"sqrt"`` by its square root.
        warmup_steps: Number of optimizer steps in which rates go from those for ``base_batch`` to the scaled ones.

    Raises:
        MisconfigurationException: If an argument has none of its accepted values; when training starts, if the global
            batch is not known or changes, or a learning rate is no number that can be scaled; in training, if
            something else changes a learning rate while it is scaled.
    """

    def __init__(self, base_batch: int, rule: Literal["linear", "sqrt"] = "linear", warmup_steps: int = 0) -> None:
        if rule not in _EXPONENTS:
            raise MisconfigurationException(f"ScaleLearningRate(rule={rule!r}): expected 'linear' or 'sqrt'.")
        for name, value, least in (("base_batch", base_batch, 1), ("warmup_steps", warmup_steps, 0)):
            if value < least:
                raise MisconfigurationException(f"ScaleLearningRate({name}={value}): expected {least} or more.")
        self.base_batch = base_batch
        self.rule = rule
        self.warmup_steps = warmup_steps
        self._factor: float | None = None
        self._rates: list[_Rates] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before all callbacks that may read learning rates, and let one behind them put the rates back."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # Lightning is iterating over this list. What is behind this callback keeps its place, or comes later.
        callbacks.remove(self)
        callbacks.insert(0, self)
        if not any(isinstance(callback, _PutBack) and callback.owner is self for callback in callbacks):
            first_checkpoint = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(first_checkpoint, _PutBack(self))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()  # A fit that failed may not have ended.
        _refuse_what_cannot_work(trainer, pl_module)
        self._factor = None
        self._rates = [_Rates(optimizer, partial(self._multiplier, trainer)) for optimizer in trainer.optimizers]

    def _multiplier(self, trainer: Trainer) -> float:
        """Return by what the learning rates are multiplied in the next optimizer step."""
        if self._factor is None:  # A run that resumes may have changed its batches after on_train_start.
            self._factor = self._find_factor(trainer)
        progress = min(logging_step(trainer) / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        return 1 + (self._factor - 1) * progress

    def _find_factor(self, trainer: Trainer) -> float:
        batch = global_batch(trainer)
        if batch is None:
            raise MisconfigurationException(
                f"ScaleLearningRate(base_batch={self.base_batch}): the number of samples in an optimizer step is not"
                " known, because there are several training loaders, or a loader has no batch_size. Use one DataLoader"
                " with a batch_size, or set the learning rate yourself."
            )
        factor = float((batch.total / self.base_batch) ** _EXPONENTS[self.rule])
        warm_up = f", after a warm-up of {self.warmup_steps} steps" if self.warmup_steps else ""
        rank_zero_info(
            f"Learning rates are multiplied by {factor:.4g}{warm_up}: {batch.describe()}, base_batch={self.base_batch},"
            f" rule={self.rule!r}."
        )
        return factor

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._show()

    def _show(self) -> None:
        """Scale the rates for callbacks that read them, until :meth:`put_back`."""
        for rates in self._rates:
            rates.scale()

    def put_back(self) -> None:
        """Give the optimizers their own learning rates back."""
        for rates in self._rates:
            rates.put_back()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        self.put_back()
        for rates in self._rates:
            rates.remove()
        self._rates = []


class _PutBack(Callback):
    """Put learning rates back that :class:`ScaleLearningRate` has scaled for the callbacks between the two.

    Args:
        owner: The callback that scales them.
    """

    def __init__(self, owner: ScaleLearningRate) -> None:
        self.owner = owner

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.owner.put_back()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.owner.put_back()


class _Rates:
    """Scale the learning rates of an optimizer in its steps, and put them back.

    Args:
        optimizer: The optimizer, which gets hooks on its steps.
        multiplier: Function that returns by what rates are multiplied.
    """

    def __init__(self, optimizer: Optimizer, multiplier: Callable[[], float]) -> None:
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._scaled: list[tuple[dict[str, Any], float, float]] = []
        """The optimizer's groups whose rates are scaled now, with the rate before and the scaled one."""
        self._depth = 0
        """Number of steps that run now: the step of a class may call that of its base class."""
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._depth += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._depth > 1:
            return None
        self.scale()
        if closure is None:
            return None

        def closure_without_scale() -> Any:
            self.put_back()
            output = closure()  # It runs the user's code.
            self.scale()
            return output

        return (args[0], *args[2:]), {**kwargs, "closure": closure_without_scale}

    def _after(self, *unused: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.put_back()

    def scale(self) -> None:
        """Multiply the learning rate of each group."""
        self.put_back()
        multiplier = self._multiplier()
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate * multiplier
            self._scaled.append((group, rate, group["lr"]))

    def put_back(self) -> None:
        """Give each group its own learning rate back, if it is scaled.

        Raises:
            MisconfigurationException: If something else has changed a rate meanwhile.
        """
        scaled, self._scaled = self._scaled, []
        for group, rate, expected in scaled:
            now, group["lr"] = group["lr"], rate
            if now != expected:
                raise MisconfigurationException(
                    f"ScaleLearningRate has multiplied the learning rate {rate} of {type(self._optimizer).__name__} for"
                    f" a step, in which something else has changed it from {expected} to {now}. Let schedulers step,"
                    " and your code set rates, before or after the optimizer's step, or leave the callback out."
                )

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()


def _refuse_what_cannot_work(trainer: Trainer, module: LightningModule) -> None:
    """Refuse runs whose learning rates cannot be scaled.

    Raises:
        MisconfigurationException: With what hinders it.
    """
    if changes_accumulation(trainer):
        raise MisconfigurationException(
            "ScaleLearningRate with a GradientAccumulationScheduler, which changes the global batch in the run. Leave"
            " one of the two out."
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if sum(isinstance(callback, ScaleLearningRate) for callback in callbacks) > 1:
        raise MisconfigurationException("ScaleLearningRate is listed twice, and would scale rates twice. Remove one.")
    parallel = parallelized(module)
    if parallel is not None and any(group.steps_in_backward for group in parallel.groups):
        raise MisconfigurationException(
            "ScaleLearningRate with step_in_backward=True, under which optimizers have no hooks. Leave one of the two"
            " out."
        )
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise MisconfigurationException(
                f"ScaleLearningRate with {name}, which is no torch.optim.Optimizer, so that its rates cannot be scaled"
                " in its step. Leave the callback out."
            )
        for group in optimizer.param_groups:
            if not isinstance(group.get("lr"), float | int):
                raise MisconfigurationException(
                    f"ScaleLearningRate with {name}(lr={group.get('lr')!r}): only a learning rate that is a Python"
                    " number can be scaled. Give a number, or leave the callback out."
                )
