"""Compress the gradients that replicas send each other.

- ``options``: Defines the arguments.
- ``compressor``: Defines the base class of compressors.
- ``compressors``: Implements them, one per file.
- ``two_shot``: Implements the exchange of those that encode each number or block on its own.
- ``blockwise``: Implements the encoding of those that send 8-bit numbers.
- ``wire``: Runs their collectives and counts the bytes.
- ``background``: Runs them beside the backward.
- ``non_finite``: Lets steps be skipped in which a gradient is not finite.
- ``compression``: Implements the technique.
- ``saved_states``: Writes their tensors into checkpoints, and reads them in a run with any layout.
- ``local_updates``: Implements a second technique: replicas train on their own, and synchronize their weights.
- ``sync_methods``: Implements the methods by which they do so.
"""

from lightning_dist.techniques.compression.compression import Compression
from lightning_dist.techniques.compression.compressor import Compressor, compressor_from
from lightning_dist.techniques.compression.compressors import COMPRESSORS
from lightning_dist.techniques.compression.compressors.fp8 import FP8
from lightning_dist.techniques.compression.compressors.half import BF16, FP16
from lightning_dist.techniques.compression.compressors.int8 import Int8
from lightning_dist.techniques.compression.compressors.powersgd import PowerSGD
from lightning_dist.techniques.compression.compressors.topk import TopK
from lightning_dist.techniques.compression.local_updates import LocalUpdates
from lightning_dist.techniques.compression.options import CompressionOptions, SyncOptions
from lightning_dist.techniques.compression.sync_methods import DiLoCo, LocalSGD, SyncMethod, sync_method_from

__all__ = [
    "BF16",
    "COMPRESSORS",
    "FP8",
    "FP16",
    "Compression",
    "CompressionOptions",
    "Compressor",
    "DiLoCo",
    "Int8",
    "LocalSGD",
    "LocalUpdates",
    "PowerSGD",
    "SyncMethod",
    "SyncOptions",
    "TopK",
    "compressor_from",
    "sync_method_from",
]
