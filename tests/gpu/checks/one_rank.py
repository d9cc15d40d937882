"""List the checks of one rank."""

from __future__ import annotations

from typing import Any

from tests.gpu.check import CUDA, NO_SIMULATION, Check, capability, memory_gib, package
from tests.gpu.checks.evaluation import evaluation
from tests.gpu.checks.memory import CONFIGURATIONS, predicted_memory
from tests.gpu.checks.parity import case_parity
from tests.gpu.checks.precision import OF_LIGHTNING, PRECISIONS, low_precision
from tests.gpu.checks.resuming import save_and_resume
from tests.gpu.checks.speed import step_time
from tests.gpu.checks.synchronizations import synchronizations
from tests.parity.run import Case

__all__ = ["ONE_RANK", "memory_checks"]

STEPS = 4
LAYOUTS = {
    "data_parallel": "data_parallel", "full_shard": "full_shard", "hybrid_shard": "1x1", "tensor_parallel": "tp1",
    "context_parallel": "cp1", "pipeline_parallel": "pp1", "nd_parallel": "nd",
}  # fmt: skip
OTHER_MODELS = ("resnet", "gan", "llama")

OPTIONS: dict[str, dict[str, Any]] = {
    "offload-optimizer": {"offload": "optimizer"},
    "checkpointing-full": {"activation_checkpointing": "full"},
    "checkpointing-selective": {"activation_checkpointing": "selective"},
    "checkpointing-every-2": {"activation_checkpointing": {"every": 2}},
    "checkpointing-budget": {"activation_checkpointing": {"budget": 0.5}},
    "checkpointing-offload": {"activation_checkpointing": "offload"},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "tiling": {"tiled_mlp": 3, "tiled_loss": 3},
}
"""Arguments of ``full_shard`` with which gradients and weights must be those of one process."""


def _parity(name: str, section: str, case: Case, **kwargs: Any) -> Check:
    needs = kwargs.pop("needs", ()) + ((package("transformers"),) if case.model == "llama" else ())
    return Check(name, section, case_parity, (1, case), needs, **kwargs)


def _strategies() -> list[Check]:
    section = "One rank: parity with one process"
    checks = [
        _parity(f"parity-1/{name}", section, Case(layout, "gpt", 1, None, num_steps=STEPS))
        for name, layout in LAYOUTS.items()
    ]
    checks += [
        _parity(f"parity-1/{name}-{model}", section, Case(name, model, 1, None, num_steps=STEPS))
        for model in OTHER_MODELS
        for name in ("data_parallel", "full_shard")
    ]
    accumulated = Case("full_shard", "gpt", 3, 0.1, num_steps=STEPS)
    adamw = Case("full_shard", "gpt", 1, None, optimizer="adamw", num_steps=STEPS)
    float32 = Case("full_shard", "resnet", 1, None, precision="32-true", num_steps=STEPS)
    checks += [
        _parity("parity-1/full_shard-accumulating-clipping", section, accumulated),
        _parity("parity-1/full_shard-adamw", section, adamw),
        _parity("parity-1/full_shard-resnet-float32", section, float32),
        Check("evaluation-1/full_shard", section, evaluation, (1, Case("full_shard", "gpt", 1, None))),
    ]
    return checks


def _options() -> list[Check]:
    section = "One rank: options of full_shard, parity with one process"
    checks = [
        _parity(
            f"options-1/{name}",
            section,
            Case("full_shard", "gpt", 1, None, num_steps=STEPS, options=tuple(given.items())),
        )
        for name, given in OPTIONS.items()
    ]
    compiled = (("compile", True),)
    for name in ("data_parallel", "full_shard"):
        case = Case(name, "gpt", 1, None, num_steps=STEPS, options=compiled)
        checks.append(
            _parity(f"options-1/compile-{name}", section, case, needs=(NO_SIMULATION,), limit_s=300, is_alone=True)
        )
    return checks


def _precisions() -> list[Check]:
    checks = []
    for name in PRECISIONS:
        needs = (package("torchao"), capability(8, 9)) if name.startswith("float8") else ()
        needs += (NO_SIMULATION,) if name in OF_LIGHTNING else ()
        section = "One rank: low precision against float32"
        checks.append(Check(f"precision-1/{name}", section, low_precision, (1, "full_shard", name), needs))
    return checks


def memory_checks(place: str, num_ranks: int, names: tuple[str, ...], section: str, **kwargs: Any) -> list[Check]:
    """Make the checks of the predicted memory, whose names begin with ``memory-<place>``."""
    return [
        Check(f"memory-{place}/{name}", section, predicted_memory, (num_ranks, name), is_alone=True, **kwargs)
        for name in names
    ]


def _speed() -> list[Check]:
    section = "One rank: speed and memory against loops written by hand"
    return [
        Check(
            f"speed-1/{name}-{size}",
            section,
            step_time,
            (1, name, size, 30.0),
            (memory_gib(needed), NO_SIMULATION),
            300.0,
            True,
        )
        for size, needed in (("124M", 30), ("1B", 60))
        for name in ("full_shard", "data_parallel")
    ]


def _synchronizations() -> list[Check]:
    names = ("full_shard", "data_parallel", "full_shard-offload-optimizer", "full_shard-checkpointing-offload")
    section = "One rank: lines that wait for the device"
    return [
        Check(f"synchronizations-1/{name}", section, synchronizations, (1, name), (CUDA, memory_gib(16)))
        for name in names
    ]


ONE_RANK = (
    *_strategies(),
    Check("resume-1/full_shard", "One rank: checkpoints", save_and_resume, (1, "full_shard", ((1, "data_parallel"),))),
    Check(
        "resume-1/data_parallel", "One rank: checkpoints", save_and_resume, (1, "data_parallel", ((1, "full_shard"),))
    ),
    *_precisions(),
    *_options(),
    *memory_checks(
        "1",
        1,
        tuple(name for name in CONFIGURATIONS if name != "full_shard-offload-both"),
        "One rank: predicted memory",
        needs=(memory_gib(30), NO_SIMULATION),
    ),
    *_speed(),
    *_synchronizations(),
)
