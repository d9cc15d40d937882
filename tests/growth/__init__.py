"""Measure what a rank needs at up to 16,384 ranks, of which all but one are imagined."""
