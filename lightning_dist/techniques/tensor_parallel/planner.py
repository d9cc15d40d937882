"""Find the tensor-parallel plan of a model.

The plans of the user and of Hugging Face come first; the rest is inferred from a step on fake tensors. Each block is
then split and compared with the whole block on random inputs (``trial``). If the results differ, a split that the
user has asked for is refused, and any other is replaced by replicating the modules.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.mesh.consensus import check_agreement
from lightning_dist.model.layers import linear_layer
from lightning_dist.model.units import Unit
from lightning_dist.techniques.options import FirstStep
from lightning_dist.techniques.tensor_parallel.attention_heads import attention_modules
from lightning_dist.techniques.tensor_parallel.find_sequence import SequenceFinder
from lightning_dist.techniques.tensor_parallel.gathered import layers_to_gather
from lightning_dist.techniques.tensor_parallel.hooked import (
    SPLITS_FEATURES,
    SeenByHooks,
    modules_that_see_parts,
    why_refused,
)
from lightning_dist.techniques.tensor_parallel.infer import LayerGroup, inferred, innermost_around
from lightning_dist.techniques.tensor_parallel.layers import shared_heads
from lightning_dist.techniques.tensor_parallel.plan import (
    Entry,
    Plan,
    PlanError,
    Source,
    SplitSequence,
    is_inside,
    resolve_plan,
)
from lightning_dist.techniques.tensor_parallel.split_logits import works_on_parts
from lightning_dist.techniques.tensor_parallel.ties import blocks_that_share, with_tied_of_groups
from lightning_dist.techniques.tensor_parallel.unit_trials import PartialPlan, UnitTrials
from lightning_dist.techniques.tensor_parallel.unsplit import check_share, reasons_for_whole, share_split
from lightning_dist.tracing.step_graph import Dataflow, record_step

__all__ = ["StepTrace", "find_plan", "make_plan"]


def find_plan(
    root: nn.Module,
    units: Sequence[Unit],
    user_plan: Mapping[str, str] | None,
    first: FirstStep,
    mesh: DeviceMesh,
    *,
    num_shards: int,
    is_strict: bool | None,
    splits_sequence: bool | None,
    splits_logits: bool | None,
    experts: Mapping[str, tuple[str, str]],
    splits_attention: bool = True,
) -> Plan:
    """Find the plan by which ``root`` is split. This is a collective over all processes.

    Args:
        root: The model, not split yet.
        units: All units of the model; those of the kind ``block`` are its repeated blocks.
        user_plan: The user's plan, as for :func:`~lightning_dist.techniques.tensor_parallel.resolve_plan`.
        first: The step to run on fake tensors.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        is_strict: Whether to raise an error if no plan can be inferred, or if a block that is split as inferred does
            not compute the same as the whole block. None: only if nothing at all can be split.
        splits_sequence: Whether hidden states are split along the sequence; None: wherever that computes the same.
        splits_logits: Whether logits stay split along the vocabulary; None: unless the step needs whole logits.
        experts: The style of each module of experts (``experts``: another technique distributes them; ``replicate``)
            and a remark for the start-up table, by full module name.
        splits_attention: Whether modules of ``nn.MultiheadAttention`` may be split by heads.

    Raises:
        PlanError: If a name in the user's plan matches no module, or a block that is split as the user says does not
            compute the same as the whole block; or if nothing can be split, unless ``is_strict`` is False.
        OtherRankError: If ranks have found different plans.
    """
    explicit = resolve_plan(root, user_plan)
    blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
    trace = _trace_of(root, blocks, first, torch.device(mesh.device_type))
    plan = make_plan(
        root,
        blocks,
        explicit,
        trace,
        mesh,
        num_shards=num_shards,
        is_strict=bool(is_strict),
        splits_sequence=splits_sequence,
        splits_logits=splits_logits,
        experts=experts,
        splits_attention=splits_attention,
    )
    check_agreement("The plan of tensor parallelism", plan.outline())
    if is_strict is not False:
        reasons = [note for note in plan.notes if note.startswith(("no pair ", "no plan ", "whole, "))]
        check_share(share_split(root, plan.entries, plan.parameters), mesh.size(), reasons)
    return plan


@dataclass(frozen=True)
class StepTrace:
    """Hold the record of one step of a model on fake tensors.

    Args:
        dataflow: The recorded data flow; None: no step could be run.
        why_not: The reason why the step ended early or could not begin; empty: it ran to its end.
    """

    dataflow: Dataflow | None
    why_not: str = ""


def _trace_of(root: nn.Module, blocks: Mapping[str, nn.Module], first: FirstStep, device: torch.device) -> StepTrace:
    if first.run is None:
        return StepTrace(None, first.why_not)
    return StepTrace(*record_step(lambda: Dataflow(frozenset(blocks), root, works_on_parts), root, first.run, device))


def make_plan(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    explicit: Mapping[str, Entry],
    step_trace: StepTrace,
    mesh: DeviceMesh,
    *,
    num_shards: int = 1,
    is_strict: bool = False,
    splits_sequence: bool | None = None,
    splits_logits: bool | None = None,
    experts: Mapping[str, tuple[str, str]] | None = None,
    splits_attention: bool = True,
) -> Plan:
    """Make the plan of ``root``, and try it block by block. This is a collective over all processes.

    Args:
        root: The model, not split yet.
        blocks: The model's repeated blocks, by full name.
        explicit: The entries that the user and Hugging Face give, by full module name; other modules' are inferred.
        step_trace: The record of a step of the model on fake tensors.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        is_strict: Whether to raise an error if no plan can be inferred, or if a block that is split as inferred does
            not compute the same as the whole block.
        splits_sequence: Whether hidden states are split along the sequence; None: wherever that computes the same.
        splits_logits: Whether logits stay split; None: unless the recorded step needs whole logits.
        experts: As for :func:`find_plan`.
        splits_attention: As for :func:`find_plan`.

    Raises:
        PlanError: If a block that is split as the user says does not compute the same as the whole block, or if
            ``splits_sequence`` or ``splits_logits`` is True and cannot be fulfilled.
    """
    planner = _Planner(root, blocks, step_trace, mesh, num_shards, is_strict, splits_attention)
    explicit, of_experts = _split_off_experts(explicit, experts or {})
    plan = planner.plan(dict(explicit), of_experts, splits_sequence, splits_logits)
    del planner
    gc.collect()  # The trials hold copies of blocks, whose modules and hooks are in reference cycles.
    return plan


def _split_off_experts(
    explicit: Mapping[str, Entry], experts: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return the given entries without those of experts, and the entries of experts, by full module name."""
    others = {name: entry for name, entry in explicit.items() if name not in experts and entry.style != "experts"}
    of_experts: dict[str, Entry] = {}
    for name, (style, why) in experts.items():
        source: Source = "user" if name in explicit and explicit[name].source == "user" else "inferred"
        of_experts[name] = Entry(style, source, why)
    return others, of_experts


_FEATURES = (*SPLITS_FEATURES, "rowwise")
"""Styles whose layers return or are given a part of the features."""


class _Planner:
    def __init__(
        self,
        root: nn.Module,
        blocks: Mapping[str, nn.Module],
        step_trace: StepTrace,
        mesh: DeviceMesh,
        num_shards: int,
        is_strict: bool,
        splits_attention: bool,
    ) -> None:
        self._splits_attention = splits_attention
        self._root = root
        self._blocks = blocks
        self._step_trace = step_trace
        self._mesh = mesh
        self._is_strict = is_strict
        self._notes: list[str] = []
        self._rows_of_attention: list[str] = []
        """Names of layers that are given the output of an attention."""
        self._hooks = SeenByHooks(root, step_trace.dataflow)
        self._trials = UnitTrials(
            root, step_trace.dataflow, step_trace.why_not, mesh, num_shards, is_strict, self._note_once
        )

    def plan(
        self,
        entries: dict[str, Entry],
        of_experts: Mapping[str, Entry],
        splits_sequence: bool | None,
        splits_logits: bool | None,
    ) -> Plan:
        dataflow = self._step_trace.dataflow
        groups: list[LayerGroup] = []
        if dataflow is not None:
            found = inferred(self._root, dataflow, self._mesh.size())
            groups = [group for group in found.groups if entries.keys().isdisjoint(group.names)]
            self._rows_of_attention = [group.row for group in found.groups if group.mixes_tokens]
            entries, groups = self._without_leaked(entries, groups, dataflow.leaked_layers)
            entries, groups = self._without_hooked(entries, groups)
            vocabulary = {name: self._unless_hooked(name, entry) for name, entry in found.vocabulary.items()}
            attention = self._attention(entries, dataflow)
            given, entries = entries, {**vocabulary, **attention, **entries}
            if not given and not groups and not entries:
                why_not = self._step_trace.why_not or "no layer's output is added to what it was computed from"
                self._notes.append(f"no pair of layers was found: {why_not}")
        else:
            entries, _ = self._without_hooked(entries, [])
            if not entries:
                self._complain(f"no plan could be inferred: {self._step_trace.why_not}")
        is_whole_step = dataflow is not None and not self._step_trace.why_not
        readers = dataflow.readers if dataflow is not None and is_whole_step else None
        entries, groups = with_tied_of_groups(self._root, self._blocks, entries, groups, readers)
        entries = self._tried(entries, groups)
        entries = {name: entries[name] for name, _ in self._root.named_modules() if name in entries}
        sizes = self._trials.kept.sizes
        sequence: SplitSequence | None = None
        why_not = "sequence_parallel=False"
        if splits_sequence is not False:
            sequence, why_not = self._split_sequence(entries, sizes)
        if sequence is None and splits_sequence:
            raise PlanError(f"sequence_parallel=True: {why_not}")
        entries = {name: self._note_shared_heads(name, entry) for name, entry in entries.items()}
        self._notes.append(f"hidden states are {'' if sequence else 'not '}split along the sequence" +
                           (f" ({why_not})" if why_not else ""))  # fmt: skip
        split_logits = self._split_logits(entries, splits_logits)
        entries |= of_experts
        entries |= self._gathered(entries, sequence, split_logits)
        if self._is_strict and not any(entry.is_split for entry in entries.values()):
            self._complain(next((note for note in self._notes if note.startswith("no pair ")), "nothing can be split"))
        entries = {name: entries[name] for name, _ in self._root.named_modules() if name in entries}
        self._notes += reasons_for_whole(self._root, entries, self._trials.kept.parameters, dataflow, self._mesh.size())
        return Plan(
            entries,
            sizes,
            sequence,
            self._may_draw(),
            split_logits,
            tuple(self._notes),
            self._trials.kept.parameters,
            self._trials.kept.heads,
            modules_that_see_parts(self._root, entries, sequence, split_logits, dataflow),
            self._trials.kept.widths,
        )

    def _tried(self, entries: dict[str, Entry], groups: list[LayerGroup]) -> dict[str, Entry]:
        """Return ``entries``, and those of ``groups`` with which units compute the same as whole."""
        for name, unit in self._units_to_try(groups, entries).items():
            its_groups = [group for group in groups if is_inside(group.row, name)]
            given = {key: entry for key, entry in entries.items() if is_inside(key, name)}
            if its_groups or any(entry.is_split for entry in given.values()):
                entries |= self._trials.try_unit(name, unit, PartialPlan(given), its_groups).entries
                groups = [group for group in groups if group not in its_groups]
        for group in groups:  # The remaining groups are in no module whose call was recorded.
            entries |= self._untried(group)
        return entries

    def _split_logits(self, entries: Mapping[str, Entry], splits_logits: bool | None) -> tuple[str, ...]:
        """Return the names of the heads whose logits stay split along the vocabulary, and note why.

        Raises:
            PlanError: If ``splits_logits`` is True, and no head is split in this way.
        """
        heads = [
            name
            for name, entry in entries.items()
            if entry.style == "colwise_gather_output" and linear_layer(self._root.get_submodule(name)) is not None
        ]
        if splits_logits and not heads:
            raise PlanError("loss_parallel=True: no head is split along the vocabulary; give a plan that does.")
        if not heads:
            return ()
        dataflow = self._step_trace.dataflow
        uses = dataflow.uses if dataflow is not None else {}
        needs = sorted({use for head in heads for use in uses.get(head, ())})
        keeps = splits_logits is not False and (not needs or bool(splits_logits))
        why = f" (used by {', '.join(needs)})" if needs else " (loss_parallel=False)" if not keeps else ""
        self._notes.append(f"logits are {'split along the vocabulary' if keeps else 'gathered'}{why}")
        return tuple(heads) if keeps else ()

    def _attention(self, given: Mapping[str, Entry], dataflow: Dataflow) -> dict[str, Entry]:
        """Return entries of modules that are split by heads, unless one is given for a module in them."""
        if not self._splits_attention:
            return {}
        found = attention_modules(self._root, dataflow, self._mesh.size())
        return {name: entry for name, entry in found.items() if not any(is_inside(key, name) for key in given)}

    def _gathered(
        self, entries: Mapping[str, Entry], sequence: SplitSequence | None, split_logits: Collection[str]
    ) -> dict[str, Entry]:
        """Return entries of layers that are split with a gathered output, if too few parameters are split otherwise."""
        dataflow = self._step_trace.dataflow
        if dataflow is None or self._step_trace.why_not:
            return {}
        parameters, num_ranks = self._trials.kept.parameters, self._mesh.size()
        found = layers_to_gather(self._root, entries, parameters, sequence, dataflow, num_ranks)
        return {name: entry for name, entry in found.items() if dataflow.input_sources[name].isdisjoint(split_logits)}

    def _without_leaked(
        self, entries: dict[str, Entry], groups: list[LayerGroup], leaked_layers: Collection[str]
    ) -> tuple[dict[str, Entry], list[LayerGroup]]:
        """Replicate inferred groups whose features leave a block other than by its output.

        A hook or an attribute may pass the features of a layer to code outside of the blocks. That code would see only
        this rank's features.

        Args:
            entries: The entries that the user and Hugging Face give, by full module name.
            groups: The inferred groups of layers.
            leaked_layers: Full names of the layers whose features leave a block in this way.

        Returns:
            The entries together with those of the replicated groups, and the groups that are not replicated.

        Raises:
            PlanError: If the features are of a layer that the user or Hugging Face splits.
        """
        for name, entry in entries.items():
            if name in leaked_layers and entry.style in SPLITS_FEATURES:
                raise PlanError(
                    f"plan: code outside of the blocks uses what {name}, which is split, has computed, and would see"
                    " this rank's features only: use replicate for it and for the layers that it feeds."
                )
        kept = []
        for group in groups:
            of_group = group.entries()
            if any(name in leaked_layers and entry.style in SPLITS_FEATURES for name, entry in of_group.items()):
                why = "code outside of its block uses its features"
                entries = {**entries, **{name: entry.replicated(why) for name, entry in of_group.items()}}
            else:
                kept.append(group)
        return entries, kept

    def _without_hooked(
        self, entries: dict[str, Entry], groups: list[LayerGroup]
    ) -> tuple[dict[str, Entry], list[LayerGroup]]:
        """Replicate inferred groups whose features are seen by a hook, as :meth:`_without_leaked` does.

        Raises:
            PlanError: If the features are of a layer that the user or Hugging Face splits.
        """
        for name, entry in entries.items():
            if hooked := self._hooks.of_entry(name, entry):
                raise PlanError(f"plan: {why_refused(hooked)}")
        kept = []
        for group in groups:
            if hooked := self._hooks.of_group(group):
                why = f"{hooked} has a hook"
                entries = {**entries, **{name: entry.replicated(why) for name, entry in group.entries().items()}}
            else:
                kept.append(group)
        return entries, kept

    def _unless_hooked(self, name: str, entry: Entry) -> Entry:
        hooked = self._hooks.of_entry(name, entry)
        return entry.replicated(f"{hooked} has a hook") if hooked else entry

    def _units_to_try(self, groups: Sequence[LayerGroup], entries: Mapping[str, Entry]) -> dict[str, nn.Module]:
        """Return the modules to try: the blocks, and the innermost called modules around what is split outside of them.

        These are the module around each group, the one around all layers that the user gives a part of the features,
        and modules that are split by heads.
        """
        around = {innermost_around(group.names, self._trials.calls) for group in groups}
        of_user = {name for name, entry in entries.items() if entry.source == "user" and entry.style in _FEATURES}
        of_user = {name for name in of_user if not any(is_inside(name, block) for block in self._blocks)}
        parents = [name.rpartition(".")[0] for name in of_user]  # A layer alone does not compute the same.
        around |= {innermost_around(parents, self._trials.calls)}
        around |= {name for name, entry in entries.items() if entry.style == "attention_heads"}
        found = {
            name
            for name in around - {""}
            if not any(is_inside(name, block) or is_inside(block, name) for block in self._blocks)
        }
        outermost = {name for name in found if not any(is_inside(name, other) for other in found - {name})}
        return {**self._blocks, **{name: self._root.get_submodule(name) for name in sorted(outermost)}}

    def _untried(self, group: LayerGroup) -> dict[str, Entry]:
        """Return the entries of a group that no trial can confirm.

        A plain feed-forward group (at most two ``colwise`` layers, not packed, without heads or other parameters) is
        split nevertheless; any other group is replicated.
        """
        if len(group.cols) <= 2 and group.num_packed == 1 and not group.parameters and not group.heads:
            return group.entries()
        why = "no module around it can be tried"
        return {name: entry.replicated(why) for name, entry in group.entries().items()}

    def _split_sequence(
        self, entries: Mapping[str, Entry], sizes: Mapping[str, Mapping[str, int]]
    ) -> tuple[SplitSequence | None, str]:
        dataflow = self._step_trace.dataflow
        if dataflow is None or not dataflow.calls:
            return None, f"no step could be run on fake tensors: {self._step_trace.why_not}"
        num_ranks, sharing = self._mesh.size(), blocks_that_share(self._root, self._blocks)
        finder = SequenceFinder(
            self._blocks,
            dataflow,
            num_ranks,
            sharing,
            self._trials.difference,
            self._hooks.inside,
            self._rows_of_attention,
        )
        return finder.find(entries, sizes)

    def _note_shared_heads(self, name: str, entry: Entry) -> Entry:
        """Add to the entry of a key or value layer the remark that several ranks hold the same head."""
        heads = shared_heads(self._root, name, self._mesh.size()) if entry.style == "colwise" else None
        return entry if heads is None else replace(entry, why=f"each of its {heads} heads is on several ranks")

    def _complain(self, text: str) -> None:
        if self._is_strict:
            raise PlanError(f"strict_plan=True: {text}. Give a plan.")
        self._notes.append(text)

    def _may_draw(self) -> bool:
        dataflow = self._step_trace.dataflow
        return dataflow is None or bool(self._step_trace.why_not) or dataflow.draws_random

    def _note_once(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
