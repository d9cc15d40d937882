"""The command ``compare`` shows what differs between the runs of an MLflow store."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from mlflow import MlflowClient

from lightning_dist.cli import main
from lightning_dist.cli.compare.curves import thinned
from lightning_dist.cli.compare.measures import is_compared, measures_of
from lightning_dist.cli.compare.reading import Series
from tests.stored_runs import log_run

_SHARED = {"dist.world_size": 4, "trainer.max_steps": 30, "model.init_args.lr": 0.1, "lr": 0.1}


def _params(strategy: str, shard_size: int, seed: int, **others: Any) -> dict[str, Any]:
    own = {
        "dist.strategy": strategy,
        "dist.layout.dp_shard_size": shard_size,
        "trainer.strategy.class_path": f"lightning_dist.{strategy}",
        "trainer.strategy.init_args.compression": "None",
        "trainer.strategy.init_args.dp_shard_size": "None",
        "trainer.logger.init_args.run_name": f"{strategy}{seed}",
        "seed_everything": seed,
    }
    return _SHARED | own | others


def _ddp() -> dict[str, Any]:
    """Return the parameters of a strategy of Lightning, which is given by its name and has no layout."""
    return _SHARED | {"dist.strategy": "DDPStrategy", "trainer.strategy": "ddp", "seed_everything": 1}


class _Store:
    """Hold the addresses of the store that all tests read, and the IDs of its runs."""

    def __init__(self, database: Path) -> None:
        self.uri = f"sqlite:///{database}"
        client = MlflowClient(self.uri)
        versions = {"version.torch": "2.13.0", "git.commit": "a" * 40}
        self.ddp = log_run(
            client,
            "gpt",
            "ddp",
            _ddp(),
            {
                "train/loss": [(10, 2, 4.0), (20, 4, 3.0), (30, 6, 3.2)],
                "val/loss": [(15, 3, 3.5), (30, 6, 3.004)],
                "perf/step_ms": [(10, 2, 100), (20, 4, 130), (30, 6, 110)],
                "perf/tokens_per_s": [(10, 2, 1000), (20, 4, 3000), (30, 6, 2000)],
                "perf/samples_per_s": [(10, 2, 10), (20, 4, 30), (30, 6, 20)],
                "memory/peak_mib": [(10, 2, 500), (30, 6, 800)],
                "memory/peak_mib_rank0": [(10, 2, 500), (30, 6, 800)],
                "epoch": [(10, 2, 0), (30, 6, 0)],
            },
            tags=versions | {"lightning_dist.training": "0123"},
        )
        self.full = log_run(
            client,
            "gpt",
            "full_shard",
            _params("full_shard", 4, 1),
            {
                # The run was resumed behind step 10, and has logged step 20 again.
                "train/loss": [(10, 1, 4.0), (20, 2, 2.9), (20, 8, 3.1), (30, 9, 2.0)],
                "val/loss": [(15, 4, 3.1), (30, 9, 2.5)],
                "perf/step_ms": [(10, 1, 200), (20, 8, 220), (30, 9, 300)],
                "perf/tokens_per_s": [(10, 1, 500), (20, 8, 1000), (30, 9, 900)],
                "perf/samples_per_s": [(10, 1, 5), (20, 8, 10), (30, 9, 9)],
                "memory/peak_mib": [(10, 1, 400)],
                "comm/dp_shard_mib_per_step": [(10, 1, 12.0), (20, 8, 14.0)],
                "checkpoint/stall_ms": [(15, 4, 30), (30, 9, 50)],
                "perf/peak_tflops": [(10, 1, 0.5), (30, 9, 0.5)],
                "perf/mfu": [(10, 1, 0.25), (30, 9, 0.35)],
            },
            started=100,
            tags=versions,
        )
        self.hybrids = [
            log_run(
                client,
                "gpt",
                f"hybrid_shard{seed}",
                _params("hybrid_shard", 2, seed),
                {"val/loss": [(15, 2, 3.4), (30, 4, loss)], "perf/step_ms": [(10, 1, step_ms), (30, 4, step_ms)]},
                started=200 + seed,
                tags=versions | {"git.commit": "b" * 40},
            )
            for seed, loss, step_ms in ((1, 2.6, 80), (2, 2.8, 120))
        ]
        log_run(client, "gpt", "twin", {}, {}, status="FAILED", started=300)
        log_run(client, "gpt", "twin", {}, {}, status="KILLED", started=301)
        evaluated = _params("full_shard", 4, 1) | {"dist.task": "validate"}
        log_run(client, "gpt", "full_shard 4 validate", evaluated, {"val/loss": [(0, 1, 2.5)]}, started=302)
        self.cnn = log_run(
            client,
            "vision",
            "cnn",
            {"dist.strategy": "ddp"},
            {"val/accuracy": [(10, 1, 0.5), (20, 2, 0.9), (30, 3, 0.8)], "bad/loss": [(10, 1, float("nan"))]},
            status="RUNNING",
        )


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> _Store:
    database = tmp_path_factory.mktemp("compare") / "mlflow.db"
    shutil.copy(empty_mlflow_database, database)
    return _Store(database)


@pytest.fixture
def store(read_only: _Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Store]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", read_only.uri)
    monkeypatch.setenv("COLUMNS", "180")
    monkeypatch.chdir(tmp_path)
    yield read_only
    assert {path.name for path in tmp_path.iterdir()} <= {"compare.html", "compare.png", "text.db"}


Capture = pytest.CaptureFixture[str]


def _document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["compare", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def _values(document: dict[str, Any]) -> dict[str, list[float | None]]:
    return {" ".join(filter(None, (row["metric"], row["statistic"]))): row["values"] for row in document["rows"]}


def _lines(text: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by the names of the rows; the end of a cell is three spaces, or its ratio."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {words[0]: words[1:] for words in rows}


def test_each_number_is_what_its_row_says_of_the_history(store: _Store, capsys: Capture) -> None:
    document = _document(capsys, "ddp", "full_shard")
    assert _values(document) == {
        # 3.004 is the lowest validation loss of ddp, and full_shard reaches less; three digits are enough.
        "seconds to val/loss <= 3.01": [pytest.approx(4), pytest.approx(8)],
        "steps to val/loss <= 3.01": [30, 30],
        "val/loss lowest": [3.004, 2.5],
        "val/loss last": [3.004, 2.5],
        "train/loss lowest": [3.0, 2.0],
        "train/loss last": [3.2, 2.0],
        "perf/tokens_per_s median": [2000, 900],
        "perf/step_ms median": [110, 220],
        "perf/mfu median": [None, pytest.approx(0.3)],
        "memory/peak_mib highest": [800, 400],
        "comm/dp_shard_mib_per_step median": [None, 13.0],
        "checkpoint/stall_ms mean": [None, 40],
    }
    step = next(row for row in document["rows"] if row["metric"] == "perf/step_ms")
    assert (step["ratios"], step["is_best"], step["better"]) == ([None, 2.0], [True, False], "lower")
    tokens = next(row for row in document["rows"] if row["metric"] == "perf/tokens_per_s")
    assert (tokens["ratios"], tokens["is_best"]) == ([None, 0.45], [True, False])
    assert [run["id"] for column in document["columns"] for run in column["runs"]] == [store.ddp, store.full]
    assert document["columns"][1]["runs"][0]["duration_s"] == 9


def test_only_parameters_that_differ_are_shown_and_each_once(store: _Store, capsys: Capture) -> None:
    document = _document(capsys, "ddp", "full_shard", "hybrid_shard1")
    assert document["parameters"] == {
        "dist.strategy": ["DDPStrategy", "full_shard", "hybrid_shard"],
        "dist.layout.dp_shard_size": ["-", "4", "2"],
        "trainer.strategy": ["ddp", "lightning_dist.full_shard", "lightning_dist.hybrid_shard"],
        "git.commit": ["a" * 40, "a" * 40, "b" * 40],
    }
    assert _document(capsys, "hybrid_shard1", "hybrid_shard2")["parameters"] == {"seed_everything": ["1", "2"]}


def test_the_table_marks_the_best_and_shows_ratios_and_missing_values(store: _Store, capsys: Capture) -> None:
    assert main(["compare", "ddp", "full_shard"]) == 0
    output = capsys.readouterr().out
    lines = _lines(output)
    assert lines["ddp"] == ["full_shard"]
    assert lines[store.ddp[:8]] == [store.full[:8]]
    assert lines["dist.strategy"] == ["DDPStrategy", "full_shard"]
    assert "dist.world_size" not in lines
    assert lines["perf/step_ms"] == ["(median)", "110", "*", "220", "2.00x"]
    assert lines["perf/tokens_per_s"] == ["(median)", "2,000", "*", "900", "0.45x"]
    assert lines["perf/mfu"] == ["(median)", "-", "30%"]
    assert lines["memory/peak_mib"] == ["(highest)", "800", "400", "*", "0.50x"]
    runs = f"%5B%22{store.ddp}%22%2C%22{store.full}%22%5D"
    experiment = MlflowClient(store.uri).get_run(store.ddp).info.experiment_id
    assert f"http://127.0.0.1:5000/#/compare-runs?runs={runs}&experiments=%5B%22{experiment}%22%5D\n" in output
    assert f"mlflow server --backend-store-uri {store.uri}\n" in output
    assert "--html compare.html" in output


def test_runs_of_a_group_are_shown_by_mean_and_standard_deviation(store: _Store, capsys: Capture) -> None:
    document = _document(capsys, "--experiment", "gpt", "--by", "strategy", "--baseline", "full_shard")
    assert document["grouped_by"] == "dist.strategy"
    assert [column["label"] for column in document["columns"]] == ["full_shard", "DDPStrategy", "hybrid_shard"]
    step = next(row for row in document["rows"] if row["metric"] == "perf/step_ms")
    assert step["values"] == [220, 110, 100]
    assert step["spreads"] == [None, None, pytest.approx(28.2843, rel=1e-5)]
    assert step["ratios"] == [None, 0.5, pytest.approx(100 / 220)]
    assert step["is_best"] == [False, False, True]
    assert document["parameters"]["seed_everything"] == ["1", "1", "1, 2"]
    assert main(["compare", "--experiment", "gpt", "--by", "dp_shard_size"]) == 0
    captured = capsys.readouterr()
    lines = _lines(captured.out)
    assert lines["dist.layout.dp_shard_size"] == ["-", "4", "2"]
    assert lines["perf/step_ms"] == ["(median)", "110", "220", "2.00x", "100", "±", "28", "*", "0.91x"]
    assert (
        captured.err
        == "3 runs that failed, were stopped or did not train are left out; name runs to compare them too.\n"
    )


@pytest.mark.parametrize(
    ("target", "seconds", "steps"),
    [
        ("val/loss=3.0", [None, 8], [None, 30]),
        ("train/loss=3.5", [2, 7], [20, 20]),  # At step 20, the resumed run has logged 3.1 last, at 8 s.
        ("train/loss<=3.0", [2, 8], [20, 30]),
        ("perf/tokens_per_s=900", [0, 7], [10, 20]),
        ("perf/step_ms>=210", [None, 7], [None, 20]),
    ],
)
def test_the_time_to_a_target_is_that_of_the_first_value_which_reaches_it(
    store: _Store, capsys: Capture, target: str, seconds: list[float | None], steps: list[int | None]
) -> None:
    document = _document(capsys, "ddp", "full_shard", "--target", target)
    rows = document["rows"]
    assert (rows[0]["values"], rows[1]["values"]) == (pytest.approx(seconds), steps)
    assert rows[0]["metric"].startswith("seconds to ")


def test_a_run_that_misses_the_target_is_not_the_best(store: _Store, capsys: Capture) -> None:
    assert main(["compare", "full_shard", "hybrid_shard1", "hybrid_shard2", "--target", "val/loss=2.7"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("seconds to"))
    assert line.split()[5:] == ["8", "3", "*", "0.38x", "not", "reached"]
    arguments = ["full_shard", "hybrid_shard1", "hybrid_shard2", "--by", "strategy", "--target", "val/loss=2.7"]
    assert main(["compare", *arguments]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("seconds to"))
    assert line.split()[5:] == ["8", "3", "(1", "of", "2)", "0.38x"]


def test_metrics_of_the_users_own_are_shown_without_a_judgement(store: _Store, capsys: Capture) -> None:
    document = _document(capsys, "cnn", "ddp", "--target", "val/accuracy>=0.85")
    assert document["parameters"]["experiment"] == ["vision", "gpt"]
    assert _values(document)["seconds to val/accuracy >= 0.85"] == [1, None]
    accuracy = next(row for row in document["rows"] if row["metric"] == "val/accuracy")
    assert (accuracy["statistic"], accuracy["better"], accuracy["values"]) == ("last", None, [0.8, None])
    assert _values(document)["bad/loss lowest"] == [None, None]
    assert not is_compared("memory/peak_mib_rank0") and not is_compared("epoch") and not is_compared("system/cpu")
    assert measures_of("noise/scale") and is_compared("noise/scale_low") and not measures_of("noise/scale_low")
    assert is_compared("comm/tp_mib_per_step") and is_compared("lr-AdamW") and is_compared("val/epoch_accuracy")


def test_a_run_is_found_by_id_by_the_start_of_its_id_and_by_name(store: _Store, capsys: Capture) -> None:
    length = next(n for n in range(1, 33) if sum(i.startswith(store.ddp[:n]) for i in _ids(store)) == 1)
    for words in ([store.ddp], [store.ddp[:length]], ["ddp"], ["ddp", store.ddp], ["ddp", "--experiment", "gpt"]):
        document = _document(capsys, *words)
        assert [run["id"] for column in document["columns"] for run in column["runs"]] == [store.ddp], words
        assert document["parameters"] == {}


def _ids(store: _Store) -> list[str]:
    client = MlflowClient(store.uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return [run.info.run_id for run in client.search_runs(ids)]


def test_columns_that_do_not_fit_follow_below_with_the_first_one_repeated(
    store: _Store, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["compare", "--experiment", "gpt"]) == 0
    output = capsys.readouterr().out
    heads = [line.split() for line in output.splitlines() if line.split()[:1] == ["ddp"]]
    assert len(heads) > 1
    assert [name for head in heads for name in head[1:]] == ["full_shard", "hybrid_shard1", "hybrid_shard2"]
    assert max(map(len, output.split("MLflow:")[0].splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nonsense"], ["RUN='nonsense'", "no such run.", "hybrid_shard2"]),
        (["hybrid_shard"], ["RUN='hybrid_shard'", "did you mean 'hybrid_shard"]),
        (["0123456789abcdef"], ["RUN='0123456789abcdef'", "no such run"]),
        (["ddp", "--experiment", "vision"], ["RUN='ddp'", "experiment 'vision'", "cnn"]),
        (["twin"], ["RUN='twin' is ambiguous", "start of the ID", "FAILED", "KILLED"]),
        (["a'b\"c"], ["both kinds of quotes", "give the run's ID"]),
        (["a'b"], ['RUN="a\'b"', "no such run"]),
        ([], ["several experiments", "'gpt'", "'vision'", "--experiment"]),
        (["--experiment", "gtp"], ["--experiment='gtp'", "did you mean 'gpt'?"]),
        (["--experiment", "Default"], ["'Default'", "no run that has finished or is running"]),
        (["ddp", "--target", "val/loss"], ["--target='val/loss'", "METRIC=VALUE", "val/loss=1.85"]),
        (["ddp", "--target", "val/loss=low"], ["--target='val/loss=low'", "'low' is no number"]),
        (["ddp", "--target", "val/los=1"], ["none of the runs has the metric 'val/los'", "did you mean 'val/loss'?"]),
        (["ddp", "--target", "val/loss=1"], ["reaches val/loss <= 1", "nearest is 3.004, of ddp", "Choose"]),
        (["cnn", "--target", "val/accuracy=0.9"], ["'val/accuracy>=0.9'", "in quotes"]),
        (["ddp", "--by", "strategi"], ["--by='strategi'", "did you mean 'strategy'?"]),
        (["full_shard", "--by", "init"], ["--by='init'", "none of the runs has such a parameter"]),
        (["ddp", "--baseline", "full_shard"], ["--baseline='full_shard'", "Give one of ddp"]),
        (["ddp", "--html", "nowhere/a.html"], ["--html='nowhere/a.html'", "no folder"]),
        (["cnn", "--png", "a.png", "--experiment", "gpt"], ["RUN='cnn'"]),
        (["--nonsense"], ["--nonsense"]),
        (["ddp", "--tracking-uri", "sqlite:///other.db"], ["='sqlite:///other.db'", "no file", "mlflow.db"]),
        (["ddp", "--tracking-uri", "sqlite:///text.db"], ["--tracking-uri='sqlite:///text.db'", "not a database"]),
        (["ddp", "--tracking-uri", "http://127.0.0.1:9"], ["--tracking-uri='http://127.0.0.1:9'", "server is up"]),
        (["ddp", "--tracking-uri", "ftp://a/b"], ["--tracking-uri='ftp://a/b'", "ftp"]),
        (["ddp", "--tracking-uri", "file:./mlruns"], ["--tracking-uri='file:./mlruns'", "mlflow migrate-filestore"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_reported_with_argument_value_and_fix(
    store: _Store, capsys: Capture, arguments: list[str], parts: list[str]
) -> None:
    Path("text.db").write_text("This is no database." * 100)
    started = time.monotonic()
    try:
        code = main(["compare", *arguments])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("error: ")
    for part in parts:
        assert part in captured.err
    assert time.monotonic() - started < 20


def test_a_server_that_never_answers_is_not_tried_again(
    store: _Store, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        assert main(["compare", "--tracking-uri", address]) == 2
        assert 1 <= time.monotonic() - started < 10
    assert f"--tracking-uri={address!r}: the store cannot be read: " in capsys.readouterr().err


def test_a_store_without_runs_is_an_error(workplace: Path, capsys: Capture) -> None:
    assert main(["compare"]) == 2
    assert "--tracking-uri='sqlite:///mlflow.db': the store has no runs." in capsys.readouterr().err


@pytest.fixture(scope="module")
def scaling_store(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> str:
    """Return the address of a store with runs of different numbers of processes, two of them with two."""
    database = tmp_path_factory.mktemp("scaling") / "mlflow.db"
    shutil.copy(empty_mlflow_database, database)
    client = MlflowClient(f"sqlite:///{database}")
    runs = (("four", 4, 3000), ("two a", 2, 1800), ("two b", 2, 2200), ("eight", 8, 4800), ("unknown", None, 7))
    for place, (name, size, tokens) in enumerate(runs):
        params = {"dist.strategy": "full_shard"} | ({} if size is None else {"dist.world_size": size})
        series: dict[str, Any] = {
            "train/loss": [(10, 2, 4.0)],
            "perf/samples_per_s": [(10, 2, 1), (20, 4, 1)],
            # The median of the throughput is the second value.
            "perf/tokens_per_s": [(10, 2, 1), (20, 4, tokens), (30, 6, 2 * tokens)],
        }
        log_run(client, "scaling", name, params, series, started=place)
    return f"sqlite:///{database}"


@pytest.fixture
def worlds(scaling_store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scaling_store)
    monkeypatch.setenv("COLUMNS", "180")
    monkeypatch.chdir(tmp_path)


def test_runs_by_world_size_show_their_efficiency_against_the_fewest_processes(worlds: None, capsys: Capture) -> None:
    document = _document(capsys, "--by", "world_size")
    assert [column["label"] for column in document["columns"]] == ["2", "4", "8", "-"]
    row = next(row for row in document["rows"] if row["metric"] == "scaling efficiency")
    assert row["statistic"] == "tokens_per_s"
    # Two processes make 2000 tokens per second, so that four should make 4000, and eight 8000.
    assert row["values"] == [pytest.approx(1), pytest.approx(0.75), pytest.approx(0.6), None]
    assert row["spreads"] == [pytest.approx(0.02**0.5), None, None, None]
    assert row["is_best"] == [False] * 4
    assert document["scaling"] == {
        "metric": "perf/tokens_per_s",
        "sizes": [2, 4, 8],
        "measured": [2000, 3000, 4800],
        "ideal": [2000, 4000, 8000],
    }
    document = _document(capsys, "--by", "world_size", "--baseline", "8")
    row = next(row for row in document["rows"] if row["metric"] == "scaling efficiency")
    assert [column["label"] for column in document["columns"]] == ["8", "2", "4", "-"]
    assert row["values"] == [pytest.approx(0.6), pytest.approx(1), pytest.approx(0.75), None]


def test_the_table_the_page_and_the_picture_show_how_runs_scale(worlds: None, capsys: Capture) -> None:
    assert main(["compare", "--by", "world_size", "--html", "compare.html", "--png", "compare.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("scaling efficiency"))
    assert line.split() == [
        "scaling",
        "efficiency",
        "(tokens_per_s)",
        "100%",
        "±",
        "14%",
        "75%",
        "0.75x",
        "60%",
        "0.60x",
        "-",
    ]
    page = Path("compare.html").read_text()
    assert '"scaling": {"metric": "perf/tokens_per_s", "sizes": [2, 4, 8], "measured": [2000.0, 3000.0, 4800.0]' in page
    picture = matplotlib.image.imread("compare.png")[..., :3]
    height, width, _ = picture.shape
    first = picture[: height // 2, : width // 3]
    assert (abs(first - 0x7F / 255) < 0.02).all(-1).sum() > 150  # This is the line of the ideal throughput.


@pytest.mark.parametrize("arguments", [["--by", "strategy"], ["two a", "two b", "--by", "world_size"], []])
def test_runs_that_do_not_differ_in_world_size_have_no_efficiency(
    worlds: None, capsys: Capture, arguments: list[str]
) -> None:
    document = _document(capsys, *arguments)
    assert document["scaling"] is None
    assert "scaling efficiency" not in [row["metric"] for row in document["rows"]]


def test_the_picture_has_a_line_of_each_run(store: _Store, capsys: Capture) -> None:
    assert main(["compare", "hybrid_shard1", "ddp", "--png", "compare.png"]) == 0
    assert "Picture: compare.png\n" in capsys.readouterr().out
    picture = matplotlib.image.imread("compare.png")[..., :3]
    height, width, _ = picture.shape
    assert (picture[-height // 5 :, -width // 4 :] == 1).all()  # There are 7 plots in rows of 3.
    for red, green, blue in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        # Curves are somewhat transparent.
        wanted = [1 - 0.85 * (1 - part / 255) for part in (red, green, blue)]
        assert (abs(picture - wanted) < 0.02).all(-1).sum() > 200


def test_a_long_history_keeps_its_ends_and_extremes() -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[4321], values[8765] = 99.0, -99.0
    series = thinned(Series(list(range(10_000)), [0.5 * index for index in range(10_000)], values), max_points=100)
    assert 50 < len(series.values) <= 100
    assert {0, 4321, 8765, 9999} <= set(series.steps)
    assert series.seconds == [0.5 * step for step in series.steps]
    assert series.values == [values[step] for step in series.steps]
    assert series.steps == sorted(series.steps)


def test_help_has_examples_and_exit_codes(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "lightning-dist compare --target val/loss=1.85" in text
    assert "exit codes: 0 compared, 2 bad input" in text


@pytest.mark.parametrize(("other", "is_left_out"), [(0.502, False), (0.06, True)])
def test_utilizations_that_are_relative_to_different_peaks_are_left_out(
    mlflow_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, other: float, is_left_out: bool
) -> None:
    monkeypatch.chdir(mlflow_folder)
    monkeypatch.setenv("COLUMNS", "180")
    uri = f"sqlite:///{mlflow_folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name, mfu, peak in (("one", 0.3, 0.5), ("two", 0.03, other)):
        metrics = {"perf/mfu": [(10, 1, mfu)], "perf/peak_tflops": [(10, 1, peak)], "val/loss": [(10, 1, 1.0)]}
        log_run(MlflowClient(uri), "gpt", name, {"dist.strategy": name}, metrics)
    assert main(["compare", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    rows = {row["metric"] for row in compared["rows"]}
    assert ("perf/mfu" in rows) is not is_left_out
    assert ("perf/peak_tflops" in rows) is is_left_out
    assert bool(compared["notes"]) is is_left_out
    assert main(["compare", "--html", "compare.html"]) == 0
    assert ("perf/mfu is left out" in capsys.readouterr().out) is is_left_out
    assert ("perf/mfu is left out" in (mlflow_folder / "compare.html").read_text()) is is_left_out
