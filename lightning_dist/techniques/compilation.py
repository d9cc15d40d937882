"""Compile each block by ``torch.compile``; code between the blocks is not compiled.

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dist._compat import compile_backwards_without_autocast
from lightning_dist.model.units import Unit
from lightning_dist.techniques.options import Arguments, Build, Fit, Run, TechniqueOptions, refuse_without_blocks
from lightning_dist.techniques.protocol import Parallel, Rows, Technique

__all__ = ["Compilation", "CompileConfig", "CompileOptions"]


@dataclass(frozen=True)
class CompileConfig:
    """Configure how blocks are compiled.

    Args:
        backend: The backend of torch.compile, such as ``"inductor"``.
        mode: The mode of torch.compile, such as ``"reduce-overhead"``; None: torch's default.
    """

    backend: str = "inductor"
    mode: str | None = None

    @property
    def captures_graphs(self) -> bool:
        """Return whether compiled blocks run as CUDA graphs, whose results the next step overwrites."""
        return self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"

    def __str__(self) -> str:
        return self.backend if self.mode is None else f"{self.backend}, {self.mode}"


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileOptions(TechniqueOptions):
    """Choose how blocks are compiled.

    Args:
        compile: Whether each block is compiled by ``torch.compile``; a string names the backend, and a mapping such as
            ``{"mode": "max-autotune-no-cudagraphs"}`` the mode. The modes ``"reduce-overhead"`` and ``"max-autotune"``
            run blocks as CUDA graphs, if nothing is sharded, split, in stages or accumulated.

    Raises:
        ValueError: If ``compile`` is none of these, a mode does not exist, or the backend has none.
    """

    compile: bool | str | dict[str, str] = False

    def __post_init__(self) -> None:
        value, config = self.compile, self.config
        if config is None:
            return
        if config.mode is not None and config.mode not in _MODES:
            raise ValueError(f"compile={value!r}: the mode must be one of {', '.join(map(repr, _MODES))}.")
        if config.mode is not None and config.backend != "inductor":
            raise ValueError(
                f"compile={value!r}: only the backend 'inductor' has modes. Leave mode out, or use backend='inductor'."
            )

    @property
    def config(self) -> CompileConfig | None:
        """Return the backend and the mode; None: nothing is compiled.

        Raises:
            ValueError: If the argument is none of the accepted values.
        """
        value = self.compile
        if not value:
            return None
        if value is True:
            return CompileConfig()
        if isinstance(value, str):
            return CompileConfig(value)
        if not isinstance(value, Mapping) or not set(value) <= {"mode", "backend"}:
            raise ValueError(
                f"compile={value!r} must be True, False, the name of a backend of torch.compile, or {{'mode': ...}}"
                " with one of its modes, and optionally 'backend'."
            )
        return CompileConfig(value.get("backend", "inductor"), value.get("mode"))

    def compared(self) -> Mapping[str, Any]:
        """Return the backend and the mode in place of the argument, which has several spellings."""
        return {"compile": self.config}

    def given(self) -> dict[str, Any]:
        """Return the argument if anything is compiled."""
        return {} if self.config is None else super().given()

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse CUDA graphs where they do not exist or would replay what has changed.

        A graph replays its kernels with the memory addresses of the time when it was captured, and its results are
        overwritten by the next replay.
        """
        config, layout = self.config, run.layout
        if config is not None and arguments["activation_checkpointing"] == "selective":
            raise ValueError(
                "activation_checkpointing='selective' with compile: a compiled block is one operation, so that none of"
                " its results could be kept. Use activation_checkpointing='full', {'every': k} or {'budget': b}, or"
                " leave compile out."
            )
        if config is None or not config.captures_graphs:
            return
        reasons = {
            f"on {run.device_type}: CUDA graphs exist on CUDA devices only": run.device_type != "cuda",
            f"with {layout}, where FSDP2 gathers the parameters of a block into other memory in each step, while a"
            " graph replays the same addresses": layout.num_shards > 1,
            f"with pp_size={layout.pp}: a pipeline runs a block for several microbatches before their backwards, which"
            " torch does not do with graphs": layout.pp > 1,
            f"with tp_size={layout.tp}, cp_size={layout.cp} and ep_size={layout.ep}: blocks exchange tensors between"
            " ranks, which inductor does not capture": max(layout.tp, layout.cp, layout.ep) > 1,
            "with activation_checkpointing: a block runs again in the backward, which torch does not do with graphs": (
                arguments.recomputes
            ),
            "with tiled_mlp: parts of a block run again in the backward, which torch does not do with graphs": (
                arguments["tiled_mlp"] is not None
            ),
        }
        for reason, is_given in reasons.items():
            if is_given:
                raise ValueError(
                    f"compile={_shown(config)} {reason}. Use compile=True, or"
                    " compile={'mode': 'max-autotune-no-cudagraphs'}."
                )

    def check_fit(self, run: Run, fit: Fit, arguments: Arguments) -> None:
        """Refuse CUDA graphs if gradients may be added up over steps: each replay overwrites the last gradients."""
        config = self.config
        if config is None or not config.captures_graphs:
            return
        reasons = {
            f"accumulate_grad_batches={fit.accumulate_grad_batches}": fit.accumulate_grad_batches > 1,
            "an accumulate_grad_batches that changes during the run": fit.changes_accumulation,
            "elastic_batch='fixed'": arguments["elastic_batch"] == "fixed",
            "automatic_optimization = False, which may add gradients up over steps": not fit.is_automatic,
        }
        for reason, is_given in reasons.items():
            if is_given:
                raise ValueError(
                    f"compile={_shown(config)} with {reason}: a CUDA graph writes gradients into the same memory in"
                    " each step. Use compile={'mode': 'max-autotune-no-cudagraphs'}."
                )

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the backend and the mode as text."""
        return {"compile": None if self.config is None else str(self.config)}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique if blocks are compiled."""
        if self.config is not None:
            refuse_without_blocks("compile", build)
            yield Compilation(self.config)


def _shown(config: CompileConfig) -> str:
    return repr(config.backend) if config.mode is None else f"{{'mode': {config.mode!r}}}"


class Compilation(Technique):
    """Compile each block separately by ``torch.compile``.

    Args:
        config: The backend and the mode of torch.compile.
    """

    def __init__(self, config: CompileConfig) -> None:
        self._config = config
        compile_backwards_without_autocast()

    def prepare_unit(self, unit: Unit) -> None:
        """Compile the forwards of the unit's modules if it is a block."""
        options = {} if self._config.mode is None else {"mode": self._config.mode}
        for block in unit.modules if unit.kind == "block" else ():
            block.forward = torch.compile(block.forward, backend=self._config.backend, **options)  # type: ignore[call-overload]

    def before_step(self) -> None:
        """Let CUDA graphs reuse the memory of the last step's results.

        Each block is a graph of its own. Without this, a block would begin a new step where no gradients are computed,
        and overwrite the result of the block before it.
        """
        if self._config.captures_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def table_rows(self) -> Rows:
        """Return a row that names the backend and the mode."""
        yield "compiled", f"blocks ({self._config})"
