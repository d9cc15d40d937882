"""Run distributed tests on CPUs under the rules of NCCL.

``pytest --backend nccl-rules`` lets the ranks of tests communicate over a backend that sends data over gloo, and
differs from gloo in what the code above it can observe:

- ``dist.get_backend(group)`` is not ``"gloo"``, so that code takes its branches for other backends, and Lightning
  evaluates in inference mode.
- Dtypes, reductions, layouts and calls that NCCL does not have are refused with the errors that torch raises for NCCL.
- The operations of a group run in the order in which a rank has begun them, as on the stream of an NCCL communicator.
  All ranks must begin the same ones: operation, dtype, number of elements, reduction and root are compared, and a
  difference raises :class:`~tests.nccl_rules.operations.RuleError` where NCCL would hang or mix up data.
- Sends and receives outside of a batch are operations of that order as well, ignore tags, and end when they are
  received.
- Outputs hold NaN, or bytes of 0x5A, until the caller waits for the operation. Changing inputs or outputs before the
  wait is an error.
- Ranks that begin operations of two groups in different orders, or from two threads, are found after each test.

The modules, from the bottom up:

- ``memory``: Reads and writes the memory of tensors, also that of a simulated device.
- ``rules``: Refuses what NCCL refuses.
- ``log``: Records what each rank begins, and compares the orders.
- ``operations``: Runs the operations of a group in order, and hides their outputs until the wait.
- ``group``: Is the process group, with the collectives; ``messages`` has sends and receives.
- ``backend``: Registers the backend.
"""

import os

__all__ = ["VARIABLE", "is_chosen"]

VARIABLE = "LIGHTNING_DIST_TESTS_BACKEND"
"""Environment variable with the backend over which distributed tests communicate, which the workers inherit."""


def is_chosen() -> bool:
    """Return whether distributed tests run under NCCL's rules."""
    return os.environ.get(VARIABLE) == "nccl-rules"
