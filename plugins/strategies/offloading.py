"""Turn the arguments ``offload`` and ``offload_folder`` of a strategy into the engine's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.offload import OffloadConfig, What

__all__ = ["backend_for_offload", "leaves_device", "offload_config", "offloads_optimizer", "refuse_offload"]


def offload_config(what: str | None, folder: str | None) -> OffloadConfig | None:
    """Return the configuration for the two arguments of a strategy.

    Raises:
        ValueError: If ``what`` is none of the possible values, or a folder is given without it.
    """
    if what is None or what == "none":
        if folder is not None:
            raise ValueError(f"offload_folder={folder!r} without offload: say what is kept there, offload='optimizer'.")
        return None
    if what not in get_args(What):
        raise ValueError(f"offload={what!r} must be one of {', '.join(map(repr, get_args(What)))}, or None.")
    return OffloadConfig(what, None if folder is None else Path(folder).expanduser().absolute())  # type: ignore[arg-type]


def refuse_offload(config: OffloadConfig | None, layout: ParallelLayout, precision: Precision, strategy: str) -> None:
    """Refuse to offload parameters where they are not sharded, or what is gathered is not the shards themselves.

    Args:
        config: The configuration; None: nothing is offloaded.
        layout: The sizes of the mesh's axes.
        precision: The run's precision plugin.
        strategy: Name of the strategy, for the error.

    Raises:
        ValueError: If parameters are to be offloaded and are not sharded, or are gathered in float8.
    """
    if config is not None and config.has_params and getattr(precision, "float8_all_gather", False):
        raise ValueError(
            f"offload={config.what!r} with Float8Precision(float8_all_gather=True), which rounds shards on the device."
            " Leave float8_all_gather out, or use offload='optimizer'."
        )
    if config is not None and config.has_params and layout.num_shards == 1:
        raise ValueError(
            f"offload={config.what!r} with strategy {strategy!r} on {layout}: only sharded parameters can be offloaded."
            " Set dp_shard_size to at least 2 (full_shard, hybrid_shard or nd_parallel), or use offload='optimizer'."
        )


def offloads_optimizer(config: OffloadConfig | None) -> bool:
    """Return whether the states of optimizers are kept elsewhere than on the device."""
    return config is not None and config.has_optimizer


def leaves_device(config: OffloadConfig | None, device: torch.device) -> bool:
    """Return whether what is offloaded is kept elsewhere than in the memory of ``device``, on which steps run."""
    return config is not None and (config.folder is not None or device.type != "cpu")


def backend_for_offload(config: OffloadConfig | None, backend: str | None, device: torch.device) -> str | None:
    """Return the backend of a run, which communicates on the CPU as well if shards are offloaded there.

    Args:
        config: The configuration; None: nothing is offloaded.
        backend: The backend that the user has chosen; None: the default for the device.
        device: The device on which steps run.
    """
    if config is None or not config.has_params or device.type == "cpu" or (backend is not None and ":" in backend):
        return backend
    return f"cpu:gloo,{device.type}:{backend or dist.get_default_backend_for_device(device)}"
