"""Print one message from one process when the command fails, and return an exit code.

Every process of a run meets the same mistake at the same time. Rank 0 prints it; another rank waits a moment and
prints its error, with its rank in front, only if no other process of its machine has printed the same. Processes may
have no connection yet, or may have just lost it, so they coordinate through files in the temporary folder.
"""

import hashlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

TRAINING_FAILED = 1
BAD_CONFIGURATION = 2
SHOW_TRACEBACK = "LIGHTNING_DIST_TRACEBACK"
"""Environment variable that makes the command print the traceback of a mistake in the configuration."""

_GRACE_S = 2.0
_STALE_S = 60.0


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: ``"; did you mean 'x'?"``, or a full stop."""
    names = sorted(candidates)
    matches = get_close_matches(name, names, n=1, cutoff=0.6) or [long for long in names if long.startswith(name)]
    return f"; did you mean {matches[0]!r}?" if matches else "."


def users_line(error: BaseException) -> str:
    """Return the line of the user's own code that raised an error, as text to append to its message.

    Args:
        error: An error that was raised; the line is taken from its first cause.

    Returns:
        A line break and the place, or an empty string if only library code is in the traceback.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if _is_users(frame.filename)), None)
    if own is None:
        return ""
    place = f"{os.path.relpath(own.filename)}:{own.lineno}, in {own.name}"
    return f"\n  at {place} ({SHOW_TRACEBACK}=1 shows the traceback)"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    installed = "site-packages" in path.parts or not path.is_file()
    # The paths are not resolved, because plugins and cli are reached through symbolic links in the package.
    libraries = (Path(__file__).parents[1], Path(os.__file__).parent)
    return not installed and not any(path.is_relative_to(library) for library in libraries)


def print_error(text: str, prefix: str = "error: ") -> None:
    """Print a message to stderr in one write, so that the lines of several processes are not mixed."""
    sys.stderr.write(f"{prefix}{text.rstrip()}\n")
    sys.stderr.flush()


def report(text: str, code: int, prefix: str = "error: ", cause: str | None = None) -> int:
    """Print an error that other processes of the run may have too, and return the exit code.

    Args:
        text: The message to print to stderr.
        code: Exit code of this process. Processes that only see a lost connection exit with it as well.
        prefix: Text that is put before the message.
        cause: Text by which the errors of several processes are recognized as the same; None: the message.
    """
    rank, markers = _rank(), _markers()
    if markers is None:
        print_error(text, prefix)
        return code
    marker = markers.of(cause or text)
    if rank == 0:
        _claim(marker, code)
        print_error(text, prefix)
        return code
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        if _is_fresh(marker):
            return code
        time.sleep(0.05)
    if _claim(marker, code):
        print_error(text, f"[rank {rank}] {prefix}")
    return code


def reported_by_another() -> int | None:
    """Return the exit code of another process of this run that reports its failure within seconds, else None.

    A process that only sees a lost connection calls this, because its own error would be noise.
    """
    markers = _markers()
    if markers is None:
        return None
    # The other rank may itself be waiting for a third one to report.
    deadline = time.monotonic() + 2 * _GRACE_S
    while time.monotonic() < deadline:
        for marker in markers.fresh():
            return int(marker.read_text() or TRAINING_FAILED)
        time.sleep(0.05)
    return None


def _rank() -> int:
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0


class _Markers:
    """Manage the files by which this run's processes on this machine tell each other which errors were reported."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run

    def of(self, cause: str) -> Path:
        """Return the marker file of an error."""
        return self._folder / f"{self._run}-{_digest(cause)}"

    def fresh(self) -> list[Path]:
        """Return the recent marker files of this run."""
        return [marker for marker in self._folder.glob(f"{self._run}-*") if _is_fresh(marker)]


def _markers() -> _Markers | None:
    """Return the markers of this run, or None if the run has only one process."""
    if "MASTER_PORT" not in os.environ:
        return None
    run = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun, which is the parent of all ranks, uses the same port for all of its runs.
        run.append(str(os.getppid()))
    folder = Path(tempfile.gettempdir(), f"lightning-dist-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for marker in folder.iterdir():
        if not _is_fresh(marker):
            marker.unlink(missing_ok=True)
    return _Markers(folder, _digest("|".join(run)))


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:16]


def _claim(marker: Path, code: int) -> bool:
    """Create the marker of an error that this process reports; return False if another process has created it."""
    try:
        with marker.open("x") as file:
            file.write(str(code))
    except FileExistsError:
        return False
    return True


def _is_fresh(marker: Path) -> bool:
    """Return whether a marker is recent, and so belongs to this run and not to an earlier one on the same port."""
    try:
        return time.time() - marker.stat().st_mtime < _STALE_S
    except FileNotFoundError:
        return False
