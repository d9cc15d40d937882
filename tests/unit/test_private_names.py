"""Use private names of other libraries only in ``_compat`` modules, and no more of them than today.

The functions of other libraries that this package replaces for a whole process are counted as well.

The rule: a private name is an identifier that begins with one underscore. It counts as one of another library if it is

- in what is imported from such a library (``from torch.utils._pytree import tree_map``); the dotted path is one name,
- a string with such a dotted path (``"torch._subclasses.fake_tensor"``),
- an attribute (``tensor._base``), a string (``getattr(tensor, "_base")``) or, in a class with a base class of another
  library, a method, and this package defines no function, class, variable, argument or attribute of ``self`` of that
  name. What a ``_compat`` module defines counts as defined there only.

Two kinds of attributes count although this package defines the same name: those behind an import
(``torch.ops.aten._grouped_mm``), and those of ``_SHARED``, unless they are attributes of ``self`` or ``cls`` in a class
without a base class of another library.

The names of ``_ALLOWED`` do not count. An attribute or string is torch's if the engine uses it, which never imports
Lightning, and it is not in ``_OF_TORCHFT``, or if one of ``_OF_TORCH`` has it. Each name is counted once, in however
many places it is used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("lightning_dist", "plugins", "cli")
_LIBRARIES = (
    "torch", "torchao", "torchmetrics", "lightning", "lightning_utilities", "jsonargparse", "mlflow", "fsspec",
    "transformers", "safetensors",
)  # fmt: skip

_MAX_OF_TORCH = 75
_MAX_OF_OTHERS = 54
_MAX_REPLACED = 24

_ALLOWED = {
    # Documented, in spite of the underscore.
    "_exit": "os",
    "_getframe": "sys",
    "_ARGCOMPLETE": "the environment variable by which a shell asks for completions",
    "_fields": "named tuples",
    "_replace": "named tuples",
    "_init_weights": "Hugging Face's models, which define it for others to call",
    "_no_split_modules": "Hugging Face's models, which declare it for others to read",
    "_experts_implementation": "configurations of Hugging Face, where it holds the argument experts_implementation",
    "_tp_plan": "Hugging Face's models, which declare it for others to read",
    # Attributes that this package gives to objects of other libraries.
    **dict.fromkeys(
        (
            "_features_of", "_history", "_is_of_block", "_is_scaled", "_is_used_outside", "_made_by", "_made_in",
            "_marks", "_param_name", "_returned_by", "_sources", "_summed",
        ),
        "tensors in a trace",
    ),
    **dict.fromkeys(("_is_others", "_tensor_parallel_bias", "_tensor_parallel_held"), "modules that are split"),
    "_lightning_dist_own": "methods of metrics",
    "_lightning_dist_record": "storages of deferred tensors",
    # Parts of words.
    "_size": "the end of the names of strategies' arguments",
    "_find_unused": "a part of the names of Lightning's strategies",
}  # fmt: skip
"""The names that may be used anywhere, and whose they are."""

_HELD = (
    torch.Tensor, DTensor, torch.nn.Module(), torch.optim.Optimizer, torch.amp.GradScaler, FSDPParam, FSDPParamGroup
)  # fmt: skip
_OF_TORCHFT = frozenset({"_quorum_future"})
"""Names of torchft that the engine uses; they count as those of other libraries than torch."""

_OF_TORCH = (*_HELD, torch, torch.UntypedStorage, clip_grad, distributed_c10d)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


_SHARED = frozenset(
    name
    for names in (*map(dir, _HELD), *(cls.__annotations__ for cls in (FSDPParam, FSDPParamGroup)))
    for name in names
    if _is_private(name)
)
"""The names of attributes of objects of torch that this package works with."""


class Use(NamedTuple):
    """A use of a private name of another library."""

    path: str
    line: int
    name: str
    is_torch: bool

    @property
    def is_wrapped(self) -> bool:
        return any(part.removesuffix(".py") == "_compat" for part in self.path.split("/"))


def private_names(sources: Mapping[str, str]) -> list[Use]:
    """Find the uses of private names of other libraries, by the rule of this module.

    Args:
        sources: The text of each module by its path from the root of the repository.
    """
    trees = {path: ast.parse(text) for path, text in sources.items()}
    defined = {path: set(_defined(tree)) | set(path.removesuffix(".py").split("/")) for path, tree in trees.items()}
    public = set().union(*(names for path, names in defined.items() if not Use(path, 0, "", False).is_wrapped))
    everywhere = set().union(*defined.values())
    uses = []
    for path, tree in trees.items():
        own = everywhere if Use(path, 0, "", False).is_wrapped else public | defined[path]
        for line, name in _uses(tree, own):
            is_torch = name.startswith("torch.") if "." in name else _is_of_torch(path, name)
            uses.append(Use(path, line, name, is_torch))
    return uses


def _is_of_torch(path: str, name: str) -> bool:
    if name in _OF_TORCHFT:
        return False
    return path.startswith("lightning_dist/") or any(hasattr(owner, name) for owner in _OF_TORCH)


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    imported = dict(_imported(tree))
    for path in imported.values():
        line, dotted = path
        if any(map(_is_private, dotted.split("."))):
            yield line, dotted
    libraries = {name for name, (_, dotted) in imported.items()}

    def visit(node: ast.AST, extends: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.ClassDef):
            extends = any(_root(base) in libraries for base in node.bases)
        name = None
        if isinstance(node, ast.Attribute):
            is_shared = node.attr in _SHARED and (extends or not _is_self(node.value))
            is_theirs = node.attr not in own or is_shared or _root(node) in libraries
            name = node.attr if is_theirs else None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(rf"({'|'.join(_LIBRARIES)})(\.\w+)*\._\w+(\.\w+)*", node.value):
                yield node.lineno, node.value
            elif re.fullmatch(r"_[A-Za-z]\w*", node.value) and (node.value not in own or node.value in _SHARED):
                name = node.value
        elif isinstance(node, ast.FunctionDef) and extends and node.name in _SHARED:
            name = node.name
        if name is not None and _is_private(name) and name not in _ALLOWED:
            yield node.lineno, name
        for child in ast.iter_child_nodes(node):
            # The text of an f-string is no name.
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                yield from visit(child, extends)

    yield from visit(tree, False)


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the local names that are imported from other libraries, with the line and the dotted path of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in _LIBRARIES:
            for alias in node.names:
                yield alias.asname or alias.name, (node.lineno, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _LIBRARIES:
                    yield alias.asname or alias.name.split(".")[0], (node.lineno, alias.name)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _modules() -> set[Path]:
    return {path.resolve() for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    return private_names({path.relative_to(_ROOT).as_posix(): path.read_text() for path in _modules()})


def test_private_names_of_other_libraries_are_used_only_in_compat_modules(uses: list[Use]) -> None:
    found = [f"{use.path}:{use.line}: {use.name}" for use in uses if not use.is_wrapped]
    assert not found, (
        "Use a public name, or wrap these in a _compat module under a public name, and say there what would replace"
        " the private one:\n" + "\n".join(found)
    )


def test_no_more_private_names_of_torch_are_used_than_before(uses: list[Use]) -> None:
    found = sorted({use.name for use in uses if use.is_torch})
    assert len(found) <= _MAX_OF_TORCH, (
        f"{len(found)} private names of torch are used, more than _MAX_OF_TORCH = {_MAX_OF_TORCH}. Use a public name."
        " Only if none does the same as fast, raise the limit, and say in the commit why:\n" + "\n".join(found)
    )


def test_no_more_private_names_of_other_libraries_are_used_than_before(uses: list[Use]) -> None:
    found = sorted({use.name for use in uses if not use.is_torch})
    assert len(found) <= _MAX_OF_OTHERS, (
        f"{len(found)} private names of Lightning, jsonargparse and others are used, more than _MAX_OF_OTHERS ="
        f" {_MAX_OF_OTHERS}. Use a public name:\n" + "\n".join(found)
    )


def replaced(source: str) -> list[str]:
    """Return the attributes of what is imported from other libraries to which ``source`` assigns."""
    tree = ast.parse(source)
    theirs = {name for name, _ in _imported(tree)}
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        found += [ast.unparse(each) for each in targets if isinstance(each, ast.Attribute) and _root(each) in theirs]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            owner, name = node.args[:2]
            found += [f"{ast.unparse(owner)}.{ast.unparse(name)}"] if _root(owner) in theirs else []
    return found


def test_no_more_functions_of_other_libraries_are_replaced_than_before() -> None:
    found = sorted({name for path in _modules() for name in replaced(path.read_text())})
    assert len(found) <= _MAX_REPLACED, (
        f"{len(found)} attributes of other libraries are replaced, more than _MAX_REPLACED = {_MAX_REPLACED}. Use a"
        " public way, such as a hook or a subclass:\n" + "\n".join(found)
    )


def test_what_is_replaced_is_found() -> None:
    source = "import torch\nfrom torch import nn\nx.y = 1\ntorch.load = f\nsetattr(nn.Linear, 'forward', g)\n"
    assert replaced(source) == ["torch.load", "nn.Linear.'forward'"]


def test_every_allowed_name_is_used() -> None:
    texts = "".join(path.read_text() for path in _modules())
    assert [name for name in _ALLOWED if not re.search(rf"\b{name}\b", texts)] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._guards import a, b", ["torch._guards.a", "torch._guards.b"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from lightning.pytorch.core.optimizer import _init", ["lightning.pytorch.core.optimizer._init"]),
        ("import torch\ntorch._C._check()", ["_check", "_C"]),
        ("def f(x):\n    return x._base", ["_base"]),
        ("def f(x):\n    return getattr(x, '_base')", ["_base"]),
        ("import logging\nlogging.getLogger('torch._dynamo.utils')", ["torch._dynamo.utils"]),
        # A tensor's version, and an attribute of the same name of a class of this package.
        ("class A:\n    def f(self, x):\n        self._version = x._version\n        self._version += 1", ["_version"]),
        # A method that replaces one of torch's.
        ("from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn):\n        pass", ["_apply"]),
        # An operation of torch, and a function of this package with the same name.
        ("import torch\ndef _mm(): return torch.ops.aten._mm", ["_mm"]),
        # What is no private name of another library.
        ("class A:\n    _x = 1\n    def f(self, other):\n        self._y = other._y + other._x + self._x", []),
        ("import os\nfrom torch import nn as _nn\nos._exit(1)\nfor _ in range(3): _nn.Linear.__init__", []),
        ("def f(x):\n    return f'{x}_total', 'a _base'", []),
    ],
)  # fmt: skip
def test_scanner_finds_private_names(source: str, names: list[str]) -> None:
    assert [use.name for use in private_names({"lightning_dist/a.py": source})] == names


def test_names_that_a_compat_module_defines_may_not_be_used_elsewhere() -> None:
    sources = {
        "plugins/_compat/a.py": "class A:\n    def f(self, plugin):\n        self._plugin = plugin",
        "plugins/b.py": "def f(strategy):\n    strategy._plugin = None",
    }
    assert private_names(sources) == [Use("plugins/b.py", 2, "_plugin", False)]
