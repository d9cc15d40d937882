"""Offload parameters and the states of optimizers to the memory of the CPU or to a disk (Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.offload.mapped_file import MappedFile
from lightning_dist.techniques.offload.offloaded_step import OffloadedStep
from lightning_dist.techniques.options import Arguments, Build, Run, TechniqueOptions
from lightning_dist.techniques.protocol import Parallel, ParameterRules, Rows, Technique

__all__ = ["Offload", "OffloadOptions", "What"]

What = Literal["params", "optimizer", "both"]
"""What is offloaded: ``"params"``, the shards of parameters and gradients; ``"optimizer"``, the states of optimizers,
which then step on the CPU; or ``"both"``."""

_WHAT: tuple[What, ...] = get_args(What)


@dataclass(frozen=True)
class OffloadOptions(TechniqueOptions):
    """Choose what is kept outside of the device's memory.

    Args:
        offload: What is kept in the memory of the CPU instead of the device's. ``"params"``: shards of parameters and
            gradients. ``"optimizer"``: the states of optimizers, which step on the CPU. ``"both"``: all of these. None
            or ``"none"``: nothing.
        offload_folder: Folder on a disk of each node in which ``offload`` keeps parameters and states, instead of the
            memory of the CPU. This saves memory on the CPU as well.

    Raises:
        ValueError: If ``offload`` is none of the possible values, or a folder is given without it.
    """

    offload: str | None = None
    offload_folder: str | None = None

    def __post_init__(self) -> None:
        if self.offload == "none":
            object.__setattr__(self, "offload", None)
        if self.offload is None and self.offload_folder is not None:
            raise ValueError(
                f"offload_folder={self.offload_folder!r} without offload: say what is kept there, offload='optimizer'."
            )
        if self.offload_folder is not None:  # A relative path is one of the folder in which the strategy is created.
            object.__setattr__(self, "offload_folder", str(Path(self.offload_folder).expanduser().absolute()))
        if self.offload not in (None, *get_args(What)):
            raise ValueError(
                f"offload={self.offload!r} must be one of {', '.join(map(repr, get_args(What)))}, or None."
            )

    @property
    def what(self) -> What:
        """Return what is offloaded; only for options that offload something."""
        return next(what for what in _WHAT if what == self.offload)

    @property
    def folder(self) -> Path | None:
        """Return the folder; None: offloaded tensors are in the memory of the CPU."""
        return None if self.offload_folder is None else Path(self.offload_folder)

    @property
    def has_params(self) -> bool:
        """Return whether shards of parameters are offloaded."""
        return self.offload in ("params", "both")

    @property
    def keeps_states_elsewhere(self) -> bool:  # type: ignore[override]
        """Return whether the states of optimizers are offloaded."""
        return self.offload in ("optimizer", "both")

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse to offload parameters where they are not sharded, or what is gathered is not the shards themselves."""
        if self.has_params and run.gathers_float8:
            raise ValueError(
                f"offload={self.offload!r} with Float8Precision(float8_all_gather=True), which rounds shards on the"
                " device. Leave float8_all_gather out, or use offload='optimizer'."
            )
        if self.has_params and run.layout.num_shards == 1:
            raise ValueError(
                f"offload={self.offload!r} with strategy {run.strategy!r} on {run.layout}: only sharded parameters can"
                " be offloaded. Set dp_shard_size to at least 2 (full_shard, hybrid_shard or nd_parallel), or use"
                " offload='optimizer'."
            )

    def backend(self, backend: str | None, device: torch.device) -> str | None:
        """Return the backend of the process group, which communicates on the CPU as well if shards are there."""
        if not self.has_params or device.type == "cpu" or (backend is not None and ":" in backend):
            return backend
        return f"cpu:gloo,{device.type}:{backend or dist.get_default_backend_for_device(device)}"

    def needs_shards(self, device: torch.device, is_asked: bool) -> str:
        """Return the argument if what is offloaded is kept elsewhere than in the memory of ``device``."""
        leaves_device = self.offload is not None and (self.folder is not None or device.type != "cpu")
        return f"offload={self.offload!r}" if leaves_device else ""

    def memory_traits(self, device: torch.device) -> Mapping[str, bool]:
        """Return what is not in the memory of the device."""
        leaves_device = bool(self.needs_shards(device, False))
        return {
            "offloads_params": leaves_device and self.has_params,
            "offloads_gradients": device.type != "cpu" and self.has_params,
            "offloads_states": leaves_device and self.keeps_states_elsewhere,
        }

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return what is offloaded."""
        return {"offload": self.offload}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique if anything is offloaded."""
        if self.offload is not None:
            yield Offload(self, build.mesh.device_type)


class Offload(ParameterRules):
    """Keep shards of parameters, or the states of optimizers, outside of the device's memory.

    Args:
        options: What is offloaded, and where it is kept.
        device_type: Type of the device on which the module's steps run.

    Raises:
        ValueError: If no file can be created in the folder.
    """

    def __init__(self, options: OffloadOptions, device_type: str) -> None:
        self._options = options
        self._device_type = device_type
        self._file = None if options.folder is None else MappedFile(options.folder)

    def shard_memory(self) -> ShardMemory | None:
        """Return the memory that keeps shards of parameters; None: that of the device."""
        if not self._options.has_params:
            return None
        return self._file or _HostMemory(self._device_type != "cpu")

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Let ``optimizer`` step where its states are kept.

        Returns:
            A function that undoes this; None: the optimizer steps on the device, on which everything that it needs is.

        Raises:
            ValueError: If the optimizer was made for an accelerator only, and would step on the CPU.
        """
        steps_on_host = self._options.keeps_states_elsewhere
        if self._device_type == "cpu":
            if self._file is None:
                return None
            states = self._file if steps_on_host else None
            return OffloadedStep(optimizer, torch.device("cpu"), states, self._file).remove
        if not steps_on_host:
            device = torch.device(self._device_type, torch.accelerator.current_device_index())
            return OffloadedStep(optimizer, device, None, self._file).remove
        refuse_for_accelerators_only(optimizer, self._options.what)
        return OffloadedStep(optimizer, torch.device("cpu"), self._file, self._file).remove

    def table_rows(self) -> Rows:
        """Return a row that says what is offloaded, and where it is kept."""
        what = {
            "params": "parameters and gradients",
            "optimizer": "optimizer states",
            "both": "parameters, gradients and optimizer states",
        }[self._options.what]
        if self._options.folder is not None:
            # Gradients are made and used in the memory of the CPU.
            what = what.replace(" and gradients", "").replace(", gradients", "")
            where = f"to files in {self._options.folder}"
        elif self._device_type == "cpu":
            where = "to the memory of the CPU, which is the device: nothing is saved (offload_folder would)"
        else:
            where = "to pinned memory of the CPU"
        yield "offloaded", f"{what}, {where}"


class _HostMemory:
    """Leave shards in the memory of the CPU, to which FSDP2 has moved them."""

    def __init__(self, is_pinned: bool) -> None:
        self.is_pinned = is_pinned

    def place(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``."""
        return tensor

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing, because memory of the CPU stays in use."""


_FUSED_ON_HOST = frozenset({optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD})
"""torch's optimizers whose fused step has an implementation for the CPU."""


def refuse_for_accelerators_only(optimizer: Optimizer, what: What) -> None:
    """Refuse an optimizer with an option for accelerators only.

    Args:
        optimizer: The optimizer, whose states are to be kept on the CPU.
        what: The value of the argument, for the error.

    Raises:
        ValueError: If an option of the optimizer does not fit; the text names it and the fix.
    """
    options = ("capturable",) if type(optimizer) in _FUSED_ON_HOST else ("fused", "capturable")
    for group in optimizer.param_groups:
        for option in options:
            if group.get(option):
                raise ValueError(
                    f"offload={what!r} with {type(optimizer).__name__}({option}=True): the optimizer steps on the CPU,"
                    f" which has no such step. Leave {option} out."
                )
