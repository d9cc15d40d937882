"""Import the cases and what they need in the fork server, so that its workers need not."""
# ruff: noqa: F401 - The forked workers use these imports.

import gc

import tests.preload_more
from tests.behaviour.matrix import load_cases

load_cases()
gc.collect()
gc.freeze()
