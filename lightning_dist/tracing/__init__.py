"""Run a step on fake tensors, and try what a distributed block computes."""
