"""Compress the gradients that replicas send each other."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist._compat import backend_of, local_of, new_group_of
from lightning_dist.parameters.gradient_reducer import GradientReducer, LocalGradient, Reduction
from lightning_dist.techniques.compression.background import InBackground
from lightning_dist.techniques.compression.compressor import (
    Compressor,
    CompressorState,
    Gradient,
    refuse_if_unused,
    wide_dtype,
)
from lightning_dist.techniques.compression.non_finite import NonFiniteGradients
from lightning_dist.techniques.compression.saved_states import SavedStates
from lightning_dist.techniques.compression.wire import Wire
from lightning_dist.techniques.protocol import Parallel, ParameterRules, RemoteParts, Rows, SavedState, bound

__all__ = ["Compression"]


class Compression(ParameterRules, SavedState):
    """Average gradients over replicas by a compressor in place of an all-reduce.

    The techniques that manage parameters call this one where they would all-reduce gradients over ``dp_replicate``:
    after FSDP2 has reduced them inside a replica, or for each bucket of whole gradients. Parameters that the compressor
    does not take are reduced exactly, or by its fallback.

    If a gradient is not finite, no rank changes its weights in that step, and the compressor forgets its state, which
    the gradient may have made non-finite as well. On an accelerator with fused optimizers it forgets it two steps
    later, so that up to two further steps are skipped.

    Args:
        compressor: The compressor that averages gradients between replicas.
        scales_losses: Whether losses are scaled, so that the scaler skips steps with non-finite gradients by itself.
        mesh: A mesh with the axes ``(dp_replicate, dp_shard)``.
        parameter_mesh: The same mesh, and ``tp`` as its last axis if layers are split.
    """

    def __init__(
        self, compressor: Compressor, scales_losses: bool, mesh: DeviceMesh, parameter_mesh: DeviceMesh
    ) -> None:
        self.compressor = compressor
        self.num_skipped_steps = 0
        """Number of optimizer steps that were skipped because a gradient was not finite."""
        self._mesh = mesh
        self._parameter_mesh = parameter_mesh
        self._scales_losses = scales_losses
        self._shared: set[str] = set()
        self._fallback = compressor.fallback_compressor()
        self.states: dict[str, CompressorState] = {}
        """The compressor's tensors about each parameter, by the parameter's full name."""
        self.num_reductions: Counter[str] = Counter()
        self._background = InBackground(torch.device(mesh.device_type))
        self._defers = False
        self._deferred: list[Reduction] = []
        self._of_failed_step: list[Reduction] = []
        self._figures = _Figures()

    def attach(self, parallel: Parallel) -> None:
        """Check that the compressor fits the model, and create its process group. This is a collective."""
        self._parallel = parallel
        self.compressor.check({name: param.shape for name, param in parallel.module.named_parameters()})
        # A thread communicates over this group while the main thread uses the others.
        ranks = dist.get_process_group_ranks(self._mesh.get_group("dp_replicate"))
        backend = backend_of(self._mesh.get_group("dp_replicate"))
        self.wire = Wire(new_group_of(ranks, backend, "compression"))
        self._non_finite = NonFiniteGradients(torch.device(self._mesh.device_type), self._scales_losses)

    def gradient_reducer(self) -> GradientReducer:
        """Return this object, which reduces gradients between replicas."""
        return self

    def finish(self) -> None:
        """Check that this object reduces the gradients of all parameters that the compressor takes.

        This is a collective over all ranks.

        Raises:
            RuntimeError: If a parameter group reduces such gradients in another way.
            ValueError: If no rank has a part of a parameter that is large enough to be compressed.
        """
        for group in self._parallel.groups:
            shapes = {name: param.shape for name, param in zip(group.names, group.params, strict=True)}
            missed = [name for name, shape in shapes.items() if self.compressor.compresses(name, shape)]
            if missed and group.reducer is not self:
                raise RuntimeError(
                    f"compression={self.compressor} was requested, and the gradient of {missed[0]} would not be"
                    f" compressed: {type(group).__name__} does not call its hook."
                )

        # Stages sum the gradients of a parameter that they share after the reduction, and each would have a residual.
        parts = [{name: None for group in self._parallel.groups for name in group.names}]
        for collect in bound(self._parallel.techniques, RemoteParts.collect_parts):
            parts = collect(parts)
        counts = Counter(name for part in parts for name in part)
        self._shared = {name for name, count in counts.items() if count > 1}

        params = (zip(group.names, group.params, strict=True) for group in self._parallel.groups)
        local_shapes = {name: local_of(param).shape for pairs in params for name, param in pairs}
        refuse_if_unused(self.compressor, {name: s for name, s in local_shapes.items() if name not in self._shared})

    # Reduction

    def reduce(self, flat: Tensor, gradients: Sequence[LocalGradient]) -> Reduction:
        """Begin to average ``gradients`` over the replicas. This is a collective over the replicas."""
        return self._background.run(partial(self._average, flat, gradients))

    def reduce_later(self, flat: Tensor, gradients: Sequence[LocalGradient]) -> None:
        """Begin the same reduction, for which :meth:`after_backward` waits."""
        reduction = self.reduce(flat, gradients)
        if self._defers:
            self._deferred.append(reduction)
        else:
            reduction.wait()

    def discard(self, gradients: Sequence[LocalGradient]) -> None:
        """Add means that are not used to the residuals, so that a later reduction includes them."""
        if self.compressor.error_feedback and gradients:
            self._background.run(partial(self._add_to_residuals, gradients)).wait()

    def forget(self, names: Sequence[str]) -> None:
        """Drop the residuals of some parameters."""
        self._background.run(partial(self._drop_residuals, names)).wait()

    def _drop_residuals(self, names: Sequence[str]) -> None:
        for name in names:
            self.states.get(name, {}).pop("residual", None)

    def _add_to_residuals(self, gradients: Sequence[LocalGradient]) -> None:
        for name, value in gradients:
            residual = self.states.get(name, {}).get("residual")
            if residual is not None:
                residual.add_(value)

    def _average(self, flat: Tensor, gradients: Sequence[LocalGradient]) -> None:
        start, seconds_before = time.perf_counter(), self.wire.seconds
        compressed, exact = list[Gradient](), list[Tensor]()
        by_fallback = list[Gradient]()
        for name, value in gradients:
            num_reductions = self.num_reductions[name]
            self.num_reductions[name] += 1
            gradient = Gradient(name, value, self.states.setdefault(name, {}), num_reductions)
            if not value.numel():  # This rank's shard of a small parameter may be empty.
                continue
            if value.is_complex():  # Compressors compute in float32 or float64.
                exact.append(value)
            elif self._is_compressed(gradient):
                compressed.append(gradient)
            elif self._fallback is not None:
                by_fallback.append(gradient)
            else:
                exact.append(value)
        if exact:
            self._average_exactly(exact, flat)
        if by_fallback:
            assert self._fallback is not None
            self._fallback.average(by_fallback, self.wire)
        if compressed:
            self.compressor.average(compressed, self.wire)
        for gradient in compressed:
            self._figures.add_norms(gradient)
        # A sum is not finite if an element is not. Other reductions, such as the largest magnitude, take much longer.
        total = flat.sum() if flat.is_complex() else flat.sum(dtype=wide_dtype(flat))
        self._non_finite.add(total)
        self._figures.num_bytes_exact += 2 * (self.wire.size - 1) * flat.numel() * flat.itemsize // self.wire.size
        self._figures.seconds += time.perf_counter() - start - (self.wire.seconds - seconds_before)

    def _is_compressed(self, gradient: Gradient) -> bool:
        """Return whether the compressor, and not the fallback, averages ``gradient``."""
        if gradient.num_reductions < self.compressor.start_step or gradient.name in self._shared:
            return False
        return self.compressor.compresses(gradient.name, gradient.value.shape)

    def _average_exactly(self, values: Sequence[Tensor], flat: Tensor) -> None:
        if sum(value.numel() for value in values) < flat.numel():
            self.wire.average(values)
            return
        self.wire.sum(flat)
        flat.div_(self.wire.size)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Let reductions run beside the backward in this context."""
        if self._of_failed_step:
            for reduction in self._of_failed_step:
                with suppress(Exception):
                    reduction.wait()
            self._of_failed_step = []
            self._non_finite.clear()
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def after_backward(self, reduces: bool) -> None:
        """Wait for the reductions that run beside the backward."""
        deferred, self._deferred = self._deferred, []
        for reduction in deferred:
            reduction.wait()

    def after_microbatches(self, reduces: bool) -> None:
        """Wait for the reductions that have not ended."""
        self.after_backward(reduces)

    def after_error(self) -> None:
        """Do not wait for the reductions of a failed step, in which other ranks may never take part.

        If all ranks have failed at the same place and go on, the next backward waits for them.
        """
        self._of_failed_step += self._deferred
        self._deferred = []
        self._non_finite.clear()

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let a fused ``optimizer`` skip steps on the device."""
        return self._non_finite.prepare_optimizer(optimizer)

    def before_optimizer_step(self) -> None:
        """Skip the optimizer step on all ranks if a gradient is not finite on any. This is a collective.

        The compressor forgets its state then.
        """
        self.after_backward(True)
        if not self._non_finite.found():
            return
        self.states.clear()
        if self._scales_losses:
            return
        self.num_skipped_steps += 1
        if not self._non_finite.is_skipped_on_device:
            for group in self._parallel.groups:
                for param in group.params:
                    param.grad = None
        _warn(
            "A gradient is not finite: no rank changes its weights in this optimizer step, and the state of"
            f" compression={self.compressor} begins anew."
        )

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the compressor's state by its name and the names of parameters. This is a collective."""
        collects = bound(self._parallel.techniques, RemoteParts.collect_parts)
        return {str(self.compressor): self._saved_states().save(self.states, self.num_reductions, collects)}

    def _saved_states(self) -> SavedStates:
        pairs = (zip(group.names, group.params, strict=True) for group in self._parallel.groups)
        params = {name: param for group in pairs for name, param in group}
        return SavedStates(self.compressor, params, self._parameter_mesh)

    def state_template(self, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor for what this rank needs of a saved tensor of the same compressor."""
        kind, name, key = path
        return self._saved_states().template(name, key, shape, dtype) if kind == str(self.compressor) else None

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the compressor's state, if a compressor of the same name saved the checkpoint."""
        if str(self.compressor) not in state:
            _warn(
                f"The checkpoint was saved with compression={next(iter(state))}, and this run has"
                f" compression={self.compressor}: the residuals in the checkpoint are dropped."
            )
            return
        self.states, num_reductions = self._saved_states().load(state[str(self.compressor)])
        self.num_reductions = Counter(num_reductions)

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank has sent and computed for the compression, and the size of its residuals."""
        figures, self._figures = self._figures, _Figures()
        num_bytes, self.wire.num_bytes = self.wire.num_bytes, 0
        values = {
            "comm/dp_replicate_mib_per_step": num_bytes / num_steps / 2**20,
            "compression/ratio": figures.num_bytes_exact / max(num_bytes, 1),
            "grad/skipped_steps": float(self.num_skipped_steps),
        }
        if self._mesh.device_type == "cpu":  # On an accelerator, the host only begins the operations.
            values["compression/ms_per_step"] = 1000 * figures.seconds / num_steps
        if self.compressor.error_feedback:
            values["compression/residual_over_gradient"] = figures.residual_over_gradient
        return values

    def table_rows(self) -> Rows:
        """Return a row with the compressor and its arguments."""
        described = ", ".join(f"{key}={value}" for key, value in self.compressor.describe().items())
        if self._shared:
            described += f"; {len(self._shared)} parameters that several stages share are not compressed"
        yield "compression", f"{self.compressor} between {self._mesh['dp_replicate'].size()} replicas ({described})"


@dataclass
class _Figures:
    """Hold figures of the steps since the last log."""

    num_bytes_exact: int = 0
    seconds: float = 0.0
    squares: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add_norms(self, gradient: Gradient) -> None:
        """Measure the norms of a mean gradient and of this rank's residual, in the first step after a log."""
        residual = gradient.state.get("residual")
        if residual is not None and gradient.name not in self.squares:
            self.squares[gradient.name] = residual.square().sum(), gradient.value.square().sum()

    @property
    def residual_over_gradient(self) -> float:
        """Return the norm of this rank's residuals over that of the mean gradients; 0 if none were measured."""
        if not self.squares:
            return 0.0
        residuals, gradients = (float(sum(values)) for values in zip(*self.squares.values(), strict=True))
        return math.sqrt(residuals / gradients) if gradients else 0.0


def _warn(text: str) -> None:
    """Warn on the first rank."""
    if dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
