"""Build the documentation as pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pictures import FOLDER, LAYOUTS, layout_picture
from tests.launched import ROOT
from tests.pool import WorkerPool


def build(folder: str) -> int:
    from sphinx.cmd.build import main

    return int(main(["-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), folder]))


def test_the_pages_are_built_without_a_warning(own_pool: WorkerPool, tmp_path: Path) -> None:
    assert own_pool.run(build, 1, str(tmp_path), timeout_s=250) == [0]
    index = (tmp_path / "index.html").read_text()
    assert 'href="strategies/full_shard.html"' in index
    reference = (tmp_path / "api/strategies.html").read_text()
    assert "zero_stage" in reference
    assert ":class:" not in reference


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_pictures_of_layouts_show_what_the_strategies_choose(name: str) -> None:
    stored = (FOLDER / f"layout_{name}.svg").read_text()
    assert stored == layout_picture(name), "run python -m tests.docs.pictures layouts"
