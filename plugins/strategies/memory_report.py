"""Compare the predicted memory of a run with the measured one, and say what would help if memory runs out."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist._compat import local_of
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parameters.memory_use import advise, predict, run_size, state_bytes_per_element
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import KEPT_BYTES, MeshPrecision
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.run.telemetry import bytes_in_use, peak_bytes_since, reset_peak
from lightning_dist.techniques.options import Arguments

__all__ = ["MemoryReport", "is_out_of_memory"]

_MIB = 2**20
_NUM_STEPS = 2
"""Number of optimizer steps after which the report is made: the first one creates the states of optimizers."""


class MemoryReport:
    """Measure the first steps of a fit, and explain errors when memory runs out.

    Args:
        trainer: The Trainer of the fit.
        module: The parallel module.
        optimizers: The optimizers of the fit.
        arguments: The options of all techniques.
        layout: The sizes of the mesh's axes.
        device: The device of this rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: ParallelModule,
        optimizers: Sequence[Optimizer],
        arguments: Arguments,
        layout: ParallelLayout,
        device: torch.device,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._optimizers = optimizers
        self._layout = layout
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        traits = [options.memory_traits(device) for options in arguments.options]
        self._size = replace(
            run_size(module.module, module.groups, optimizers),
            accumulates=trainer.accumulate_grad_batches > 1 and not arguments.reduces_every_batch,
            **{name: value for own in traits for name, value in own.items()},
        )
        plugin = trainer.precision_plugin
        if isinstance(plugin, MeshPrecision) and plugin.master_weights is not None and optimizers:
            moments = state_bytes_per_element(optimizers[0], optimizers[0].param_groups[0], torch.float32)
            self._size = replace(self._size, state_bytes=moments + KEPT_BYTES[plugin.master_weights])
        self._runs_whole_steps = layout.pp == 1 and module.module.automatic_optimization
        self._other: int | None = None
        """Bytes in use when the first step begins, without parameters and buffers; None: not measured."""
        self._before_step = 0
        self._gradients = 0
        self._num_steps = 0

    @classmethod
    def of(cls, host: Host) -> MemoryReport:
        """Return the report of a fit that begins.

        Args:
            host: The strategy, which is set up.
        """
        return cls(host.trainer, host.parallel, host.optimizers, host.config.arguments, host.layout, host.root_device)

    def measured(self, step: Callable[[], Any]) -> Any:
        """Run ``step``, a training step, measure its memory, and return its output."""
        if self._num_steps or self._size.activations is not None:
            with self.explained():
                return step()
        before = bytes_in_use(self._device)
        if before is None:
            with self.explained():
                return step()
        if self._other is None:
            reset_peak(self._device)
            use = predict(self._size)
            self._other = before - use.parameters - use.buffers
        self._before_step = before
        with self.explained():
            output = step()
        if self._runs_whole_steps:
            self._size = replace(self._size, activations=self._activations(bytes_in_use(self._device) or 0))
        return output

    def _activations(self, in_use: int) -> int:
        """Return what a forward keeps besides gathered parameters."""
        size = self._size
        gathered = size.outer + (size.block if size.frees_blocks else size.blocks)
        return max(in_use - self._before_step - gathered, 0)

    def before_optimizer_step(self) -> None:
        """Measure the gradients."""
        if self._num_steps < _NUM_STEPS:
            gradients = (param.grad for param in self._params())
            self._gradients = sum(local_of(grad).nbytes for grad in gradients if grad is not None)

    def after_optimizer_step(self) -> None:
        """Make the report after the second step. This is a collective over all processes then."""
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS:
            self._report()

    def _params(self) -> list[nn.Parameter]:
        return [param for param in self._module.module.parameters() if not is_remote(param)]

    def _report(self) -> None:
        use, size = predict(self._size), self._size
        other = self._other
        states = [value for optimizer in self._optimizers for state in optimizer.state.values() for value in _of(state)]
        rows = {
            "parameters": (use.parameters, 0 if size.offloads_params else _bytes(self._params())),
            "gradients": (use.gradients, 0 if size.offloads_gradients else self._gradients),
            "optimizer": (use.optimizer, 0 if size.offloads_states else _bytes(states)),
            "buffers": (use.buffers, use.buffers),
            "gathered": (use.gathered, -1),
            "activations": (-1, -1 if use.activations is None else use.activations),
            "peak": (
                -1 if use.activations is None else use.peak,
                -1 if other is None else peak_bytes_since(self._device) - other,
            ),
        }
        mine = torch.tensor([number for row in rows.values() for number in row], device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found = {name: (int(a), int(b)) for name, (a, b) in zip(rows, mine.view(-1, 2).tolist(), strict=True)}
        rank_zero_info(_table(found))
        metrics: dict[str, float] = {}
        for name, (predicted, measured) in found.items():
            metrics |= {f"memory/{name}_predicted_mib": predicted / _MIB} if predicted >= 0 else {}
            metrics |= {f"memory/{name}_mib": measured / _MIB} if measured >= 0 and name != "peak" else {}
            metrics |= {"memory/peak_of_model_mib": measured / _MIB} if measured >= 0 and name == "peak" else {}
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=_compat.logging_step(self._trainer))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add settings that would help to an error in this context that says that memory has run out."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and not hasattr(error, "has_advice"):
                error.has_advice = True  # type: ignore[attr-defined]
                error.args = (f"{error}\n{self.advice()}",)
            raise

    def advice(self) -> str:
        """Return settings that would lower the peak, with their predicted savings, the most effective first."""
        size = self._size
        if size.activations is None and self._runs_whole_steps:
            size = replace(size, activations=self._activations(bytes_in_use(self._device) or 0))
        use = predict(size)
        parts = [
            f"{name} {_mib(number)}"
            for name, number in (
                ("parameters", use.parameters),
                ("gradients", use.gradients),
                ("optimizer states", use.optimizer),
                ("gathered parameters", use.gathered),
                ("activations so far", use.activations or 0),
            )
        ]
        savings = advise(size, self._layout.dp_replicate, self._is_on_cpu)
        lines = [f"  - {saving.setting}: about {_mib(saving.num_bytes)} less" for saving in savings]
        return "\n".join(
            [
                f"Out of memory. This rank's peak is predicted to be {_mib(use.peak)}: {', '.join(parts)}.",
                "These settings would lower it, the most effective first:" if lines else "No setting would lower it.",
                *lines,
            ]
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    texts = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _of(state: Any) -> list[Tensor]:
    values = state.values() if isinstance(state, dict) else ()
    return [value for value in values if isinstance(value, Tensor) and not is_remote(value)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local_of(tensor).nbytes for tensor in tensors)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"


_LABELS = {"optimizer": "optimizer states", "gathered": "gathered parameters, communication"}


def _table(rows: dict[str, tuple[int, int]]) -> str:
    lines = ["memory of a rank in the first two steps (MiB)       predicted   measured"]
    for name, (predicted, measured) in rows.items():
        numbers = "".join(
            f"{number / _MIB:>11,.1f}" if number >= 0 else f"{'-':>11}" for number in (predicted, measured)
        )
        lines.append(f"  {_LABELS.get(name, name):<48}{numbers}")
    return "\n".join(lines)
