"""Run the commands of a page in one shell, one after the other."""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.tutorials.blocks import Command

__all__ = ["Failure", "run_commands"]

NUM_LAST_LINES = 25
"""Number of lines of a failed command's output that are shown."""


@dataclass(frozen=True)
class Failure:
    """Hold what is known of a command that failed.

    Args:
        place: Page and line of the command.
        command: Text of the command.
        reason: How it ended.
        output: Last lines of its output.
    """

    place: str
    command: str
    reason: str
    output: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}\n  $ {self.command}\n{self.output}"


@dataclass
class _Run:
    """Hold the command that runs, what it has printed, and when it began."""

    command: Command
    began: float
    output: str = ""


def run_commands(
    commands: Sequence[Command],
    page: str,
    folder: Path,
    environment: dict[str, str],
    limit_s: float,
    log: TextIO,
    report: Callable[[str], None] = print,
) -> Failure | None:
    """Run ``commands`` in one shell, so that variables and background jobs last, until one of them fails.

    Args:
        commands: Commands of the page, in their order.
        page: Path of the page, for the report.
        folder: Working directory.
        environment: All environment variables of the shell.
        limit_s: Seconds that all commands may take together.
        log: File that gets each command and its output.
        report: Function that is given a line on each command when it begins and when it has ended.

    Returns:
        The command that failed, or None if all commands ended with code 0.
    """
    token = secrets.token_hex(8)
    shell = subprocess.Popen(
        ["bash", "-c", _script(commands, token)], cwd=folder, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return _follow(shell, commands, page, token, time.monotonic() + limit_s, limit_s, log, report)
    finally:
        with suppress(ProcessLookupError):  # Jobs in the background may still run.
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _script(commands: Sequence[Command], token: str) -> str:
    """Return a script that marks the end of each command in the output, and stops after one that fails."""
    lines = [
        f"_mark() {{ local code=$?; echo; echo {token} $1 $code; [ $code = 0 ] || exit $code; }}",
        "set -o pipefail",
    ]
    for index, command in enumerate(commands):
        # With eval, an error of syntax is one of this command alone.
        lines += [f"eval {shlex.quote(command.text)}", f"_mark {index}"]
    return "\n".join(lines)


def _follow(
    shell: subprocess.Popen[bytes],
    commands: Sequence[Command],
    page: str,
    token: str,
    deadline: float,
    limit_s: float,
    log: TextIO,
    report: Callable[[str], None],
) -> Failure | None:
    """Read the shell's output up to the end of its last command, and report on each command."""
    assert shell.stdout is not None
    remaining = list(commands)
    run = _begin(remaining.pop(0), page, log, report)
    text = ""
    with selectors.DefaultSelector() as selector:
        selector.register(shell.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return _failure(run, page, f"the page has taken more than its {limit_s:g} s", log)
            read = os.read(shell.stdout.fileno(), 65536)
            text += read.decode(errors="replace")
            *lines, text = text.split("\n")
            for line in lines if read else [*lines, text]:
                if not line.startswith(token):
                    run.output += line + "\n"
                    continue
                code = int(line.split()[2])
                report(f"  {time.monotonic() - run.began:6.1f} s  code {code}")
                if code:
                    return _failure(run, page, f"exit code {code}", log)
                log.write(run.output)
                if not remaining:
                    return None
                run = _begin(remaining.pop(0), page, log, report)
            if not read:
                return _failure(run, page, f"the shell has ended with code {shell.wait()}", log)


def _begin(command: Command, page: str, log: TextIO, report: Callable[[str], None]) -> _Run:
    report(f"{page}:{command.line}: {command.text}")
    log.write(f"$ {command.text}\n")
    log.flush()
    return _Run(command, time.monotonic())


def _failure(run: _Run, page: str, reason: str, log: TextIO) -> Failure:
    log.write(run.output)
    last = "\n".join(run.output.rstrip().splitlines()[-NUM_LAST_LINES:])
    return Failure(f"{page}:{run.command.line}", run.command.text, reason, last)
