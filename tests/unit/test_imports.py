"""Importing lightning_dist is fast, and registers the strategies in whatever order a program imports the packages."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module, reload
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_dist
from lightning_dist.run.after_import import call_after_import
from tests.cpu_time import cpu_seconds

_HEAVY = "import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torchmetrics.functional"
"""Imports of Lightning that know nothing of this package, and need most of the time."""

_ORDERS = {
    "lightning_dist, lightning": "import lightning_dist; assert 'lightning' not in sys.modules; import lightning",
    "a module of the plugins": "from lightning_dist.plugins.callbacks.fault_tolerance import FaultTolerance",
    "a private module": "import lightning_dist.plugins._compat.checkpoints",
    "a module of the engine": "import lightning_dist.checkpoint.whole_files, lightning.pytorch.callbacks",
    "all names": "from lightning_dist import *",
}

_CHECK = """
import lightning.pytorch, torch
import lightning_dist.plugins, lightning_dist.plugins.planning
assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state()), "The import draws numbers."
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry
import lightning_dist
assert StrategyRegistry["hybrid_shard"]["strategy"] is lightning_dist.HybridShardStrategy
assert "nd_parallel" in StrategyRegistry
assert torch.save.__wrapped__ and torch.load.__wrapped__ and saving.pl_load.__wrapped__
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "lightning_dist.run.after_import"]
assert type(lightning.pytorch.__spec__.loader).__name__ == "SourceFileLoader"
"""


def test_the_version_is_that_of_the_installed_package() -> None:
    assert lightning_dist.__version__ == version("lightning-dist")


@pytest.mark.slow
def test_every_order_of_imports_registers_the_strategies() -> None:
    # The children share the imports of their parent.
    program = f"""
        import os, sys, traceback
        {_HEAVY}
        torch.manual_seed(0)

        for name, imports in {_ORDERS!r}.items():
            child = os.fork()
            if not child:
                try:
                    exec(imports + {_CHECK!r})
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, name
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


@pytest.mark.alone
def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    program = "import sys, lightning_dist; print(*{'torch', 'lightning', 'mlflow'} & set(sys.modules))"
    seconds, ended = cpu_seconds([sys.executable, "-c", program])
    assert (ended.returncode, ended.stdout.split()) == (0, [])
    assert seconds < 0.5


def test_public_names_are_listed_and_others_are_refused() -> None:
    assert set(lightning_dist.__all__) <= set(dir(lightning_dist))
    with pytest.raises(AttributeError, match="has no attribute 'HybirdShardStrategy'"):
        lightning_dist.HybirdShardStrategy  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported."""
    name = "module_to_import_later"
    (tmp_path / f"{name}.py").write_text("import os\nassert not os.environ.get('BROKEN')\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.fixture
def calls(module: str) -> list[int]:
    """Return a list that gets what is in the module each time that its import calls the function."""
    values: list[int] = []
    function: Callable[[], None] = lambda: values.append(sys.modules[module].value)  # noqa: E731
    call_after_import(module, function)
    return values


def test_the_function_is_called_once_after_the_import(module: str, calls: list[int]) -> None:
    assert calls == []
    imported = import_module(module)
    assert calls == [3]
    reload(imported)
    assert calls == [3]
    assert vars(imported.__spec__.loader) == {"name": module, "path": imported.__file__}  # type: ignore[union-attr]


def test_the_function_is_called_at_once_if_the_module_is_imported(module: str) -> None:
    import_module(module)
    calls: list[int] = []
    call_after_import(module, lambda: calls.append(1))
    assert calls == [1]


def test_the_function_is_called_although_an_earlier_import_failed(module: str, calls: list[int]) -> None:
    os.environ["BROKEN"] = "1"
    with pytest.raises(AssertionError):
        import_module(module)
    del os.environ["BROKEN"]
    assert calls == []
    import_module(module)
    assert calls == [3]


@pytest.mark.slow
def test_the_command_reads_a_configuration_without_importing_mlflow(tmp_path: Path) -> None:
    # The logger of the command is that for MLflow, whose import takes seconds, and only the first rank uses it.
    (tmp_path / "x.yaml").write_text("model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}")
    program = """
        import contextlib, sys
        from lightning_dist.cli import main
        sys.argv = ["lightning-dist", "fit", "-c", "x.yaml", "--print_config"]
        with contextlib.suppress(SystemExit):
            main()
        assert "jsonargparse" in sys.modules and "mlflow" not in sys.modules
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "BoringModel" in ended.stdout
