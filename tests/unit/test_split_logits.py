"""Logits that are split over ranks have the same losses and gradients as whole logits, however users compute them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dist.techniques.tensor_parallel import SplitLogits
from tests.pool import WorkerPool

VOCAB = 12
Use = Callable[[Tensor, Tensor], Tensor]


def given() -> tuple[Tensor, Tensor]:
    """Return whole logits, and targets of which two are ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (3, 5), generator=generator)
    targets[0, :2] = -100
    return logits, targets


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).double().mean() + logits.sum()


def masked(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits[targets != -100], targets[targets != -100])


# These losses are computed from the parts of the ranks, without gathering the logits.
SPLIT: dict[str, Use] = {
    "flatten": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    "view": lambda x, y: functional.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "float": lambda x, y: functional.cross_entropy(x.double().contiguous().reshape(-1, VOCAB), y.reshape(-1)),
    "transpose": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "permute": lambda x, y: functional.cross_entropy(torch.permute(x, (0, 2, 1)), y, reduction="sum"),
    "shift": lambda x, y: functional.cross_entropy(x[..., :-1, :].flatten(0, 1), y[..., 1:].flatten()),
    "last": lambda x, y: functional.cross_entropy(x[:, -1], y[:, -1]),
    "scaled": lambda x, y: functional.cross_entropy((x / 0.7 * 2).flatten(0, 1), y.flatten(), reduction="sum"),
    "capped": lambda x, y: functional.cross_entropy((torch.tanh(x / 3) * 3).flatten(0, 1), y.flatten()),
    "none": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").square().sum(),
    "index": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.clamp(0).flatten(), ignore_index=0),
}
# For these uses, the logits are gathered.
GATHERED: dict[str, Use] = {
    "accuracy": accuracy,
    "masked": masked,
    "smoothing": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weight": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.linspace(1, 2, VOCAB, dtype=x.dtype)
    ),
    "soft": lambda x, y: functional.cross_entropy(x.flatten(0, 1), torch.full_like(x.flatten(0, 1), 1 / VOCAB)),
    "softmax": lambda x, y: x.softmax(-1)[..., 3].sum(),
    "slice": lambda x, y: x[..., 2:5].square().sum(),
    "added": lambda x, y: (x + torch.arange(VOCAB, dtype=x.dtype)).square().sum(),
    "stacked": lambda x, y: torch.stack([x, x * 2]).square().sum(),
}


def compare(names: list[str]) -> dict[str, tuple[float, float, int]]:
    """Return, for each use, the largest errors of loss and gradient, and how often the logits were gathered."""
    dist.init_process_group("gloo")
    results = {}
    for name in names:
        use = {**SPLIT, **GATHERED}[name]
        logits, targets = given()
        logits.requires_grad_()
        expected = use(logits, targets)
        (wanted,) = torch.autograd.grad(expected, logits)
        part = logits.detach().chunk(4, -1)[dist.get_rank()].clone().requires_grad_()
        counts, whole = [0], SplitLogits.whole

        def counting(self: SplitLogits, function: str, counts: list[int] = counts, whole: object = whole) -> Tensor:
            counts[0] += 1
            return whole(self, function)  # type: ignore[operator]

        SplitLogits.whole = counting  # type: ignore[method-assign]
        try:
            split = SplitLogits(part * 1, dist.group.WORLD)
            assert split.shape == logits.shape and split.requires_grad
            assert (isinstance(split, Tensor) and "1 of 4" in repr(split)) or dist.get_rank()
            actual = use(split, targets)
            (gradient,) = torch.autograd.grad(actual, part)
        finally:
            SplitLogits.whole = whole  # type: ignore[method-assign]
        results[name] = (
            float((actual - expected).abs().detach()),
            float((gradient - wanted.chunk(4, -1)[dist.get_rank()]).abs().max()),
            counts[0],
        )
    return results


def test_every_use_of_split_logits_gives_the_loss_and_gradient_of_whole_logits(pool: WorkerPool) -> None:
    for results in pool.run(compare, 4, [*SPLIT, *GATHERED]):
        for name, (loss, gradient, num_gathered) in results.items():
            assert loss < 1e-12 and gradient < 1e-12, name
            assert (num_gathered == 0) == (name in SPLIT), name


def out_of_bounds() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(IndexError, match="Target 12 is out of bounds: there are 12 classes"):
        functional.cross_entropy(SplitLogits(torch.zeros(2, 3), dist.group.WORLD), torch.tensor([0, 12]))


def in_place() -> None:
    dist.init_process_group("gloo")
    logits = SplitLogits(torch.zeros(2, 3), dist.group.WORLD)
    with pytest.raises(RuntimeError, match="masked_fill_ of logits that are split over tp would change a copy"):
        logits.masked_fill_(torch.ones(2, 12, dtype=torch.bool), 1.0)
    with pytest.raises(RuntimeError, match="__setitem__ of logits"):
        logits[..., 2] = 0.0


def test_changing_split_logits_in_place_is_refused(pool: WorkerPool) -> None:
    pool.run(in_place, 4)


def test_a_target_out_of_bounds_is_an_error(pool: WorkerPool) -> None:
    pool.run(out_of_bounds, 4)


def bfloat16() -> tuple[torch.dtype, float]:
    dist.init_process_group("gloo")
    logits, targets = given()
    part = logits.chunk(4, -1)[dist.get_rank()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(SplitLogits(part.bfloat16(), dist.group.WORLD).flatten(0, 1), targets.flatten())
        expected = functional.cross_entropy(logits.bfloat16().flatten(0, 1), targets.flatten())
    assert loss.dtype == expected.dtype
    return loss.dtype, float((loss - expected).abs())


def test_under_autocast_the_loss_of_split_logits_has_the_dtype_and_value_of_whole_ones(pool: WorkerPool) -> None:
    for dtype, difference in pool.run(bfloat16, 4):
        assert dtype == torch.float32 and difference < 1e-6
