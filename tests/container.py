"""Build the image of the Dockerfile, or, where no builder is at hand, run its steps in a clean folder.

Run as ``python -m tests.container``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def steps(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the arguments of a Dockerfile with their defaults, and the commands that it runs."""
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return arguments, re.findall(r"^RUN (.*)$", text, re.MULTILINE)


def build() -> int | None:
    """Build the image with docker, and return its exit code; None: no builder is at hand."""
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return subprocess.run(["docker", "build", "--tag", "lightning-dist", str(ROOT)], check=False).returncode


def run_steps(folder: Path) -> int:
    """Run the steps in an empty folder, with a Python that has nothing installed, and return an exit code."""
    arguments, commands = steps((ROOT / "Dockerfile").read_text())
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "code" / name, follow_symlinks=False)
    venv.create(folder / "python", with_pip=True, symlinks=True)
    environment = {**os.environ, **arguments, "PATH": f"{folder / 'python' / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    for command in commands:
        print(f"+ {command}", flush=True)
        code = subprocess.run(["sh", "-c", command], cwd=folder / "code", env=environment, check=False).returncode
        if code:
            return code
    return 0


def main() -> int:
    """Build the image or run the steps, and return an exit code."""
    code = build()
    if code is not None:
        return code
    print("There is no builder of images: the steps run in a folder.", flush=True)
    with tempfile.TemporaryDirectory(prefix="container-") as name:
        return run_steps(Path(name))


if __name__ == "__main__":
    sys.exit(main())
