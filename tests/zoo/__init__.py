"""Train tiny models of Hugging Face families, built offline, under every strategy, and compare them with one process.

- ``family`` defines a family, its model and its batches; ``text`` and ``media`` list the families.
- ``run`` trains a model on the ranks of a strategy, or in one process.
- ``compare`` compares the two, which gives one cell of the table: equal, refused, wrong, crashed or hung.
- ``table`` writes the table into the documentation, and a summary of it.
"""
