"""Let replicas take optimizer steps on their own gradients, and synchronize their weights only now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist._compat import local_of, tree_leaves, tree_map
from lightning_dist.mesh.consensus import timed_barrier
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.compression.compressor import refuse_if_unused
from lightning_dist.techniques.compression.saved_states import (
    SavedStates,
    add_states_of_others,
    empty_dtensor,
    placements_of,
    to_dtensor,
)
from lightning_dist.techniques.compression.sync_methods import SyncMethod
from lightning_dist.techniques.compression.wire import Wire
from lightning_dist.techniques.protocol import Parallel, RemoteParts, Rows, SavedState, bound

__all__ = ["LocalUpdates"]


_SECONDS_TO_ARRIVE = 30.0
"""Seconds for which a rank waits for the others before a synchronization, if they may have taken fewer steps."""


class LocalUpdates(SavedState):
    """Synchronize the weights of replicas every ``inner_steps`` optimizer steps, and not their gradients.

    The other techniques of the list work within a replica: their mesh has no axis of replicas. Before an evaluation and
    before a checkpoint, replicas that have trained on since the last synchronization are synchronized as well. The
    states of the optimizers stay different on each replica, but for a checkpoint, which gives all replicas their mean.

    Args:
        method: How weights are synchronized.
        waits_for_ranks: Whether ranks wait for each other, for some seconds, before they synchronize, because the
            user's code steps the optimizers, and may do so on some ranks only.
        mesh: Device mesh of all parameters including the axis of replicas, which is its first axis. The other
            techniques work on the mesh without this axis.
    """

    def __init__(self, method: SyncMethod, waits_for_ranks: bool, mesh: DeviceMesh) -> None:
        self.method = method
        self._waits_for_ranks = waits_for_ranks
        self._mesh = mesh
        self._num_steps = 0
        self._has_begun = False
        self._differs = False
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def attach(self, parallel: Parallel) -> None:
        """Create the connection to the other replicas."""
        self._parallel = parallel
        self.wire = Wire(self._mesh.get_group(0))

    def finish(self) -> None:
        """Check that the method's compressor takes a part of a parameter. This is a collective over all ranks."""
        if self.method.compression is not None:
            refuse_if_unused(self.method.compression, {name: weight.shape for name, weight in self._weights().items()})

    def _params(self) -> dict[str, Tensor]:
        """Return the parameters of this rank by full name."""
        pairs = (zip(group.names, group.params, strict=True) for group in self._parallel.groups)
        return {name: param for group in pairs for name, param in group if not is_remote(param)}

    def _weights(self) -> dict[str, Tensor]:
        """Return this rank's shards of the weights by full name, without integers, which are not trained."""
        params = self._params().items()
        return {
            name: local_of(param.detach()) for name, param in params if param.is_floating_point() or param.is_complex()
        }

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Tell the method the weights from which all replicas begin, before the first step after a synchronization."""
        if not self._has_begun:
            self._has_begun = True
            states = self._loaded or self.method.states
            self.method.begin(self._weights())  # A checkpoint's weights are loaded by now.
            self.method.load_states(states)
            self._loaded = {}

    def after_optimizer_step(self) -> None:
        """Synchronize the replicas if it is due. This is a collective in that case.

        Raises:
            OtherRankError: If the user's code steps the optimizers, and other ranks have taken fewer steps.
        """
        self._num_steps += 1
        self._differs = True
        is_due = self._num_steps <= self.method.start_step or self._num_steps % self.method.inner_steps == 0
        if is_due and self._waits_for_ranks:
            timed_barrier(
                f"{self.method}: the synchronization after {self._num_steps} optimizer steps of this rank (have others"
                " taken fewer?)",
                _SECONDS_TO_ARRIVE,
            )
        if self._num_steps <= self.method.start_step:
            self.wire.average_each(list(self._weights().values()))
            self._differs = self._has_begun = False
        elif is_due:
            self._synchronize()

    def synchronize_replicas(self) -> None:
        """Synchronize the replicas unless their weights are equal already. This is a collective in that case."""
        self._synchronize()
        self._has_begun = False  # Other weights may be loaded before the next step.

    def _synchronize(self) -> None:
        if self._differs:
            self.method.synchronize(self._weights(), self.wire)
            self._differs = False

    # Checkpoints

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict whose sharded tensors are replicated, so that each replica writes a part of them."""
        return {name: self._replicated(value) for name, value in state.items()}

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the optimizer's state by its mean over the replicas, and return it as replicated DTensors.

        This is a collective over the replicas.
        """
        params = self._params()
        tensors = {
            (name, key, place): local_of(value)
            for name, entry in state["state"].items()
            for key, values in entry.items()
            for place, value in enumerate(tree_leaves(values))  # Factors of matrices, for example, are kept in lists.
            if isinstance(value, Tensor) and not is_remote(value) and value.is_floating_point()
            # Counters of steps, which have no dimensions, are the same on all replicas.
            if value.ndim or not (name in params and params[name].ndim > 0)
        }
        # Replicas may have used different parameters so far, and in another order.
        keys = gather_objects(list(tensors), self.wire.group)
        for key in sorted(set(keys[0]).intersection(*keys)):
            # NCCL sends no tensors of the CPU, such as the number of steps of a scalar parameter.
            on_device = tensors[key].to(self._mesh.device_type)
            self.wire.average([on_device])
            tensors[key].copy_(on_device)
        return {**state, "state": tree_map(self._replicated, state["state"])}

    def _replicated(self, value: Any) -> Any:
        if not isinstance(value, DTensor) or is_remote(value) or value.device_mesh.ndim >= self._mesh.ndim:
            return value
        return to_dtensor(local_of(value.detach()), self._mesh, placements_of(value, self._mesh), value.shape)

    def state(self) -> dict[str, Any]:
        """Return the number of steps and the method's tensors. This is a collective."""
        params = self._params()
        saved: dict[str, dict[str, Any]] = {
            name: {
                key: to_dtensor(value.clone(), self._mesh, placements_of(params[name], self._mesh), params[name].shape)
                for key, value in tensors.items()
            }
            for name, tensors in self.method.states.items()
        }
        collects = bound(self._parallel.techniques, RemoteParts.collect_parts)
        add_states_of_others(saved, collects)
        residuals = self._saved_residuals()
        return {
            "num_steps": self._num_steps,
            "method": type(self.method).__name__,
            "weights": saved,
            "residuals": {} if residuals is None else residuals.save(self.method.residuals, None, collects),
        }

    def _saved_residuals(self) -> SavedStates | None:
        compressor = self.method.compression
        return None if compressor is None else SavedStates(compressor, self._params(), self._mesh)

    def state_template(self, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor, sharded as the parameter that a saved tensor belongs to."""
        kind, name, key = path
        if kind == "residuals":
            residuals = self._saved_residuals()
            return None if residuals is None else residuals.template(name, key, shape, dtype)
        param = self._params().get(name)
        if param is None or shape != param.shape:
            return None
        return empty_dtensor(self._mesh, placements_of(param, self._mesh), shape, dtype)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the number of steps and the method's tensors, if a method of the same name saved them."""
        self._num_steps = state["num_steps"]
        self._has_begun = False
        if state["method"] == type(self.method).__name__:
            self._loaded = {
                name: {key: local_of(value) for key, value in own.items()} for name, own in state["weights"].items()
            }
            if (residuals := self._saved_residuals()) is not None:
                self.method.residuals, _ = residuals.load(state["residuals"])

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return what this rank has sent to other replicas."""
        num_bytes, self.wire.num_bytes = self.wire.num_bytes, 0
        return {"comm/dp_replicate_mib_per_step": num_bytes / num_steps / 2**20}

    def table_rows(self) -> Rows:
        """Return a row about the method."""
        yield "sync", f"{self._mesh.size(0)} replicas train on their own: {self.method}"
