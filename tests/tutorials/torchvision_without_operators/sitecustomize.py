"""Let torchvision be imported where its compiled operators cannot be loaded.

The wheels of torchvision on PyPI are built for the CUDA builds of torch. Beside a CPU build of torch, their compiled
operators are missing, and ``import torchvision`` fails with "operator torchvision::nms does not exist", because it
registers fake implementations of some operators. timm imports torchvision, but needs none of its operators here. With
this folder in PYTHONPATH, these operators are declared, without implementations, right before torchvision is imported.
Processes that do not import torchvision do not import torch either.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_libraries: list[Any] = []  # A torch.library.Library removes its operators when it is deleted.


class _DeclareOperators(MetaPathFinder):
    """Declare the operators when torchvision is about to be imported, and let other finders find it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not _libraries:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _libraries.append(library)
        return None


sys.meta_path.insert(0, _DeclareOperators())
