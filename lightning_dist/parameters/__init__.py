"""Manage the forms that a parameter has while it is distributed: whole, a shard, gathered, and in hooks."""
