"""Mark tests as thorough, which ``make test`` leaves out, and ``make thorough`` and ``make nccl-rules`` run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test, of which all but the first and each ``number``-th after it are thorough.

    Args:
        number: Distance between two parameters that ``make test`` runs.
        values: The parameters: a tuple for a test with several arguments, and else a value.
    """
    params = []
    for index, value in enumerate(values):
        marks = [pytest.mark.thorough] if index % number else []
        params.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return params
