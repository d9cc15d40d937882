"""Cells of the matrix that are known to be wrong, or that crash or hang, and that wait to be mended.

``make behaviour`` reports them as what they are; only the covering part in ``make test`` leaves them out.
"""

OPEN_DEFECTS: frozenset[tuple[str, str]] = frozenset()
