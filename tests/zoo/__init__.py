"""Hugging Face families, built tiny and offline, under every strategy against one process.

- ``family``: what a family is, and how its model and its batches are made; ``text`` and ``media``: the families.
- ``run``: one training run on the ranks of a strategy, or in one process.
- ``compare``: one cell of the table: equal, refused, wrong, crashed or hung.
- ``table``: the table, printed and written into the documentation.
"""
