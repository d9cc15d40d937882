"""Logits that are computed tile by tile behave like those that are computed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.model.reruns import StateOfForward
from lightning_dist.techniques.tiling import TilingOptions
from lightning_dist.techniques.tiling.tiled_logits import Head, TiledLogits

BATCH, LENGTH, WIDTH, CLASSES, TILE = 3, 8, 5, 31, 3


class Setting:
    """Hold a head, hidden states and targets."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        self.targets = torch.randint(CLASSES, (BATCH, LENGTH))
        self.targets[0, 1] = self.targets[2, :4] = -100
        self.used: dict[str, bool] = {}

    def logits(self, is_tiled: bool) -> Tensor:
        if not is_tiled:
            return self.head(self.hidden)
        head = Head(self.hidden, self.head, CLASSES, TILE, StateOfForward(self.head).begin, self.used.__setitem__)
        return TiledLogits(head, torch.float64)

    def results(self, loss: Callable[[Tensor, Tensor], Tensor], is_tiled: bool) -> list[Tensor]:
        """Return the loss, and the gradients of the hidden states and of the head's parameters."""
        value = loss(self.logits(is_tiled), self.targets)
        total = (value * torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)).sum()
        return [value, *torch.autograd.grad(total, [self.hidden, *self.head.parameters()])]


WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flattened": lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "viewed": lambda logits, targets: functional.cross_entropy(logits.view(-1, CLASSES), targets.view(-1)),
    "transposed": lambda logits, targets: functional.cross_entropy(logits.transpose(1, 2), targets),
    "permuted": lambda logits, targets: functional.cross_entropy(logits.permute(0, 2, 1), targets),
    "shifted": lambda logits, targets: functional.cross_entropy(
        logits[:, :-1].contiguous().flatten(0, 1), targets[..., 1:].flatten()
    ),
    "shifted_by_ellipsis": lambda logits, targets: functional.cross_entropy(
        logits[..., :-1, :].reshape(-1, CLASSES), targets[..., 1:].reshape(-1)
    ),
    "summed": lambda logits, targets: functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ),
    "each": lambda logits, targets: functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"),
    "each_flat": lambda logits, targets: functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ),
    "weighted": lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), WEIGHT),
    "smoothed": lambda logits, targets: functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1
    ),
    "capped": lambda logits, targets: functional.cross_entropy(
        (3 * torch.tanh(logits / 3)).flatten(0, 1), targets.flatten()
    ),
    "biased": lambda logits, targets: functional.cross_entropy((logits + WEIGHT).flatten(0, 1), targets.flatten()),
    "module": lambda logits, targets: nn.CrossEntropyLoss(ignore_index=-100)(logits.flatten(0, 1), targets.flatten()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(name: str) -> None:
    setting = Setting()
    expected = setting.results(LOSSES[name], is_tiled=False)
    for actual, wanted in zip(setting.results(LOSSES[name], is_tiled=True), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert setting.used == {"cross_entropy": True}


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.softmax(-1),
        lambda logits: logits[:, 2],
        lambda logits: logits.transpose(1, 2).log_softmax(1),
        lambda logits: logits.flatten(0, 1).max(-1).values,
        lambda logits: logits * torch.ones(LENGTH, 1, dtype=torch.float64),
        lambda logits: functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), torch.zeros(24, dtype=torch.long)),
    ],
)
def test_other_functions_get_whole_logits(function: Callable[[Tensor], Tensor]) -> None:
    setting = Setting()
    torch.testing.assert_close(function(setting.logits(True)), function(setting.logits(False)))
    assert False in setting.used.values()


def test_argmax_works_tile_by_tile() -> None:
    setting = Setting()
    for find in (lambda x: x.argmax(-1), lambda x: torch.argmax(x.flatten(0, 1), dim=1)):
        assert torch.equal(find(setting.logits(True)), find(setting.logits(False)))
    assert setting.used == {"argmax": True}


def test_casts_are_part_of_a_tile() -> None:
    setting = Setting()
    logits = setting.logits(True).float()
    assert logits.dtype == torch.float32
    assert logits.shape == (BATCH, LENGTH, CLASSES)
    loss = functional.cross_entropy(logits.flatten(0, 1), setting.targets.flatten())
    wanted = functional.cross_entropy(setting.logits(False).float().flatten(0, 1), setting.targets.flatten())
    torch.testing.assert_close(loss, wanted)


class _Largest(TorchDispatchMode):
    """Remember the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else [out]:
            if isinstance(value, Tensor) and not value.is_meta:  # Meta tensors, which have no memory, show shapes.
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("is_tiled", [True, False])
def test_logits_are_never_whole(is_tiled: bool) -> None:
    setting = Setting()
    with _Largest() as largest:
        setting.results(LOSSES["shifted"], is_tiled)
    assert (largest.numel <= BATCH * TILE * CLASSES) == is_tiled


@pytest.mark.parametrize(("mlp", "loss", "name"), [(0, None, "tiled_mlp=0"), (None, True, "tiled_loss=True")])
def test_numbers_of_tokens_must_be_positive(mlp: Any, loss: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number of tokens of at least 1"):
        TilingOptions(mlp, loss)
