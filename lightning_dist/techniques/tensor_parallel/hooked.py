"""Find hooks of users on modules that see only this rank's part of the features of a split layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from lightning_dist._compat import ForeignHooks
from lightning_dist.techniques.tensor_parallel.plan import Entry, PlanError, SplitSequence
from lightning_dist.tracing.step_graph import Dataflow, tensors_in
from lightning_dist.tracing.step_graph.dataflow import sources
from lightning_dist.tracing.users_hooks import hooked_inside, hooked_modules

if TYPE_CHECKING:
    from lightning_dist.techniques.tensor_parallel.infer import LayerGroup

__all__ = ["SPLITS_FEATURES", "LateHooks", "SeenByHooks", "modules_that_see_parts", "why_refused"]

SPLITS_FEATURES = ("colwise", "packed_colwise")
"""Styles that leave each rank with its own output features."""


class SeenByHooks:
    """Find the layers whose features are seen by the hooks of a model's modules.

    A hook on one rank counts on all ranks, which must find the same plan. Creating an instance is a collective over
    all processes.

    Args:
        root: The model, not split yet.
        dataflow: The record of a step of the model; None: only hooks on the layers themselves are found.
    """

    def __init__(self, root: nn.Module, dataflow: Dataflow | None) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in hooked_modules(root, dataflow)}
        for call in dataflow.calls if dataflow is not None and self._seen else ():
            if call.name in self._seen:
                self._seen[call.name] |= _features_seen(call.args, call.kwargs, call.output)

    def of_group(self, group: LayerGroup) -> str:
        """Return the name of a module with a hook that sees features of ``group``; empty: there is none."""
        cols = set(group.cols)
        return next((name for name, seen in self._seen.items() if name in group.names or seen & cols), "")

    def of_entry(self, name: str, entry: Entry) -> str:
        """Return the name of a module with a hook that sees what the module ``name`` computes as ``entry`` says.

        Empty: there is none.
        """
        if not entry.is_split:
            return ""
        splits_features = entry.style in SPLITS_FEATURES
        return next((key for key, seen in self._seen.items() if key == name or (splits_features and name in seen)), "")

    def inside(self, name: str) -> str:
        """Return the name of a module with a hook among ``name`` and the modules inside of it; empty: there is none."""
        return hooked_inside(name, list(self._seen), itself=True)


def modules_that_see_parts(
    root: nn.Module,
    entries: Mapping[str, Entry],
    sequence: SplitSequence | None,
    split_logits: Collection[str],
    dataflow: Dataflow | None,
) -> dict[str, str]:
    """Find the modules that are given or return only a rank's part of the features or of the tokens.

    Args:
        root: The model that the plan splits.
        entries: The entries of the plan, by full module name.
        sequence: Where hidden states are split along the sequence; None: nowhere.
        split_logits: Full names of the layers whose output stays split along the vocabulary.
        dataflow: The record of a step of the model; None: only split modules are found to see parts of features.

    Returns:
        ``"tokens"`` or ``"features"``, of which the module sees a part, by its full name.
    """
    blocks = {block for chain in sequence.chains for block in chain} if sequence is not None else set()
    found = {
        name: "tokens" for name, _ in root.named_modules() if any(f"{name}.".startswith(f"{key}.") for key in blocks)
    }
    cols = {name for name, entry in entries.items() if entry.style in SPLITS_FEATURES}
    for call in dataflow.calls if dataflow is not None and cols else ():
        if cols & _features_seen(call.args, call.kwargs, call.output):
            found[call.name] = "features"
    for name, entry in entries.items():
        is_gathered = entry.style == "colwise_gather_output" and name not in split_logits
        if entry.is_split and not entry.is_of_submodules and not is_gathered:
            found[name] = "features"
    return found


def _features_seen(*values: object) -> set[str]:
    return set().union(*(sources(tensor) for tensor in tensors_in(values)))


class LateHooks:
    """Refuse hooks that are put on modules which see only parts after the model was split.

    Args:
        root: The split model.
        with_parts: The modules that see parts, from :func:`modules_that_see_parts`.
    """

    def __init__(self, root: nn.Module, with_parts: Mapping[str, str]) -> None:
        self._with_parts = with_parts
        self._hooks = ForeignHooks({name: root.get_submodule(name) for name in with_parts})

    def check(self) -> None:
        """Check that no hook was added.

        Raises:
            PlanError: If a module has a hook. It is raised on the ranks where the module has one.
        """
        if name := self._hooks.find():
            raise PlanError(why_refused(name, self._with_parts[name]))


def why_refused(name: str, parts: str = "features") -> str:
    """Return the sentence that refuses a hook on a module.

    Args:
        name: Full name of the module.
        parts: ``"features"`` or ``"tokens"``, of which the module sees only this rank's part.
    """
    also = ", set sequence_parallel=False" if parts == "tokens" else ""
    return (
        f"{name} has a hook, which would see only this rank's {parts}, because tensor parallelism has split them."
        f" Register the hook before the fit, so that what it sees stays whole, put it on a module outside of the"
        f" blocks{also}, or leave the layers whole by a plan that gives them the style replicate."
    )
