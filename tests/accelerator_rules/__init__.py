"""Run distributed tests on a simulated accelerator, which shows on CPUs what a GPU would punish.

``pytest --accelerator simulated`` lets the ranks of tests train on the device ``simulated``. Its memory is that of the
host, and its operations run on the CPU at once, so that the results are exact. Nevertheless it keeps account of the
order that streams and events guarantee, as ``torch.cuda._sanitizer`` does, and so finds:

- operations of two streams on the same memory that nothing orders,
- memory that is freed while another stream may still use it,
- pinned memory that the host reads or changes before a copy has ended,
- tensors of the CPU among those of the device,
- transfers and operations for which the host waits, with the lines of the project that cause them.

The modules, from the bottom up:

- ``device``: Has the device in C++: allocators, streams, operations, and the vector clocks of the streams.
- ``build``: Compiles it, once per content of the sources.
- ``device_module``: Is ``torch.simulated``.
- ``install``: Registers the device with torch, Lightning, and the backend with NCCL's rules.
- ``host_waits``: Counts what the host waits for in a step; a command prints a table.
"""

from __future__ import annotations

import os

__all__ = ["NAME", "is_chosen"]

NAME = "simulated"
"""Name of the accelerator, and of the type of its device."""


def is_chosen() -> bool:
    """Return whether the ranks of distributed tests run on the simulated accelerator."""
    return os.environ.get("LIGHTNING_DIST_TESTS_ACCELERATOR") == NAME
