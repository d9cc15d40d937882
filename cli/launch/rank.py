"""Run one rank of a launched job (``python -m lightning_dist.cli.launch.rank``).

Launchers start all ranks again after one has failed. Two ends of a run must not be followed by a new start: a mistake
in the configuration, which would be met again, and a stop on request, after which the user wants the devices back. The
rank that ends in this way notes it in the folder of the logs, and a rank that is started later ends in the same way,
before it has imported anything.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "LIGHTNING_DIST_LAUNCH_LOGS"
"""Environment variable with the folder of the logs of this launch."""

STOPPED = 75
BAD_CONFIGURATION = 2
FINAL = (BAD_CONFIGURATION, STOPPED)
"""The exit codes after which the job is not started again."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class End:
    """Describe how a launch has ended for good.

    Args:
        code: Its exit code, one of :data:`FINAL`.
        attempt: Number of the start of the processes that has ended so.
        rank: The rank that has noted it first.
    """

    code: int
    attempt: int
    rank: int


def end_of(folder: Path) -> End | None:
    """Return how a launch has ended for good; None: it has not.

    Args:
        folder: Folder of its logs.
    """
    try:
        return End(*map(int, (folder / "end").read_text().split()))
    except FileNotFoundError:
        return None


def main(words: list[str]) -> int:
    """Run a command of lightning-dist, or a script, and return its exit code.

    Args:
        words: The command or the script, and its arguments.
    """
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    if folder is not None and (end := end_of(folder)) is not None:
        return end.code
    code = _run(words)
    if folder is not None and code in FINAL:
        _note(folder, code)
    return code


def _note(folder: Path, code: int) -> None:
    environment = os.environ
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", environment.get("SLURM_RESTART_COUNT", "0"))
    rank = environment.get("RANK", environment.get("SLURM_PROCID", "0"))
    whole = folder / f"end.{rank}"
    whole.write_text(f"{code}\n{attempt}\n{rank}\n")
    with suppress(FileExistsError):
        os.link(whole, folder / "end")  # No other rank sees a part of it, and that of the first rank stays.
    whole.unlink()


def end_with_parent() -> None:
    """Let Linux end this process when its agent is killed, so that it does not keep its device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(words: list[str]) -> int:
    try:
        if not words[0].endswith(".py"):
            from lightning_dist.cli import main as command

            return command(words)
        sys.argv = words
        sys.path[0] = str(Path(words[0]).absolute().parent)
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    sys.exit(main(sys.argv[1:]))
