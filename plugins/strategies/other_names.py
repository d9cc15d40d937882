"""Name the strategy of this package that a name from elsewhere means."""

from __future__ import annotations

import re

__all__ = ["hint"]

_MEANT = {
    "cp": "context_parallel",
    "deepspeed": "full_shard",
    "dp": "data_parallel",
    "fsdp": "full_shard",
    "hsdp": "hybrid_shard",
    "megatron": "nd_parallel",
    "pp": "pipeline_parallel",
    "tp": "tensor_parallel",
    "ulysses": "context_parallel",
    "zero": "full_shard",
}
"""The strategies that are meant by names that begin with these words."""


def hint(name: str) -> str:
    """Return ``"lightning-dist's strategy for this is 'x'."`` with what ``name`` means; empty if that is not known.

    Args:
        name: Name of a strategy in Lightning, torch, DeepSpeed or Megatron, such as ``"fsdp2"`` or ``"zero_2"``.
    """
    word = re.split(r"[\W\d_]", name.lower())[0]
    if word not in _MEANT:
        return ""
    stage = re.search("[123]", name) if word in ("deepspeed", "zero") else None
    argument = f" with zero_stage={stage[0]}" if stage else ""
    return f"lightning-dist's strategy for this is {_MEANT[word]!r}{argument}."
