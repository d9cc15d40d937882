"""Test which linear layers compute in float8, and that a training with emulated float8 learns as well."""

from __future__ import annotations

import copy
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from examples.gpt.data import TextDataModule
from examples.gpt.model import GPTModule, Linear
from lightning_dist import Float8Precision
from lightning_dist.plugins.precision import precision_policy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.mlp = nn.Sequential(Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.uneven = nn.Linear(32, 24)
        self.narrow = nn.Linear(32, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embedding.weight


def converted(**options: Any) -> tuple[Model, list[str]]:
    """Return a model, and the names of the layers in it that compute in float8."""
    model = Model()
    precision = Float8Precision(**{"min_size": 32, "emulate": True, **options})
    precision.prepare(torch.device("cpu"))
    assert precision.convert_module(model) is model
    names = [name for name, part in model.named_modules() if hasattr(part, "linear_mm_config")]
    assert precision.describe().startswith(f"{len(names)} of 7 linear layers compute in float8 (tensorwise")
    return model, names


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["mlp.0", "mlp.2"]),
        ({"min_size": 16}, ["mlp.0", "mlp.2", "narrow"]),
        ({"exclude": []}, ["mlp.0", "mlp.2", "lm_head"]),
        ({"exclude": ["mlp.2", "*head"]}, ["mlp.0"]),
        ({"exclude": ["mlp.*"]}, ["lm_head"]),
        ({"base": "bf16-true"}, ["mlp.0", "mlp.2"]),
    ],
)
def test_layers_are_chosen_by_name_and_size(options: dict[str, Any], names: list[str]) -> None:
    assert converted(**options)[1] == names


def test_converted_layers_keep_what_belongs_to_them() -> None:
    model, _ = converted(exclude=[])
    original = Model()
    assert model.state_dict().keys() == original.state_dict().keys()
    assert model.lm_head.weight is model.embedding.weight
    assert isinstance(model.mlp[0], Linear)
    assert model.mlp[0].gain == 1.0
    seen = []
    model.mlp.register_forward_hook(lambda *args: seen.append(args[0]))
    other = copy.deepcopy(model)
    inputs = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        output = other.mlp(inputs)
    original.load_state_dict(model.state_dict())
    assert output.dtype == torch.bfloat16
    assert seen == [other.mlp]
    error = (output.float() - original.mlp(inputs)).norm() / original.mlp(inputs).norm()
    assert 0.005 < error < 0.1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "rowise"}, "recipe='rowise' must be one of 'tensorwise', 'rowwise'"),
        ({"base": "16-mixed"}, "base='16-mixed' must be one of 'bf16-mixed', 'bf16-true'"),
        ({"exclude": "head"}, r"exclude='head' must be a list of patterns: use \['head'\]"),
        ({"recipe": "rowwise", "float8_all_gather": True}, "float8_all_gather=True with recipe='rowwise'"),
    ],
)
def test_unknown_values_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Float8Precision(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"min_size": 1024}, r"none of the 7 linear layers of Model would compute in float8(.|\n)*below min_size=1024"),
        ({"exclude": ["heads"]}, "'heads' matches none of the 7 linear layers of Model"),
        ({"emulate": False}, "needs matrix units for float8"),
        ({"float8_all_gather": True}, "float8_all_gather=True does not work with strategies of Lightning"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(MisconfigurationException, match=error):
        converted(**options)


def test_torchao_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not hasattr(finder, "MAPPING")])
    sys.path_importer_cache.clear()
    with pytest.raises(MisconfigurationException, match=r"pip install 'lightning-dist\[float8\]'"):
        Float8Precision()


def test_parameters_are_sharded_as_in_the_base_precision() -> None:
    for base in ("bf16-mixed", "bf16-true"):
        policy = precision_policy(Float8Precision(base=base))  # type: ignore[arg-type]
        assert (policy.param_dtype, policy.reduce_dtype, policy.gather_as) == (torch.bfloat16, torch.float32, None)
    assert precision_policy(Float8Precision(float8_all_gather=True)).gather_as is not None


def validation_loss(**precise: Any) -> float:
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=80,
        limit_val_batches=20,
        val_check_interval=80,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **precise,
    )
    model = GPTModule(dim=64, num_layers=2, num_heads=2, max_len=64, lr=5e-3, warmup_steps=10)
    trainer.fit(model, TextDataModule(context=64, global_batch_size=8, max_bytes=1_000_000))
    return float(trainer.callback_metrics["val/loss"])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_validation_loss_is_that_of_bfloat16() -> None:
    expected = validation_loss(precision="bf16-mixed")
    assert expected < 3.3  # It begins at 5.5.
    actual = validation_loss(plugins=[Float8Precision(min_size=64, emulate=True)])
    assert actual == pytest.approx(expected, rel=0.01)
    assert actual != expected


def test_layers_compute_as_before_when_the_trainer_has_ended() -> None:
    model, inputs = Model(), torch.randn(4, 32)
    before = model.mlp(inputs)
    precision = Float8Precision(min_size=32, emulate=True)
    precision.prepare(torch.device("cpu"))
    precision.convert_module(model)
    assert not torch.equal(model.mlp(inputs), before)
    precision.teardown()
    assert torch.equal(model.mlp(inputs), before)
