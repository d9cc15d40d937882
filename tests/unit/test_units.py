from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.model.units import find_blocks, find_units, merge_units
from tests.models import Block, Residual, Transformer


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x)


class Stage(nn.Module):
    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(depth))
        self.down = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x)


def holder(**children: nn.Module) -> nn.Module:
    """Make a module with these children."""
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


CASES = {
    "module list": (lambda: holder(model=Transformer()), ["model.blocks.0", "model.blocks.1"]),
    "sequential": (lambda: holder(body=nn.Sequential(Block(8), Block(8))), ["body.0", "body.1"]),
    "module dict": (lambda: holder(body=nn.ModuleDict({"a": Block(8), "b": Block(8)})), ["body.a", "body.b"]),
    "other shapes of the class too": (
        lambda: holder(body=nn.Sequential(Residual(2), Residual(2), Residual(4))),
        ["body.0", "body.1", "body.2"],
    ),
    "layers, not their experts": (
        lambda: holder(layers=nn.ModuleList([MoELayer(), MoELayer()])),
        ["layers.0", "layers.1"],
    ),
    "blocks, not their stages": (
        lambda: holder(stages=nn.ModuleList([Stage(2, 2), Stage(4, 1)])),
        ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"],
    ),
    "torch's encoder": (
        lambda: holder(encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2)),
        ["encoder.layers.0", "encoder.layers.1"],
    ),
    "linears are no blocks": (lambda: holder(mlp=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))), []),
    "shared block, once": (lambda: holder(body=nn.ModuleList([b := Block(8), b])), []),
}


@pytest.mark.parametrize("case", CASES)
def test_repeated_blocks_are_found(case: str) -> None:
    build, names = CASES[case]
    assert sorted(find_blocks(build())) == names


def test_the_blocks_of_a_hugging_face_model_are_found() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    assert list(find_blocks(holder(model=model))) == ["model.transformer.h.0", "model.transformer.h.1"]


def test_blocks_of_named_classes_are_found_and_unknown_classes_are_refused() -> None:
    root = holder(layers=nn.ModuleList([MoELayer(), MoELayer()]))
    assert len(find_blocks(root, ["Expert"])) == 4
    with pytest.raises(ValueError, match=r"units=\['MoELayr'\]: the model has no module .* Did you mean MoELayer"):
        find_blocks(root, ["MoELayr"])


def kinds(root: nn.Module, **kwargs: int) -> list[tuple[str, list[str], list[str]]]:
    """Return the kind, the modules and the parameters of each unit."""
    return [(unit.kind, unit.names, sorted(unit.params)) for unit in find_units(root, **kwargs)]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    root = holder(model=Transformer())
    root.scale = nn.Parameter(torch.ones(2))
    root.temperature = nn.Parameter(torch.ones(()))
    units = find_units(root)
    assert [unit.kind for unit in units] == ["block", "block", "outer", "root", "scalars"]
    named = [name for unit in units for name in unit.params]
    assert sorted(named) == sorted(name for name, _ in root.named_parameters())
    assert units[2].numel == sum(p.numel() for n, p in root.named_parameters() if "model" in n and "blocks" not in n)


def test_a_model_without_blocks_is_cut_by_size() -> None:
    cnn = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Conv2d(8, 16, 3), nn.Linear(4, 2))
    assert kinds(holder(cnn=cnn), min_num_params=10**6) == [
        ("outer", ["cnn"], ["cnn.0.0.bias", "cnn.0.0.weight", "cnn.0.1.bias", "cnn.0.1.weight",
                            "cnn.1.bias", "cnn.1.weight", "cnn.2.bias", "cnn.2.weight"]),
    ]  # fmt: skip
    assert [(kind, names) for kind, names, _ in kinds(holder(cnn=cnn), min_num_params=100)] == [
        ("large", ["cnn.0.0"]),
        ("large", ["cnn.1"]),
        ("outer", ["cnn"]),
    ]


@pytest.mark.parametrize(
    ("tie", "kind", "names"),
    [
        ("between children", "outer", ["a", "b"]),
        ("between a block and the head", "outer", ["body", "b"]),
        ("with the root", "root", [""]),
    ],
)
def test_a_tied_parameter_is_in_exactly_one_unit(tie: str, kind: str, names: list[str]) -> None:
    root = holder(a=nn.Linear(4, 4), body=nn.Sequential(Block(4), Block(4)), b=nn.Linear(4, 4))
    if tie == "between children":
        tied = root.b.weight = root.a.weight
    elif tie == "between a block and the head":
        tied = root.body[0].out.weight = root.b.weight
    else:
        tied = root.alias = root.a.weight
    units = find_units(root)
    holders = [unit for unit in units if any(param is tied for param in unit.params.values())]
    assert [(unit.kind, unit.names) for unit in holders] == [(kind, names)]
    assert sum(len(unit.params) for unit in units) == len(list(root.parameters()))


def test_a_model_without_parameters_has_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU())) == []


class Pair(nn.Sequential):
    """Represent a block, unlike a plain ``nn.Sequential``, which counts as a container."""


def test_parameters_of_a_rarer_dtype_are_a_unit_of_their_own() -> None:
    blocks = nn.Sequential(*(Pair(nn.LayerNorm(8), nn.Linear(8, 8).bfloat16()) for _ in range(2)))
    units = find_units(nn.Sequential(blocks))
    assert [(unit.kind, unit.names) for unit in units] == [
        ("outer", ["0.0.0"]),
        ("block", ["0.0"]),
        ("outer", ["0.1.0"]),
        ("block", ["0.1"]),
    ]
    assert all(len({param.dtype for param in unit.params.values()}) == 1 for unit in units)


def test_frozen_parameters_of_a_rarer_dtype_stay_in_their_unit() -> None:
    blocks = nn.Sequential(*(Pair(nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 8).bfloat16()) for _ in "ab"))
    assert [unit.names for unit in find_units(nn.Sequential(blocks))] == [["0.0"], ["0.1"]]


def test_a_layer_of_two_dtypes_is_refused() -> None:
    layer = nn.Linear(8, 8)
    layer.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"0 has parameters of several dtypes, one of them 0.bias in torch.float64"):
        find_units(nn.Sequential(layer))


def test_blocks_are_merged_up_to_a_size() -> None:
    root = holder(
        embedding=nn.Embedding(16, 4),
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(5)),
        norm=nn.LayerNorm(4),
    )
    root.blocks[3].double()
    block_bytes = 4 * sum(param.numel() for param in root.blocks[0].parameters())
    units = find_units(root)
    merged = merge_units(units, 2 * block_bytes)
    assert [unit.names for unit in merged if unit.kind == "block"] == [
        ["blocks.0", "blocks.1"],
        ["blocks.2"],
        ["blocks.3"],  # It has another dtype.
        ["blocks.4"],
    ]
    assert [unit.names for unit in merged if unit.kind == "outer"] == [["embedding", "norm"]]
    assert merged[0].modules == [root.blocks[0], root.blocks[1]]
    names = [name for unit in merged for name in unit.params]
    assert sorted(names) == sorted(name for name, _ in root.named_parameters())
    assert [len(unit.params) for unit in units if unit.kind == "block"] == [4] * 5, "the given units were changed"
