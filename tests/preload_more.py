"""What the tests' workers need beyond ``tests.preload``, each of which would else import it again.

Apart from that because benchmarks measure the memory of workers that do without. The one thread that is started, of
the allocator of MLflow's pyarrow, is made for forking.
"""
# ruff: noqa: F401 - what is imported here is used by the workers that are forked

import gc

import mlflow.store.tracking.sqlalchemy_store
import pytest
import torch._inductor.compile_fx
import torch.profiler
import transformers.models.llama.modeling_llama

import lightning_dist.cli
import tests.pipeline_models

gc.collect()
gc.freeze()
