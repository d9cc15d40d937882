"""Test what runs the tutorials: it runs what a page shows, and fails where a command fails."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.tutorials import __main__ as harness
from tests.tutorials import notebooks
from tests.tutorials.blocks import commands
from tests.tutorials.shell import Failure, run_commands

PAGE = """# A page

```bash
name=two  # a comment

echo one \\
    $name
```

```text
exit 4
```

```shell
exit 5
```

1. A block in a list:

   ```bash
   for number in 3 4; do
       echo $number
   done
   cat <<END
   five
   END
   ```
"""


def run(folder: Path, text: str, limit_s: float = 20) -> tuple[Failure | None, list[str], str]:
    """Run a page, and return its failure, the lines of the report and the log."""
    page = folder / "page.md"
    page.write_text(text)
    lines: list[str] = []
    log = io.StringIO()
    failure = run_commands(commands(page), "page.md", folder, dict(os.environ), limit_s, log, lines.append)
    return failure, lines, log.getvalue()


def test_a_page_is_split_into_commands(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    found = commands(tmp_path / "page.md")
    assert [command.line for command in found] == [4, 6, 21, 24]
    assert found[3].text == "cat <<END\nfive\nEND"


def test_commands_run_in_one_shell_and_other_blocks_do_not(tmp_path: Path) -> None:
    failure, lines, log = run(tmp_path, PAGE)
    assert failure is None
    shown = [line for line in log.splitlines() if line in ("one two", "3", "4", "five")]
    assert shown == ["one two", "3", "4", "five", "five"]
    assert [line.split()[-1] for line in lines[1::2]] == ["0"] * 4


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("```bash\ntrue\necho before; exit 3\necho never\n```\n", 3, "exit code 3"),
        ("```bash\ntrue\n```\n\n```bash\nfalse | cat\n```\n", 6, "exit code 1"),
        ("```bash\nno-such-command --now\n```\n", 2, "exit code 127"),
    ],
)
def test_a_page_fails_where_a_command_fails(tmp_path: Path, text: str, line: int, reason: str) -> None:
    failure, _, log = run(tmp_path, text)
    assert failure is not None
    assert failure.place == f"page.md:{line}"
    assert reason.split()[-1] in failure.reason
    assert "never" not in log.replace("echo never", "")


def test_a_page_that_takes_too_long_is_stopped_with_its_jobs(tmp_path: Path) -> None:
    failure, _, _ = run(tmp_path, "```bash\nsleep 60 &\necho $! > job; echo shown; wait\n```\n", limit_s=0.3)
    assert failure is not None
    assert "more than its 0.3 s" in failure.reason
    assert "shown" in failure.output
    job = Path(f"/proc/{(tmp_path / 'job').read_text().strip()}/stat")
    for _ in range(100):  # It has been sent a signal, and ends as soon as it runs.
        if not job.exists() or job.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the job of the page still runs")


def test_a_block_that_ends_within_a_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("text\n```bash\necho 'one\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:3: the block ends within this command"):
        commands(tmp_path / "page.md")


def test_the_exit_code_and_the_end_say_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "PAGES", tmp_path)
    monkeypatch.setattr(harness, "NOTEBOOKS", tmp_path)
    (tmp_path / "good.md").write_text("```bash\ntest -f examples/gpt/model.py && command -v python\n```\n")
    (tmp_path / "bad.md").write_text("```bash\necho the last words; false\n```\n")
    (tmp_path / "empty.md").write_text("```text\nfalse\n```\n")
    assert harness.main(["good", f"--logs={tmp_path / 'logs'}"]) == 0
    assert str(Path(sys.executable).parent) in (tmp_path / "logs/good.log").read_text()
    assert harness.main([f"--logs={tmp_path / 'logs'}"]) == 1
    said = capsys.readouterr().err
    assert "bad.md:2: exit code 1\n  $ echo the last words; false\nthe last words" in said
    assert "empty.md: the page has no bash block" in said
    assert "good.md" not in said


def test_a_notebook_without_nbclient_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "missing_packages", lambda: ["nbclient"])
    failure = notebooks.run_notebook(tmp_path / "one.ipynb", "one.ipynb", tmp_path, {}, 1, io.StringIO())
    assert failure is not None
    assert "pip install nbclient" in failure.reason


def test_a_command_in_a_cell_raises_if_it_fails() -> None:
    source = notebooks.with_checked_commands("x = 1\n!fit -c one \\\n    -c two\n!ls\ny = 2")
    check = "assert not _exit_code, f'exit code {_exit_code}'"
    assert source == f"x = 1\n!fit -c one \\\n    -c two\n{check}\n!ls\n{check}\ny = 2"


PAGES = [path for name, path in harness.tutorials().items() if path.suffix == ".md"]
STORED = [path for path in harness.tutorials().values() if path.suffix == ".ipynb"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_page_runs_something_and_ends_with_a_check(page: Path) -> None:
    found = commands(page)
    assert found
    assert found[-1].text.startswith("python "), "the last command checks the claim of the page"
    assert "\n## Use the weights elsewhere\n" in page.read_text()


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert any(cell["cell_type"] == "code" for cell in cells)
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
