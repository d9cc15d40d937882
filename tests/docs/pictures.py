"""Draw the pictures of the documentation from what the code does (``python -m tests.docs.pictures``)."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from html import escape
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    MeshStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.mesh.layout import ParallelLayout
from tests.distributed.test_examples import curves, fit_on_rank
from tests.pool import WorkerPool, fork_server

__all__ = ["FOLDER", "LAYOUTS", "layout_picture"]

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

NUM_NODES, DEVICES_PER_NODE = 2, 4

LAYOUTS: dict[str, MeshStrategy] = {
    "data_parallel": DataParallelStrategy(),
    "full_shard": FullShardStrategy(),
    "hybrid_shard": HybridShardStrategy(),
    "tensor_parallel": TensorParallelStrategy(),
    "context_parallel": ContextParallelStrategy(),
    "pipeline_parallel": PipelineParallelStrategy(num_microbatches=8),
    "nd_parallel": NDParallelStrategy(pp_size=2, dp_shard_size=2, tp_size=2, num_microbatches=8),
}
"""The strategies whose layouts are drawn, with the sizes that they choose on two nodes of four devices."""

_HAS = {
    "pp": "stage {} of {}",
    "dp_replicate": "replica {} of {}",
    "shards": "shard {} of {}",
    "cp": "tokens: part {} of {}",
    "tp": "layers: part {} of {}",
}
"""What a rank has along an axis, beginning with the outermost one; ``shards`` are those of FSDP2."""

# These are colours of Okabe and Ito's palette, which people with colour blindness can tell apart, mixed with white.
_COLOURS = ("#bfe3f7", "#f9dca8", "#a9dfcd", "#f0c9de", "#fbf3b4", "#a8cce6", "#f2bf9f", "#dcdcdc")

_BOX, _GAP, _LINE, _TOP = 150, 10, 17, 34


def resolve(strategy: MeshStrategy) -> ParallelLayout:
    """Return the layout that ``strategy`` chooses on ``NUM_NODES`` nodes with ``DEVICES_PER_NODE`` devices each."""
    strategy.parallel_devices = [torch.device("cpu")] * DEVICES_PER_NODE
    strategy.num_nodes = NUM_NODES
    return ParallelLayout.resolve(NUM_NODES * DEVICES_PER_NODE, **strategy._requested_sizes())


def _lines(layout: ParallelLayout, rank: int) -> Iterator[str]:
    """Yield what ``rank`` has, one line for each axis with several ranks."""
    at = layout.coordinates(rank)
    sizes = {**layout.sizes, "shards": layout.num_shards}
    at["shards"] = at["dp_shard"] * layout.cp + at["cp"]
    yield f"batch: part {layout.data_parallel_rank(rank) + 1} of {layout.num_data_parallel}"
    for axis, text in _HAS.items():
        if sizes[axis] > 1:
            yield text.format(at[axis] + 1, sizes[axis])


def layout_picture(name: str) -> str:
    """Return an SVG of what each rank has under the strategy ``name``. Ranks of one colour have the same samples."""
    layout = resolve(LAYOUTS[name])
    num_lines = max(len(list(_lines(layout, rank))) for rank in range(layout.world_size))
    box_height = 34 + _LINE * num_lines
    node_width = DEVICES_PER_NODE * (_BOX + _GAP) + _GAP
    width, height = node_width + 70, _TOP + NUM_NODES * (box_height + 3 * _GAP)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_GAP}" y="22" font-weight="bold" font-size="15">{escape(name)}: {escape(str(layout))}</text>',
    ]
    for node in range(NUM_NODES):
        top = _TOP + node * (box_height + 3 * _GAP)
        svg.append(f'<text x="{_GAP}" y="{top + box_height / 2 + _GAP}">node {node + 1}</text>')
        svg.append(
            f'<rect x="64" y="{top}" width="{node_width}" height="{box_height + 2 * _GAP}" rx="8" fill="none"'
            ' stroke="#999999"/>'
        )
        for device in range(DEVICES_PER_NODE):
            rank = node * DEVICES_PER_NODE + device
            left = 64 + _GAP + device * (_BOX + _GAP)
            colour = _COLOURS[layout.data_parallel_rank(rank) % len(_COLOURS)]
            svg.append(
                f'<rect x="{left}" y="{top + _GAP}" width="{_BOX}" height="{box_height}" rx="5" fill="{colour}"/>'
            )
            svg.append(f'<text x="{left + 10}" y="{top + _GAP + 21}" font-weight="bold">rank {rank}</text>')
            for index, line in enumerate(_lines(layout, rank)):
                svg.append(f'<text x="{left + 10}" y="{top + _GAP + 41 + _LINE * index}">{escape(line)}</text>')
    return "\n".join([*svg, "</svg>", ""])


RANKS = {
    "single": 1,
    "ddp": 2,
    "full_shard": 2,
    "hybrid_shard": 4,
    "tensor_parallel": 2,
    "context_parallel": 2,
    "pipeline_parallel": 2,
    "nd_parallel": 4,
}
"""The overlays of the GPT example whose curves are drawn, with the numbers of processes."""

GPT = [
    "--trainer.accelerator=cpu", "--trainer.max_steps=100", "--trainer.val_check_interval=50",
    "--trainer.limit_val_batches=4", "--trainer.log_every_n_steps=4", "--trainer.enable_progress_bar=false",
    "--data.init_args.max_bytes=2000000", "--data.init_args.context=64", "--model.init_args.dim=64",
    "--model.init_args.num_layers=4", "--model.init_args.num_heads=4", "--trainer.callbacks.num_tokens=4",
]  # fmt: skip


def draw_curves(folder: Path, path: Path, schedule: Path) -> None:
    """Train the GPT example in ``folder`` under every strategy, and draw the training losses into ``path``.

    The picture of a step of the pipeline, which the run has logged to MLflow, is copied to ``schedule``.
    """
    fork_server("tests.preload_more")
    pool = WorkerPool()
    try:
        for strategy, num_ranks in RANKS.items():
            flags = [*GPT, f"--trainer.devices={num_ranks}"]
            pool.run(fit_on_rank, num_ranks, folder, [f"gpt/{strategy}"], flags, timeout_s=900)
    finally:
        pool.close()
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, "attributes.run_name = 'pipeline_parallel'")
    with chdir(folder):
        shutil.copy(client.download_artifacts(run.info.run_id, "pipeline/schedule.png"), schedule)
    runs = {name: metrics["train/loss"] for name, metrics in curves(folder).items()}
    _plot({name: runs[name] for name in RANKS}, path)


def _plot(losses: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    reference = losses["single"]
    for index, (name, values) in enumerate(losses.items()):
        style: dict[str, Any] = {"color": f"C{index}", "label": name}
        steps = sorted(values)
        # Earlier lines are wider, so that they can be seen below the later ones.
        left.plot(steps, [values[step] for step in steps], linewidth=1 + 1.6 * (len(losses) - index), **style)
        if name != "single":
            right.semilogy(steps, [abs(values[step] - reference[step]) + 1e-9 for step in steps], ".-", **style)
    left.set(title="train/loss", xlabel="step")
    right.set(title="distance from one process (float32)", xlabel="step", ylim=(1e-9, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    canvas.print_png(path)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.docs.pictures", description=__doc__)
    parser.add_argument("pictures", nargs="*", default=["layouts", "curves"], help="layouts, curves (with a schedule)")
    chosen = parser.parse_args().pictures
    if "layouts" in chosen:
        for name in LAYOUTS:
            (FOLDER / f"layout_{name}.svg").write_text(layout_picture(name))
    if "curves" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            draw_curves(Path(folder), FOLDER / "curves.png", FOLDER / "schedule.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
