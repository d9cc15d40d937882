"""Tests of how the state of other stages is added to this rank's state."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

from torch import nn

from lightning_dist.techniques.pipeline import whole_state


class Pair(NamedTuple):
    first: int
    second: Any


def test_leaves_are_replaced_and_containers_keep_their_classes() -> None:
    versions = nn.Linear(1, 1).state_dict()
    state = {
        "a": [1, (2, Pair(3, Counter(x=4)))],
        "b": OrderedDict(c=5),
        6: defaultdict(list, d=7),
        "e": versions,
    }
    paths: dict[str, Any] = {}

    def double(path: str, leaf: Any) -> Any:
        paths[path] = leaf
        return 2 * leaf if isinstance(leaf, int) else leaf

    result = whole_state._map_leaves(double, state)
    assert result.pop("e")._metadata == versions._metadata
    assert result == {"a": [2, (4, Pair(6, Counter(x=4)))], "b": OrderedDict(c=10), 6: {"d": 14}}
    assert type(result["a"][1][1]) is Pair and result[6].default_factory is list
    assert paths.pop("['a'][1][1][1]") == Counter(x=4)
    assert {path: leaf for path, leaf in paths.items() if "'e'" not in path} == {
        "['a'][0]": 1, "['a'][1][0]": 2, "['a'][1][1][0]": 3, "['b']['c']": 5, "[6]['d']": 7
    }  # fmt: skip
