"""Lay out the ranks of a run, and let them communicate."""
