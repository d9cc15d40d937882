"""Test that deferred tensors get the bits that their constructor would have given them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.model.deferred_init import deferred_init, is_deferred, operations_of, values_of
from lightning_dist.model.initialization import materialize

CPU = torch.device("cpu")


class Initialisations(nn.Module):
    """Initialise tensors in all ways in which constructors do.

    Args:
        file: File with a tensor of 4 elements.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 30)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        self.rates = torch.linspace(0, 1, 5).tolist()
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(12, 20)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.position = nn.Parameter(torch.randn(8, 5) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.legacy = nn.Parameter(torch.Tensor(3, 4).uniform_())
        self.from_file = nn.Parameter(torch.load(file))
        self.recurrent = nn.LSTM(5, 7)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.batch_norm = nn.BatchNorm2d(3)
        self.copied = copy.deepcopy(nn.ModuleList([self.batch_norm, self.linear]))
        with torch.no_grad():
            self.in_parts = nn.Parameter(torch.empty(4, 4))
            self.in_parts[:2].normal_()
            self.in_parts[2:] = 0.5
            for param in self.encoder.parameters():
                param.mul_(0.5)
            self.linear.weight[self.linear.weight > 0.01] = 0
            self.linear.bias.copy_(torch.from_numpy(torch.rand(30).numpy()))
        generator = torch.Generator().manual_seed(3)
        self.own_generator = nn.Parameter(nn.init.normal_(torch.empty(5), generator=generator))
        self.own_generator_again = nn.Parameter(torch.randn(5, generator=generator))
        self.drawn_from_drawn = nn.Parameter(torch.bernoulli(torch.rand(50)))
        self.chunks = nn.ParameterList(torch.randn(6, 4).chunk(2))
        self.decided = 0.1 if self.position.sum() > 0 else 0.2
        self.permuted = nn.Parameter(torch.randn(10)[torch.randperm(10)])
        self.half = nn.Linear(3, 3).to("cpu", torch.bfloat16)
        self.channels_last = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.selected = nn.Parameter(torch.nonzero(torch.rand(9) > 0.5).float())
        self.register_buffer("range", torch.log(torch.arange(1, 5) / 3), persistent=False)
        self.seen = str(self.range.device), self.range.is_meta, self.range.is_cpu
        torch.manual_seed(11)
        self.reseeded = nn.Linear(3, 3)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_tensor_gets_the_bits_of_the_constructor_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    file = tmp_path / "tensor"
    torch.save(torch.randn(4), file)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        expected = Initialisations(file)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with deferred_init(CPU):
            module = Initialisations(file)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state)
    found = tensors(module)
    real = {name for name, tensor in found.items() if not tensor.is_meta}
    assert real == {"from_file", "selected", "batch_norm.num_batches_tracked", "copied.0.num_batches_tracked"}
    for name, tensor in reversed(tensors(expected).items()):
        value = found[name] if name in real else values_of([found[name]], CPU)[0]
        assert torch.equal(value, tensor), name
        assert value.stride() == tensor.stride()
        assert value.dtype == tensor.dtype
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert torch.equal(torch.get_rng_state(), state)
    for child in reversed(list(module.children())):
        materialize([child], module, CPU)
    materialize([module], module, CPU)
    materialized = tensors(module)
    assert all(torch.equal(materialized[name], tensor) for name, tensor in tensors(expected).items())
    assert all(weight is not None and not weight.is_meta for weight in module.recurrent._flat_weights)
    assert module.rates == expected.rates
    assert module.decided == expected.decided
    assert module.seen == expected.seen == ("cpu", False, True)


def test_only_what_a_tensor_depends_on_runs() -> None:
    with deferred_init(CPU):
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        nn.init.zeros_(first.weight)
    assert [operation.function for operation in operations_of([first.weight])] == [torch.ops.aten.zero_.default]
    assert len(operations_of([*first.parameters(), *second.parameters()])) == 4


def test_tensors_that_get_no_values_are_not_deferred() -> None:
    with torch.device("meta"):
        elsewhere = nn.Linear(3, 3)
    with deferred_init(CPU):
        empty = torch.empty(3)
        copied = empty + 1
        other = torch.zeros(3, 3).copy_(elsewhere.weight)
        shaped = torch.zeros_like(empty)
        on_meta = torch.zeros(3, device="meta")
    assert not any(map(is_deferred, (empty, copied, other, on_meta, elsewhere.weight)))
    assert is_deferred(shaped)


def test_moves_to_the_device_are_deferred_and_values_can_be_read() -> None:
    with deferred_init(CPU), deferred_init(CPU):
        module = nn.Linear(3, 3).to("cpu").cpu().to(torch.device("cpu"))
        values: list[Any] = [torch.arange(3).cpu().numpy().tolist(), float(torch.ones(2).sum())]
        real = torch.from_numpy(torch.zeros(2).numpy())
        real.copy_(torch.ones(2))
    assert all(map(is_deferred, module.parameters()))
    assert values == [[0, 1, 2], 2.0]
    assert real.tolist() == [1.0, 1.0]
