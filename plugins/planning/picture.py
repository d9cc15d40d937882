"""Draw a plan: memory against speed, the parts of a step, and the devices of the best layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned

__all__ = ["draw_plan", "frontier"]

_WIDTH_IN, _HEIGHT_IN, _DPI = 15.0, 4.6, 110
_NUM_BARS = 8
_MOST_NODES, _MOST_DEVICES = 8, 8
_MIB = 2**20
_SHORT = {"dp_replicate": "r", "dp_shard": "s"}

# These are colours of Okabe and Ito's palette, which people with colour blindness can tell apart.
_PARTS = {"compute": "#0072b2", "sending": "#e69f00", "bubble": "#cc79a7", "optimizer": "#009e73", "host": "#999999"}
_GROUPS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2", "#bbbbbb")


def frontier(planned: Sequence[Planned], memory: int | None) -> list[Planned]:
    """Return the layouts that fit and than which none is faster with as little memory, those with the least first.

    Args:
        planned: The predictions, with times.
        memory: Bytes of the memory of a device; None: it has no limit.
    """
    found: list[Planned] = []
    for one in sorted(
        (one for one in planned if one.fits(memory)), key=lambda one: (one.peak or 0, -one.samples_per_s)
    ):
        if not found or one.samples_per_s > found[-1].samples_per_s:
            found.append(one)
    return found


def draw_plan(planned: Sequence[Planned], memory: int | None, num_devices: int, path: Path) -> None:
    """Write a PNG of a plan.

    Args:
        planned: The predictions, with times, in the order of a plan.
        memory: Bytes of the memory of a device; None: it has no limit.
        num_devices: Number of devices of a node.
        path: The PNG file to write; an existing one is replaced.

    Raises:
        ValueError: If matplotlib is not installed, or no layout has a predicted time.
    """
    try:
        # pyplot is avoided, because it keeps figures in memory and looks for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('--png needs matplotlib: pip install "lightning-dist[cli]"') from error
    timed = [one for one in planned if one.time is not None]
    if not timed:
        raise ValueError(f"--png={str(path)!r}: no layout has a predicted time.")
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.2, 0.8))
    _draw_frontier(left, timed, memory)
    _draw_parts(middle, timed[:_NUM_BARS])
    _draw_devices(right, timed[0].layout, num_devices)
    canvas.print_png(path)


def _draw_frontier(axes: Any, planned: Sequence[Planned], memory: int | None) -> None:
    best = frontier(planned, memory)
    for fits, marker in ((True, "o"), (False, "x")):
        shown = [one for one in planned if one.fits(memory) == fits]
        x, y = [(one.peak or 0) / _MIB for one in shown], [one.samples_per_s for one in shown]
        axes.scatter(x, y, marker=marker, color="#0072b2" if fits else "#999999", s=22)
    axes.plot([(one.peak or 0) / _MIB for one in best], [one.samples_per_s for one in best], color="#0072b2", lw=1)
    for one in best:
        axes.annotate(
            one.layout.axes, ((one.peak or 0) / _MIB, one.samples_per_s), fontsize=7, xytext=(4, 4),
            textcoords="offset points",
        )  # fmt: skip
    if memory is not None:
        axes.axvline(0.9 * memory / _MIB, color="#d55e00", lw=1, ls="--")
        axes.annotate(
            "90% of a device", (0.9 * memory / _MIB, 0.02), xycoords=("data", "axes fraction"), fontsize=7, rotation=90,
            va="bottom", ha="right", color="#d55e00",
        )  # fmt: skip
    axes.set_xlabel("predicted peak of a rank, MiB")
    axes.set_ylabel("predicted samples per second")
    axes.set_title("Memory and speed")
    axes.margins(x=0.12, y=0.12)


def _draw_parts(axes: Any, planned: Sequence[Planned]) -> None:
    names = [str(one.layout).replace(" with ", "\n") for one in planned]
    begins = [0.0] * len(planned)
    for part, colour in _PARTS.items():
        values = [1e3 * _part(one, part) for one in planned]
        axes.barh(range(len(planned)), values, left=begins, color=colour, label=part, height=0.7)
        begins = [begin + value for begin, value in zip(begins, values, strict=True)]
    axes.set_yticks(range(len(planned)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("predicted time of a step, ms")
    axes.set_title("Parts of a step, best layout first")
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(_PARTS))


def _part(planned: Planned, part: str) -> float:
    time = planned.time
    assert time is not None
    return sum(time.communication.values()) if part == "sending" else float(getattr(time, part))


def _draw_devices(axes: Any, layout: Layout, num_devices: int) -> None:
    """Draw a box for each device of some nodes, with the same colour for those that split one replica of the model."""
    parallel = ParallelLayout(**layout.sizes)
    num_nodes = -(-layout.num_ranks // num_devices)
    for node in range(min(num_nodes, _MOST_NODES)):
        for device in range(min(num_devices, _MOST_DEVICES)):
            rank = node * num_devices + device
            indices = parallel.coordinates(rank)
            colour = _GROUPS[parallel.data_parallel_rank(rank) % len(_GROUPS)]
            axes.add_patch(_box(device, node, colour))
            shown = {_SHORT.get(axis, axis): index for axis, index in indices.items() if layout.sizes[axis] > 1}
            text = "\n".join(f"{axis} {index}" for axis, index in shown.items()) or "rank 0"
            axes.text(device + 0.5, node + 0.5, text, ha="center", va="center", fontsize=5)
    axes.set_xlim(0, min(num_devices, _MOST_DEVICES))
    axes.set_ylim(min(num_nodes, _MOST_NODES), 0)
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(min(num_nodes, _MOST_NODES))], range(min(num_nodes, _MOST_NODES)))
    axes.set_xlabel("devices (r: dp_replicate, s: dp_shard)\na colour for each part of the batch", fontsize=8)
    axes.set_ylabel("node")
    more = ", the first 8" if num_nodes > _MOST_NODES else ""
    axes.set_title(f"{layout.axes}{more}", fontsize=9)


def _box(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, color=colour, alpha=0.55)
