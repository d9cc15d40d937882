"""Test how the methods of techniques are looked up."""

from __future__ import annotations

from lightning_dist.techniques.protocol import INSIDE_OUT, Points, Technique, bound


class Outer(Technique):
    def __init__(self, name: str = "outer") -> None:
        self.name = name

    def before_step(self) -> None: ...

    def after_step(self, backward_follows: bool) -> None: ...


class Inner(Outer):
    pass


def test_every_method_of_the_protocol_is_looked_up() -> None:
    methods = {name for name, value in vars(Technique).items() if not name.startswith("_") and callable(value)}
    assert vars(Points([])).keys() == methods
    assert methods >= INSIDE_OUT


def test_methods_are_called_from_the_outside_in_or_from_the_inside_out() -> None:
    techniques = [Outer(), Technique(), Inner()]
    assert bound(techniques, Technique.before_step) == (techniques[0].before_step, techniques[2].before_step)
    assert bound(techniques, Technique.after_step) == (techniques[2].after_step, techniques[0].after_step)
    assert bound(techniques, Technique.finish) == ()
