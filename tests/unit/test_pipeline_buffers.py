"""Buffers that change by the data of the batch are told apart from those that change by weights and buffers alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.techniques.pipeline.buffers import BuffersOfStep
from lightning_dist.tracing.step_graph.batch_marks import BatchMarks


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("vector", torch.ones(3))
        self.register_buffer("constant", torch.ones(3))
        self.weight = nn.Parameter(torch.eye(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.mean(0), 0.1)
            self.vector = torch.nn.functional.normalize(self.weight @ self.vector, dim=0)
        return self.norm(x * self.constant)


def test_buffers_that_depend_on_the_batch_are_told_apart_from_other_changed_buffers() -> None:
    module, batch = Changes(), torch.randn(4, 3)
    marks = BatchMarks()
    marks.begin(module)
    marks.mark(batch)
    with marks:
        output = module(batch)
    assert marks.is_marked(output)
    changed = marks.changed(module)
    assert {name for name, by_batch in changed.items() if not by_batch} == {"count", "vector"}
    assert {name for name, by_batch in changed.items() if by_batch} >= {"mean", "norm.running_mean"}
    assert "constant" not in changed


def test_writing_batch_data_into_a_view_marks_the_base_tensor() -> None:
    queue, batch = torch.zeros(4, 3), torch.ones(2, 3)
    marks = BatchMarks()
    marks.mark(batch)
    with marks:
        queue[1:3] = batch
    assert marks.is_marked(queue)


def test_restored_buffers_have_their_old_values_and_are_the_same_objects() -> None:
    module = Changes()
    vector = module.vector
    kept = BuffersOfStep(module, {"count", "vector", "norm.running_mean"})
    module(torch.randn(4, 3))
    left = kept.current()
    kept.restore(except_prefixes=("norm.",))
    assert module.vector is vector
    assert int(module.count) == 0
    assert bool(module.norm.running_mean.any())
    kept.set(left)
    assert int(module.count) == 1
    assert module.vector is vector
