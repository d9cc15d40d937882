"""Run one step of a model on fake tensors, and record which tensors its modules exchange and what it reads and changes.

Nothing is computed or sent, so that a step can be traced before any process group exists. Tensor parallelism derives
its plan from this record, and pipelines derive their stages from it.

The modules, in the order in which they build on each other:

- ``errors``: Defines the errors that a trace raises.
- ``watched_numbers``: Records how a step uses numbers, such as ``global_step``.
- ``tensor_reads``: Makes up the values that a step reads from fake tensors.
- ``contents``: Reads and sets what containers and objects in a model's attributes contain.
- ``iterators``: Gives a step the items once more that a run on fakes has taken.
- ``fake_rules``, ``fake_run``: Run a step on fake tensors.
- ``dataflow``: Records which layers feed which.
- ``chains``: Finds chains of blocks that pass hidden states to each other.
- ``graph``: Describes which tensors the parts of a model pass to each other in a step.
- ``marks``: Marks tensors with what they were computed from.
- ``means``: Finds out which tensors are means over samples.
- ``draws``: Finds out which parts draw random numbers.
- ``batch_marks``: Finds the buffers that a step changes, and those that depend on the batch.
- ``attribute_changes``: Finds the attributes of modules that a step changes.
- ``changes_after_parts``: Finds what a step changes in parts after it has called them.
- ``logged_values``: Finds out whether what a step logs and returns are means over samples.
- ``observer``: Builds the graph while the step runs.
- ``reentrant_checkpointing``: Supports activation checkpointing in the user's model.
- ``control_flow``: Runs a step that decides by values of tensors once for each outcome.
- ``parts``, ``trace``: Find the parts of a model, and the graph of a step.
- ``first_calls``: Finds the order of the parts in a step that runs its own backwards.
- ``known_paths``: Remembers the graphs of earlier steps, and decides when a step must be traced again.
"""

from lightning_dist.tracing.step_graph.chains import argument_of, find_chains, hidden_key, output_values
from lightning_dist.tracing.step_graph.changes_after_parts import Undone
from lightning_dist.tracing.step_graph.contents import is_object, items_of, packages_of, set_items
from lightning_dist.tracing.step_graph.dataflow import Dataflow, record_step
from lightning_dist.tracing.step_graph.errors import (
    LoopByValueError,
    NotTraceableError,
    RefusalError,
    RepeatedCallsError,
    TraceError,
)
from lightning_dist.tracing.step_graph.fake_rules import FakeRules
from lightning_dist.tracing.step_graph.fake_run import FailureReason, restored, run_on_fakes, tensors_in
from lightning_dist.tracing.step_graph.first_calls import trace_first_calls
from lightning_dist.tracing.step_graph.graph import InnerCall, Leaf, Output, PartCall, StepGraph, Value
from lightning_dist.tracing.step_graph.known_paths import KnownPaths, Readable
from lightning_dist.tracing.step_graph.observer import note_exchange
from lightning_dist.tracing.step_graph.parts import find_parts
from lightning_dist.tracing.step_graph.reentrant_checkpointing import checkpointing_without_reentry
from lightning_dist.tracing.step_graph.trace import trace_step

__all__ = [
    "Dataflow",
    "FailureReason",
    "FakeRules",
    "InnerCall",
    "KnownPaths",
    "Leaf",
    "LoopByValueError",
    "NotTraceableError",
    "Output",
    "PartCall",
    "Readable",
    "RefusalError",
    "RepeatedCallsError",
    "StepGraph",
    "TraceError",
    "Undone",
    "Value",
    "argument_of",
    "checkpointing_without_reentry",
    "find_chains",
    "find_parts",
    "hidden_key",
    "is_object",
    "items_of",
    "note_exchange",
    "output_values",
    "packages_of",
    "record_step",
    "restored",
    "run_on_fakes",
    "set_items",
    "tensors_in",
    "trace_first_calls",
    "trace_step",
]
