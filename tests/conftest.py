import fcntl
import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# Several ranks share a few cores, so more than one thread per rank would slow them down. torch reads this variable when
# it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What runs keep for later ones is not that of the user who runs the tests.
os.environ.setdefault(
    "LIGHTNING_DIST_CACHE", os.path.join(tempfile.gettempdir(), f"lightning-dist-cache-{os.getuid()}")
)

from tests import nccl_rules
from tests.accelerator import VARIABLE
from tests.launched import Forked
from tests.pool import WorkerPool, fork_server


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server now, since it imports for seconds, during which this process can collect the tests."""
    if session.config.getoption("accelerator") == "simulated":
        session.config.option.backend = "nccl-rules"  # The device has no other backend.
    os.environ[nccl_rules.VARIABLE] = session.config.getoption("backend")
    if session.config.getoption("accelerator") == "gpu":
        os.environ[VARIABLE] = "gpu"
        # Processes are forked from this one, and cannot use CUDA if this one has initialized it to count the GPUs.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--accelerator=gpu: this machine has no GPU that torch can use")
    if session.config.getoption("accelerator") == "simulated":
        from tests.accelerator_rules.build import compiled, reason_not_to_compile

        if reason := reason_not_to_compile():
            pytest.exit(reason, returncode=0)
        os.environ[VARIABLE] = "simulated"
        compiled()
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # This process only distributes the tests.
    fork_server("tests.preload_more")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let tests that are marked as ``alone`` run while no other process of the session runs a test."""
    if "PYTEST_XDIST_TESTRUNUID" not in os.environ:
        return (yield)
    folder = Path(tempfile.gettempdir())
    session = os.environ["PYTEST_XDIST_TESTRUNUID"]
    with open(folder / f"{session}.gate", "w") as gate, open(folder / f"{session}.running", "w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)  # Whoever waits for its turn holds the gate, so that nobody overtakes it.
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


def pytest_sessionfinish() -> None:
    """Remove the files by which the processes of this session took turns."""
    if session := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        for name in ("gate", "running"):
            (Path(tempfile.gettempdir()) / f"{session}.{name}").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables after each test, such as the seed that Lightning keeps in one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def reference_pool() -> Iterator[WorkerPool]:
    """Return a second pool, which computes a reference in one process while ``pool`` runs the compared ranks.

    The two are run at the same time by :func:`tests.pool.in_parallel`.
    """
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    """Provide workers whose allocator may be changed."""
    workers = WorkerPool()
    yield workers
    workers.close()


def _create_mlflow_database(folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    from lightning_dist.plugins.loggers import MLflowLogger
    from lightning_dist.plugins.loggers.store import connect

    connect("sqlite:///empty.db")
    assert MLflowLogger(tracking_uri="sqlite:///new/runs.db").run_id


@pytest.fixture(scope="session")
def created_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let the logger create a database, which takes MLflow seconds, once for all processes of this session.

    Returns:
        A folder with the database ``new/runs.db``, which the logger has created with a run, ``empty.db`` without runs,
        and ``printed``, the text that was printed meanwhile.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "created_mlflow_database"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "printed").exists():
            process = Forked(_create_mlflow_database, folder, environment=dict(os.environ))
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
            (folder / "printed").write_text(printed)
    return folder


@pytest.fixture(scope="session")
def empty_mlflow_database(created_mlflow_database: Path) -> Path:
    """Return the path of an empty MLflow database, which tests copy."""
    return created_mlflow_database / "empty.db"


@pytest.fixture
def mlflow_folder(tmp_path: Path, empty_mlflow_database: Path) -> Path:
    """Return this test's temporary folder, with an empty MLflow database ``mlflow.db`` in it."""
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    return tmp_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accelerator",
        choices=["cpu", "gpu", "simulated"],
        default="cpu",
        help="where the ranks of distributed tests run",
    )
    parser.addoption(
        "--backend",
        choices=["default", "nccl-rules"],
        default="default",
        help="how ranks communicate: over the default backend of their device, or over gloo under the rules of NCCL",
    )
    parser.addoption("--thorough", action="store_true", help="run the tests that are marked as thorough as well")
    parser.addoption(
        "--matrix", choices=["pairwise", "full"], default="pairwise", help="which combinations the parity tests run"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests, and those of what only gloo does if ranks communicate over another backend."""
    left_out = [] if config.getoption("thorough") else ["thorough"]
    left_out += [] if config.getoption("backend") == "default" else ["gloo"]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, since every fit would otherwise traverse them."""
    gc.collect()
    gc.freeze()
