"""List the optimizers of torch and of packages, each with a function that makes it for a module."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["PACKAGES", "Maker", "makers", "versions"]

Maker = Callable[[nn.Module], Optimizer]

PACKAGES = ("torch", "transformers", "timm", "lion-pytorch", "schedulefree", "pytorch-optimizer", "here")
"""Where optimizers come from; "here" stands for small ones of :mod:`tests.whole_optimizers`."""

RATE = 0.01


def versions() -> str:
    """Return the versions of the packages, as text."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES if name != "here"}
    return ", ".join(f"{name} {version.partition('+')[0]}" for name, version in found.items())


def makers(packages: Iterable[str] = PACKAGES) -> dict[str, Maker]:
    """Return the functions that make the optimizers of ``packages``, by ``package: name``."""
    return {f"{package}: {name}": maker for package in packages for name, maker in _OF_PACKAGES[package]().items()}


def _of_class(cls: Any, select: Callable[[Tensor], bool] | None = None, **arguments: Any) -> Maker:
    """Return a function that makes an optimizer of ``cls``, with a learning rate if it takes one."""

    def make(module: nn.Module) -> Optimizer:
        params = [param for param in module.parameters() if select is None or select(param)]
        accepted = inspect.signature(cls).parameters
        rate = {"lr": RATE} if "lr" in accepted and "lr" not in arguments else {}
        optimizer: Optimizer = cls(params, **rate, **arguments)
        return optimizer

    return make


def _is_matrix(param: Tensor) -> bool:
    return param.ndim == 2


def _of_torch() -> dict[str, Maker]:
    found = {
        name: _of_class(cls)
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    found["Muon"] = _of_class(torch.optim.Muon, _is_matrix)
    found["LBFGS"] = _of_class(torch.optim.LBFGS, lr=0.1, max_iter=4)
    found["LBFGS, strong_wolfe"] = _of_class(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    found["SGD, momentum"] = _of_class(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01)
    return found


def _of_transformers() -> dict[str, Maker]:
    cls = importlib.import_module("transformers.optimization").Adafactor
    by_hand = {"lr": RATE, "relative_step": False, "scale_parameter": False}
    return {
        "Adafactor": _of_class(cls, lr=None),
        "Adafactor, lr": _of_class(cls, **by_hand),
        "Adafactor, beta1": _of_class(cls, **by_hand, beta1=0.9),
    }


def _of_timm() -> dict[str, Maker]:
    _import_timm_without_models()
    optim = importlib.import_module("timm.optim")

    def maker(name: str) -> Maker:
        return lambda module: optim.create_optimizer_v2(list(module.parameters()), opt=name, lr=RATE, weight_decay=0.01)

    return {name: maker(name) for name in optim.list_optimizers()}


def _import_timm_without_models() -> None:
    """Let ``timm.optim`` be imported without timm's models, which need a torchvision that fits torch."""
    if "timm" in sys.modules:
        return
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    package = types.ModuleType("timm")
    package.__path__ = list(spec.submodule_search_locations or ())
    models = types.ModuleType("timm.models")
    models.group_parameters = None  # type: ignore[attr-defined]
    sys.modules |= {"timm": package, "timm.models": models}


def _of_lion() -> dict[str, Maker]:
    package = importlib.import_module("lion_pytorch")
    return {
        "Lion": _of_class(package.Lion, lr=1e-3, weight_decay=0.01),
        "Lion, decoupled": _of_class(package.Lion, lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True),
    }


def _of_schedulefree() -> dict[str, Maker]:
    package = importlib.import_module("schedulefree")
    names = [name for name in dir(package) if isinstance(getattr(package, name), type)]
    found = {name: _of_class(getattr(package, name)) for name in names if "Wrapper" not in name}
    if "ScheduleFreeWrapper" in names:
        found["ScheduleFreeWrapper"] = lambda module: package.ScheduleFreeWrapper(
            torch.optim.SGD(module.parameters(), lr=RATE), momentum=0.9
        )
    return found


def _of_pytorch_optimizer() -> dict[str, Maker]:
    package = importlib.import_module("pytorch_optimizer.optimizer")
    needs_groups = {name for name in package.OPTIMIZERS if "muon" in name} | {"adago"}
    special: dict[str, Maker] = {
        "lookahead": lambda module: package.Lookahead(torch.optim.SGD(module.parameters(), lr=RATE), k=2),
        "schedulefreewrapper": lambda module: package.ScheduleFreeWrapper(
            torch.optim.SGD(module.parameters(), lr=RATE), momentum=0.9
        ),
    }
    special |= {name: package.OPTIMIZERS[name] for name in ("adalomo", "adammini", "lomo")}  # They take the module.
    special["bsam"] = _of_class(package.OPTIMIZERS["bsam"], num_data=64)
    special["ranger21"] = _of_class(package.OPTIMIZERS["ranger21"], num_iterations=10)
    for name in ("sam", "gsam", "wsam", "looksam", "friendlysam"):
        if name in package.OPTIMIZERS:
            cls = package.OPTIMIZERS[name]
            takes_base = "base_optimizer" in inspect.signature(cls).parameters
            special[name] = _of_class(cls, **({"base_optimizer": torch.optim.SGD} if takes_base else {}))

    def in_groups(cls: Any) -> Maker:
        def make(module: nn.Module) -> Optimizer:
            matrices = [param for param in module.parameters() if param.ndim == 2]
            rest = [param for param in module.parameters() if param.ndim != 2]
            groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
            optimizer: Optimizer = cls(groups)
            return optimizer

        return make

    found: dict[str, Maker] = {}
    for name in package.get_supported_optimizers():
        cls = package.OPTIMIZERS[name]
        found[name] = special.get(name) or (in_groups(cls) if name in needs_groups else _of_class(cls))
    return found


def _of_this_project() -> dict[str, Maker]:
    package = importlib.import_module("tests.whole_optimizers")
    return {name: _of_class(getattr(package, name)) for name in package.__all__}


_OF_PACKAGES: dict[str, Callable[[], dict[str, Maker]]] = {
    "torch": _of_torch,
    "transformers": _of_transformers,
    "timm": _of_timm,
    "lion-pytorch": _of_lion,
    "schedulefree": _of_schedulefree,
    "pytorch-optimizer": _of_pytorch_optimizer,
    "here": _of_this_project,
}
