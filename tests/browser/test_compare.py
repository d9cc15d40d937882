"""A browser shows the page of ``compare``, and MLflow's own pages of runs that our logger has logged."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from lightning_dist.cli import main
from lightning_dist.cli.compare.colours import ON_DARK, ON_LIGHT
from lightning_dist.cli.mlflow_pages import runs_page
from lightning_dist.plugins.loggers import MLflowLogger
from tests.browser.chromium import EXECUTABLE, Chromium, Page

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is absent: apt-get install chromium")

_STRATEGIES = {"data_parallel": 1, "full_shard": 4, "hybrid_shard": 2}
_NUM_STEPS = 8
_SECONDS_TO_START = 100


class _Site:
    """Hold a store with a run of each strategy, and a server of MLflow that shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        for strategy, shard_size in _STRATEGIES.items():
            tags = {"run.strategy": f"{strategy} {shard_size}"}
            logger = MLflowLogger("gpt", run_name=f"{strategy} <run>", tracking_uri=self.uri, tags=tags)
            layout = {"dp_shard_size": shard_size}
            logger.log_hyperparams({"lr": 0.003, "dist": {"strategy": strategy, "world_size": 4, "layout": layout}})
            for step in range(_NUM_STEPS):
                metrics = {"train/loss": 4 / (1 + step) + shard_size, "perf/step_ms": 100 * shard_size + step}
                logger.log_metrics(metrics, step)
            logger.finalize("success")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        options = f"--backend-store-uri {self.uri} --artifacts-destination {folder}/mlruns --port {port} --workers 1"
        # The server starts seven more processes for jobs, unless it is told otherwise.
        self._server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options.split()],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=(folder / "server.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + _SECONDS_TO_START
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
            except OSError as error:
                log = (self.folder / "server.log").read_text()
                assert self._server.poll() is None and time.monotonic() < deadline, f"{error}\n{log}"
                time.sleep(0.1)
            else:
                return

    def close(self) -> None:
        """End the server."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> Iterator[_Site]:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    site = _Site(folder)
    yield site
    site.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


def test_the_page_draws_every_curve_over_steps_and_over_time(site: _Site, chromium: Chromium) -> None:
    path = site.folder / "compare.html"
    assert main(["compare", "--tracking-uri", site.uri, "--html", str(path)]) == 0
    page = chromium.open(path.as_uri(), height=1400)
    text = page.wait_for_text("train/loss", "dist.strategy", "hybrid_shard <run>", "3 runs")
    assert "lr" not in re.findall(r"^\S+", text, re.MULTILINE)  # All runs have the same.
    drawn = "[...document.querySelectorAll('path.curve')].map((path) => path.getAttribute('d'))"
    over_steps = page.evaluate(drawn)
    assert [curve.count("L") for curve in over_steps] == [_NUM_STEPS - 1] * 6  # There are 2 metrics of 3 runs.
    captions = page.evaluate("[...document.querySelectorAll('figcaption')].map((caption) => caption.innerText)")
    assert captions == ["train/loss", "perf/step_ms"]
    # A loss falls, so that each of its points is below the one before: y grows downwards.
    heights = [float(point.split()[1]) for point in over_steps[0].removeprefix("M").split("L")]
    assert heights == sorted(heights) and 10 < heights[0] < heights[-1] < 210
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    assert _colours(_picture(page, site)) == {(0, 0x72, 0xB2), (0xD5, 0x5E, 0), (0, 0x9E, 0x73)}

    page.evaluate("document.querySelector('[data-axis=seconds]').click()")
    over_time = page.evaluate(drawn)
    assert len(over_time) == 6 and all(a != b for a, b in zip(over_time, over_steps, strict=True))
    page.evaluate("document.querySelector('#legend button').click()")
    assert len(page.evaluate(drawn)) == 4


def test_the_page_follows_the_dark_scheme(site: _Site, chromium: Chromium) -> None:
    path = site.folder / "dark.html"
    assert main(["compare", "--tracking-uri", site.uri, "--html", str(path)]) == 0
    page = chromium.open(path.as_uri(), height=1400, is_dark=True)
    page.wait_for_text("perf/step_ms")
    picture = _picture(page, site)
    assert picture.mean() < 0.25
    assert _colours(picture) == {(0x4A, 0xA8, 0xE8), (0xFF, 0x8A, 0x3D), (0x2F, 0xC7, 0x9A)}


def test_mlflow_shows_the_runs_and_compares_them_under_the_printed_address(
    site: _Site, chromium: Chromium, capsys: pytest.CaptureFixture[str]
) -> None:
    site.wait()
    assert main(["compare", "--tracking-uri", site.address]) == 0
    printed = re.search(r"MLflow: (\S+compare-runs\S+)", capsys.readouterr().out)
    assert printed is not None and printed[1].startswith(site.address)
    names = [f"{strategy} <run>" for strategy in _STRATEGIES]
    comparison = chromium.open(printed[1], width=1600, height=2000)
    runs = chromium.open(f"{site.address}/{runs_page('1')}", width=1600)
    strategies = [f"{strategy} {shard_size}" for strategy, shard_size in _STRATEGIES.items()]
    runs.wait_for_text("gpt", *names, *strategies, "train/loss", "1.5", "2.5", "4.5")
    comparison.wait_for_text(*names, *_STRATEGIES, "dist.strategy", "dist.layout.dp_shard_size", "perf/step_ms")


def _picture(page: Page, site: _Site) -> Any:
    """Return the colours of the window's pixels, with the height and width as the first two dimensions."""
    path = site.folder / "window.png"
    page.screenshot(path)
    return matplotlib.image.imread(path)[..., :3]


def _colours(picture: Any) -> set[tuple[int, ...]]:
    """Return which colours of the first four columns, on light or dark paper, fill a visible part of a picture."""
    colours = [tuple(bytes.fromhex(colour[1:])) for colour in (*ON_LIGHT[:4], *ON_DARK[:4])]
    return {colour for colour in colours if (abs(picture * 255 - colour) < 4).all(-1).sum() > 50}
