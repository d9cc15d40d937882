"""Test what the argument ``compile`` accepts, and where CUDA graphs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import options_from
from lightning_dist.techniques.compilation import Compilation, CompileConfig, CompileOptions
from tests.arguments import fit_of, run_of

GRAPHS = CompileConfig(mode="reduce-overhead")


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        (False, None, None),
        (True, CompileConfig("inductor"), "inductor"),
        ("aot_eager", CompileConfig("aot_eager"), "aot_eager"),
        ({"mode": "max-autotune"}, CompileConfig("inductor", "max-autotune"), "inductor, max-autotune"),
        ({"backend": "eager"}, CompileConfig("eager"), "eager"),
    ],
)
def test_values_are_understood(value: Any, expected: CompileConfig | None, text: str | None) -> None:
    config = CompileOptions(value).config
    assert config == expected
    assert (None if config is None else str(config)) == text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"mode": "fast"}, "compile={'mode': 'fast'}: the mode must be one of 'default', 'reduce-overhead'"),
        ({"modes": "default"}, "compile={'modes': 'default'} must be True, False, the name of a backend"),
        ({"mode": "default", "backend": "eager"}, "only the backend 'inductor' has modes. Leave mode out"),
    ],
)
def test_other_values_are_refused(value: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error.replace("{", r"\{")):
        CompileOptions(value)


def test_only_graphs_begin_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    for config in (CompileConfig(), CompileConfig("eager"), CompileConfig(mode="max-autotune-no-cudagraphs")):
        Compilation(config).before_step()
    assert not begun
    for config in (GRAPHS, CompileConfig(mode="max-autotune"), CompileConfig("cudagraphs")):
        Compilation(config).before_step()
    assert len(begun) == 3


@pytest.mark.parametrize(
    ("layout", "kwargs", "device_type", "error"),
    [
        ({"dp_replicate": 2}, {}, "cpu", "on cpu: CUDA graphs exist on CUDA devices only"),
        ({"dp_shard": 2}, {}, "cuda", "FSDP2 gathers the parameters of a block into other memory in each step"),
        ({"pp": 2}, {}, "cuda", "with pp_size=2: a pipeline runs a block for several microbatches"),
        ({"tp": 2}, {}, "cuda", "with tp_size=2, cp_size=1 and ep_size=1: blocks exchange tensors"),
        ({}, {"activation_checkpointing": "full"}, "cuda", "with activation_checkpointing"),
        ({}, {"tiled_mlp": 4}, "cuda", "with tiled_mlp"),
        ({"dp_replicate": 8}, {}, "cuda", None),
    ],
)
def test_graphs_are_refused_where_they_cannot_work(
    layout: dict[str, int], kwargs: dict[str, Any], device_type: str, error: str | None
) -> None:
    run = run_of(ParallelLayout(**layout), device_type=device_type)
    arguments = options_from({"compile": {"mode": "reduce-overhead"}, **kwargs})
    if error is None:
        arguments.of(CompileOptions).check(run, arguments)
        return
    with pytest.raises(ValueError, match=error) as raised:
        arguments.of(CompileOptions).check(run, arguments)
    assert str(raised.value).startswith("compile={'mode': 'reduce-overhead'} ")
    assert str(raised.value).endswith("or compile={'mode': 'max-autotune-no-cudagraphs'}.")
    CompileOptions(True).check(run, options_from({"compile": True, **kwargs}))


@pytest.mark.parametrize(
    ("accumulate", "is_automatic", "error"),
    [(2, True, "accumulate_grad_batches=2"), (1, False, "automatic_optimization = False"), (1, True, None)],
)
def test_graphs_are_refused_if_gradients_add_up(accumulate: int, is_automatic: bool, error: str | None) -> None:
    run = run_of(ParallelLayout(), device_type="cuda")
    fit = fit_of(accumulate_grad_batches=accumulate, is_automatic=is_automatic)
    graphs, arguments = CompileOptions({"mode": "reduce-overhead"}), options_from({})
    CompileOptions(True).check_fit(run, fit, arguments)
    if error is None:
        graphs.check_fit(run, fit, arguments)
        return
    with pytest.raises(ValueError, match=error):
        graphs.check_fit(run, fit, arguments)
