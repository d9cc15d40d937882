"""Try units that are split as a plan says, and replicate the layers whose split changes the results.

A unit is a block, or the innermost called module around a group of layers outside of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.techniques.tensor_parallel.attention_heads import is_inferred_attention
from lightning_dist.techniques.tensor_parallel.infer import LayerGroup
from lightning_dist.techniques.tensor_parallel.plan import (
    Entry,
    Plan,
    PlanError,
    SplitHeads,
    SplitSequence,
    is_inside,
)
from lightning_dist.techniques.tensor_parallel.sizes import SizeFinder, Sizes
from lightning_dist.techniques.tensor_parallel.trial import BLOCK, Trial
from lightning_dist.tracing.block_trial import kind_of_block
from lightning_dist.tracing.planning import OncePerKind, first_that_fits
from lightning_dist.tracing.step_graph import Dataflow
from lightning_dist.tracing.step_graph.dataflow import Call

__all__ = ["PartialPlan", "UnitTrials"]


@dataclass(frozen=True)
class PartialPlan:
    """Represent the part of a plan that concerns one unit, or several of them.

    The fields mean the same as those of :class:`~lightning_dist.techniques.tensor_parallel.plan.Plan`.
    """

    entries: Mapping[str, Entry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, SplitHeads] = field(default_factory=dict)
    widths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def joined(self, *others: PartialPlan) -> PartialPlan:
        """Merge this part of a plan with ``others``; later ones override earlier ones."""
        result = self
        for other in others:
            result = PartialPlan(
                {**result.entries, **other.entries},
                {**result.sizes, **other.sizes},
                {**result.parameters, **other.parameters},
                {**result.heads, **other.heads},
                {**result.widths, **other.widths},
            )
        return result

    def inside(self, name: str) -> PartialPlan:
        """Return the part of this plan that concerns the module ``name`` and its submodules."""
        return PartialPlan(
            {key: value for key, value in self.entries.items() if is_inside(key, name)},
            {key: value for key, value in self.sizes.items() if is_inside(key, name)},
            {key: value for key, value in self.parameters.items() if is_inside(key, name)},
            {key: value for key, value in self.heads.items() if is_inside(key, name)},
            {key: value for key, value in self.widths.items() if is_inside(key, name)},
        )


def _candidates(group: LayerGroup) -> Iterator[PartialPlan]:
    """Yield the ways to split a group that are worth a trial, with the most likely one first."""
    for num_packed in dict.fromkeys((group.num_packed, 1)):
        yield PartialPlan(group.entries(num_packed), {}, group.parameters, group.heads)
        if group.parameters or group.heads:
            yield PartialPlan(group.entries(num_packed))


class UnitTrials:
    """Compare split units with whole ones, and remember the results.

    Args:
        root: The model with whole parameters.
        dataflow: The recorded data flow of a step; None: no step could be run.
        why_not: The reason why the step ended early or could not begin; empty: it ran to its end.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        is_strict: Whether to raise an error if a unit that is split as inferred does not compute the same.
        note: Function that is given a sentence for the start-up table.
    """

    def __init__(
        self,
        root: nn.Module,
        dataflow: Dataflow | None,
        why_not: str,
        mesh: DeviceMesh,
        num_shards: int,
        is_strict: bool,
        note: Callable[[str], None],
    ) -> None:
        self._root = root
        self._dataflow = dataflow
        self._why_not = why_not
        self._mesh = mesh
        self._num_shards = num_shards
        self._is_strict = is_strict
        self._note = note
        self._trials = OncePerKind[Trial]()
        self._answers = OncePerKind[str]()
        self._impossible: set[str] = set()  # These are the errors of splits that could not even be tried.
        self._units: dict[str, nn.Module] = {}
        self.calls: dict[str, Call] = {}
        """The first call of each module in the recorded step, by the module's name."""
        if dataflow is not None:
            self.calls = dataflow.first_calls()
        self.kept = PartialPlan({})
        """The part of the plan that has passed its trials so far."""

    def try_unit(self, name: str, unit: nn.Module, given: PartialPlan, groups: Sequence[LayerGroup]) -> PartialPlan:
        """Try a unit as planned, and replicate the inferred groups whose split changes its results.

        Args:
            name: Full name of the unit in the model.
            unit: The module itself, with whole parameters; the trial works on copies of it.
            given: The part of the plan for the unit that the user, Hugging Face and the split of the vocabulary
                determine.
            groups: The inferred groups inside the unit.

        Returns:
            The part of the plan for the unit, in which inferred groups that change its results are replicated.

        Raises:
            PlanError: If the user's entries change the results, or any entries under ``strict_plan=True``.
        """
        self._units[name] = unit
        tried = self._tried(name, given, groups)
        self.kept = self.kept.joined(tried)
        return tried

    def _tried(self, name: str, given: PartialPlan, groups: Sequence[LayerGroup]) -> PartialPlan:
        kind = type(self._units[name]).__name__
        everything = given.joined(*(next(_candidates(group)) for group in groups))
        if name not in self.calls:
            self._note(f"{kind} was not tried: " + (self._why_not or "it was not called"))
            why = "it could not be tried: its block was not called"
            whole = {key: entry.replicated(why) for group in groups for key, entry in group.entries().items()}
            return given.joined(PartialPlan(whole))
        tried, error = self._try_sizes(name, everything)
        if not error:
            return tried
        attention = {key: entry for key, entry in given.entries.items() if is_inferred_attention(entry)}
        others = {key: entry for key, entry in given.entries.items() if key not in attention}
        kept = self._tried_of_given(name, replace(given, entries=others))
        for key, entry in attention.items():
            tried, error = self._try_sizes(name, kept.joined(PartialPlan({key: entry})))
            kept = kept.joined(PartialPlan({key: entry.replicated(error)})) if error else tried
        for group in groups:
            so_far = kept
            found, error = first_that_fits(_candidates(group), lambda part: self._try_sizes(name, so_far.joined(part)))  # noqa: B023
            if found is not None:
                kept = found
                continue
            if self._is_strict:
                raise PlanError(
                    f"strict_plan=True: split as inferred, {name} ({kind}) does not compute the same: {error}"
                )
            kept = kept.joined(PartialPlan({key: entry.replicated(error) for key, entry in group.entries().items()}))
        return kept

    def _tried_of_given(self, name: str, given: PartialPlan) -> PartialPlan:
        """Try a unit whose inferred groups are not split.

        If the given entries do not come from the user, those that change the unit's results are replicated.

        Raises:
            PlanError: If the user's entries change the results, or any entries under ``strict_plan=True``.
        """
        if not any(entry.is_split for entry in given.entries.values()):
            return given
        tried, error = self._try_sizes(name, given)
        if not error:
            return tried
        source = next(entry.source for entry in given.entries.values() if entry.is_split)
        kind = type(self._units[name]).__name__
        if source == "user" and self._trial_of(name).error and not self._is_block(name):
            self._note(f"{name} was not tried: {self._trial_of(name).error}")
            return given
        if source == "user" and error in self._impossible:
            raise PlanError(f"plan: {error}")
        if source == "user":
            raise PlanError(f"plan: split as given, {name} ({kind}) does not compute the same as the whole: {error}")
        if self._is_strict:
            raise PlanError(f"strict_plan=True: split as {source}, {name} ({kind}) does not compute the same: {error}")
        kept = PartialPlan({})
        for part in self._parts(given.entries):
            tried, error = self._try_sizes(name, kept.joined(PartialPlan(part)))
            whole = PartialPlan({key: entry.replicated(error) for key, entry in part.items()})
            kept = kept.joined(whole) if error else tried
        return kept

    def _parts(self, entries: Mapping[str, Entry]) -> list[dict[str, Entry]]:
        """Partition a block's entries by the ``rowwise`` layer that they feed; entries that feed none come last."""
        dataflow = self._dataflow
        assert dataflow is not None
        rows = [name for name, entry in entries.items() if entry.style == "rowwise"]
        parts = []
        for row in rows:
            cols = dataflow.input_sources[row]
            feeding = [
                name
                for name in entries
                if name in cols
                or (name not in rows and dataflow.input_sources[name] and dataflow.input_sources[name] <= cols)
            ]
            parts.append({name: entries[name] for name in (*feeding, row)})
        taken = {name for part in parts for name in part}
        rest = {name: entry for name, entry in entries.items() if name not in taken}
        return [*parts, *([rest] if rest else [])]

    def _try_sizes(self, name: str, split: PartialPlan) -> tuple[PartialPlan, str]:
        """Find the sizes with which the code of a split unit computes the same as the whole one.

        Returns:
            The split with these sizes, and an empty text; or ``split`` itself, and the error of the first try.
        """

        def attempt(sizes: Sizes) -> tuple[PartialPlan, str]:
            tried = replace(split, sizes=sizes.attributes, widths=sizes.widths)
            return tried, self._difference(name, tried, None)

        finder = SizeFinder(self._root, self._dataflow, self.calls, self._mesh.size())
        found, why_not = first_that_fits(finder.candidates(name, split.entries), attempt)
        return (split if found is None else found), why_not

    def difference(
        self,
        name: str,
        entries: Mapping[str, Entry],
        sizes: Mapping[str, Mapping[str, int]],
        sequence: SplitSequence | None,
    ) -> str:
        """Return how a unit differs from the whole one if it is split as given; empty: it does not.

        The parameters and heads of the unit are split as in the part of the plan that has already passed for it.

        Args:
            name: Full name of a unit that :meth:`try_unit` has tried.
            entries: The entries of the unit's modules, by full name.
            sizes: The attribute sizes of the unit's modules, as in the plan.
            sequence: Description of the split of hidden states along the sequence; None: they are not split.
        """
        return self._difference(name, replace(self.kept.inside(name), entries=entries, sizes=sizes), sequence)

    def _difference(self, name: str, split: PartialPlan, sequence: SplitSequence | None) -> str:
        """Return how a split unit differs from the whole one (see :meth:`Trial.difference`); empty: it does not.

        Units of the same class, shapes, inputs and flags share one trial and its answers.
        """

        def inside(key: str) -> str:
            return BLOCK + key[len(name) :]

        # The entries are sorted, because ranks must agree on whether a plan was tried already: a trial is a collective.
        plan = Plan(
            {inside(key): entry for key, entry in sorted(split.entries.items())},
            {inside(key): dict(sorted(value.items())) for key, value in sorted(split.sizes.items())},
            sequence,
            parameters={inside(key): dim for key, dim in sorted(split.parameters.items())},
            heads={inside(key): heads for key, heads in sorted(split.heads.items())},
            widths={inside(key): arguments for key, arguments in sorted(split.widths.items())},
        )
        trial = self._trial_of(name)
        if trial.error:
            return f"it could not be tried: {trial.error}"

        def difference() -> str:
            try:
                return trial.difference(plan)
            except PlanError as error:
                text = str(error).removeprefix("plan: ").replace(f"{BLOCK}.", f"{name}.")
                text = name + text.removeprefix(BLOCK) if text.startswith(f"{BLOCK} ") else text
                self._impossible.add(text)
                return text

        return self._answers.of((self._kind_of(name), repr(plan)), difference)

    def _trial_of(self, name: str) -> Trial:
        """Return the trial of a unit and of all units of its kind. Making it is a collective."""
        used, call = self._used(name), self.calls[name]
        return self._trials.of(
            self._kind_of(name), lambda: Trial(self._units[name], call, self._mesh, self._num_shards, used)
        )

    def _kind_of(self, name: str) -> object:
        return kind_of_block(self._units[name], name, self.calls[name], self._used(name))

    def _used(self, name: str) -> Collection[int]:
        return () if self._dataflow is None else self._dataflow.used_later.get(name, ())

    def _is_block(self, name: str) -> bool:
        return self._dataflow is not None and name in self._dataflow.blocks
