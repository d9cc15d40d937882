"""Store what was measured of a machine as a file of JSON, which planning may read later."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["DeviceFigures", "LinkFigures", "MachineProfile", "ProfileError"]

_FORMAT = 1
"""Version of the file's format."""


class ProfileError(ValueError):
    """Report a file that is no profile; the text names the file, the key and what to do."""


@dataclass(frozen=True)
class LinkFigures:
    """Hold the two figures of a linear model of a communication: ``seconds = alpha_s + bytes / bytes_per_s``.

    The bytes are those that the slowest rank must send at least (NVIDIA's nccl-tests, doc/PERFORMANCE.md, call the
    quotient the bus bandwidth). For a buffer of S bytes on n ranks these are ``2 (n - 1) / n * S`` for an all-reduce,
    ``(n - 1) / n * S`` for an all-gather, a reduce-scatter and an all-to-all, where S is the larger one of input and
    output, and S for a message from one rank to another.

    Args:
        scope: Where the ranks are: in one node, or each in another node.
        operation: The collective, or ``"point_to_point"`` for a message between two ranks.
        ranks: Global ranks that took part.
        alpha_s: Seconds that the operation takes for a few bytes.
        bytes_per_s: Bandwidth in bytes per second, positive.
    """

    scope: Literal["node", "between_nodes"]
    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]
    ranks: tuple[int, ...]
    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class DeviceFigures:
    """Hold what was measured of the device of one rank.

    Args:
        rank: Global rank that uses the device.
        host: Name of its host.
        name: Name of the device, such as ``"NVIDIA H100 80GB HBM3"``.
        memory_bytes: Size of its memory.
        free_bytes: Bytes of it that were free.
        memory_bytes_per_s: Bytes that a copy inside of its memory reads and writes per second.
        flops_per_s: Floating-point operations per second of matrix products, by the name of the dtype.
    """

    rank: int
    host: str
    name: str
    memory_bytes: int
    free_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class MachineProfile:
    """Hold what was measured of the devices of a run and of the links between them.

    Args:
        backend: Backend of the process group, such as ``"nccl"``; empty for a single process.
        num_nodes: Number of nodes.
        devices: Figures of the device of each rank, in the order of ranks.
        links: Figures of the links.
        versions: Versions on rank 0 by name.
        created: Time of the measurement in UTC, as in ISO 8601.
    """

    backend: str
    num_nodes: int
    devices: tuple[DeviceFigures, ...]
    links: tuple[LinkFigures, ...]
    versions: dict[str, str]
    created: str = field(default_factory=_now)

    def write(self, path: str | Path) -> None:
        """Write the profile to a file, which is replaced in one step.

        Raises:
            OSError: If the file cannot be written.
        """
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> MachineProfile:
        """Read the profile that :meth:`write` has written.

        Raises:
            OSError: If the file cannot be read.
            ProfileError: If the file is not such a profile; the text names the file, the key and what to do.
        """
        try:
            content = json.loads(Path(path).read_text())
            if not isinstance(content, dict):
                raise _Malformed("", "must be an object", content)
            number = content.pop("format", None)
            if number != _FORMAT:
                raise _Malformed("format", f"must be {_FORMAT}", number)
            profile: MachineProfile = _converted(cls, content, "")
            _check_numbers(profile)
        except (_Malformed, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"{path} is not a profile of a machine: {error}. Make a new one by `lightning-dist doctor"
                f" --write {path}`, on the nodes and devices on which the run shall be."
            ) from error
        return profile

    def why_other_machine(self, host: str, device_name: str) -> str | None:
        """Return a sentence that says why the profile was made on another machine; None: it was made on this one.

        Args:
            host: Name of this host.
            device_name: Name of this process's device, as in :class:`DeviceFigures`.
        """
        names = sorted({device.name for device in self.devices})
        if device_name not in names:
            return f"The profile was made on {', '.join(names)}, and this process has {device_name}."
        hosts = sorted({device.host for device in self.devices})
        if host not in hosts:
            return f"The profile was made on the host {', '.join(hosts)}, and this process is on {host}."
        return None


class _Malformed(Exception):  # noqa: N818 - It becomes a ProfileError.
    def __init__(self, key: str, expected: str, value: Any) -> None:
        shown = json.dumps(value)
        super().__init__(f"{key or 'the file'} {expected}, and is {shown[:80]}{'...' if len(shown) > 80 else ''}")


def _converted(kind: Any, value: Any, key: str) -> Any:
    """Return a value of JSON as an object of type ``kind``; ``key`` is its place in the file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _converted_object(kind, value, key)
    if origin is tuple:
        if not isinstance(value, list):
            raise _Malformed(key, "must be a list", value)
        return tuple(_converted(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Malformed(key, "must be an object", value)
        return {name: _converted(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise _Malformed(key, f"must be one of {', '.join(arguments)}", value)
        return value
    assert origin not in (Union, UnionType), kind
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _Malformed(key, f"must be {_NAMES[kind]}", value)
    return value


_NAMES = {str: "a text", int: "a whole number", float: "a number"}


def _converted_object(kind: Any, value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise _Malformed(key, "must be an object", value)
    hints, names = get_type_hints(kind), [item.name for item in fields(kind)]
    prefix = f"{key}." if key else ""
    for name in names:
        if name not in value:
            raise _Malformed(prefix + name, "must be there", None)
    for name in value:
        if name not in names:
            raise _Malformed(prefix + name, f"is none of the keys {', '.join(names)}", value[name])
    return kind(**{name: _converted(hints[name], value[name], prefix + name) for name in names})


def _check_numbers(profile: MachineProfile) -> None:
    """Refuse numbers with which no time can be computed."""
    numbers = {"num_nodes": float(profile.num_nodes)}
    for index, link in enumerate(profile.links):
        numbers[f"links[{index}].bytes_per_s"] = link.bytes_per_s
        if not 0 <= link.alpha_s < math.inf:
            raise _Malformed(f"links[{index}].alpha_s", "must be at least 0", link.alpha_s)
    for index, device in enumerate(profile.devices):
        numbers[f"devices[{index}].memory_bytes"] = float(device.memory_bytes)
        numbers[f"devices[{index}].memory_bytes_per_s"] = device.memory_bytes_per_s
        for name, number in device.flops_per_s.items():
            numbers[f"devices[{index}].flops_per_s.{name}"] = number
    if not profile.devices:
        raise _Malformed("devices", "must have an entry", [])
    for key, number in numbers.items():
        if not 0 < number < math.inf:
            raise _Malformed(key, "must be more than 0", number)
