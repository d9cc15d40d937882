"""Name the strategy of this package that a name from elsewhere, or a misspelt one, means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

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


def hint(name: str, own: Collection[str] = ()) -> str:
    """Return ``"lightning-dist's strategy for this is 'x'."`` with what ``name`` means; else the names that there are.

    Args:
        name: Name of a strategy in Lightning, torch, DeepSpeed or Megatron, such as ``"fsdp2"`` or ``"zero_2"``, or a
            misspelt one.
        own: Names of this package's strategies, which are listed if the meaning is not known.
    """
    word = re.split(r"[\W\d_]", name.lower())[0]
    if word not in _MEANT:
        if not own:
            return ""
        close = difflib.get_close_matches(name.lower(), own, n=1)
        meant = f"Did you mean {close[0]!r}? " if close else ""
        return f"{meant}The strategies of lightning-dist are {', '.join(sorted(own))}."
    stage = re.search("[123]", name) if word in ("deepspeed", "zero") else None
    argument = f" with zero_stage={stage[0]}" if stage else ""
    return f"lightning-dist's strategy for this is {_MEANT[word]!r}{argument}."
