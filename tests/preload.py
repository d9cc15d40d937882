"""What the fork server imports, so that its workers have it. Imports only; nothing here starts a thread."""

import gc

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import lightning_dist  # noqa: F401

# A fit collects garbage, and would look through all of the above each time, and copy its pages into every worker.
gc.collect()
gc.freeze()
