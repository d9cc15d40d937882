"""Run the fault campaigns: kill saves at every operation, damage checkpoints, simulate power loss, and kill ranks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from tests.faults import corruption, kill, power, soak

Campaign = Callable[[Path], Counter[str]]


def campaigns(quick: bool) -> dict[str, Campaign]:
    """Return the campaigns by name; quick ones try a sample of the same points."""
    return {
        "kill, new, 1 rank": partial(kill.campaign, num_ranks=1, overwrites=False, stride=5 if quick else 1),
        "kill, overwriting, 1 rank": partial(kill.campaign, num_ranks=1, overwrites=True, stride=5 if quick else 1),
        "kill, overwriting, 2 ranks": partial(kill.campaign, num_ranks=2, overwrites=True, stride=10 if quick else 1),
        "kill, overwriting, 4 ranks": partial(kill.campaign, num_ranks=4, overwrites=True, stride=40 if quick else 1),
        "damage": partial(corruption.campaign, num_trials=60 if quick else 1000),
        "power loss, new": partial(power.campaign, overwrites=False),
        "power loss, overwriting": partial(power.campaign, overwrites=True),
        "soak": partial(soak.campaign, num_kills=1 if quick else 50, is_forked=quick),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaigns, print the result of each, and return 1 if one of them found a defect, otherwise 0."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="try a sample of the points, which takes a minute")
    options = parser.parse_args(argv)
    failed = 0
    for name, campaign in campaigns(options.quick).items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = campaign(Path(folder) / "campaign")
                result = ", ".join(f"{n} {kind}" for kind, n in found.items())
            except AssertionError as error:
                failed += 1
                result = f"FAILED: {error}"
        print(f"{name:<28} {result}  ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
