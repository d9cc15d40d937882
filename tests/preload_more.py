"""Import modules in the fork server that the tests' workers need in addition to those of ``tests.preload``.

They are not in ``tests.preload``, because the benchmarks measure the memory of workers that do not need them. One
thread is started here, by the allocator of MLflow's pyarrow; it is safe to fork.
"""
# ruff: noqa: F401 - The forked workers use these imports.

import functools
import gc

import lightning.fabric.utilities.registry
import mlflow.store.tracking.sqlalchemy_store
import pytest
import torch._inductor.compile_fx
import torch.profiler
import transformers.models.llama.modeling_llama

import lightning_dist.cli
import lightning_dist.plugins.parity_check
import lightning_dist.plugins.precision.float8_linear
import tests.pipeline_models

# Every Trainer looks for callbacks in the metadata of all installed packages, which are 140 files here.
registry = lightning.fabric.utilities.registry
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]

gc.collect()
gc.freeze()
