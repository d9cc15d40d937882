"""Save and set the state of random number generators, and let ranks draw different random numbers temporarily."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

__all__ = [
    "RankRng",
    "RngGenerators",
    "digest_of_states",
    "rng_state",
    "set_rng_state",
    "unchanged_random_numbers",
]


def rng_state() -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy (the global one), torch, and this rank's accelerator.

    The result holds only tensors and plain values, so that it loads with ``weights_only=True``.
    """
    version, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    state: dict[str, Any] = {
        # The numbers are stored as tensors, because these are pickled much faster than tuples of integers.
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": torch.get_rng_state(),
    }
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def _accelerator() -> torch.device | None:
    """Return the machine's accelerator if this process uses it; None otherwise, as reading its state initializes it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return None
    return accelerator


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state from :func:`rng_state`; that of an accelerator only if this process uses the same device type."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


@contextmanager
def unchanged_random_numbers() -> Iterator[None]:
    """Restore the states of the generators at the end of the context, also after an error.

    ``lightning.pytorch.utilities.seed.isolate_rng`` does not restore them after an error. No tensor is made here,
    because it would be a fake one while a step is traced.
    """
    accelerator = _accelerator()
    device = None if accelerator is None else torch.get_device_module(accelerator)
    numbers, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_device = None if device is None else device.get_rng_state()
    try:
        yield
    finally:
        random.setstate(numbers)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if device is not None:
            device.set_rng_state(of_device)


def digest_of_states(of_torch_only: bool = False) -> int:
    """Hash the states of the generators of torch, Python and NumPy into an integer of 32 bits.

    Args:
        of_torch_only: Whether to leave out those of Python and NumPy.
    """
    states = [torch.get_rng_state()]
    accelerator = _accelerator()
    if accelerator is not None:
        states.append(torch.get_device_module(accelerator).get_rng_state())
    arrays: list[Any] = [state.numpy() for state in states]
    digest = xxhash.xxh3_64()
    if not of_torch_only:
        _, numbers, gauss = random.getstate()
        of_numpy: Any = np.random.get_state(legacy=True)
        digest.update(repr((hash(numbers), gauss, of_numpy[2:])).encode())
        arrays.insert(0, of_numpy[1])
    for array in arrays:
        digest.update(memoryview(array))
    return digest.intdigest() % 2**32


class RngGenerators:
    """Control the generators that a step may use: ``torch`` (on the CPU and on a device), ``python`` and ``numpy``.

    Args:
        device: Device whose torch generator is included, in addition to the CPU's.
    """

    KINDS = frozenset({"torch", "python", "numpy"})

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._generators.append(module.default_generators[module.current_device()])

    def seed(self, seed: int, kinds: Collection[str] = KINDS) -> None:
        """Seed the generators of ``kinds``.

        Args:
            seed: Non-negative integer of at most 63 bits.
            kinds: Kinds of generators, a subset of ``KINDS``.
        """
        if "torch" in kinds:
            for generator in self._generators:
                generator.manual_seed(seed)
        if "python" in kinds:
            random.seed(seed)
        if "numpy" in kinds:
            np.random.seed(seed % 2**32)

    @contextmanager
    def kept(self, kinds: Collection[str] = KINDS) -> Iterator[None]:
        """Restore the generators of ``kinds`` at the end of the context to their state at its beginning."""
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


def _draw_seed() -> int:
    return int(torch.randint(2**62, ()))


class RankRng:
    """Let ranks with equal generator states draw different random numbers temporarily, and then equal ones again.

    Args:
        device: Device whose torch generator is used.
        rank: Number of this rank, which is added to the seed.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        if device.type == "cpu":
            self._generator = torch.default_generator
        else:
            module = torch.get_device_module(device)
            self._generator = module.default_generators[module.current_device()]
        self._outside: torch.Tensor | None = None
        self._seeded: torch.Tensor | None = None

    def enter(self) -> bool:
        """Seed the generator from the CPU's generator and the rank, so that ranks differ until :meth:`leave`.

        Returns:
            Whether ranks drew equal numbers until now.
        """
        was_outside = self._outside is None
        if was_outside:
            before = torch.default_generator.get_state()
            seed = _draw_seed()  # It is the same on all ranks, and after a resume.
            torch.default_generator.set_state(before)
            self._outside = self._generator.get_state()
            self._generator.manual_seed(seed + self._rank)
            self._seeded = self._generator.get_state()
        return was_outside

    def leave(self) -> None:
        """Restore the state that the generator had at :meth:`enter`.

        If numbers have been drawn since, the CPU's generator goes on by one number, so that the next seed is another.
        Otherwise, the generators are as in one process, which has drawn nothing either.
        """
        if self._outside is not None and self._seeded is not None:
            has_drawn = not torch.equal(self._generator.get_state(), self._seeded)
            self._generator.set_state(self._outside)
            self._outside = None
            if has_drawn:
                _draw_seed()

    def forget(self) -> None:
        """Forget an :meth:`enter` whose :meth:`leave` was skipped by an error or a rerun, and restore nothing."""
        self._outside = None
