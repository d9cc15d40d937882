"""Write a comparison as one HTML page that needs no other file and no network."""

from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lightning_dist.cli.compare import format as formats
from lightning_dist.cli.compare.colours import ON_DARK, ON_LIGHT, dashes_of
from lightning_dist.cli.compare.comparison import Comparison
from lightning_dist.cli.compare.curves import curves_of


def write_page(comparison: Comparison, tracking_uri: str, how_to_open: str, path: Path) -> None:
    """Write the page.

    Args:
        comparison: What the page shows.
        tracking_uri: URI of the store of the runs, which the page names.
        how_to_open: Text that says where MLflow compares the same runs.
        path: The HTML file to write; an existing one is replaced.
    """
    folder = files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # The order of the metrics is that of the charts.
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    text = template.render(
        comparison=comparison,
        formats=formats,
        tracking_uri=tracking_uri,
        how_to_open=how_to_open,
        curves=_curves(comparison),
        scaling=None if comparison.scaling is None else asdict(comparison.scaling),
        num_colours=len(ON_LIGHT),
        on_light=ON_LIGHT,
        on_dark=ON_DARK,
        dashes=[" ".join(map(str, dashes_of(index))) for index in range(len(comparison.columns))],
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
    )
    path.write_text(text, encoding="utf-8")


def _curves(comparison: Comparison) -> dict[str, list[dict[str, Any]]]:
    """Return the curves of every metric for the page's script."""
    return {
        name: [
            {
                "column": curve.column,
                "run": curve.run.name,
                "step": curve.series.steps,
                "seconds": curve.series.seconds,
                "value": [float(f"{value:.6g}") for value in curve.series.values],
            }
            for curve in curves
        ]
        for name, curves in curves_of(comparison).items()
    }
