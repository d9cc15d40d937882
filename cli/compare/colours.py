"""Choose the colour and the dashes of each column's curves.

The colours are those of Okabe and Ito, which people with colour blindness can tell apart, darker on light paper and
lighter on dark paper where they would be hard to see. Behind eight columns they are repeated with dashes.
"""

ON_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8569a", "#b07a00", "#2f9bd8", "#7a5c3e", "#4d4d4d")
ON_DARK = ("#4aa8e8", "#ff8a3d", "#2fc79a", "#e59ac6", "#f0b429", "#8fd0f7", "#c9a27e", "#c8c8c8")
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))
"""Lengths of dashes and gaps, in widths of the line."""


def dashes_of(column: int) -> tuple[int, ...]:
    """Return the dashes of a column's curves, empty for solid lines."""
    return DASHES[column // len(ON_LIGHT) % len(DASHES)]
