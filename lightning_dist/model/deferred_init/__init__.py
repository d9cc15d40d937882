"""Build modules on the meta device, and give their tensors later the values that they would have had.

What a constructor does to tensors is recorded, operation by operation, together with the state that the random number
generator has before each draw. The operations that a tensor depends on can then run at any time, for the tensors in any
order, and yield the same bits as if the constructor had run on the device itself. The idea is that of torchdistX's
``deferred_init``.

The constructor does not notice: deferred tensors report the device on which they would be, a value that it asks for is
computed at once, and random numbers are drawn into scratch memory, for one tensor at a time, so that the generator
advances as it would have. The record is attached to the storages of the meta tensors, and is freed with them.
"""

from lightning_dist.model.deferred_init.operations import Operation, is_deferred, operations_of, values_of
from lightning_dist.model.deferred_init.recorder import deferred_init

__all__ = ["Operation", "deferred_init", "is_deferred", "operations_of", "values_of"]
