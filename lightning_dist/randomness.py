"""The state of this process's random number generators, as plain values that load without pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Of Python, NumPy's global generator, torch, and this rank's accelerator if there is one."""
    version, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    state: dict[str, Any] = {
        # Tensors, since they are pickled at once and not number by number.
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": torch.get_rng_state(),
    }
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def _accelerator() -> torch.device | None:
    """That of this machine, if this process uses it: to ask for its state would begin to."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return None
    return accelerator


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set what :func:`rng_state` returned; an accelerator's only where this process uses one of its kind."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])
