"""Run one step of a model on fake tensors, and record what modules pass to each other and what it reads and changes.

Nothing is computed or sent, so that a step can be traced before any process group exists. Tensor parallelism finds its
plan in what is recorded here, and pipelines find their stages.

The modules, in the order in which they build on each other:

- ``watched_numbers``, ``tensor_reads``: numbers that a step compares, and values that it reads from tensors;
- ``generators``: random number generators that a module has of its own;
- ``fake_rules``, ``fake_run``: how a step runs on fake tensors;
- ``dataflow``: which layers feed which;
- ``graph``: which tensors the parts of a model pass to each other in a step;
- ``marks``, ``draws``, ``batch_marks``: what a tensor was computed from, which parts draw random numbers, and which
  buffers depend on the batch;
- ``observer``: how the graph is built while the step runs;
- ``reentrant_checkpointing``: activation checkpointing in the user's model;
- ``control_flow``: a step that decides by values of tensors runs once for each outcome;
- ``parts``, ``trace``: the parts of a model, and the graph of a step;
- ``contents``: what containers and objects in a model's attributes contain;
- ``known_paths``: the graphs of earlier steps, and when a step must be traced again.
"""

from lightning_dist.step_graph.contents import is_object, items_of, packages_of, set_items
from lightning_dist.step_graph.dataflow import Dataflow
from lightning_dist.step_graph.fake_run import RefusalError, WhyNot, run_on_fakes, tensors_in
from lightning_dist.step_graph.graph import InnerCall, Leaf, Output, PartCall, StepGraph, TraceError, Value
from lightning_dist.step_graph.known_paths import KnownPaths, Readable
from lightning_dist.step_graph.observer import note_exchange
from lightning_dist.step_graph.parts import find_parts
from lightning_dist.step_graph.reentrant_checkpointing import checkpointing_without_reentry
from lightning_dist.step_graph.trace import trace_step

__all__ = [
    "Dataflow",
    "InnerCall",
    "KnownPaths",
    "Leaf",
    "Output",
    "PartCall",
    "Readable",
    "RefusalError",
    "StepGraph",
    "TraceError",
    "Value",
    "WhyNot",
    "checkpointing_without_reentry",
    "find_parts",
    "is_object",
    "items_of",
    "note_exchange",
    "packages_of",
    "run_on_fakes",
    "set_items",
    "tensors_in",
    "trace_step",
]
