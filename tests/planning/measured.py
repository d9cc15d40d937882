"""Measure the memory of the second optimizer step of real ranks, without any code of the prediction."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.planning.cases import Case, make

__all__ = ["Measured", "fit", "measure"]


class Measured(NamedTuple):
    """Hold the bytes of all tensors when the measured step begins, and the most in it."""

    resident: int
    peak: int


class _Peak(TorchDispatchMode):
    """Add up the sizes of all storages that are alive, after each operation in this context.

    The tensors that are alive at its begin are found by Python's garbage collector. Torch's profiler is not used,
    because it misses what the threads of gloo free.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        gc.collect()
        for tensor in gc.get_objects():
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                self._add(tensor)
        self.resident = self.peak = self._total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and type(leaf) in (torch.Tensor, torch.nn.Parameter):
                self._add(leaf)
        self.peak = max(self.peak, self._total())
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().device.type == "cpu":
            reference = StorageWeakRef(tensor.untyped_storage())
            self._alive[reference.cdata] = reference

    def _total(self) -> int:
        total = 0
        for key, reference in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total


class _Measure(Callback):
    """Measure the second optimizer step."""

    def __init__(self, accumulated: int) -> None:
        self._accumulated = accumulated
        self._num_batches = 0
        self.measured = Measured(0, 0)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == self._accumulated:
            self._mode = _Peak()
            self._mode.__enter__()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._num_batches += 1
        if self._num_batches == 2 * self._accumulated:
            self._mode.__exit__(None, None, None)
            self.measured = Measured(self._mode.resident, self._mode.peak)


def measure(case: Case) -> Measured:
    """Train two optimizer steps on this rank, and return its memory. This is a collective over all processes."""
    torch.set_num_threads(1)
    callback = _Measure(case.trainer.get("accumulate_grad_batches", 1))
    fit(case, callback)
    return callback.measured


def fit(case: Case, callback: Callback) -> None:
    """Train two optimizer steps on this rank. This is a collective over all processes."""
    module, data, arguments = make(case)
    trainer = Trainer(
        **arguments, accelerator="cpu", devices=case.num_ranks, max_steps=2, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
