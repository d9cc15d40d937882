"""What the fork server imports, so that its workers have it. Imports only; nothing here starts a thread."""
# ruff: noqa: F401 - what is imported here is used by the workers that are forked

import gc

import lightning.pytorch
import torch
import transformers.modeling_utils

import lightning_dist

# A fit collects garbage, and would look through all of the above each time, and copy its pages into every worker.
gc.collect()
gc.freeze()
