"""What the tests' workers need beyond ``tests.preload``, each of which would else import it again.

Apart from that because benchmarks measure the memory of workers that do without. The one thread that is started, of
the allocator of MLflow's pyarrow, is made for forking.
"""

import gc

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.profiler  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import lightning_dist.cli  # noqa: F401
import tests.pipeline_models  # noqa: F401

gc.collect()
gc.freeze()
