"""Build the documentation as pages."""

from __future__ import annotations

from pathlib import Path

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
