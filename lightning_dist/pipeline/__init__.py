"""Pipeline parallelism: a model cut into stages, its step left as it is."""

from lightning_dist.pipeline.as_written import AsWritten
from lightning_dist.pipeline.flow import Flow, FlowError, find_flow
from lightning_dist.pipeline.microbatches import batch_size_of, num_microbatches_for, signature, split_batch
from lightning_dist.pipeline.runner import Pipeline, PreparedStep
from lightning_dist.pipeline.schedules import SCHEDULES
from lightning_dist.pipeline.simulation import simulate
from lightning_dist.pipeline.stages import PipelineConfig, Stages, find_stages, keep_own, own_units
from lightning_dist.pipeline.timeline import Timeline

__all__ = [
    "SCHEDULES",
    "AsWritten",
    "Flow",
    "FlowError",
    "Pipeline",
    "PipelineConfig",
    "PreparedStep",
    "Stages",
    "Timeline",
    "batch_size_of",
    "find_flow",
    "find_stages",
    "keep_own",
    "num_microbatches_for",
    "own_units",
    "signature",
    "simulate",
    "split_batch",
]
