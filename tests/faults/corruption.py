"""Damage random files of a checkpoint in random ways, and check that reading it notices all damage."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from lightning_dist.checkpoint import CheckpointError
from tests.faults.saves import found, save, with_ranks

__all__ = ["campaign"]

KINDS = ("flip", "truncate", "delete", "zero", "append")


def campaign(folder: Path, num_trials: int, num_ranks: int = 2, seed: int = 0) -> Counter[str]:
    """Damage a checkpoint in ``num_trials`` ways, one at a time, and try to read it.

    Returns:
        The number of trials for each kind of damage, all of which were noticed.

    Raises:
        AssertionError: If reading did not notice the damage.
    """
    folder.mkdir(parents=True, exist_ok=True)
    good, damaged = folder / "good.ckpt", folder / "damaged.ckpt"
    with_ranks(num_ranks, folder / "store", lambda rank: save(good, 1))
    files = sorted(path.name for path in good.iterdir())
    assert len(files) == 2 * num_ranks + 2, files
    generator = random.Random(seed)
    noticed: Counter[str] = Counter()
    for trial in range(num_trials):
        shutil.copytree(good, damaged)
        # Most of the bytes are tensors, so the files take turns: the manifest is damaged as often as the others.
        file = damaged / files[trial % len(files)]
        kind = generator.choices(KINDS, [8, 4, 1, 2, 1])[0]
        what = _damage(file, kind, generator)
        try:
            found(damaged)
        except CheckpointError as error:
            assert str(damaged) in str(error), error
            noticed[kind] += 1
        else:
            raise AssertionError(f"{what} went unnoticed")
        shutil.rmtree(damaged)
    return noticed


def _damage(file: Path, kind: str, generator: random.Random) -> str:
    content = bytearray(file.read_bytes())
    where = generator.randrange(len(content))
    if kind == "flip":
        content[where] ^= 1 << generator.randrange(8)
    elif kind == "truncate":
        del content[where:]
    elif kind == "zero":  # The file is as if one of its blocks had never been written.
        end = min(len(content), where + 4096)
        if not any(content[where:end]):
            content[where] = 1
        else:
            content[where:end] = bytes(end - where)
    elif kind == "append":
        content += generator.randbytes(1 + generator.randrange(64))
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{kind} at {where} of {file.name}"
