"""Random numbers: the state of this process's generators, and ranks that draw different ones for a while."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["RankRng", "RngGenerators", "agree_on_random_numbers", "rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Of Python, NumPy's global generator, torch, and this rank's accelerator; it loads without pickle."""
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


def agree_on_random_numbers(group: dist.ProcessGroup) -> None:
    """Let all ranks of ``group`` draw the numbers that its first would have drawn. A collective over it."""
    state = [rng_state()]
    dist.broadcast_object_list(state, group=group, group_src=0)
    set_rng_state(state[0])


class RngGenerators:
    """The generators that a step may draw from: ``torch`` (on the CPU and on a device), ``python`` and ``numpy``.

    Args:
        device: Whose generator, besides the CPU's.
    """

    KINDS = frozenset({"torch", "python", "numpy"})

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._generators.append(module.default_generators[module.current_device()])

    def seed(self, seed: int, kinds: Collection[str] = KINDS) -> None:
        """From here on, numbers of ``kinds`` follow from ``seed``, a number of 63 bits."""
        if "torch" in kinds:
            for generator in self._generators:
                generator.manual_seed(seed)
        if "python" in kinds:
            random.seed(seed)
        if "numpy" in kinds:
            np.random.seed(seed % 2**32)

    @contextmanager
    def kept(self, kinds: Collection[str] = KINDS) -> Iterator[None]:
        """Afterwards, numbers of ``kinds`` go on as if none had been drawn inside."""
        states = [generator.get_state() for generator in self._generators] if "torch" in kinds else []
        python = random.getstate() if "python" in kinds else None
        numpy_state = np.random.get_state() if "numpy" in kinds else None
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=False):
                generator.set_state(state)
            if python is not None:
                random.setstate(python)
            if numpy_state is not None:
                np.random.set_state(numpy_state)


class RankRng:
    """Lets ranks that draw the same random numbers draw different ones for a while, after which they agree again.

    Args:
        device: Whose numbers.
        rank: What tells the ranks apart.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        if device.type == "cpu":
            self._generator = torch.default_generator
        else:
            module = torch.get_device_module(device)
            self._generator = module.default_generators[module.current_device()]
        self._outside: torch.Tensor | None = None

    def enter(self) -> None:
        """From here to :meth:`leave`, draw numbers that follow from the common ones and the rank."""
        if self._outside is None:
            seed = int(torch.randint(2**62, ()))  # the same on all ranks, and after a resume
            self._outside = self._generator.get_state()
            self._generator.manual_seed(seed + self._rank)

    def leave(self) -> None:
        """Go on with the common numbers."""
        if self._outside is not None:
            self._generator.set_state(self._outside)
            self._outside = None

    def forget(self) -> None:
        """Be outside, whatever an error or a recomputed part of a model has left."""
        self._outside = None
