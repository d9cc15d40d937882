"""Check the files by which others join the project: they parse, and their commands exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container import steps

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(workflow: Path) -> list[str]:
    """Return the commands of a workflow, once for each entry of its matrix."""
    found = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        entries: list[dict[str, Any]] = matrix.get("include") or [{"target": one} for one in matrix.get("target", [])]
        lines = [step["run"] for step in job["steps"] if "run" in step]
        assert job["runs-on"], "a job needs a machine"
        assert job["timeout-minutes"]
        for line in lines:
            for entry in entries:
                found.append(re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match, e=entry: str(e[match[1]]), line))
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(workflow: Path) -> None:
    made = [words[1] for line in commands(workflow) if (words := shlex.split(line))[0] == "make"]
    assert made
    assert set(made) <= TARGETS


def test_the_workflows_run_what_ci_runs_and_every_campaign() -> None:
    by_name = {path.stem: {line.removeprefix("make ") for line in commands(path)} for path in WORKFLOWS}
    assert {"lint", "quick", "test", "docs", "wheel"} <= by_name["ci"]
    elsewhere = {"bench", "clean", "container", "demo", "gpu", "help", "slow-links", "slurm"}
    assert by_name["nightly"] >= TARGETS - by_name["ci"] - elsewhere


def test_every_target_is_explained() -> None:
    explained = set(re.findall(r'@echo "make ([\w-]+) ', (ROOT / "Makefile").read_text()))
    assert explained == TARGETS - {"help", "clean", "lint"}


def test_hooks_before_a_commit_are_the_checks_of_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["entry"].removeprefix(".venv/bin/").replace(" --fix", " .") for hook in repository["hooks"]}
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    checks = {line.removeprefix("\t$(BIN)/") for line in lint.splitlines()[1:]}
    assert {entry.replace("ruff format", "ruff format --check .") for entry in entries} == checks


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_templates_of_issues_have_fields_with_names(name: str) -> None:
    template = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "labels", "body"} <= template.keys()
    ids = [field["id"] for field in template["body"]]
    assert len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in template["body"])


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_container_installs_with_the_pins() -> None:
    arguments, commands = steps((ROOT / "Dockerfile").read_text())
    installs = [command for command in commands if "pip install" in command]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in command for command in installs)
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
