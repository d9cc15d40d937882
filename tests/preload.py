"""Import modules in the fork server, so that its workers need not. No import here may start a thread."""
# ruff: noqa: F401 - The forked workers use these imports.

import gc

import lightning.pytorch
import torch
import transformers.modeling_utils

import lightning_dist

# Every fit runs the garbage collector, which would traverse all objects of these modules each time, and thereby copy
# their memory pages into every worker.
gc.collect()
gc.freeze()
