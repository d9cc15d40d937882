"""Turn the argument ``compile`` of a strategy into the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.techniques.compilation import CompileConfig

__all__ = ["CompileArgument", "compile_config", "refuse_accumulation_in_graphs", "refuse_cuda_graphs"]

CompileArgument: TypeAlias = bool | str | dict[str, str]
"""Whether blocks are compiled, or the backend, or the backend and the mode by their names."""

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_config(value: bool | str | Mapping[str, str] | None) -> CompileConfig | None:
    """Return what the argument ``compile`` of a strategy asks for; None: nothing is compiled.

    Args:
        value: True; the name of a backend; or a mapping with ``mode``, ``backend`` or both.

    Raises:
        ValueError: If ``value`` is none of these, a mode does not exist, or the backend has none.
    """
    if not value:
        return None
    if value is True:
        return CompileConfig()
    if isinstance(value, str):
        return CompileConfig(value)
    if not isinstance(value, Mapping) or not set(value) <= {"mode", "backend"}:
        raise ValueError(
            f"compile={value!r} must be True, False, the name of a backend of torch.compile, or {{'mode': ...}} with"
            " one of its modes, and optionally 'backend'."
        )
    config = CompileConfig(value.get("backend", "inductor"), value.get("mode"))
    if config.mode is not None and config.mode not in _MODES:
        raise ValueError(f"compile={value!r}: the mode must be one of {', '.join(map(repr, _MODES))}.")
    if config.mode is not None and config.backend != "inductor":
        raise ValueError(
            f"compile={value!r}: only the backend 'inductor' has modes. Leave mode out, or use backend='inductor'."
        )
    return config


def refuse_cuda_graphs(config: ParallelConfig, layout: ParallelLayout, device_type: str) -> None:
    """Refuse CUDA graphs where they do not exist or would replay what has changed.

    A graph replays its kernels with the memory addresses of the time when it was captured, and its results are
    overwritten by the next replay.

    Args:
        config: The configuration from the strategy's arguments.
        layout: The sizes of the mesh's axes.
        device_type: Type of the device on which steps run.

    Raises:
        ValueError: If a graph is asked for and cannot be captured; the text names the reason and the fix.
    """
    if config.compilation is None or not config.compilation.captures_graphs:
        return
    reasons = {
        f"on {device_type}: CUDA graphs exist on CUDA devices only": device_type != "cuda",
        f"with {layout}, where FSDP2 gathers the parameters of a block into other memory in each step, while a graph"
        " replays the same addresses": layout.num_shards > 1,
        f"with pp_size={layout.pp}: a pipeline runs a block for several microbatches before their backwards, which"
        " torch does not do with graphs": layout.pp > 1,
        f"with tp_size={layout.tp}, cp_size={layout.cp} and ep_size={layout.ep}: blocks exchange tensors between ranks,"
        " which inductor does not capture": max(layout.tp, layout.cp, layout.ep) > 1,
        "with activation_checkpointing: a block runs again in the backward, which torch does not do with graphs": bool(
            config.activation_checkpointing
        ),
        "with tiled_mlp: parts of a block run again in the backward, which torch does not do with graphs": (
            config.tiling.mlp is not None
        ),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise ValueError(
                f"compile={_shown(config.compilation)} {reason}. Use compile=True, or"
                " compile={'mode': 'max-autotune-no-cudagraphs'}."
            )


def refuse_accumulation_in_graphs(config: ParallelConfig, trainer: Trainer) -> None:
    """Refuse CUDA graphs if gradients may be added up over steps, because each replay overwrites the last gradients.

    Raises:
        MisconfigurationException: If gradients are accumulated, or the module may accumulate them itself.
    """
    if config.compilation is None or not config.compilation.captures_graphs or trainer.state.fn != TrainerFn.FITTING:
        return
    reasons = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": trainer.accumulate_grad_batches > 1,
        "automatic_optimization = False, which may add gradients up over steps": (
            not trainer.lightning_module.automatic_optimization
        ),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise MisconfigurationException(
                f"compile={_shown(config.compilation)} with {reason}: a CUDA graph writes gradients into the same"
                " memory in each step. Use compile={'mode': 'max-autotune-no-cudagraphs'}."
            )


def _shown(config: CompileConfig) -> str:
    return repr(config.backend) if config.mode is None else f"{{'mode': {config.mode!r}}}"
