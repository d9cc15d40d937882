"""Provide the compressors and synchronization methods of replicas, and the base classes for your own."""

from lightning_dist.techniques.compression import (
    BF16,
    FP8,
    FP16,
    Compressor,
    DiLoCo,
    Int8,
    LocalSGD,
    PowerSGD,
    SyncMethod,
    TopK,
)
from lightning_dist.techniques.compression.blockwise import Blockwise
from lightning_dist.techniques.compression.two_shot import TwoShot

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "Blockwise",
    "Compressor",
    "DiLoCo",
    "Int8",
    "LocalSGD",
    "PowerSGD",
    "SyncMethod",
    "TopK",
    "TwoShot",
]
