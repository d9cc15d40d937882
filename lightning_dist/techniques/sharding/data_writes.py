"""Find changes of gathered parameters through ``.data`` on an accelerator, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dist.mesh.deferred_read import DeferredRead

__all__ = ["DataWrites"]

_NUM_FIRST = 4
"""Number of frees of a parameter in training, from the first one on, at which its copy is always written back."""

_PERIOD = 61
"""Number of frees after which a copy is compared with its shard again. A prime number reaches the frees after forwards
as well as those after backwards, for which parameters are gathered anew."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DataWrites:
    """Decide whether the gathered copy of a parameter is written back into its shard when it is freed.

    A change through ``param.data`` leaves the version of the copy as it is. On the CPU, the copy is compared with the
    shard. On an accelerator, the host would have to wait for the result. The first copies are therefore always written
    back, and the results of their comparisons are read later. If a copy had changed, all later copies are written back
    as well. Otherwise, a copy is compared now and then, and a change is an error, since it was lost.

    Args:
        name: Full name of the parameter.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_frees = 0
        self._is_found = False
        self._read: DeferredRead | None = None
        self._is_first = True

    def is_written_back(self, shard: Tensor, own: Tensor, is_training: bool) -> bool:
        """Return whether ``own`` must be written into ``shard``, although its version has not changed.

        Args:
            shard: This rank's shard.
            own: The same elements of the gathered copy, possibly in another dtype.
            is_training: Whether the module is in training mode.

        Raises:
            RuntimeError: If an earlier copy that was not written back had changed.
        """
        if self._read is not None and self._read.is_ready:
            self._judge(self._read)
            self._read = None
        if self._is_found:
            return True
        self._num_frees += is_training
        is_first = is_training and self._num_frees <= _NUM_FIRST
        if self._read is None and (is_first or self._num_frees % _PERIOD == 0):
            bits = _BITS[own.element_size() // (2 if own.is_complex() else 1)]
            before, after = (torch.view_as_real(t) if t.is_complex() else t for t in (shard.to(own.dtype), own))
            self._read = DeferredRead((before.view(bits) != after.view(bits)).any())
            self._is_first = is_first
        return is_first

    def _judge(self, read: DeferredRead) -> None:
        if not bool(read.result()):
            return
        if not self._is_first:
            raise RuntimeError(
                f"A step has changed the parameter {self._name!r} through .data, which it had not done in its first"
                " steps, and this change was lost. Change it in place in torch.no_grad(), as in"
                " `with torch.no_grad(): param.clamp_(0)`."
            )
        self._is_found = True
