"""Repeat a recorded run in one process, by Lightning's own strategy for a single device.

What several data-parallel ranks compute in a step, one process computes by accumulating their batches: the gradient is
the mean of the gradients of the ranks' losses, as with DDP. Buffers are those of the first rank after each batch. One
process can compute the microbatches of a pipeline in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dist.plugins.parity_check.randomness import (
    have_advanced,
    random_states,
    set_random_states,
    switch_off_dropout,
)
from lightning_dist.plugins.parity_check.recording import RecordedBatch, Recording, loosen_plateaus, number_of
from lightning_dist.plugins.strategies.steps.microbatching import BatchSplitter
from lightning_dist.run.parity import whole_gradients, whole_parameters

__all__ = ["Reference", "batch_norms", "join_batches", "one_process", "repeat"]


@dataclass
class Reference:
    """Hold what one process has computed.

    Args:
        losses: Loss of each call of ``training_step``; None for a call that returned none.
        weights_of_losses: Weight of each loss; 1 for a step that returned none.
        gradients: Gradients of the first optimizer step, before clipping, by parameter name.
        weights: Parameters after the last step, by name.
        dtypes: Dtypes, other than that of the parameters, in which steps have computed.
        learning_rates: Learning rates of the parameter groups of all optimizers in the first step.
        has_drawn: Whether a step has drawn random numbers.
    """

    losses: list[float | None] = field(default_factory=list)
    weights_of_losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    learning_rates: list[float] = field(default_factory=list)
    has_drawn: bool = False


def repeat(
    module: LightningModule,
    recording: Recording,
    num_steps: int,
    num_parts: int,
    device: torch.device,
    datamodule: LightningDataModule | None,
    without_dropout: bool,
    callbacks: Sequence[Callback],
    **arguments: Any,
) -> Reference:
    """Repeat the steps of a recorded run in this process.

    Args:
        module: New instance of the module that was run, which gets the recorded initial weights.
        recording: The run under the strategy.
        num_steps: Number of optimizer steps; with manual optimization, of batches.
        num_parts: Number of microbatches into which each batch is split.
        device: Device to compute on.
        datamodule: The run's datamodule, which steps may read attributes of; it is not asked for data.
        without_dropout: Whether dropout was switched off in the run.
        callbacks: Callbacks that take part in the training.
        arguments: Arguments of the Trainer, without those that distribute a run.
    """
    calls = _calls(module, recording, num_parts)
    repeater = _Repeater(calls, recording, num_steps, datamodule)
    per_batch = num_parts * len(recording.batches)
    if recording.is_automatic:
        arguments["accumulate_grad_batches"] = per_batch * arguments.get("accumulate_grad_batches", 1)
    strategy = _OneProcess(device, without_dropout)
    trainer = Trainer(
        **{**arguments, "callbacks": [repeater, *callbacks], "strategy": strategy, "devices": 1, "num_nodes": 1}
    )
    repeater.wrap_step(module)
    trainer.fit(module, train_dataloaders=_Batches([call.batch for call in calls], recording.num_batches * per_batch))
    return repeater.reference


@dataclass
class _Call:
    """Describe a call of ``training_step`` in one process.

    Args:
        batch: The batch, or a microbatch of it.
        recorded: The batch as a rank was given it.
        begins: Whether it is the first call for this batch.
        ends: Whether it is the last call for this batch.
        is_of_first_rank: Whether the batch is that of the first data-parallel rank.
        is_of_last_rank: Whether the batch is that of the last data-parallel rank.
    """

    batch: Any
    recorded: RecordedBatch
    begins: bool
    ends: bool
    is_of_first_rank: bool
    is_of_last_rank: bool


def _calls(module: LightningModule, recording: Recording, num_parts: int) -> list[_Call]:
    splitter, calls = BatchSplitter(module), []
    for of_ranks in zip(*recording.batches, strict=True):
        for rank, recorded in enumerate(of_ranks):
            is_split = num_parts > 1
            parts = splitter.split(recorded.batch, num_parts) if is_split else [recorded.batch]
            if len(parts) != num_parts:
                raise ValueError(f"A batch of data-parallel rank {rank} cannot be split into {num_parts} parts.")
            for index, part in enumerate(parts):
                call = _Call(part, recorded, index == 0, index == len(parts) - 1, rank == 0, rank == len(of_ranks) - 1)
                calls.append(call)
    return calls


def batch_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every BatchNorm that normalises the samples of one call by themselves."""
    for name, part in module.named_modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and part.training:
            yield name, part


def join_batches(recording: Recording) -> Recording:
    """Return the recording with the batches of all data-parallel ranks joined into one batch for each step.

    Raises:
        ValueError: If the batches cannot be joined.
    """
    joined = [
        replace(of_ranks[0], batch=_join([recorded.batch for recorded in of_ranks]))
        for of_ranks in zip(*recording.batches, strict=True)
    ]
    return replace(recording, batches=[joined])


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.ndim:
        if any(part.shape != first.shape for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"The batches of the ranks have tensors of different shapes ({shapes}) and cannot be joined."
            )
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(_join, zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(map(_join, zip(*parts, strict=True)))
    if isinstance(first, bool | int | float | str | None) and all(part == first for part in parts):
        return first
    raise ValueError(
        f"The batches of the ranks cannot be joined into one for one process: they have a {type(first).__name__} that"
        " is no tensor with samples along dimension 0. Check it with a single data-parallel rank."
    )


@contextmanager
def one_process() -> Iterator[None]:
    """Hide in this context the environment variables by which a launcher describes several processes."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI")) or name in _OF_LAUNCHERS:
            del os.environ[name]
    os.environ.update({name: value for name, value in _OF_LAUNCHERS.items() if value is not None})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_OF_LAUNCHERS = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0", "GROUP_RANK": "0",
    "MASTER_ADDR": None, "MASTER_PORT": None,
}  # fmt: skip
"""Environment variables of launchers, with their values for one process; None: they are not set."""


class _OneProcess(SingleDeviceStrategy):
    """Run the module on a single device; dropout can be switched off."""

    def __init__(self, device: torch.device, without_dropout: bool) -> None:
        super().__init__(device)
        self._without_dropout = without_dropout

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        if self._without_dropout:
            switch_off_dropout(self.lightning_module)
        super().setup(trainer)


class _Batches:
    """Yield recorded batches, with the length of an epoch that the run had, from which schedules are computed."""

    def __init__(self, batches: Sequence[Any], length: float) -> None:
        self._batches = batches
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        if self._length == float("inf"):
            raise TypeError("The length is not known.")
        return int(self._length)


class _DtypeWatch(TorchFunctionMode):
    """Collect the floating-point dtypes of results through which gradients flow."""

    def __init__(self, found: set[torch.dtype]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            self._found.add(result.dtype)
        return result


class _Repeater(Callback):
    """Give steps the recorded weights, random states and batches, and record what they compute.

    Args:
        calls: Calls of ``training_step`` in their order.
        recording: The run under the strategy.
        num_steps: Number of optimizer steps; with manual optimization, of batches.
        datamodule: The run's datamodule; None: the run has loaders only.
    """

    def __init__(
        self,
        calls: Sequence[_Call],
        recording: Recording,
        num_steps: int,
        datamodule: LightningDataModule | None,
    ) -> None:
        self._calls = calls
        self._recording = recording
        self._num_steps = num_steps
        self._datamodule = datamodule
        self._num_calls = 0
        self._buffers_before: dict[str, Tensor] = {}
        self._buffers_after: dict[str, Tensor] = {}
        self._num_in_step = 0
        self.reference = Reference()

    def wrap_step(self, module: LightningModule) -> None:
        """Let ``module`` run its steps as the ranks did, and take recorded batches as they are."""
        step = module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            index_of_rank = self._calls[self._num_calls].recorded.batch_idx
            args = tuple(index_of_rank if index == 1 and type(arg) is int else arg for index, arg in enumerate(args))
            before = random_states(module)
            with _DtypeWatch(self.reference.dtypes):
                output = step(*args, **kwargs)
            self.reference.has_drawn |= have_advanced(before, random_states(module))
            self._num_calls += 1
            return self._weighted(output)

        module.training_step = training_step  # type: ignore[method-assign]
        # The batches were recorded after these hooks.
        module.on_before_batch_transfer = lambda batch, dataloader_idx: batch  # type: ignore[method-assign]
        module.on_after_batch_transfer = lambda batch, dataloader_idx: batch  # type: ignore[method-assign]

    def _weighted(self, output: Any) -> Any:
        """Record the loss, and return ``output`` with the loss times its weight, if it has one."""
        weight = number_of(output, "weight") if isinstance(output, Mapping) else None
        self.reference.losses.append(number_of(output, "loss"))
        self.reference.weights_of_losses.append(1.0 if weight is None else weight)
        if weight is None:
            return output
        loss = torch.where(torch.tensor(weight > 0, device=output["loss"].device), output["loss"], 0.0) * weight
        return {**output, "loss": loss}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # It is set here, since the Trainer has asked its datamodule to set itself up before.
        trainer.datamodule = self._datamodule  # type: ignore[attr-defined]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.datamodule = None  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loosen_plateaus(trainer)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                self.reference.learning_rates.append(float(group.get("lr", 1.0)))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._num_calls:
            _fill(pl_module, self._recording.initial, self._recording.buffers)
        call = self._calls[self._num_calls]
        if not call.begins:
            return
        # The batches of all ranks begin with the same buffers, of which those of the first rank are kept.
        if call.is_of_first_rank:
            self._buffers_before = _copy_of_buffers(pl_module)
        else:
            _fill(pl_module, {}, self._buffers_before)
        set_random_states(pl_module, call.recorded.random_states)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        weights = self.reference.weights_of_losses[self._num_in_step :]
        self._num_in_step = self._num_calls
        if any(weight != 1 for weight in weights):
            factor = len(weights) / sum(weights) if sum(weights) else 0.0
            for param in pl_module.parameters():
                if param.grad is not None:
                    param.grad.mul_(factor)
        if self._recording.is_automatic and self.reference.gradients:
            return
        for name, gradient in whole_gradients(pl_module).items():
            self.reference.gradients.setdefault(name, gradient)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        call = self._calls[self._num_calls - 1]
        if call.ends and call.is_of_first_rank:
            self._buffers_after = _copy_of_buffers(pl_module)
        elif call.ends and call.is_of_last_rank:
            _fill(pl_module, {}, self._buffers_after)
        is_automatic = self._recording.is_automatic
        if (trainer.global_step if is_automatic else self._num_calls) >= self._num_steps:
            self.reference.weights = whole_parameters(pl_module)
            trainer.should_stop = True


def _copy_of_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _fill(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Write values into the parameters and buffers of ``module`` by name."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name in params:
                param.copy_(params[name])
        for name, buffer in list(module.named_buffers()):
            value = buffers.get(name)
            if value is None:
                continue
            if value.shape == buffer.shape:
                buffer.copy_(value)
            else:
                path, _, key = name.rpartition(".")
                setattr(module.get_submodule(path), key, value.to(buffer.device).clone())
