"""Keep parameters or the states of optimizers in the memory of the CPU, or on a disk, between their uses.

- ``offload``: Defines the technique and its arguments.
- ``mapped_file``: Keeps tensors in a file that is mapped into memory.
- ``offloaded_step``: Runs optimizer steps on another device than that of the parameters.
"""

from lightning_dist.techniques.offload.mapped_file import MappedFile
from lightning_dist.techniques.offload.offload import Offload, OffloadOptions, What
from lightning_dist.techniques.offload.offloaded_step import OffloadedStep

__all__ = ["MappedFile", "Offload", "OffloadOptions", "OffloadedStep", "What"]
