"""Check the project on this machine's GPUs, and write a page about it.

Results are kept in gpu-results/<date>-<device>.json, and a later call continues with the checks that have not run yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

__all__ = ["main"]

LOG_NAME = "ranks.log"
"""Name of the file beside the results to which ranks print."""

NEEDED = ("torch", "lightning", "torchmetrics")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks.

    Returns:
        0 if no check failed, 1 if one did, 2 if there is no GPU or an argument is wrong.
    """
    options = _parse(argv)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return _refuse(f"{', '.join(missing)} cannot be imported by {sys.executable}: use make gpu PYTHON=<a python>")

    if options.device == "cuda" and not options.list and (why := _no_gpu()):
        return _refuse(why)

    from tests.gpu.checks import CHECKS
    from tests.gpu.kit import run_checks
    from tests.gpu.machine import OPTIONAL_PACKAGES, describe
    from tests.gpu.ranks import Processes
    from tests.gpu.results import FAILED, Results

    pattern = options.only if set("*?[") & set(options.only) else f"*{options.only}*"
    checks = [check for check in CHECKS if fnmatchcase(check.name, pattern)]
    if not checks:
        return _refuse(f"--only {options.only}: no check has such a name; --list shows all names")
    if options.list:
        for check in checks:
            print(f"{check.name:<70}{check.section}")
        return 0
    processes = Processes(options.device, options.out / LOG_NAME)
    try:
        machine = processes.pool(False).run(describe, 1, options.device)[0]
        results = Results(options.out, machine, begins=options.again == "all" and options.only == "*")
        print(f"{len(machine.devices)} x {machine.name}" if machine.devices else f"no GPU ({machine.kind})")
        print(", ".join(f"{name} {version}" for name, version in machine.versions.items()))
        for name in machine.missing:
            print(f"not installed: {name} (left out: {OPTIONAL_PACKAGES[name]})")
        print(f"the page is {results.page}\n", flush=True)
        late = run_checks(checks, machine, processes, results, 60 * options.minutes, options.again, CHECKS)
    finally:
        processes.close()
    if late:
        print(f"\nThe time was used up: {len(late)} checks were not started. The same command continues with them.")
    print(f"\nThe page is {results.page}; what ranks have printed is in {options.out / LOG_NAME}.")
    return int(any(row["state"] in FAILED for row in results.checks.values()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which no check is started (default: 8)")
    parser.add_argument("--list", action="store_true", help="list the checks, in their order")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run checks whose names contain or match this")
    parser.add_argument(
        "--again", metavar="NAME", help="repeat a check, those that match a pattern, `failed` or `all`, and no others"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="folder of the results")
    # Other devices show that the kit itself works, on a machine without a GPU.
    parser.add_argument("--device", choices=["cuda", "simulated", "cpu"], default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _no_gpu() -> str:
    """Return why no GPU can be used; empty if one can."""
    import torch

    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda or torch.version.hip
    return "this machine has no GPU that torch can use" + ("" if built else f" (torch {torch.__version__} has no CUDA)")


def _refuse(why: str) -> int:
    print(f"python -m tests.gpu: {why}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
