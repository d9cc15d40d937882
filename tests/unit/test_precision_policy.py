"""Test that precision plugins that cannot work are refused by name, under every strategy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.precision import transformer_engine
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, FSDPPrecision, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.plugins.precision import PrecisionPolicy, precision_policy, refuse_uncomputable

STRATEGIES = [
    "context_parallel",
    "data_parallel",
    "full_shard",
    "hybrid_shard",
    "nd_parallel",
    "pipeline_parallel",
    "tensor_parallel",
]


class Quantized(BitsandbytesPrecision):
    """Skip the constructor, which needs the package bitsandbytes."""

    def __init__(self) -> None:
        Precision.__init__(self)


@pytest.fixture
def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide what the constructor of Lightning's plugin needs of the package transformer_engine."""
    monkeypatch.setattr(transformer_engine, "_TRANSFORMER_ENGINE_AVAILABLE", True)
    recipe: Any = ModuleType("recipe")
    recipe.DelayedScaling = object
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipe)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["transformer-engine", "transformer-engine-float16"])
@pytest.mark.usefixtures("fake_transformer_engine")
def test_transformer_engine_is_refused_by_every_strategy(strategy: str, precision: Any) -> None:
    with pytest.raises(ValueError, match=r"^TransformerEnginePrecision replaces .* plugins=\[Float8Precision\(\)\]"):
        pl.Trainer(strategy=strategy, precision=precision, accelerator="cpu", devices=2, logger=False)
    plugin = transformer_engine_plugin()
    with pytest.raises(ValueError, match=r"^TransformerEnginePrecision replaces"):
        pl.Trainer(strategy=strategy, plugins=[plugin], accelerator="cpu", devices=2, logger=False)


def transformer_engine_plugin() -> Precision:
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    return TransformerEnginePrecision(weights_dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bitsandbytes_is_refused_by_every_strategy(strategy: str) -> None:
    """Lightning's Trainer itself refuses the plugin on a CPU, so that the strategy is asked directly."""
    with pytest.raises(ValueError, match=r"^Quantized stores weights in quantized form, .* use precision='bf16-true'"):
        StrategyRegistry.get(strategy).precision_plugin = Quantized()


def test_a_dtype_that_the_device_cannot_compute_is_refused() -> None:
    cpu = torch.device("cpu")
    for precision in ("64-true", "bf16-mixed", "16-mixed"):
        policy = PrecisionPolicy(torch.bfloat16 if precision == "bf16-mixed" else torch.float16, torch.float32)
        refuse_uncomputable(policy, precision, cpu)
    with pytest.raises(MisconfigurationException, match=r"the device .cpu. cannot compute in") as error:
        refuse_uncomputable(PrecisionPolicy(torch.float8_e8m0fnu), "bf16-true", cpu)
    assert "float8_e8m0fnu" in str(error.value) and "Use precision='32-true'" in str(error.value)


def test_plugins_of_other_strategies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^The plugin FSDPPrecision \(precision='bf16-true'\) is not supported"):
        precision_policy(FSDPPrecision("bf16-true"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrong_dtype_is_refused_when_the_strategy_is_constructed(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype='bf16' must be one of .*; did you mean 'bfloat16'\?"):
        StrategyRegistry[strategy]["strategy"](reduce_dtype="bf16")


@pytest.mark.parametrize(("name", "ours"), [("fsdp2", "full_shard"), ("fsdp", "full_shard"), ("tp", "tensor_parallel")])
def test_the_trainer_names_the_strategy_that_a_name_from_elsewhere_means(name: str, ours: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=f"strategy for this is '{ours}'"):
        pl.Trainer(strategy=name, accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("name", "hint"), [("hybird_shard", "Did you mean 'hybrid_shard'? The"), ("quantum", "The strategies of")]
)
def test_the_trainer_names_the_strategies_for_a_misspelt_name(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=r"lightning-dist are .*data_parallel, full_shard, hybrid_shard") as error:
        pl.Trainer(strategy=name, accelerator="cpu", devices=2)
    assert hint in str(error.value)
