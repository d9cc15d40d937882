"""Split modules that share parameters, or whose parameters other modules read, alike or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_dist.model.layers import linear_layer
from lightning_dist.techniques.tensor_parallel.infer import LayerGroup
from lightning_dist.techniques.tensor_parallel.layers import unsupported_options
from lightning_dist.techniques.tensor_parallel.plan import Entry, PlanError

__all__ = ["blocks_that_share", "with_tied", "with_tied_of_groups"]


def with_tied(
    root: nn.Module, entries: Mapping[str, Entry], readers: Mapping[str, Collection[str]] | None = None
) -> dict[str, Entry]:
    """Add entries for the modules that share a split parameter with a module in ``entries``.

    Where one of the modules that share a parameter cannot be split, all of them are replicated.

    Args:
        root: The model with whole parameters.
        entries: The entries of the plan, by full module name.
        readers: The names of the modules whose code uses a parameter, by full parameter name. A module that holds the
            parameter without using it needs no entry. None: it is not known which modules use a parameter, so each
            module that holds it needs an entry.

    Returns:
        The entries by full module name, in the order in which the model defines its modules.

    Raises:
        PlanError: If a module that cannot be split is tied to one that the user wants split.
    """
    split = {
        param: name
        for name, entry in entries.items()
        if entry.is_split
        for param in root.get_submodule(name).parameters(recurse=False)
    }
    result = dict(entries)
    names = {param: name for name, param in root.named_parameters()}
    for name, module in root.named_modules():
        own = [param for param in module.parameters(recurse=False) if param in split]
        tied = [split[param] for param in own if readers is None or name in readers.get(names[param], ())]
        if not name or not tied or (name in entries and entries[name].is_split):
            continue
        first = entries[tied[0]]
        asked = entries.get(name)
        if asked is not None and asked.source == "user" and first.source != "user":
            alike = _sharing(root, entries, tied[0]) - {name}
            asked_to_split = [key for key in alike if entries[key].source == "user" and entries[key].is_split]
            if asked_to_split:
                raise _conflict(name, asked, asked_to_split[0], entries[asked_to_split[0]])
            why = f"tied to {name}, which plan replicates"
            return with_tied(root, {**entries, **{key: entries[key].replicated(why) for key in alike}}, readers)
        if asked is not None and asked.source == "user":
            raise _conflict(name, asked, tied[0], first)
        if isinstance(module, nn.Embedding) and not unsupported_options(module):
            style = "embedding_rowwise"
        elif linear_layer(module) is not None and first.style == "embedding_rowwise":
            style = "colwise_gather_output"
        elif first.source == "user":
            raise PlanError(
                f"plan: {name} is tied to {tied[0]}, which is split as {first.style}, and cannot be split itself: use"
                f" replicate for {tied[0]}."
            )
        else:
            alike = _sharing(root, entries, tied[0])
            why = f"tied to {name}, which cannot be split"
            return with_tied(root, {**entries, **{key: entries[key].replicated(why) for key in alike}}, readers)
        result[name] = Entry(style, first.source, f"tied to {tied[0]}")
    return {name: result[name] for name, _ in root.named_modules() if name in result}


def _conflict(name: str, entry: Entry, other: str, split: Entry) -> PlanError:
    return PlanError(
        f"plan: {name} is {entry.style}, and {other}, which is tied to it, is split as {split.style}: they share a"
        " parameter. Replicate both, or leave one out."
    )


def _sharing(root: nn.Module, entries: Mapping[str, Entry], name: str) -> set[str]:
    """Return the names in ``entries`` that share parameters with ``name``, directly or through other entries.

    ``name`` itself is among them.
    """
    params = {key: set(root.get_submodule(key).parameters(recurse=False)) for key in entries}
    found, shared = {name}, params[name]
    while more := {key for key, own in params.items() if key not in found and own & shared}:
        found |= more
        shared = shared.union(*(params[key] for key in more))
    return found


def with_tied_of_groups(
    root: nn.Module,
    blocks: Collection[str],
    entries: Mapping[str, Entry],
    groups: Sequence[LayerGroup],
    readers: Mapping[str, Collection[str]] | None,
) -> tuple[dict[str, Entry], list[LayerGroup]]:
    """Add entries for modules tied to split ones, and drop groups that are tied to a module that cannot be split.

    Args:
        root: The model with whole parameters.
        blocks: Full names of the model's blocks.
        entries: The entries of the plan besides those of ``groups``, by full module name.
        groups: The inferred groups of layers.
        readers: As for :func:`with_tied`.

    Returns:
        The entries of all modules that are in no remaining group, and the remaining groups.
    """
    of_groups = {name: entry for group in groups for name, entry in group.entries().items()}
    tied = _without_shared(root, blocks, with_tied(root, {**of_groups, **entries}, readers))
    if readers is not None:
        reading = {param: readers.get(name, ()) for name, param in root.named_parameters()}
        holding: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, module in root.named_modules():
            for param in module.parameters(recurse=False):
                holding[param].append(name)
        tied = {name: _unless_read_elsewhere(root, name, entry, reading, holding) for name, entry in tied.items()}
    kept = []
    for group in groups:
        whole = [name for name, entry in group.entries().items() if tied[name] != entry]
        if not whole:
            kept.append(group)
        for name in group.names if whole else ():
            if tied[name].is_split or not tied[name].why:
                tied[name] = tied[name].replicated(f"it can only be split with {whole[0]}, which is not split")
    in_groups = {name for group in kept for name in group.names}
    return {name: entry for name, entry in tied.items() if name not in in_groups}, kept


def _unless_read_elsewhere(
    root: nn.Module,
    name: str,
    entry: Entry,
    readers: Mapping[nn.Parameter, Collection[str]],
    holders: Mapping[nn.Parameter, Collection[str]],
) -> Entry:
    """Replicate a module that was inferred to be split if the code of another module reads its parameters.

    Args:
        root: The model with whole parameters.
        name: Full name of the module.
        entry: The entry of the module in the plan that was inferred or given.
        readers: Full names of the modules whose code reads a parameter, by parameter.
        holders: Full names of the modules that hold a parameter, by parameter.
    """
    if entry.source != "inferred" or not entry.is_split:
        return entry
    params = list(root.get_submodule(name).parameters(recurse=False))
    reading = {reader for param in params for reader in readers[param] if reader}
    others = reading - {holder for param in params for holder in holders[param]}
    return entry.replicated(f"the code of {min(others)} reads its weight") if others else entry


def _without_shared(root: nn.Module, blocks: Collection[str], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Replicate modules that several blocks share, because each block is tried, and perhaps split, separately."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in root.named_modules(remove_duplicate=False):
        names[module].append(name)
    result = dict(entries)
    for name, entry in entries.items():
        holders = {block for block in blocks for path in names[root.get_submodule(name)]
                   if path.startswith(f"{block}.")}  # fmt: skip
        if entry.is_split and len(holders) > 1:
            if entry.source == "user":
                raise PlanError(f"plan: {name} is a part of {len(holders)} blocks, and cannot be split: use replicate.")
            result[name] = entry.replicated(f"it is a part of {len(holders)} blocks")
    return result


def blocks_that_share(root: nn.Module, blocks: Collection[str]) -> set[str]:
    """Return the names of ``blocks`` with a parameter that is also held outside of the block."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in root.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return {
        block
        for block in blocks
        for its_names in names.values()
        if 0 < sum(name.startswith(f"{block}.") for name in its_names) < len(its_names)
    }
