"""Compare ways of reducing gradients between two nodes with slow links, which network namespaces emulate.

All ways train in the same four processes, two on each node, and take turns, so that they share the machine's changes of
speed. The rate of the link is changed between the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Each rank has half a core or more. torch reads this variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.bench.nodes import TwoNodes, sent_to_other_node, why_not

ROOT = Path(__file__).parents[2]
NUM_NODES, RANKS_PER_NODE = 2, 2
RATES: dict[str, float | None] = {"unshaped": None, "10": 10.0, "1": 1.0, "0.1": 0.1}
"""Rates of the link in Gbit/s by the names of the command line."""

BOUNDS: list[tuple[str, str, str, float]] = [
    ("0.1", "powersgd", "by_hand_hsdp", 5.0),
    ("0.1", "powersgd", "by_hand_full_shard", 14.0),
    ("0.1", "topk", "by_hand_hsdp", 4.0),
    ("0.1", "int8", "by_hand_hsdp", 2.3),
    ("0.1", "bf16", "by_hand_hsdp", 1.6),
    ("0.1", "diloco", "by_hand_hsdp", 6.0),
    ("1", "powersgd", "by_hand_hsdp", 1.25),
    ("1", "int8", "by_hand_hsdp", 1.1),
    ("unshaped", "bf16", "by_hand_hsdp", 0.98),
]
"""Rate, way, opponent, and the least factor by which the way must be faster."""

STEPS_OF_A_TURN = {"diloco": 50, "diloco_int8": 50}
"""Number of steps in a turn of ways that synchronize once in so many steps."""

LARGEST_DEVIATION = 0.1
"""Largest accepted deviation of the measured bytes from the formulas, as a fraction."""

ROUNDS_BETWEEN_LONG_TURNS = 3
"""Ways with such long turns have one in every so many rounds."""


# Ranks


def work(arguments: argparse.Namespace) -> None:
    """Train in turn on this rank, as rank 0 asks for it, and let rank 0 print the figures."""
    import torch.distributed as dist

    from tests.bench.harness import PausableTraining
    from tests.bench.sides import SLOW_LINK_SIDES
    from tests.bench.workload import Workload

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = Workload(
        dim=arguments.dim, num_layers=arguments.layers, num_heads=8, context=64, global_batch_size=2 * 4
    )
    trainings = {way: PausableTraining(partial(SLOW_LINK_SIDES[way], workload)) for way in arguments.ways}

    def turn(way: str, num_steps: int) -> tuple[float, float]:
        """Return the milliseconds and the MB that node 0 sends to node 1, both for a step."""
        dist.barrier()
        before, start = sent_to_other_node(), time.perf_counter()
        trainings[way].run_steps(num_steps)
        dist.barrier()
        seconds, sent = time.perf_counter() - start, sent_to_other_node() - before
        return 1000 * seconds / num_steps, sent / num_steps / 1e6

    _set_rate("unshaped", rank)
    for way in arguments.ways:
        turn(way, 6)
    for round_number in range(arguments.rounds):
        for rate in arguments.rates:
            _set_rate(rate, rank)
            shift = round_number % len(arguments.ways)
            for way in [*arguments.ways[shift:], *arguments.ways[:shift]]:
                if way in STEPS_OF_A_TURN and round_number % ROUNDS_BETWEEN_LONG_TURNS:
                    continue
                milliseconds, megabytes = turn(way, STEPS_OF_A_TURN.get(way, arguments.steps))
                row = {"round": round_number, "rate": rate, "way": way, "ms": milliseconds, "mb": megabytes}
                if rank == 0:
                    print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # The threads of the trainings wait for their next turn.


def _set_rate(rate: str, rank: int) -> None:
    """Let the parent process change the rate of the link."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        print(json.dumps({"set_rate": rate}), flush=True)
        sys.stdin.readline()
    dist.barrier()


# The parent process


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return 1 if a bound is missed."""
    from tests.bench.harness import median_interval

    arguments = _parse(argv)
    if arguments.worker:
        work(arguments)
    if arguments.rows is None and (reason := why_not()) is not None:
        print(f"Slow links cannot be emulated here: {reason}.")
        return 2
    rows = json.loads(arguments.rows.read_text()) if arguments.rows else _measure(arguments)
    figures: dict[tuple[str, str], dict[int, float]] = {}
    megabytes: dict[str, list[float]] = {}
    for row in rows:
        figures.setdefault((row["rate"], row["way"]), {})[row["round"]] = row["ms"]
        megabytes.setdefault(row["way"], []).append(row["mb"])
    times = {cell: median(of_rounds.values()) for cell, of_rounds in figures.items()}

    def factors(rate: str, way: str, opponent: str) -> list[float]:
        """Return by which factor ``way`` was faster than ``opponent`` in each round in which both had a turn."""
        own, other = figures[rate, way], figures[rate, opponent]
        return [other[round_number] / own[round_number] for round_number in own if round_number in other]

    header = f"\n{'ms a step':<22}" + "".join(f"{rate:>12}" for rate in arguments.rates)
    print(f"{header}{'MB a step':>12}{'by formula':>12}")
    is_met = True
    for way in arguments.ways:
        cells = "".join(f"{times[rate, way]:>12.0f}" for rate in arguments.rates)
        sent, expected = median(megabytes[way]), expected_megabytes(way, arguments.dim, arguments.layers)
        deviates = expected is not None and abs(sent / expected - 1) > LARGEST_DEVIATION
        is_met &= not deviates
        formula = "" if expected is None else f"{expected:.2f}" + (" DEVIATES" if deviates else "")
        print(f"{way:<22}{cells}{sent:>12.2f} {formula:>11}")
    print(f"\nfactor over {arguments.opponent} (95% interval of the median)")
    for way in arguments.ways:
        cells = ""
        for rate in arguments.rates:
            ratios = factors(rate, way, arguments.opponent)
            interval = median_interval(ratios)
            spread = f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
            cells += f"{median(ratios):>8.2f}{spread:<14}"
        print(f"{way:<22}" + cells)
    for rate, way, opponent, bound in BOUNDS:
        if (rate, way) in figures and (rate, opponent) in figures:
            factor = median(factors(rate, way, opponent))
            is_met &= factor >= bound
            verdict = "met" if factor >= bound else "NOT MET"
            print(f"{rate:>9} Gbit/s: {way} is {factor:.2f} times as fast as {opponent}; bound {bound}: {verdict}")
    if arguments.losses:
        _print_times_to_target(arguments, times)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not is_met)


def expected_megabytes(way: str, dim: int, num_layers: int) -> float | None:
    """Return the MB that a node must send to the other in a step, by the formulas of ``docs/compression.md``.

    Each node has two shards of the whole model, and its ranks exchange theirs with the same shards of the other node.

    Returns:
        The number for the ways of ``hybrid_shard``; None for those by hand.
    """
    import torch

    from examples.gpt.model import GPT

    if way.startswith(("by_hand", "data_parallel")):
        return None
    with torch.device("meta"):
        model = GPT(dim=dim, num_layers=num_layers, num_heads=8, max_len=64)
    # The tables of sines and cosines are broadcast in each step from the first rank, which sends them to the two ranks
    # of the other node, unless replicas train on their own.
    num_bytes = 0.0
    if way not in STEPS_OF_A_TURN:
        num_bytes += 2 * sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    for param in model.parameters():
        columns = param.shape[1:].numel()
        for rows in (len(chunk) for chunk in torch.arange(len(param)).chunk(2)):
            num_bytes += _bytes_for(way, rows, columns, is_compressed=param.ndim > 1 and rows * columns >= 1024)
    return num_bytes / 1e6


def _bytes_for(way: str, rows: int, columns: int, is_compressed: bool) -> float:
    """Return the bytes that one of two replicas sends in a step for a shard of a gradient."""
    numel, exact = rows * columns, 4.0 * rows * columns
    match way:
        case "none":
            return exact
        case "bf16" | "fp16":
            return exact / 2
        case "int8" | "fp8":
            return numel + 4 * numel / 256 if is_compressed else exact
        case "topk":
            return 5 * round(numel / 100) if is_compressed else exact
        case "powersgd" | "powersgd16":
            rank = 16 if way == "powersgd16" else 4
            return 4.0 * rank * (rows + columns) if is_compressed else exact
        case "diloco":
            return exact / 50
        case "diloco_int8":
            return (numel + 4 * numel / 256 if is_compressed else exact) / 50
    raise ValueError(f"There is no formula for {way}.")


class _Losses(NamedTuple):
    """Name the way of :mod:`tests.bench.convergence` whose losses belong to a way of this benchmark.

    Args:
        way: Its name.
        start_step: Number of its first steps, in which it reduces gradients exactly.
    """

    way: str
    start_step: int = 0


LOSSES = {
    "by_hand_hsdp": _Losses("exact"),
    "none": _Losses("exact"),
    "bf16": _Losses("bf16"),
    "int8": _Losses("int8"),
    "powersgd": _Losses("powersgd 4, from 40", 40),
    "powersgd16": _Losses("powersgd 16, from 40", 40),
    "topk": _Losses("topk 1%, from 40", 40),
}
"""Ways of which both the time of a step and the losses are known. DiLoCo is timed with other inner steps."""


def _print_times_to_target(arguments: argparse.Namespace, times: dict[tuple[str, str], float]) -> None:
    """Print the steps until the validation loss is at most the target, and the time that they take at each rate."""
    from tests.bench.convergence import steps_until

    losses = json.loads(arguments.losses.read_text())
    print(f"\nseconds until a validation loss of {arguments.target} (number of steps of each seed)")
    for way in arguments.ways:
        if way not in LOSSES or LOSSES[way].way not in losses:
            continue
        own = LOSSES[way]
        steps = [steps_until(arguments.target, by_step) for by_step in losses[own.way]]
        reached = [number for number in steps if number is not None]
        if len(reached) < len(steps):
            print(f"{way:<22}not reached by {len(steps) - len(reached)} of {len(steps)} seeds")
            continue
        mean = sum(reached) / len(reached)
        exact = min(mean, own.start_step)
        cells = ""
        for rate in arguments.rates:
            seconds = (exact * times[rate, "none"] + (mean - exact) * times[rate, way]) / 1000
            cells += f"{seconds:>12.0f}"
        print(f"{way:<22}{cells}   ({', '.join(f'{number:.0f}' for number in reached)})")


def _measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with TwoNodes.made() as nodes:
        ranks = [_start(nodes, rank, arguments) for rank in range(NUM_NODES * RANKS_PER_NODE)]
        try:
            first = ranks[0]
            assert first.stdout is not None and first.stdin is not None
            for line in first.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                row = json.loads(line)
                if "set_rate" in row:
                    nodes.set_rate(RATES[row["set_rate"]])
                    first.stdin.write("\n")
                    first.stdin.flush()
                else:
                    rows.append(row)
                    print(f"{row['rate']:>9} {row['way']:<22}{row['ms']:>9.0f} ms{row['mb']:>9.2f} MB", flush=True)
            if first.wait(timeout=60):
                raise RuntimeError(f"Rank 0 has failed with exit code {first.returncode}.")
        finally:
            for rank in ranks:
                rank.kill()
    return rows


def _start(nodes: TwoNodes, rank: int, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    node = rank // RANKS_PER_NODE
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(NUM_NODES * RANKS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "slow-links",
        **nodes.environment(node),
    }
    given = [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}", f"--dim={arguments.dim}"]
    given += [f"--layers={arguments.layers}", "--rates", *arguments.rates, "--ways", *arguments.ways, "--worker"]
    return subprocess.Popen(
        [*nodes.command(node), sys.executable, "-m", "tests.bench.slow_links", *given],
        env={**os.environ, **environment},
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
    )


WAYS = (
    "by_hand_ddp",
    "by_hand_full_shard",
    "by_hand_hsdp",
    "none",
    "bf16",
    "int8",
    "topk",
    "powersgd",
    "powersgd16",
    "diloco",
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.bench.slow_links", description=__doc__)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["unshaped", "1", "0.1"], help="Gbit/s")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="ways of reducing gradients (default: all)")
    parser.add_argument("--rounds", type=int, default=6, help="number of turns of each way at each rate")
    parser.add_argument("--steps", type=int, default=2, help="number of steps in a turn")
    parser.add_argument("--dim", type=int, default=512, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks of the model")
    parser.add_argument("--opponent", default="by_hand_hsdp", help="the way with which the others are compared")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to this file")
    parser.add_argument("--rows", type=Path, metavar="JSON", help="show what --json has written, and measure nothing")
    parser.add_argument("--losses", type=Path, metavar="JSON", help="what tests.bench.convergence --json has written")
    parser.add_argument("--target", type=float, default=2.0, help="validation loss until which the time is given")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
