"""Test how the methods of techniques are looked up."""

from __future__ import annotations

from collections.abc import Iterator

import lightning_dist.parallelize  # noqa: F401 - It imports all techniques.
from lightning_dist.techniques.protocol import (
    INSIDE_OUT,
    ParameterForms,
    ParameterRules,
    Points,
    RemoteParts,
    SavedState,
    Technique,
    TokenSplits,
    bound,
)


class Outer(Technique):
    def __init__(self, name: str = "outer") -> None:
        self.name = name

    def before_step(self) -> None: ...

    def after_step(self, backward_follows: bool) -> None: ...


class Inner(Outer):
    pass


ROLES = (ParameterForms, ParameterRules, RemoteParts, SavedState, TokenSplits)


def methods_of(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def all_techniques(kind: type = Technique) -> Iterator[type]:
    for derived in kind.__subclasses__():
        if derived.__module__.startswith("lightning_dist."):
            yield derived
            yield from all_techniques(derived)


def test_every_method_of_the_protocol_is_looked_up() -> None:
    methods = set.union(*map(methods_of, (Technique, *ROLES)))
    assert vars(Points([])).keys() == methods - {"copied_modules", "numel_in_float32"}  # Plugins call these.
    assert methods >= INSIDE_OUT


def test_the_protocol_stays_small() -> None:
    """A method that one technique needs belongs to a role, or to that technique."""
    techniques = set(all_techniques()) - set(ROLES)
    users = {name: sum(name in vars(kind) for kind in techniques) for name in methods_of(Technique)}
    assert len(users) <= 30
    assert sorted(name for name, number in users.items() if number == 1) == [
        "around_hook", "on_free", "synchronize_replicas", "while_gathered", "wrap_step"
    ]  # fmt: skip
    assert 0 not in users.values()


def test_methods_are_called_from_the_outside_in_or_from_the_inside_out() -> None:
    techniques = [Outer(), Technique(), Inner()]
    assert bound(techniques, Technique.before_step) == (techniques[0].before_step, techniques[2].before_step)
    assert bound(techniques, Technique.after_step) == (techniques[2].after_step, techniques[0].after_step)
    assert bound(techniques, Technique.finish) == ()
