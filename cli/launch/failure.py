"""Find the error of the rank that failed first in the output of all ranks (``python -m ...failure FOLDER``)."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.cli.errors import BAD_CONFIGURATION, TRAINING_FAILED

NUM_LINES = 30
"""Number of lines of a failed rank's output that are shown."""

_ERROR = re.compile(r"^(\[rank \d+\] )?(error: |Traceback \(most recent call last\))", re.MULTILINE)


USUAL = (TRAINING_FAILED, BAD_CONFIGURATION, -signal.SIGTERM)
"""The ends of a rank that another rank may have caused."""


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder of the output of all ranks of one start of the processes."""
    return folder / f"attempt_{attempt}"


@dataclass(frozen=True)
class Failure:
    """Describe how a rank ended.

    Args:
        rank: Its number among the ranks of all nodes.
        code: Its exit code; that of a rank which a signal has ended is the negative number of the signal.
    """

    rank: int
    code: int

    def how(self) -> str:
        """Return a clause that says how the rank ended."""
        if self.code >= 0:
            return f"rank {self.rank} exited with code {self.code}"
        try:
            name = f" ({signal.Signals(-self.code).name})"
        except ValueError:
            name = ""
        return f"rank {self.rank} was ended by signal {-self.code}{name}"


def first_error(attempt: Path, failures: list[Failure]) -> tuple[Failure, str]:
    """Return the rank whose failure has ended the others, and the end of the error that it has written, if any.

    A rank that has lost its connection to another one fails as well, with code 1. Therefore a rank that a signal has
    ended, or that has exited with another code, comes first, and then one that has written an error.

    Args:
        attempt: Folder of the output of the ranks.
        failures: Ranks that failed, in the order in which they did. At least one.
    """
    texts = {failure: _text(attempt / f"rank_{failure.rank}.err") for failure in failures}
    ended = [failure for failure in failures if failure.code not in USUAL]
    reported = [failure for failure in failures if _ERROR.search(texts[failure])]
    chosen = (*ended, *reported, *failures)[0]
    found = _ERROR.search(texts[chosen])
    return chosen, "\n".join(texts[chosen][found.start() :].splitlines()[-NUM_LINES:]) if found else ""


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def main(folder: Path) -> None:
    """Print the error that a rank has written first, from the files in which SLURM has kept the output of the ranks.

    Args:
        folder: Folder of one start of the job.
    """
    paths = sorted(folder.glob("rank_*.err"), key=lambda path: path.stat().st_mtime)
    failures = [Failure(int(path.stem.rpartition("_")[2]), TRAINING_FAILED) for path in paths]
    if failures:
        first, text = first_error(folder, failures)
        print(f"rank {first.rank}: {text}" if text else "No rank has written an error; srun says above how they ended.")
        print(f"The output of all ranks is in {folder}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
