"""Simulate power loss after each operation of a save: everything that was not flushed to the disk is lost.

The save is recorded on a model of the worst file system that POSIX allows. There, the content of a file is on the disk
only after an fsync of the file. The creation, the renaming and the removal of an entry of a folder are on the disk only
after an fsync of the folder. Killing the process cannot show such losses, because the system's cache outlives it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.operations import intercepted
from tests.faults.saves import found, save

__all__ = ["campaign"]


@dataclass
class Node:
    """Describe a file or a folder: its current state, and its durable state, which is on the disk."""

    is_folder: bool
    data: bytes = b""
    durable_data: bytes = b""
    children: dict[str, Node] = field(default_factory=dict)
    durable_children: dict[str, Node] = field(default_factory=dict)

    def flush(self) -> None:
        """Make the current state durable, as fsync does: of a folder its entries, but not their content."""
        self.durable_data, self.durable_children = self.data, dict(self.children)


class Disk:
    """Model the files below ``root`` by applying every operation on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = self._scan(root)
        self._open: dict[int, Node] = {}

    def _scan(self, path: Path) -> Node:
        if path.is_dir():
            node = Node(True, children={child.name: self._scan(child) for child in path.iterdir()})
        else:
            node = Node(False, path.read_bytes())
        node.flush()
        return node

    def _node(self, path: Any) -> Node:
        node = self.tree
        for part in Path(os.fspath(path)).relative_to(self.root).parts:
            node = node.children[part]
        return node

    def _slot(self, path: Any) -> tuple[dict[str, Node], str]:
        path = Path(os.fspath(path))
        return self._node(path.parent).children, path.name

    def apply(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Apply an operation that succeeded to the model."""
        if name == "open":
            path, flags = args[0], args[1]
            if not str(os.fspath(path)).startswith(f"{self.root}"):
                return  # Paths relative to a folder's descriptor, or elsewhere, are opened only to remove or read.
            children, leaf = self._slot(path) if Path(path) != self.root else ({}, "")
            if flags & os.O_CREAT and leaf not in children:
                children[leaf] = Node(False)
            self._open[result] = self._node(path)
        elif name == "write" and args[0] in self._open:
            self._open[args[0]].data += bytes(args[1][:result])
        elif name == "fsync" and args[0] in self._open:
            self._open[args[0]].flush()
        elif name == "close":
            self._open.pop(args[0], None)
        elif name == "mkdir":
            children, leaf = self._slot(args[0])
            children[leaf] = Node(True)
        elif name in ("rename", "replace"):
            (source, old), (target, new) = self._slot(args[0]), self._slot(args[1])
            target[new] = source.pop(old)
        elif name == "renameat2":
            (source, old), (target, new) = self._slot(args[0]), self._slot(args[1])
            if new in target:
                source[old], target[new] = target[new], source[old]
            else:
                target[new] = source.pop(old)


def campaign(folder: Path, overwrites: bool) -> Counter[str]:
    """Record a save, and read the checkpoint that would be on the disk after each of its operations.

    Returns:
        Counts of how often the previous checkpoint was found (or none, if there was none), and how often the new one.

    Raises:
        AssertionError: If anything else was found, or the new checkpoint was not on the disk when the save returned.
    """
    root, after = folder / "disk", folder / "after"
    root.mkdir(parents=True)
    if overwrites:
        save(root / "runs" / "run.ckpt", 1)
    disk = Disk(root)
    outcomes: Counter[str] = Counter()
    numbers: list[int | None] = []

    def take_snapshot(name: str, args: tuple[Any, ...], result: Any) -> None:
        disk.apply(name, args, result)
        snapshots.append(_durable(disk.tree))

    snapshots: list[Any] = []
    with intercepted(lambda name, args: None, take_snapshot):
        save(root / "runs" / "run.ckpt", 2)
    for snapshot in snapshots:
        shutil.rmtree(after, ignore_errors=True)
        _make(after, snapshot)
        number = found(after / "runs" / "run.ckpt")
        assert number in ((1, 2) if overwrites else (None, 2)), f"found {number}"
        numbers.append(number)
        outcomes["new" if number == 2 else "previous"] += 1
    assert numbers == sorted(numbers, key=lambda number: number == 2), "the new checkpoint was there, and then was not"
    assert numbers[-1] == 2, "the save returned before it was on the disk"
    return outcomes


def _durable(node: Node) -> Any:
    if not node.is_folder:
        return node.durable_data
    return {name: _durable(child) for name, child in node.durable_children.items()}


def _make(path: Path, snapshot: Any) -> None:
    if isinstance(snapshot, bytes):
        path.write_bytes(snapshot)
        return
    path.mkdir()
    for name, child in snapshot.items():
        _make(path / name, child)
