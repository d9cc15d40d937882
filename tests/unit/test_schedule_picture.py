"""The picture of a pipeline's step shows when each action ran."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from lightning_dist.mesh.timeline import Action
from lightning_dist.plugins.loggers.schedule_picture import draw_schedule
from lightning_dist.techniques.pipeline.simulation import simulate


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_areas_of_the_boxes_are_proportional_to_the_times_of_the_actions(tmp_path: Path, num_ranks: int) -> None:
    order = [[Action("F", rank, 0), Action("B", rank, 0)] for rank in range(num_ranks)]
    draw_schedule(simulate(order), "a title", tmp_path / "schedule.png")
    picture = matplotlib.image.imread(tmp_path / "schedule.png")

    def pixels(red: int, green: int, blue: int) -> int:
        wanted = [red / 255, green / 255, blue / 255]
        return int((abs(picture[..., :3] - wanted) < 0.01).all(-1).sum())

    forward, backward, bubble = pixels(0x56, 0xB4, 0xE9), pixels(0xE6, 0x9F, 0), pixels(0xF2, 0xF2, 0xF2)
    assert backward == pytest.approx(2 * forward, rel=0.08)
    # Boxes fill 0.8 of the height of the plot. With one microbatch, each rank is busy for 1 / num_ranks of the step.
    assert bubble == pytest.approx((forward + backward) * (num_ranks / 0.8 - 1), rel=0.08)
