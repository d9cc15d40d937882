"""Define numbers that record how they are used, to find out which of a step's decisions depend on them.

A watched number is an ``int`` or a ``float``, and results of arithmetic with it are watched as well. A comparison or
conversion of it is a question with an answer; the same question can be asked again when the number has another value.
C code that reads such a number (``range``, an index of a list, ``math.exp``) is not noticed, except for integers that
are passed to torch functions (see :func:`ask_for_value`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

__all__ = ["Answer", "ask_for_value", "watched"]

Answer = Callable[[Callable[[], Any], Any], Any]
"""Function that is given a question (a function that asks it again) and its answer, and returns the answer to use."""

_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": pow, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift, "divmod": divmod,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "round": round, "floor": math.floor,
    "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip
_COMPARISONS = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool, "int": int, "float": float, "index": operator.index, "hash": hash,
}  # fmt: skip


class _Watched:
    _value: Any
    _evaluate: Callable[[], Any] | None
    _answer: Answer

    def __repr__(self) -> str:
        return repr(self._value)

    def __str__(self) -> str:
        return str(self._value)

    def __format__(self, specification: str) -> str:
        return format(self._value, specification)

    def __reduce__(self) -> Any:
        return type(self._value), (self._value,)


class _WatchedInt(_Watched, int):
    pass


class _WatchedFloat(_Watched, float):
    pass


def watched(value: Any, evaluate: Callable[[], Any] | None, answer: Answer) -> Any:
    """Return ``value`` as a watched number; a value that is neither an ``int`` nor a ``float`` is returned unchanged.

    Args:
        value: The number's value now.
        evaluate: Function without arguments that returns the number's value at the time of the call; None: the value is
            made up. What is computed from it is made up as well.
        answer: Function that is called with every question about the number, or about a result computed from it. If
            several numbers have a part in a result, it is that of the first one that is made up, if there is one.
    """
    if type(value) not in (int, float):
        return value
    number: Any = _WatchedInt(value) if type(value) is int else _WatchedFloat(value)
    number._value, number._evaluate, number._answer = value, evaluate, answer
    return number


def ask_for_value(value: Any) -> None:
    """Record that the value of ``value`` is used, if it is a watched integer or a slice with such a bound."""
    if isinstance(value, _WatchedInt):
        value._answer(lambda: _later(value), value._value)
    elif isinstance(value, slice):
        for part in (value.start, value.stop, value.step):
            ask_for_value(part)


def _watched_all(result: Any, evaluate: Callable[[], Any], numbers: Sequence[Any]) -> Any:
    """Return the result of an operation on ``numbers`` as a watched number, or as two if it is ``divmod``."""
    asked, is_made_up = _asked(numbers)
    if not isinstance(result, tuple):
        return watched(result, None if is_made_up else evaluate, asked)
    return tuple(
        watched(part, None if is_made_up else partial(_item, evaluate, place), asked)
        for place, part in enumerate(result)
    )


def _asked(numbers: Sequence[Any]) -> tuple[Answer, bool]:
    """Return the function that answers questions about a result of ``numbers``, and whether the result is made up."""
    all_watched = [number for number in numbers if isinstance(number, _Watched)]
    made_up = next((number for number in all_watched if number._evaluate is None), None)
    return (all_watched[0] if made_up is None else made_up)._answer, made_up is not None


def _item(evaluate: Callable[[], Any], place: int) -> Any:
    return evaluate()[place]


def _now(value: Any) -> Any:
    return value._value if isinstance(value, _Watched) else value


def _later(value: Any) -> Any:
    if not isinstance(value, _Watched):
        return value
    return None if value._evaluate is None else value._evaluate()


def _add_binary(name: str, function: Callable[..., Any]) -> None:
    def forward(self: _Watched, other: Any, *modulus: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return _watched_all(
            function(self._value, _now(other), *map(_now, modulus)),
            lambda: function(_later(self), _later(other), *map(_later, modulus)),
            (self, other, *modulus),
        )

    def reflected(self: _Watched, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return _watched_all(
            function(_now(other), self._value), lambda: function(_later(other), _later(self)), (self, other)
        )

    setattr(_Watched, f"__{name}__", forward)
    setattr(_Watched, f"__r{name}__", reflected)


def _add_unary(name: str, function: Callable[..., Any]) -> None:
    def compute(self: _Watched, *digits: Any) -> Any:
        return _watched_all(function(self._value, *digits), lambda: function(_later(self), *digits), (self,))

    setattr(_Watched, f"__{name}__", compute)


def _add_comparison(name: str, function: Callable[[Any, Any], bool]) -> None:
    def compare(self: _Watched, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        answer, _ = _asked((self, other))
        return answer(lambda: function(_later(self), _later(other)), function(self._value, _now(other)))

    setattr(_Watched, f"__{name}__", compare)


def _add_conversion(name: str, function: Callable[[Any], Any]) -> None:
    def convert(self: _Watched) -> Any:
        return self._answer(lambda: function(_later(self)), function(self._value))

    setattr(_Watched, f"__{name}__", convert)


for _name, _binary in _BINARY.items():
    _add_binary(_name, _binary)
for _name, _unary in _UNARY.items():
    _add_unary(_name, _unary)
for _name, _comparison in _COMPARISONS.items():
    _add_comparison(_name, _comparison)
for _name, _conversion in _CONVERSIONS.items():
    _add_conversion(_name, _conversion)
