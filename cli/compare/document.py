"""Turn a comparison into JSON."""

import math
from dataclasses import asdict
from typing import Any

from lightning_dist.cli.compare.comparison import Comparison, Row
from lightning_dist.cli.compare.reading import Run


def as_document(comparison: Comparison, tracking_uri: str) -> dict[str, Any]:
    """Return what the tables show as a dictionary for JSON; numbers that JSON does not have are None.

    Args:
        comparison: The runs and rows that the dictionary holds.
        tracking_uri: URI of the store of the runs.

    Returns:
        A dictionary with ``tracking_uri``, ``grouped_by``, ``target``, ``columns`` (with their runs), ``parameters``
        (the values of each in the order of the columns), ``rows`` (with lists in the order of the columns), ``notes``
        (sentences about what cannot be compared) and ``scaling`` (the fields of
        :class:`~lightning_dist.cli.compare.scaling.Scaling`; None: it is not known).
    """
    target = comparison.target
    return {
        "tracking_uri": tracking_uri,
        "grouped_by": comparison.grouped_by,
        "target": None if target is None else {"metric": target.metric, "sign": target.sign, "value": target.value},
        "columns": [
            {"label": column.label, "runs": [_run(run) for run in column.runs]} for column in comparison.columns
        ],
        "parameters": dict(comparison.parameters),
        "rows": [_row(comparison, row) for row in comparison.rows],
        "notes": comparison.notes,
        "scaling": None if comparison.scaling is None else asdict(comparison.scaling),
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "started": run.started.isoformat(),
        "duration_s": run.duration,
    }


def _row(comparison: Comparison, row: Row) -> dict[str, Any]:
    indexes = range(len(comparison.columns))
    return {
        "metric": row.metric,
        "statistic": row.statistic or None,
        "better": row.better,
        "values": [_finite(cell.value) for cell in row.cells],
        "spreads": [_finite(cell.spread) for cell in row.cells],
        "num_runs": [cell.num_runs for cell in row.cells],
        "ratios": [_finite(comparison.ratio(row, index)) for index in indexes],
        "is_best": [comparison.is_best(row, index) for index in indexes],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
