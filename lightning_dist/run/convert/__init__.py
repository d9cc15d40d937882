"""Convert weights and whole checkpoints from one format to another, in one process and with little memory.

- ``formats``: Describes what a format has to do.
- ``directory``, ``dcp``, ``lightning_file``, ``safetensors_file``, ``huggingface``: Read and write one format each.
- ``conversion``: Finds the formats, converts, and compares what was written with what was read.
"""

from lightning_dist.run.convert.conversion import FORMATS, Conversion, convert
from lightning_dist.run.convert.formats import Options

__all__ = ["FORMATS", "Conversion", "Options", "convert"]
