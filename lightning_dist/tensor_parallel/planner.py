"""Find the tensor-parallel plan of a model.

The plans of the user and of Hugging Face come first; the rest is inferred from a step on fake tensors. Each block is
then split and compared with the whole block on random inputs (``confirm``). If the results differ, a split that the
user has asked for is refused, and any other is replaced by replicating the modules.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.consensus import check_agreement
from lightning_dist.layers import linear_layer
from lightning_dist.step_graph import Dataflow, run_on_fakes, tensors_in
from lightning_dist.step_graph.dataflow import Call
from lightning_dist.tensor_parallel.confirm import BLOCK, Trial
from lightning_dist.tensor_parallel.find_sequence import SequenceFinder
from lightning_dist.tensor_parallel.infer import Group, inferred, innermost_around
from lightning_dist.tensor_parallel.layers import shared_heads
from lightning_dist.tensor_parallel.plan import (
    Entry,
    Plan,
    PlanError,
    SplitHeads,
    SplitSequence,
    resolve_plan,
    with_tied,
)
from lightning_dist.tensor_parallel.split_logits import works_on_parts
from lightning_dist.tensor_parallel.unsplit import reasons_for_whole
from lightning_dist.units import Unit

__all__ = ["StepTrace", "TensorParallelConfig", "find_plan", "make_plan"]


@dataclass(frozen=True)
class TensorParallelConfig:
    """Configure how layers are split over ``tp``.

    Args:
        plan: The user's plan, module name to style; see :func:`~lightning_dist.tensor_parallel.resolve_plan`.
        is_strict: Whether to raise an error if no plan can be inferred, or if a block that is split as inferred does
            not compute the same as the whole block.
        sequence_parallel: Whether hidden states are split along the sequence; None: wherever that computes the same.
        loss_parallel: Whether logits stay split along the vocabulary; None: unless the step needs whole logits.
        step: Runs one step of the module. It is given a function that makes a fake tensor of a real one, and passes
            each tensor of the batch through it. None: no step can be run, for the reason in ``why_no_step``.
        why_no_step: The reason why ``step`` is None.
        planned: The plan of the module that this one is a copy of; None: find a plan.
    """

    plan: Mapping[str, str] | None = None
    is_strict: bool = False
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    step: Callable[[Callable[[Tensor], Tensor]], Any] | None = None
    why_no_step: str = "no step is known"
    planned: Plan | None = None


def find_plan(
    root: nn.Module, units: Sequence[Unit], config: TensorParallelConfig, mesh: DeviceMesh, num_shards: int
) -> Plan:
    """Find the plan by which ``root`` is split. A collective over all processes.

    Args:
        root: The model, not split yet.
        units: The model's units.
        config: How layers are split.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.

    Raises:
        PlanError: If a name in the user's plan matches no module, or a block that is split as the user says does not
            compute the same as the whole block.
        OtherRankError: If ranks have found different plans.
    """
    if config.planned is not None:
        return config.planned
    explicit = resolve_plan(root, config.plan)
    blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
    trace = StepTrace(None, config.why_no_step)
    if config.step is not None:
        dataflow = Dataflow(frozenset(blocks), root, works_on_parts)
        device = torch.device(mesh.device_type)
        trace = StepTrace(dataflow, run_on_fakes(root, config.step, device, dataflow))
    plan = make_plan(
        root,
        blocks,
        explicit,
        trace,
        mesh,
        num_shards=num_shards,
        is_strict=config.is_strict,
        splits_sequence=config.sequence_parallel,
        splits_logits=config.loss_parallel,
    )
    check_agreement("The plan of tensor parallelism", plan.outline())
    return plan


@dataclass(frozen=True)
class StepTrace:
    """Represent the record of one step of a model on fake tensors.

    Args:
        dataflow: The recorded data flow; None: no step could be run.
        why_not: Why the step ended early or could not begin; empty: it ran to its end.
    """

    dataflow: Dataflow | None
    why_not: str = ""


def make_plan(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    explicit: Mapping[str, Entry],
    seen: StepTrace,
    mesh: DeviceMesh,
    *,
    num_shards: int = 1,
    is_strict: bool = False,
    splits_sequence: bool | None = None,
    splits_logits: bool | None = None,
) -> Plan:
    """Make the plan of ``root``, and try it block by block. A collective over all ranks.

    Args:
        root: The model.
        blocks: The model's repeated blocks, by full name.
        explicit: The entries that the user and Hugging Face give, by full module name; what they leave out is inferred.
        seen: The record of a step of the model.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        is_strict: Whether to raise an error if no plan can be inferred, or if a block that is split as inferred does
            not compute the same as the whole block.
        splits_sequence: Whether hidden states are split along the sequence; None: wherever that computes the same.
        splits_logits: Whether logits stay split; None: unless the recorded step needs whole logits.

    Raises:
        PlanError: If a block that is split as the user says does not compute the same as the whole block, or if
            ``splits_sequence`` or ``splits_logits`` is True and cannot be fulfilled.
    """
    planner = _Planner(root, blocks, seen, mesh, num_shards, is_strict)
    plan = planner.plan(dict(explicit), splits_sequence, splits_logits)
    del planner
    gc.collect()  # The trials hold copies of blocks, whose modules and hooks are in reference cycles.
    return plan


@dataclass(frozen=True)
class _Split:
    """Represent the part of a plan that concerns one unit, or several of them.

    The fields mean the same as those of :class:`~lightning_dist.tensor_parallel.plan.Plan`.
    """

    entries: Mapping[str, Entry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, SplitHeads] = field(default_factory=dict)

    def joined(self, *others: _Split) -> _Split:
        """Merge this part of a plan with ``others``; later ones override earlier ones."""
        result = self
        for other in others:
            result = _Split(
                {**result.entries, **other.entries},
                {**result.sizes, **other.sizes},
                {**result.parameters, **other.parameters},
                {**result.heads, **other.heads},
            )
        return result

    def inside(self, name: str) -> _Split:
        """Return the part of this that concerns the module ``name`` and its submodules."""
        return _Split(
            {key: value for key, value in self.entries.items() if _is_inside(key, name)},
            {key: value for key, value in self.sizes.items() if _is_inside(key, name)},
            {key: value for key, value in self.parameters.items() if _is_inside(key, name)},
            {key: value for key, value in self.heads.items() if _is_inside(key, name)},
        )


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _candidates(group: Group) -> Iterator[_Split]:
    """Yield the ways to split a group that are worth a trial, the likeliest first."""
    for num_packed in dict.fromkeys((group.num_packed, 1)):
        yield _Split(group.entries(num_packed), {}, group.parameters, group.heads)
        if group.parameters or group.heads:
            yield _Split(group.entries(num_packed))


class _Planner:
    def __init__(
        self,
        root: nn.Module,
        blocks: Mapping[str, nn.Module],
        seen: StepTrace,
        mesh: DeviceMesh,
        num_shards: int,
        is_strict: bool,
    ) -> None:
        self._root = root
        self._blocks = blocks
        self._seen = seen
        self._mesh = mesh
        self._num_shards = num_shards
        self._is_strict = is_strict
        self._trials: dict[object, Trial] = {}
        self._answers: dict[object, str] = {}
        self._calls: dict[str, Call] = {}
        if seen.dataflow is not None:
            self._calls = {call.name: call for call in reversed(seen.dataflow.calls)}
        self._impossible: set[str] = set()  # errors of splits that cannot even be tried
        self._notes: list[str] = []
        self._units: dict[str, nn.Module] = {}
        self._kept = _Split({})

    def plan(self, entries: dict[str, Entry], splits_sequence: bool | None, splits_logits: bool | None) -> Plan:
        dataflow = self._seen.dataflow
        groups: list[Group] = []
        if dataflow is not None:
            found = inferred(self._root, dataflow, self._mesh.size())
            groups = [group for group in found.groups if entries.keys().isdisjoint(group.names)]
            given, entries = entries, {**found.vocabulary, **entries}
            if not given and not groups and not entries:
                why_not = self._seen.why_not or "no layer's output is added to what it was computed from"
                self._complain(f"no plan was found: {why_not}")
        elif not entries:
            self._complain(f"no plan could be inferred: {self._seen.why_not}")
        entries, groups = self._with_tied(entries, groups)
        for name, unit in self._with_units_of(groups).items():
            its_groups = [group for group in groups if _is_inside(group.row, name)]
            given = {key: entry for key, entry in entries.items() if _is_inside(key, name)}
            if its_groups or any(entry.is_split for entry in given.values()):
                self._units[name] = unit
                tried = self._tried(name, _Split(given), its_groups)
                entries |= tried.entries
                self._kept = self._kept.joined(tried)
                groups = [group for group in groups if group not in its_groups]
        for group in groups:  # The remaining groups are in no module whose call was recorded.
            entries |= self._untried(group)
        entries = {name: entries[name] for name, _ in self._root.named_modules() if name in entries}
        sizes = self._kept.sizes
        sequence: SplitSequence | None = None
        why_not = "sequence_parallel=False"
        if splits_sequence is not False:
            sequence, why_not = self._split_sequence(entries, sizes)
        if sequence is None and splits_sequence:
            raise PlanError(f"sequence_parallel=True: {why_not}")
        entries = {name: self._note_shared_heads(name, entry) for name, entry in entries.items()}
        self._notes.append(f"hidden states are {'' if sequence else 'not '}split along the sequence" +
                           (f" ({why_not})" if why_not else ""))  # fmt: skip
        heads = [name for name, entry in entries.items() if entry.style == "colwise_gather_output"]
        uses = dataflow.uses if dataflow is not None else {}
        needs = sorted({use for head in heads for use in uses.get(head, ())})
        keeps = splits_logits is not False and (not needs or bool(splits_logits))
        if splits_logits and not heads:
            raise PlanError("loss_parallel=True: no head is split along the vocabulary; give a plan that does.")
        if heads:
            why = f" (used by {', '.join(needs)})" if needs else " (loss_parallel=False)" if not keeps else ""
            self._notes.append(f"logits are {'split along the vocabulary' if keeps else 'gathered'}{why}")
        self._notes += reasons_for_whole(self._root, entries, self._kept.parameters, dataflow)
        return Plan(
            entries,
            sizes,
            sequence,
            self._may_draw(),
            bool(heads) and keeps,
            tuple(self._notes),
            self._kept.parameters,
            self._kept.heads,
        )

    def _with_tied(self, entries: Mapping[str, Entry], groups: list[Group]) -> tuple[dict[str, Entry], list[Group]]:
        """Add entries for modules tied to split ones, and drop groups that are tied to a module that cannot be split.

        Returns:
            The entries of all modules that are in no remaining group, and the remaining groups.
        """
        dataflow = self._seen.dataflow
        is_whole_step = dataflow is not None and not self._seen.why_not
        readers = dataflow.readers if dataflow is not None and is_whole_step else None
        of_groups = {name: entry for group in groups for name, entry in group.entries().items()}
        tied = self._without_shared(with_tied(self._root, {**of_groups, **entries}, readers))
        if readers is not None:
            tied = {name: self._unless_read_elsewhere(name, entry, readers) for name, entry in tied.items()}
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

    def _unless_read_elsewhere(self, name: str, entry: Entry, readers: Mapping[str, Collection[str]]) -> Entry:
        """Replicate a module that was inferred to be split if the code of another module reads its parameters."""
        if entry.source != "inferred" or not entry.is_split:
            return entry
        params = set(self._root.get_submodule(name).parameters(recurse=False))
        split = {key for key, param in self._root.named_parameters() if param in params}
        tied = {key for key, module in self._root.named_modules() if params & set(module.parameters(recurse=False))}
        others = {reader for param in split for reader in readers.get(param, ()) if reader} - tied
        return entry.replicated(f"the code of {min(others)} reads its weight") if others else entry

    def _with_units_of(self, groups: Sequence[Group]) -> dict[str, nn.Module]:
        """Return the modules to try: the blocks, and the innermost called module around each group outside of them."""
        around = {innermost_around(group.names, self._calls) for group in groups} - {""}
        found = {name for name in around if not any(_is_inside(name, block) for block in self._blocks)}
        outermost = {name for name in found if not any(_is_inside(name, other) for other in found - {name})}
        free = {name for name in outermost if not any(_is_inside(block, name) for block in self._blocks)}
        return {**self._blocks, **{name: self._root.get_submodule(name) for name in sorted(free)}}

    def _untried(self, group: Group) -> dict[str, Entry]:
        """Return the entries of a group that no trial can confirm.

        A plain feed-forward group (at most two ``colwise`` layers, not packed, without heads or other parameters) is
        split all the same; any other group is replicated.
        """
        if len(group.cols) <= 2 and group.num_packed == 1 and not group.parameters and not group.heads:
            return group.entries()
        why = "no module around it can be tried"
        return {name: entry.replicated(why) for name, entry in group.entries().items()}

    def _without_shared(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Replicate modules that several blocks share: each block is tried alone, and may get a different split."""
        names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in self._root.named_modules(remove_duplicate=False):
            names[module].append(name)
        result = dict(entries)
        for name, entry in entries.items():
            holders = {block for block in self._blocks for path in names[self._root.get_submodule(name)]
                       if path.startswith(f"{block}.")}  # fmt: skip
            if entry.is_split and len(holders) > 1:
                if entry.source == "user":
                    raise PlanError(
                        f"plan: {name} is a part of {len(holders)} blocks, and cannot be split: use replicate."
                    )
                result[name] = entry.replicated(f"it is a part of {len(holders)} blocks")
        return result

    def _split_sequence(
        self, entries: Mapping[str, Entry], sizes: Mapping[str, Mapping[str, int]]
    ) -> tuple[SplitSequence | None, str]:
        dataflow = self._seen.dataflow
        if dataflow is None or not dataflow.calls:
            return None, f"no step could be run on fake tensors: {self._seen.why_not}"
        num_ranks, sharing = self._mesh.size(), self._sharing_blocks()
        return SequenceFinder(self._blocks, dataflow, num_ranks, sharing, self.difference).find(entries, sizes)

    def _sharing_blocks(self) -> set[str]:
        """Return the names of blocks with a parameter that is also held outside of the block."""
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, param in self._root.named_parameters(remove_duplicate=False):
            names[param].append(name)
        return {
            block
            for block in self._blocks
            for its_names in names.values()
            if 0 < sum(name.startswith(f"{block}.") for name in its_names) < len(its_names)
        }

    def _note_shared_heads(self, name: str, entry: Entry) -> Entry:
        """Note in an entry of a key or value layer that several ranks hold the same head."""
        heads = shared_heads(self._root, name, self._mesh.size()) if entry.style == "colwise" else None
        return entry if heads is None else replace(entry, why=f"each of its {heads} heads is on several ranks")

    def _complain(self, text: str) -> None:
        if self._is_strict:
            raise PlanError(f"strict_plan=True: {text}. Give a plan.")
        self._notes.append(text)

    def _may_draw(self) -> bool:
        dataflow = self._seen.dataflow
        return dataflow is None or bool(self._seen.why_not) or dataflow.draws_random

    def _tried(self, name: str, given: _Split, groups: Sequence[Group]) -> _Split:
        """Try a unit as planned, and replicate the inferred groups with which it does not compute the same.

        Args:
            name: Full name of the unit.
            given: The part of the plan that the user, Hugging Face and the vocabulary give for the unit.
            groups: The inferred groups inside the unit.

        Returns:
            The part of the plan that passed.

        Raises:
            PlanError: If it is the user's entries that change the results, or any entries under ``strict_plan=True``.
        """
        kind = type(self._units[name]).__name__
        everything = given.joined(*(next(_candidates(group)) for group in groups))
        if name not in self._calls:
            self._note_once(f"{kind} was not tried: " + (self._seen.why_not or "it was not called"))
            why = "it could not be tried: its block was not called"
            whole = {key: entry.replicated(why) for group in groups for key, entry in group.entries().items()}
            return given.joined(_Split(whole))
        tried, error = self._try_sizes(name, everything)
        if not error:
            return tried
        kept = self._tried_of_given(name, given)
        for group in groups:
            first = ""
            for candidate in _candidates(group):
                tried, error = self._try_sizes(name, kept.joined(candidate))
                first = first or error
                if not error:
                    kept = tried
                    break
            else:
                if self._is_strict:
                    raise PlanError(
                        f"strict_plan=True: split as inferred, {name} ({kind}) does not compute the same: {first}"
                    )
                whole = {key: entry.replicated(first) for key, entry in group.entries().items()}
                kept = kept.joined(_Split(whole))
        return kept

    def _tried_of_given(self, name: str, given: _Split) -> _Split:
        """Try a unit without its inferred groups.

        Where the given entries do not come from the user, those with which the unit does not compute the same are
        replicated.

        Raises:
            PlanError: If it is the user's entries that change the results, or any entries under ``strict_plan=True``.
        """
        if not any(entry.is_split for entry in given.entries.values()):
            return given
        tried, error = self._try_sizes(name, given)
        if not error:
            return tried
        source = next(entry.source for entry in given.entries.values() if entry.is_split)
        kind = type(self._units[name]).__name__
        if source == "user" and error in self._impossible:
            raise PlanError(f"plan: {error}")
        if source == "user":
            raise PlanError(f"plan: split as given, {name} ({kind}) does not compute the same as the whole: {error}")
        if self._is_strict:
            raise PlanError(f"strict_plan=True: split as {source}, {name} ({kind}) does not compute the same: {error}")
        kept = _Split({})
        for part in self._parts(given.entries):
            tried, error = self._try_sizes(name, kept.joined(_Split(part)))
            whole = _Split({key: entry.replicated(error) for key, entry in part.items()})
            kept = kept.joined(whole) if error else tried
        return kept

    def _parts(self, entries: Mapping[str, Entry]) -> list[dict[str, Entry]]:
        """Partition a block's entries by the ``rowwise`` layer that they feed; those that feed none come last."""
        dataflow = self._seen.dataflow
        assert dataflow is not None
        rows = [name for name, entry in entries.items() if entry.style == "rowwise"]
        parts = []
        for row in rows:
            cols = dataflow.into[row]
            feeding = [
                name
                for name in entries
                if name in cols or (name not in rows and dataflow.into[name] and dataflow.into[name] <= cols)
            ]
            parts.append({name: entries[name] for name in (*feeding, row)})
        taken = {name for part in parts for name in part}
        rest = {name: entry for name, entry in entries.items() if name not in taken}
        return [*parts, *([rest] if rest else [])]

    def _try_sizes(self, name: str, split: _Split) -> tuple[_Split, str]:
        """Find the attribute sizes with which a split unit computes the same as the whole one.

        Returns:
            The split with these sizes, and an empty text; or the split as it is, and the error of the first try.
        """
        first = ""
        for sizes in self._candidate_sizes(name, split.entries):
            tried = replace(split, sizes=sizes)
            error = self._difference(name, tried, None)
            if not error:
                return tried, ""
            first = first or error
        return split, first

    def _candidate_sizes(self, name: str, entries: Mapping[str, Entry]) -> Iterator[dict[str, dict[str, int]]]:
        """Yield the attributes to divide: none, those that count heads, those that count features, and both.

        ``num_key_value_groups`` is adapted in each of them.
        """
        size = self._mesh.size()
        yield self._sizes(name, entries, size, heads=False, features=False)
        yield self._sizes(name, entries, size, heads=True, features=False)
        yield self._sizes(name, entries, size, heads=False, features=True)
        yield self._sizes(name, entries, size, heads=True, features=True)

    def _sizes(
        self, name: str, entries: Mapping[str, Entry], size: int, heads: bool, features: bool
    ) -> dict[str, dict[str, int]]:
        changed: dict[str, dict[str, int]] = {}
        rows = [key for key, entry in entries.items() if entry.style == "rowwise"]
        for row in rows:
            layer = linear_layer(self._root.get_submodule(row))
            assert layer is not None
            cols = self._seen.dataflow.into[row] if self._seen.dataflow is not None else set()
            for owner in sorted({key.rpartition(".")[0] for key in (row, *cols) if key.startswith(f"{name}.")}):
                module = self._root.get_submodule(owner)
                for key, value in vars(module).items():
                    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                        continue
                    if key == "num_key_value_groups":
                        new = self._groups_of_keys(module, value, size)
                    elif heads and re.search(r"heads?$", key) and value != layer.in_features:
                        new = max(value // size, 1)
                    elif features and value == layer.in_features:
                        new = value // size
                    else:
                        continue
                    if new != value:
                        changed.setdefault(owner, {})[key] = new
        return changed

    def _groups_of_keys(self, module: nn.Module, groups: int, size: int) -> int:
        """Return how many query heads share a key head on one rank.

        It is ``groups`` as in the whole model, unless there are fewer key heads than ranks (``size``), so that ranks
        have copies of the same key head.
        """
        head_dim, key = getattr(module, "head_dim", None), getattr(module, "k_proj", None)
        layer = linear_layer(key) if isinstance(key, nn.Module) else None
        if layer is None or not isinstance(head_dim, int):
            return groups
        num_key_heads = layer.out_features // head_dim
        return groups if num_key_heads >= size else max(groups * num_key_heads // size, 1)

    def difference(
        self,
        name: str,
        entries: Mapping[str, Entry],
        sizes: Mapping[str, Mapping[str, int]],
        sequence: SplitSequence | None,
    ) -> str:
        """Try a unit with the parameters and heads that its plan splits already; see :meth:`_difference`."""
        return self._difference(name, replace(self._kept.inside(name), entries=entries, sizes=sizes), sequence)

    def _difference(self, name: str, split: _Split, sequence: SplitSequence | None) -> str:
        """Return how a split unit differs from the whole one (see :meth:`Trial.difference`); empty: it does not.

        Units of the same class, shapes and inputs share one trial and its answers.
        """
        unit = self._units[name]

        def inside(key: str) -> str:
            return BLOCK + key[len(name) :]

        # The entries are sorted, because ranks must agree on whether a plan was tried already: a trial is a collective.
        plan = Plan(
            {inside(key): entry for key, entry in sorted(split.entries.items())},
            {inside(key): dict(sorted(value.items())) for key, value in sorted(split.sizes.items())},
            sequence,
            parameters={inside(key): dim for key, dim in sorted(split.parameters.items())},
            heads={inside(key): heads for key, heads in sorted(split.heads.items())},
        )
        shapes = tuple((key, tuple(param.shape)) for key, param in unit.named_parameters())
        used = () if self._seen.dataflow is None else self._seen.dataflow.used_later.get(name, ())
        kind = (type(unit), shapes, _shapes(self._calls[name]), tuple(sorted(used)))
        if kind not in self._trials:
            self._trials[kind] = Trial(unit, self._calls[name], self._mesh, self._num_shards, used)
        trial = self._trials[kind]
        if trial.error:
            return f"it could not be tried: {trial.error}"
        question = (kind, repr(plan))
        if question not in self._answers:
            try:
                self._answers[question] = trial.difference(plan)
            except PlanError as error:
                self._answers[question] = str(error).removeprefix("plan: ").replace(f"{BLOCK}.", f"{name}.")
                self._impossible.add(self._answers[question])
        return self._answers[question]

    def _note_once(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _shapes(call: Call) -> object:
    # Shapes are compared as text, because a symbolic size, which depends on values, can be neither compared nor hashed.
    return tuple((str(tuple(tensor.shape)), tensor.dtype) for tensor in tensors_in((call.args, call.kwargs)))
