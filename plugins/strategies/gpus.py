"""Explain errors about GPUs that are missing or shared, and refuse what an old NCCL cannot send."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.plugins.precision import PrecisionPolicy

__all__ = ["hint_about_devices", "refuse_bfloat16", "refuse_shared_gpu"]

_SINCE = (2, 10)
"""The first version of NCCL that has bfloat16 (its release notes, 2021)."""


def hint_about_devices(devices: Any, error: Exception) -> str:
    """Return what to change if ``error`` says that ``devices`` asks for more GPUs than there are, else an empty string.

    Args:
        devices: The argument of the Trainer.
        error: An error that the Trainer has raised.
    """
    if "But your machine only has" not in str(error):
        return ""
    found = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return (
        f"Trainer(devices={devices!r}): each process needs a GPU of its own, and {found} can be used here{limited}. Set"
        f" devices={found or 1} or devices='auto', or try out more processes with accelerator='cpu'."
    )


def refuse_shared_gpu(error: Exception, num_devices: int, num_nodes: int) -> None:
    """Explain NCCL's error if two processes use the same GPU, which it does not support.

    Args:
        error: An error in starting the process group.
        num_devices: Number of processes on a node.
        num_nodes: Number of nodes.

    Raises:
        MisconfigurationException: If this is NCCL's error about it; other errors are left to the caller.
    """
    if "Duplicate GPU detected" not in str(error):
        return
    raise MisconfigurationException(
        f"Trainer(devices={num_devices}, num_nodes={num_nodes}): two processes use the same GPU, and NCCL needs one for"
        " each. Start as many processes on a node as it has GPUs, and let CUDA_VISIBLE_DEVICES show each of them all"
        " GPUs of the node; or set the strategy's process_group_backend='gloo', which is slow."
    ) from error


def refuse_bfloat16(policy: PrecisionPolicy, precision: str, backend: str) -> None:
    """Refuse to send bfloat16 by a version of NCCL that does not have it, before the first collective fails.

    Args:
        policy: The dtypes in which parameters are gathered and gradients are reduced.
        precision: Lightning's name of the precision.
        backend: The backend of the process group, such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        MisconfigurationException: If the run would send bfloat16, and NCCL does not have it.
    """
    sends = torch.bfloat16 in (policy.param_dtype, policy.reduce_dtype) or precision == "bf16-true"
    if not sends or "nccl" not in (part.rpartition(":")[2] for part in backend.split(",")):
        return
    version = tuple(torch.cuda.nccl.version()[:2])
    if version >= _SINCE:
        return
    asked = "reduce_dtype='bfloat16'" if policy.reduce_dtype == torch.bfloat16 else f"precision={precision!r}"
    raise MisconfigurationException(
        f"{asked} sends bfloat16, which NCCL has since {_text(_SINCE)}, and torch {torch.__version__} uses NCCL"
        f" {_text(version)}. Use precision='32-true' or '16-mixed' and reduce_dtype='float32', or a torch that is built"
        " with a newer NCCL."
    )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
