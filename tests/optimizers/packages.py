"""Print the names of the packages that ``make optimizers`` installs, from the extra of the same name."""

import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    print(*project["project"]["optional-dependencies"]["optimizers"])
