"""Divide a model into units: the modules that are gathered, sharded, checkpointed or compiled together.

The units are found once, without the user's help, and used by all techniques. Their kinds are:

- ``block``: an instance of the model's repeated block classes. These are named by the user or by a Hugging Face model
  (``_no_split_modules``), or else they are found: a block class has parameters and children, and some container
  (ModuleList, Sequential, ModuleDict) holds two instances of it with the same parameter shapes. Blocks do not nest: of
  nested candidates, the outermost is the block, such as a layer that contains experts. The stages of a CNN usually have
  different shapes, so the blocks inside them are found instead.
- ``large``: a module outside the blocks with at least ``min_num_params`` parameters, cut bottom-up (a CNN's stage).
- ``outer``: the rest of a child of the root (embeddings, norms, heads, or all of a small model).
- ``shared``: parameters that only modules of several blocks or large units own, such as one weight in every block.
- ``root``: parameters that the root module owns directly.
- ``scalars``: parameters without dimensions, whichever module owns them.
- ``experts``: the stacked experts of a mixture, if expert parallelism has taken them out of another unit.

Every parameter is in exactly one unit; a tied parameter is in the innermost unit that contains all its owners.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MIN_NUM_PARAMS", "Unit", "UnitKind", "find_blocks", "find_units", "merge_units"]

MIN_NUM_PARAMS = 5_000_000
"""The default number of parameters from which a module outside the blocks becomes a unit."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

UnitKind = Literal["block", "large", "outer", "shared", "root", "scalars", "experts"]


@dataclass
class Unit:
    """Represent modules whose parameters are handled together.

    Args:
        kind: ``block``, ``large``, ``outer``, ``shared``, ``root``, ``scalars`` or ``experts`` (see the module's
            docstring).
        names: Full names of ``modules`` in the root module.
        modules: Modules of the unit: usually one, several if they share tied parameters.
        params: Parameters of the unit by full name; a tied parameter appears once.
        owners: Modules that own these parameters directly.
        mesh: The mesh over whose last axis the parameters are sharded, if a technique has distributed them over other
            axes before; None: the mesh of all other units.
    """

    kind: UnitKind
    names: list[str]
    modules: list[nn.Module]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: set[nn.Module] = field(default_factory=set)
    mesh: DeviceMesh | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements of the unit's parameters."""
        return sum(param.numel() for param in self.params.values())

    @property
    def has_forward(self) -> bool:
        """Return whether the unit has modules whose forwards show when its parameters are needed."""
        return self.kind not in ("shared", "root", "scalars")

    @property
    def stays_gathered(self) -> bool:
        """Return whether the parameters stay gathered for the whole step, not only for the modules' forward."""
        return self.kind in ("outer", "shared", "root", "scalars")


def find_blocks(root: nn.Module, classes: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``root`` by full name, in the order of definition, none inside another.

    Args:
        root: The model, which itself is never a block.
        classes: Names of the block classes. None: those of Hugging Face's ``_no_split_modules``, or else those found.

    Raises:
        ValueError: If no module is of one of ``classes``.
    """
    if classes is not None:
        present = Counter(type(module).__name__ for module in root.modules())
        for name in classes:
            if not present[name]:
                close = difflib.get_close_matches(name, present, n=3, cutoff=0.5)
                hint = f" Did you mean {' or '.join(close)}?" if close else f" It has {', '.join(sorted(present))}."
                raise ValueError(f"units={list(classes)!r}: the model has no module of class {name!r}.{hint}")
        wanted = set(classes)
    else:
        wanted = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        wanted &= {type(module).__name__ for module in root.modules()}
        if not wanted:
            return dict(_outermost(root, _is_repeated(root)))
    return dict(_outermost(root, {m for m in root.modules() if type(m).__name__ in wanted}))


def find_units(
    root: nn.Module,
    classes: Sequence[str] | None = None,
    min_num_params: int = MIN_NUM_PARAMS,
    has_one_dtype: bool = True,
) -> list[Unit]:
    """Return the units of ``root``, inner ones before those around them; every parameter is in exactly one unit.

    Args:
        root: Model. It never becomes a unit as a whole; parameters that it owns directly form the unit of kind
            ``root``.
        classes: Names of the block classes; None finds them (see :func:`find_blocks`).
        min_num_params: Number of parameters from which a module outside the blocks is a unit of its own.
        has_one_dtype: Whether the trainable parameters of a unit must have one dtype, because they are sharded.

    Raises:
        ValueError: If no module is of one of ``classes``, ``min_num_params`` is not positive, or a module that cannot
            be divided has trainable parameters of several dtypes although they must have one.
    """
    if min_num_params < 1:
        raise ValueError(f"min_num_params={min_num_params} must be at least 1.")
    owners = _owners(root)
    blocks = find_blocks(root, classes)
    block_ids = {id(module) for module in blocks.values()}
    units = [Unit("block", [name], [module]) for name, module in blocks.items()]
    outer: list[Unit] = []
    for name, module in _callable_children(root, ""):
        if id(module) not in block_ids:
            units += _cut_by_size(module, name, block_ids, min_num_params)
            outer.append(Unit("outer", [name], [module]))
    units += outer
    units.append(Unit("root", [""], [root]))
    scalars = Unit("scalars", [""], [root], {names[0]: param for param, names in owners.items() if param.ndim == 0})
    assigned = _assign(root, units, {param: names for param, names in owners.items() if param.ndim > 0})
    if has_one_dtype:
        assigned = _of_one_dtype(root, assigned)
    return [*assigned, scalars] if scalars.params else assigned


def merge_units(units: Sequence[Unit], max_num_bytes: int) -> list[Unit]:
    """Merge blocks into larger units, and outer units likewise, so that fewer messages carry their parameters.

    Args:
        units: Units from :func:`find_units`.
        max_num_bytes: Size in bytes that a merged unit does not exceed.

    Returns:
        The units in their order; a merged unit has the place of its first part. Units whose trainable parameters are of
        different dtypes are not merged.
    """
    merged: list[Unit] = []
    for unit in units:
        into = next((other for other in reversed(merged) if other.kind == unit.kind), None)
        if (
            into is None
            or unit.kind not in ("block", "outer")
            or _trainable_dtypes(into) != _trainable_dtypes(unit)
            or _num_bytes(into) + _num_bytes(unit) > max_num_bytes
        ):
            merged.append(replace(unit, names=[*unit.names], modules=[*unit.modules]))
            continue
        into.names += unit.names
        into.modules += unit.modules
        into.params = {**into.params, **unit.params}
        into.owners = into.owners | unit.owners
    return merged


def _trainable_dtypes(unit: Unit) -> set[torch.dtype]:
    return {param.dtype for param in unit.params.values() if param.requires_grad}


def _num_bytes(unit: Unit) -> int:
    return sum(param.nbytes for param in unit.params.values())


def _is_repeated(root: nn.Module) -> set[nn.Module]:
    """Return the candidates for blocks: the instances in containers of classes that repeat with equal shapes."""
    in_containers: dict[type, list[nn.Module]] = defaultdict(list)
    repeated: set[type] = set()
    for container in root.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        signatures: Counter[tuple[object, ...]] = Counter()
        for child in container.children():
            shapes = tuple(param.shape for param in child.parameters())
            if not shapes or not any(True for _ in child.children()) or not _has_forward(child):
                continue
            in_containers[type(child)].append(child)
            signatures[(type(child), shapes)] += 1
            if signatures[(type(child), shapes)] > 1:
                repeated.add(type(child))
    return {module for cls in repeated for module in in_containers[cls]}


def _outermost(root: nn.Module, wanted: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the outermost modules in ``wanted`` that have parameters, except the root."""
    inside = {id(sub) for module in wanted - {root} for sub in module.modules() if sub is not module}
    for name, module in root.named_modules():
        if (
            module is not root
            and module in wanted
            and id(module) not in inside
            and any(True for _ in module.parameters())
        ):
            yield name, module


def _has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` can be called, unlike a ModuleList or a ParameterDict."""
    return type(module).forward is not nn.Module.forward


def _callable_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children with parameters and a forward, by name; replace a child without a forward by its children."""
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        if not _has_forward(child):
            yield from _callable_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _cut_by_size(module: nn.Module, name: str, block_ids: set[int], min_num_params: int) -> list[Unit]:
    """Cut ``module`` bottom-up into units: submodules outside the blocks with enough parameters in no other unit.

    Args:
        module: Child of the root.
        name: Full name of ``module``.
        block_ids: Ids of the modules that are blocks.
        min_num_params: Number of parameters, not yet in a unit, from which a submodule becomes one.
    """
    units: list[Unit] = []
    taken: set[int] = set()

    def visit(current: nn.Module, path: str) -> None:
        if id(current) in block_ids:
            taken.update(id(param) for param in current.parameters())
            return
        for child_name, child in _callable_children(current, f"{path}."):
            visit(child, child_name)
        if current is module:
            return
        rest = {id(param): param.numel() for param in current.parameters() if id(param) not in taken}
        if sum(rest.values()) >= min_num_params:
            taken.update(rest)
            units.append(Unit("large", [path], [current]))

    visit(module, name)
    return units


def _of_one_dtype(root: nn.Module, units: list[Unit]) -> list[Unit]:
    """Move trainable parameters of a less frequent dtype, often norms in float32, out of their units.

    FSDP2 reduces the gradients of a unit together, in one dtype. The modules that own these parameters become an outer
    unit, listed before the unit that they are taken from.

    Raises:
        ValueError: If a module that owns such parameters has other parameters as well, itself or inside it, or if it is
            a module of the unit, so that it cannot become another unit.
    """
    names = {module: name for name, module in root.named_modules()}
    result: list[Unit] = []
    for unit in units:
        sizes: Counter[torch.dtype] = Counter()
        for param in unit.params.values():
            sizes[param.dtype] += param.numel() if param.requires_grad else 0
        rarer = [dtype for dtype, size in sizes.most_common() if size][1:]
        for dtype in rarer:
            params = {n: p for n, p in unit.params.items() if p.dtype == dtype and p.requires_grad}
            ids = set(map(id, params.values()))
            owners = [module for module in names if any(id(p) in ids for p in module.parameters(recurse=False))]
            mixed = [o for o in owners if o in unit.modules or any(id(p) not in ids for p in o.parameters())]
            if mixed:
                raise ValueError(
                    f"{names[mixed[0]] or 'the LightningModule'} has parameters of several dtypes, one of them"
                    f" {next(iter(params))} in {dtype}: their gradients are reduced together, and need one dtype. Give"
                    " all of them the same dtype, or put those of another dtype into a module of their own."
                )
            result.append(Unit("outer", [names[o] for o in owners], owners, params, set(owners)))
            unit.params = {n: p for n, p in unit.params.items() if n not in params}
            unit.owners -= set(owners)
        result.append(unit)
    return result


def _owners(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the full names of each parameter; a tied parameter has several names."""
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in root.named_parameters(remove_duplicate=False):
        owners[param].append(name)
    return dict(owners)


def _assign(root: nn.Module, units: list[Unit], owners: dict[nn.Parameter, list[str]]) -> list[Unit]:
    """Put every parameter into the innermost unit that contains all its owners; merge outer units that share one."""

    def holds(unit: Unit, param_name: str) -> bool:
        return any(not name or param_name.startswith(f"{name}.") for name in unit.names)

    for param, names in owners.items():
        holders = [unit for unit in units if all(holds(unit, name) for name in names)]
        # Inner units come first in the list; the root unit (with the name "") contains everything and is last.
        bound = [unit for unit in units if unit.kind == "outer" and any(holds(unit, name) for name in names)]
        if holders[0].kind == "root" and bound and all(any(holds(unit, name) for unit in bound) for name in names):
            first, *others = bound
            for other in others:
                first.names += other.names
                first.modules += other.modules
                first.params.update(other.params)
                first.owners |= other.owners
                units.remove(other)
            holders = [first]
        holders[0].params[names[0]] = param
        holders[0].owners.update(root.get_submodule(name.rpartition(".")[0]) for name in names)
    return [unit for unit in _move_to_shared_unit(root, units, owners) if unit.params]


def _move_to_shared_unit(root: nn.Module, units: list[Unit], owners: dict[nn.Parameter, list[str]]) -> Iterator[Unit]:
    """Move parameters that only modules of inner units own from large and outer units to the shared unit.

    The forward of a large or outer unit gathers only the parameters that its modules outside of inner units own. The
    shared unit is yielded before the root unit.
    """
    inner = {id(module) for unit in units if unit.kind in ("block", "large") for module in unit.modules}
    shared = Unit("shared", [""], [root])
    for unit in units:
        if unit.kind == "root":
            yield shared
        elif unit.kind in ("large", "outer"):
            reached = {id(sub) for module in unit.modules for sub in _outside(module, inner)}
            unit.owners.clear()
            for name, param in list(unit.params.items()):
                held_by = {root.get_submodule(path.rpartition(".")[0]) for path in owners[param]}
                if any(id(owner) in reached for owner in held_by):
                    unit.owners |= held_by
                else:
                    shared.params[name] = unit.params.pop(name)
                    shared.owners |= held_by
        yield unit


def _outside(module: nn.Module, inner: set[int]) -> Iterator[nn.Module]:
    """Yield ``module`` and all modules inside it, except those whose id is in ``inner`` and the modules inside them."""
    yield module
    for child in module.children():
        if id(child) not in inner:
            yield from _outside(child, inner)
