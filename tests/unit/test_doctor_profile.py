"""A profile of a machine is read as it was written, and a file that is none is refused by its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.run.doctor.profile import DeviceFigures, LinkFigures, MachineProfile, ProfileError

PROFILE = MachineProfile(
    backend="nccl",
    num_nodes=2,
    devices=(
        DeviceFigures(0, "a", "H100", 80 * 10**9, 79 * 10**9, 2.5e12, {"bfloat16": 6.5e14, "float32": 5e13}),
        DeviceFigures(1, "b", "H100", 80 * 10**9, 78 * 10**9, 2.6e12, {"bfloat16": 6.4e14}),
    ),
    links=(
        LinkFigures("node", "all_reduce", (0, 1, 2), 2e-5, 4e11),
        LinkFigures("between_nodes", "point_to_point", (0, 3), 3e-5, 2.5e10),
    ),
    versions={"torch": "2.13.0"},
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "profile.json")
    assert MachineProfile.read(tmp_path / "profile.json") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


Change = Callable[[dict[str, Any]], Any]
MALFORMED: list[tuple[Change, str]] = [
    (lambda content: content.update(format=2), "format must be 1, and is 2"),
    (lambda content: content.pop("format"), "format must be 1, and is null"),
    (lambda content: content.pop("links"), "links must be there"),
    (lambda content: content.update(link=[]), "link is none of the keys backend, num_nodes, devices"),
    (lambda content: content["links"][1].pop("alpha_s"), "links[1].alpha_s must be there"),
    (
        lambda content: content["links"][0].update(scope="rack"),
        'scope must be one of node, between_nodes, and is "rack"',
    ),
    (lambda content: content["links"][0].update(bytes_per_s="4e11"), 'bytes_per_s must be a number, and is "4e11"'),
    (lambda content: content["links"][0].update(bytes_per_s=0), "links[0].bytes_per_s must be more than 0, and is 0"),
    (lambda content: content["links"][0].update(alpha_s=-1.0), "links[0].alpha_s must be at least 0, and is -1.0"),
    (
        lambda content: content["links"][0].update(ranks=[0, 1.5]),
        "links[0].ranks[1] must be a whole number, and is 1.5",
    ),
    (lambda content: content["links"][0].update(ranks=3), "links[0].ranks must be a list, and is 3"),
    (lambda content: content.update(devices=[]), "devices must have an entry"),
    (
        lambda content: content["devices"][1].update(memory_bytes=True),
        "memory_bytes must be a whole number, and is true",
    ),
    (
        lambda content: content["devices"][0]["flops_per_s"].update(float32=float("inf")),
        "devices[0].flops_per_s.float32 must be more than 0, and is Infinity",
    ),
    (lambda content: content.update(versions=["torch"]), "versions must be an object"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_profile_is_refused_by_file_key_and_fix(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError) as caught:
        MachineProfile.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path} is not a profile of a machine: ")
    assert message in text
    assert f"`lightning-dist doctor --write {path}`" in text


@pytest.mark.parametrize("text", ["", "[1]", "{", "profile", "3"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ProfileError, match=r"x\.json is not a profile of a machine: .*doctor --write"):
        MachineProfile.read(tmp_path / "x.json")


def test_a_profile_tells_whether_it_is_of_another_machine() -> None:
    assert PROFILE.why_other_machine("b", "H100") is None
    assert PROFILE.why_other_machine("c", "H100") == (
        "The profile was made on the host a, b, and this process is on c."
    )
    assert PROFILE.why_other_machine("a", "A100") == "The profile was made on H100, and this process has A100."
