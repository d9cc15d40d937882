"""What the fork server imports, so that its workers have it. Imports only; nothing here starts a thread."""

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401

import lightning_dist  # noqa: F401
