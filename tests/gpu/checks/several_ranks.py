"""List the checks of several ranks: with a device for each of them, and all on one device."""

from __future__ import annotations

from tests.gpu.check import CUDA, NO_SIMULATION, Check, Found, devices, memory_gib, package
from tests.gpu.checks.environment import collective_errors
from tests.gpu.checks.evaluation import evaluation
from tests.gpu.checks.one_rank import memory_checks
from tests.gpu.checks.parity import case_parity, pipeline_parity
from tests.gpu.checks.precision import OF_LIGHTNING, low_precision
from tests.gpu.checks.replicas import COMPRESSORS, SYNC_METHODS, compression, local_training
from tests.gpu.checks.resuming import save_and_resume
from tests.gpu.checks.speed import step_time
from tests.gpu.checks.synchronizations import STRATEGIES, synchronizations
from tests.gpu.ranks import Ranks
from tests.parity.pipeline_run import PipelineCase
from tests.parity.run import Case

__all__ = ["ON_ONE_DEVICE", "ON_SEVERAL_DEVICES"]

STEPS = 4
GATHERED = (("attention", "all_gather"),)

PARITY = {
    2: {
        "data_parallel": Case("data_parallel", "gpt", 1, None),
        "full_shard": Case("full_shard", "gpt", 1, None),
        "hybrid_shard-1x2": Case("1x2", "gpt", 1, None),
        "hybrid_shard-2x1": Case("2x1", "gpt", 1, None),
        "tensor_parallel": Case("tp2", "gpt", 1, None),
        "context_parallel": Case("cp2", "gpt", 1, None),
        "context_parallel-gathered": Case("cp2", "gpt", 1, None, options=GATHERED),
        "expert_parallel": Case("ep2", "plain_moe", 1, None),
        "data_parallel-resnet": Case("data_parallel", "resnet", 1, None),
        "full_shard-resnet": Case("full_shard", "resnet", 1, None),
        "full_shard-gan": Case("full_shard", "gan", 1, None),
        "full_shard-offload-params": Case("full_shard", "gpt", 1, None, options=(("offload", "params"),)),
        "full_shard-offload-both": Case("full_shard", "gpt", 1, None, options=(("offload", "both"),)),
        "full_shard-step-in-backward": Case("full_shard", "gpt", 1, None, options=(("step_in_backward", True),)),
        "full_shard-accumulating-clipping": Case("full_shard", "gpt", 3, 0.1),
        "full_shard-llama": Case("full_shard", "llama", 1, None),
        "tensor_parallel-llama": Case("tp2", "llama3", 1, None),
        "context_parallel-llama": Case("cp2", "llama3", 1, None),
        "expert_parallel-mixtral": Case("ep2", "mixtral", 1, None),
    },
    4: {
        "data_parallel": Case("data_parallel", "gpt", 1, None),
        "full_shard": Case("full_shard", "gpt", 1, None),
        "hybrid_shard-2x2": Case("2x2", "gpt", 1, None),
        "tensor_parallel-2-of-4": Case("tp2", "gpt", 1, None),
        "tensor_parallel": Case("tp4", "example_gpt", 1, None),
        "context_parallel": Case("cp4", "gpt", 1, None),
        "context_parallel-gathered": Case("cp4", "gpt", 1, None, options=GATHERED),
        "expert_parallel": Case("ep4", "plain_moe", 1, None),
        "hybrid_shard-experts": Case("2xep2", "plain_moe", 1, None),
        "cp2-x-tp2": Case("cp2 x tp2", "gpt", 1, None),
        "cp2-x-pp2": Case("cp2 x pp2", "gpt", 1, None),
        "ep2-x-tp2": Case("ep2 x tp2", "plain_moe", 1, None),
        "hybrid_shard-resnet": Case("2x2", "resnet", 1, None),
    },
}
"""Cases by number of ranks and name."""

PIPELINES = {
    2: [
        PipelineCase("deep_gpt", "pp2", schedule, num_microbatches=8 if schedule == "dualpipev" else 4)
        for schedule in (
            "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev",
        )
    ],
    4: [
        PipelineCase("deep_gpt", "pp4"),
        PipelineCase("deep_gpt", "pp2 x shard2"),
        PipelineCase("deep_gpt", "pp2 x replicate2", "interleaved_1f1b"),
        PipelineCase("deep_gpt", "pp2 x tp2", "zbv"),
    ],
}  # fmt: skip

EVALUATED = {
    2: ("data_parallel", "full_shard", "tp2", "cp2", "pp2"),
    4: ("2x2", "tp2", "cp4", "cp2 x tp2"),
}

RESUMED = {
    2: ("full_shard", ((1, "data_parallel"), (2, "tp2"))),
    4: ("2x2", ((4, "full_shard"), (2, "data_parallel"))),
}
"""The layouts that save, and the numbers of ranks and layouts that resume as well, by number of ranks."""

NEEDS_TRANSFORMERS = ("llama", "llama3", "mixtral")


def refused_by_nccl(ranks: Ranks) -> Found:
    """Try NCCL with two ranks on one device, on which later checks depend: without it they use gloo."""
    why = ranks.try_nccl()
    details = tuple(line for line in why.splitlines() if line.strip())[-6:]
    return Found("later checks use gloo, since NCCL refuses" if why else "NCCL accepts several ranks", True, details)


def collectives(ranks: Ranks, num_ranks: int) -> Found:
    """Check the collectives of several ranks over NCCL."""
    wrong = ranks.run(collective_errors, num_ranks, "cuda")[0]
    return Found(f"wrong in {', '.join(wrong)}" if wrong else "float64, float32 and bfloat16", not wrong)


def _correctness(num_ranks: int, spreads: bool, suffix: str) -> list[Check]:
    where = f"a device for each of {num_ranks} ranks" if spreads else f"{num_ranks} ranks on one device"
    needs = (devices(num_ranks),) if spreads else ()
    common = {"limit_s": 120.0 if spreads else 300.0, "spreads": spreads}

    def check(kind: str, name: str, title: str, run: object, args: tuple[object, ...], model: str = "") -> Check:
        more = (package("transformers"),) if model in NEEDS_TRANSFORMERS else ()
        more += (NO_SIMULATION,) if name in OF_LIGHTNING else ()
        title = f"{where[:1].upper()}{where[1:]}: {title}"
        return Check(f"{kind}-{suffix}/{name}", title, run, args, (*needs, *more), **common)  # type: ignore[arg-type]

    parity, rest = "parity with one process", "replicas that compress or train on their own"
    checks = []
    for name, case in PARITY[num_ranks].items():
        short = Case(**{**vars(case), "num_steps": STEPS})
        checks.append(check("parity", name, parity, case_parity, (num_ranks, short), case.model))
    for pipeline in PIPELINES[num_ranks]:
        name = f"pipeline_parallel-{pipeline.layout.replace(' ', '')}-{pipeline.schedule}"
        short_pipeline = PipelineCase(**{**vars(pipeline), "num_steps": STEPS})
        checks.append(check("parity", name, parity, pipeline_parity, (short_pipeline,)))
    for layout in EVALUATED[num_ranks]:
        case = Case(layout, "gpt", 1, None)
        name = layout.replace(" ", "")
        checks.append(check("evaluation", name, "evaluation", evaluation, (num_ranks, case)))
    layout = {2: "2x1", 4: "2x2"}[num_ranks]
    for name in COMPRESSORS:
        checks.append(check("compression", name, rest, compression, (num_ranks, layout, name)))
    for name in SYNC_METHODS:
        checks.append(check("local", name, rest, local_training, (num_ranks, layout, name)))
    for name in ("bf16-mixed", "MeshPrecision-reduce-bfloat16", "float16-scaled") if num_ranks == 2 else ():
        args = (num_ranks, "full_shard", name)
        checks.append(check("precision", name, "low precision against float32", low_precision, args))
    saves = {
        2: ("full_shard", ((1, "data_parallel"), (2, "tp2"))),
        4: ("2x2", ((4, "full_shard"), (2, "data_parallel"))),
    }
    layout, others = saves[num_ranks]
    checks.append(check("resume", layout, "checkpoints", save_and_resume, (num_ranks, layout, others)))
    return checks


def _on_several_devices() -> list[Check]:
    section = "A device for each of 2 ranks"
    needs = (CUDA, devices(2))
    common = {"spreads": True, "is_alone": True}
    checks = [Check("collectives-devices-2", f"{section}: NCCL", collectives, (2,), needs, spreads=True)]
    checks += _correctness(2, True, "devices-2")
    for name, model in (("tensor_parallel-async", "example_gpt"), ("tensor_parallel-async-llama", "llama3")):
        case = Case("tp2", model, 1, None, num_steps=STEPS, options=(("async_tensor_parallel", True),))
        more = (package("transformers"),) if model in NEEDS_TRANSFORMERS else ()
        title = f"{section}: parity with one process"
        checks.append(
            Check(f"parity-devices-2/{name}", title, case_parity, (2, case), (*needs, *more), 120.0, spreads=True)
        )
    checks += memory_checks(
        "devices-2",
        2,
        ("full_shard", "full_shard-offload-both"),
        f"{section}: predicted memory",
        needs=needs,
        spreads=True,
    )
    for size, needed in (("124M", 30), ("1B", 60)):
        for name in ("full_shard", "data_parallel-ddp"):
            checks.append(
                Check(
                    f"speed-devices-2/{name}-{size}",
                    f"{section}: speed against loops written by hand",
                    step_time,
                    (2, name, size, 30.0),
                    (*needs, memory_gib(needed)),
                    300.0,
                    **common,
                )
            )
    for name in STRATEGIES:
        checks.append(
            Check(
                f"synchronizations-devices-2/{name}",
                f"{section}: lines that wait for the device",
                synchronizations,
                (2, name),
                (*needs, memory_gib(16)),
                spreads=True,
            )
        )
    return [*checks, *_correctness(4, True, "devices-4")]


ON_SEVERAL_DEVICES = tuple(_on_several_devices())

ON_ONE_DEVICE = (
    Check("nccl-on-one-device", "2 ranks on one device: NCCL", refused_by_nccl, needs=(CUDA, NO_SIMULATION)),
    *_correctness(2, False, "2"),
    *(
        Check(
            f"synchronizations-2/{name}",
            "2 ranks on one device: lines that wait for the device",
            synchronizations,
            (2, name),
            (CUDA, memory_gib(30)),
            300.0,
        )
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "hybrid_shard")
    ),
    *_correctness(4, False, "4"),
)
