"""Let code draw constants in place of random numbers, so that runs on different shapes can be compared.

A module that runs on a part of its input draws other random numbers than on the whole input, because it draws fewer.
Dropout keeps everything here, and every other number has a fixed value that depends on the distribution alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_dist.model.random_functions import CONSTANT_FOR, DROPOUTS

__all__ = ["fixed_draws"]

_ATTENTION = {functional.scaled_dot_product_attention, functional.multi_head_attention_forward}


@contextmanager
def fixed_draws() -> Iterator[None]:
    """Replace the numbers that torch draws in this context by constants, and seed Python's and NumPy's generators.

    Draws inside of functions that torch does not let one replace, such as a recurrent layer's dropout, begin with the
    same seed. All generators have their states of before after this context.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            with _Constants():
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class _Constants(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _ATTENTION:
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
            return func(*_without_dropout(func, args), **kwargs)
        if func is torch.randperm:
            return func(*args, **kwargs).sort().values
        out = func(*args, **kwargs)
        if name in CONSTANT_FOR and isinstance(out, Tensor):
            with torch.no_grad():
                out.fill_(CONSTANT_FOR[name])
        return out


def _without_dropout(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set the probability of dropout to 0 among the positional arguments of an attention."""
    place = 4 if func is functional.scaled_dot_product_attention else 10
    return (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
