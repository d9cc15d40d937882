"""Compare the first steps of a module under a strategy with the same steps in one process.

- ``check``: Runs both, and returns the report.
- ``settings``, ``refusals``: Derive the Trainers' arguments, and refuse what cannot be compared.
- ``recording``: Records the run under the strategy.
- ``reference``: Repeats it in one process.
- ``randomness``: Makes random numbers equal on both sides.
- ``report``: Compares the two, and explains what is wrong.
- ``verdict``: Gives the report of rank 0 to all ranks.
"""

from lightning_dist.plugins.parity_check.check import check
from lightning_dist.plugins.parity_check.report import Report

__all__ = ["Report", "check"]
