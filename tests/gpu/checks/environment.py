"""Check that the package can be imported, and that devices and collectives compute what they should."""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.check import CUDA, Check, Found
from tests.gpu.machine import OPTIONAL_PACKAGES
from tests.gpu.ranks import Ranks

__all__ = ["ENVIRONMENT", "import_all"]

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The largest accepted errors of matrix products relative to the largest element, with sums in another order."""


def import_all() -> dict[str, str]:
    """Import every module of the package, and return the packages that modules lack, by the names of these."""
    import lightning_dist

    lacking = {}
    for module in pkgutil.walk_packages(lightning_dist.__path__, "lightning_dist.", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("lightning_dist", "torch", "lightning", ""):
                raise
            lacking[module.name] = package
    return lacking


def imports(ranks: Ranks) -> Found:
    """Import everything; only modules that use a package that is not installed may fail."""
    lacking = ranks.run(import_all, 1)[0]
    lacks = sorted(set(lacking.values()))
    figure = f"{len(lacking)} modules need packages that are not installed: {', '.join(lacks)}" if lacks else "all"
    wrong = [package for package in lacks if package in OPTIONAL_PACKAGES and package not in ranks.machine.missing]
    return Found(figure, not wrong, tuple(f"{name} needs {package}" for name, package in lacking.items()))


def product_errors(device: str) -> dict[str, float]:
    """Return the errors of a matrix product in each dtype, relative to the largest element of the exact one."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    found = {}
    for dtype in TOLERANCES:
        a, b = left.to(dtype), right.to(dtype)
        exact = a.double() @ b.double()
        product = (a.to(device) @ b.to(device)).cpu().double()
        found[str(dtype)] = float((product - exact).abs().max() / exact.abs().max())
    return found


def products(ranks: Ranks) -> Found:
    """Compare matrix products of the device with those of the CPU."""
    device = {"simulated": "cpu"}.get(ranks.machine.kind, ranks.machine.kind)
    found = ranks.run(product_errors, 1, device)[0]
    is_met = all(found[str(dtype)] <= bound for dtype, bound in TOLERANCES.items())
    return Found(", ".join(f"{name[6:]} {error:.0e}" for name, error in found.items()), is_met)


def collective_errors(device: str) -> list[str]:
    """Run the collectives of sharding, and return the dtypes in which one has a wrong result."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size, wrong = dist.get_world_size(), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        own = torch.full((4 * size,), dist.get_rank() + 1.0, dtype=dtype, device=device)
        total = own.clone()
        dist.all_reduce(total)
        part = own.new_empty(4)
        dist.reduce_scatter_tensor(part, own)
        whole = own.new_empty(4 * size)
        dist.all_gather_into_tensor(whole, own[:4])
        expected = size * (size + 1) / 2
        is_right = (total == expected).all() and (part == expected).all() and whole.sum() == 4 * expected
        if not bool(is_right):
            wrong.append(str(dtype))
    return wrong


def collectives(ranks: Ranks) -> Found:
    """Check the collectives of one rank."""
    wrong = ranks.run(collective_errors, 1, "cuda" if ranks.is_cuda else "cpu")[0]
    return Found(f"wrong in {', '.join(wrong)}" if wrong else "float64, float32 and bfloat16", not wrong)


def nvml(ranks: Ranks) -> Found:
    """Return the memory that is free on the first device when nothing runs here."""
    free, total = ranks.run(torch.cuda.mem_get_info, 1)[0]
    return Found(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free", free > total / 2)


def clone_is_complete(ranks: Ranks) -> Found:
    """Check that the two links of the package lead to its folders, which some copies of a repository lose."""
    root = Path(__file__).parents[3] / "lightning_dist"
    missing = [name for name in ("plugins", "cli") if not (root / name / "__init__.py").exists()]
    return Found(f"lightning_dist/{missing[0]} leads nowhere" if missing else "", not missing)


SECTION = "Environment"

ENVIRONMENT = (
    Check("environment/links", SECTION, clone_is_complete),
    Check("environment/imports", SECTION, imports, is_alone=True),
    Check("environment/free-memory", SECTION, nvml, needs=(CUDA,)),
    Check("environment/products", SECTION, products),
    Check("environment/collectives", SECTION, collectives),
)
