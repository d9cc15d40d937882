"""Offload parameters and the states of optimizers to the memory of the CPU or to a disk (Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.offload.mapped_file import MappedFile
from lightning_dist.techniques.offload.offloaded_step import OffloadedStep
from lightning_dist.techniques.protocol import Rows, Technique

__all__ = ["Offload", "OffloadConfig", "What"]

What = Literal["params", "optimizer", "both"]
"""What is offloaded: ``"params"``, the shards of parameters and gradients; ``"optimizer"``, the states of optimizers,
which then step on the CPU; or ``"both"``."""


@dataclass(frozen=True)
class OffloadConfig:
    """Configure what is offloaded, and where it is kept.

    Args:
        what: ``"params"``, ``"optimizer"`` (the states of optimizers) or ``"both"``.
        folder: Folder on a disk of each node in which it is kept; None: it is kept in the memory of the CPU.
    """

    what: What
    folder: Path | None = None

    @property
    def has_params(self) -> bool:
        """Return whether shards of parameters are offloaded."""
        return self.what in ("params", "both")

    @property
    def has_optimizer(self) -> bool:
        """Return whether the states of optimizers are offloaded."""
        return self.what in ("optimizer", "both")


class Offload(Technique):
    """Keep shards of parameters, or the states of optimizers, outside of the device's memory.

    Args:
        config: What is offloaded, and where it is kept.
        device_type: Type of the device on which the module's steps run.

    Raises:
        ValueError: If no file can be created in the folder.
    """

    def __init__(self, config: OffloadConfig, device_type: str) -> None:
        self._config = config
        self._device_type = device_type
        self._file = None if config.folder is None else MappedFile(config.folder)

    def shard_memory(self) -> ShardMemory | None:
        """Return where shards of parameters are kept; None: on the device."""
        if not self._config.has_params:
            return None
        return self._file or _HostMemory(self._device_type != "cpu")

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Let ``optimizer`` step where its states are kept.

        Returns:
            A function that undoes this; None: the optimizer steps on the device, on which everything that it needs is.

        Raises:
            ValueError: If the optimizer was made for an accelerator only, and would step on the CPU.
        """
        steps_on_host = self._config.has_optimizer
        if self._device_type == "cpu":
            if self._file is None:
                return None
            states = self._file if steps_on_host else None
            return OffloadedStep(optimizer, torch.device("cpu"), states, self._file).remove
        if not steps_on_host:
            device = torch.device(self._device_type, torch.accelerator.current_device_index())
            return OffloadedStep(optimizer, device, None, self._file).remove
        refuse_for_accelerators_only(optimizer, self._config.what)
        return OffloadedStep(optimizer, torch.device("cpu"), self._file, self._file).remove

    def table_rows(self) -> Rows:
        """Return a row that says what is offloaded, and where it is kept."""
        what = {
            "params": "parameters and gradients",
            "optimizer": "optimizer states",
            "both": "parameters, gradients and optimizer states",
        }[self._config.what]
        if self._config.folder is not None:
            # Gradients are made and used in the memory of the CPU.
            what = what.replace(" and gradients", "").replace(", gradients", "")
            where = f"to files in {self._config.folder}"
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
