"""Run ``lightning-dist compare``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error
from lightning_dist.cli.mlflow_pages import comparison_page, how_to_open
from lightning_dist.run.tracking_uri import chosen_tracking_uri

_DESCRIPTION = """\
Compare runs that MLflow holds: their different parameters, their metrics side by side, and their curves.
"""

_EXAMPLES = """\
examples:
  lightning-dist compare                                      all runs of the only experiment
  lightning-dist compare ddp hybrid_shard                     runs by name
  lightning-dist compare 3f9a 70ac --baseline 70ac            runs by the start of their ID, against the second
  lightning-dist compare --experiment gpt --by strategy       mean and spread of the runs of each strategy
  lightning-dist compare --by world_size                      scaling efficiency against the fewest processes
  lightning-dist compare --target val/loss=1.85               when each run reaches a loss
  lightning-dist compare --target 'val/accuracy>=0.9'         when each run reaches an accuracy
  lightning-dist compare --html compare.html                  a page with curves, to open in a browser
  lightning-dist compare --json | jq '.rows[0]'               the same numbers for programs

exit codes: 0 compared, 2 bad input
"""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist compare``.

    Args:
        arguments: Words of the command line after ``compare``.

    Returns:
        The exit code: 0 for success, 2 if the input cannot be used.
    """
    options = make_parser().parse_args(arguments)
    try:
        _compare(options)
    except (ValueError, OSError) as error:
        print_error(str(error))
        return BAD_CONFIGURATION
    return 0


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="lightning-dist compare",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="ID, start of an ID, or name of a run; without: all trainings of the experiment that finished or run",
    )
    parser.add_argument(
        "--experiment", metavar="E", help="name or ID of the experiment; by default the only one that has runs"
    )
    parser.add_argument(
        "--by",
        metavar="PARAM",
        help="group runs by a parameter, such as strategy, and show mean ± spread; world_size shows how runs scale",
    )
    parser.add_argument(
        "--target",
        metavar="METRIC=VALUE",
        help="show when runs reach this value; by default the lowest loss that all runs reach, if possible val/loss",
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="run or group that the others are compared with; by default the first"
    )
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="the MLflow store; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db",
    )
    parser.add_argument("--html", metavar="OUT", type=Path, help="write a page with the tables and curves to this file")
    parser.add_argument("--png", metavar="OUT", type=Path, help="write a picture of the curves to this file")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser


def _compare(options: argparse.Namespace) -> None:
    for name in ("html", "png"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}={str(path)!r}: there is no folder {path.absolute().parent}.")
    # These modules import MLflow and rich, without which --help starts faster.
    from rich.console import Console

    from lightning_dist.cli.compare.comparison import (
        Comparison,
        baseline_first,
        columns_of,
        find_parameter,
        groups_of,
    )
    from lightning_dist.cli.compare.reading import read_runs
    from lightning_dist.cli.compare.table import print_comparison
    from lightning_dist.cli.compare.target import common_target, parse_target

    tracking_uri = chosen_tracking_uri(options.tracking_uri)
    runs, num_left_out = read_runs(tracking_uri, options.runs, options.experiment)
    target = common_target(runs) if options.target is None else parse_target(options.target, runs)
    by = None if options.by is None else find_parameter(runs, options.by)
    columns = columns_of(runs) if by is None else groups_of(runs, by)
    if options.baseline is not None:
        columns = baseline_first(columns, options.baseline)
    comparison = Comparison(columns, target, by)
    if num_left_out:
        print(
            f"{num_left_out} runs that failed, were stopped or did not train are left out; name runs to compare them"
            " too.",
            file=sys.stderr,
        )
    runs = comparison.runs
    link = how_to_open(
        tracking_uri, comparison_page(dict.fromkeys(run.experiment_id for run in runs), [run.id for run in runs])
    )
    messages = sys.stdout
    if options.json:
        from lightning_dist.cli.compare.document import as_document

        print(json.dumps(as_document(comparison, tracking_uri), indent=2))
        messages = sys.stderr
    else:
        print_comparison(comparison, Console())
    print(f"\n{link}", file=messages)
    if options.html is None:
        print("Curves: the option --html compare.html writes a page with them.", file=messages)
    else:
        from lightning_dist.cli.compare.page import write_page

        write_page(comparison, tracking_uri, link, options.html)
        print(f"Curves: {options.html}", file=messages)
    if options.png is not None:
        from lightning_dist.cli.compare.picture import draw_curves

        draw_curves(comparison, options.png)
        print(f"Picture: {options.png}", file=messages)
