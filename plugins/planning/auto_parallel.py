"""Provide ``strategy="auto_parallel"``, which chooses its layout by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.checkpoint import CheckpointError, read_manifest
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import ParallelConfig, options_from
from lightning_dist.plugins.planning.choices import names_of_set
from lightning_dist.plugins.planning.layouts import layouts_of
from lightning_dist.plugins.planning.memory_of import memory_of, parse_memory
from lightning_dist.plugins.planning.plan import plan
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.report import PredictionReport
from lightning_dist.plugins.planning.trained import Trained
from lightning_dist.plugins.planning.where import find_where
from lightning_dist.plugins.strategies.checks import check_run
from lightning_dist.plugins.strategies.nd_parallel import NDParallelStrategy
from lightning_dist.plugins.strategies.resume_path import ResumePath, candidates
from lightning_dist.run.doctor.profile import MachineProfile

__all__ = ["AutoParallelStrategy"]

_OBJECTIVES = ("tokens_per_s", "memory")

_NUM_SHOWN = 4
"""Number of layouts that are printed: the choice and the runners-up."""


class AutoParallelStrategy(NDParallelStrategy):
    """Choose the sizes of the mesh by a plan for this run's model, data and devices.

    When a training begins, rank 0 predicts the memory and the time of a step for the layouts of the run's devices
    (:func:`~lightning_dist.plugins.planning.plan.plan`), and all ranks use the best one whose predicted peak is at most
    90% of a device. Sizes that are given are kept, and the others are chosen. A run that begins with an evaluation is
    not planned; it shards the model over all ranks that no given size takes.

    Args:
        memory: Memory of a device, such as ``"80GiB"``. None: that of the device; on CPUs, that of the node divided by
            the number of its ranks.
        objective: What is best. ``"tokens_per_s"``: the most samples, and so tokens, per second. ``"memory"``: the
            lowest predicted peak.
        profile: File with measured figures of the machines, from ``lightning-dist doctor --write``. None: operations
            are measured on the device of rank 0, and the speed of links is assumed.
        dry_run: Whether to print the choice, and stop before the training.
        pp_size: Number of processes that the stages are distributed over. None: it is chosen.
        dp_replicate_size: Number of replicas. None: it is chosen.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: it is chosen.
        tp_size: Number of processes that a layer is split over. None: it is chosen.
        cp_size: Number of processes that a sequence is split over. None: it is chosen.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    Raises:
        ValueError: If ``memory`` or ``objective`` has none of its accepted values, or the file of ``profile`` is none.
        OSError: If the file of ``profile`` cannot be read.
    """

    strategy_name = "auto_parallel"
    chooses_layout = True
    offers = frozenset({"pp", "dp_replicate", "dp_shard", "tp", "cp", "ep"})

    def __init__(
        self,
        memory: str | None = None,
        objective: str = "tokens_per_s",
        profile: str | None = None,
        dry_run: bool = False,
        pp_size: int | None = None,
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        tp_size: int | None = None,
        cp_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if objective not in _OBJECTIVES:
            raise ValueError(f"objective={objective!r} is none of {', '.join(map(repr, _OBJECTIVES))}.")
        self._memory = None if memory is None else parse_memory(memory, "memory")
        self._objective = objective
        self._profile = None if profile is None else MachineProfile.read(profile)
        self._dry_run = dry_run
        sizes = {
            "pp": pp_size,
            "dp_replicate": dp_replicate_size,
            "dp_shard": dp_shard_size,
            "tp": tp_size,
            "cp": cp_size,
        }
        self._given_sizes = {axis: size for axis, size in sizes.items() if size not in (None, -1)}
        self._options = kwargs
        self._found: tuple[Exception | str, Planned | None] | None = None
        """On rank 0, what is printed and what is used, or the error and None."""
        self._chosen: Planned | None = None
        super().__init__(**{f"{axis}_size": size for axis, size in self._given_sizes.items()}, **kwargs)

    @property
    def chosen_arguments(self) -> dict[str, Any]:
        """Return the arguments that the plan has chosen; empty if there is no plan."""
        return {} if self._chosen is None else self._chosen.layout.arguments

    @property
    @override
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, with the prediction of its layout."""
        chosen = self._chosen
        if chosen is None:
            return super().settings
        predicted: dict[str, Any] = {"planned_layout": str(chosen.layout), "planned_peak_mib": _mib(chosen.peak or 0)}
        if chosen.time is not None:
            predicted["planned_step_ms"] = round(1e3 * chosen.time.total, 2)
        return {**super().settings, **predicted}

    @property
    def _is_open(self) -> bool:
        """Return whether the coming run needs a plan."""
        return self.trainer.state.fn == TrainerFn.FITTING and self._chosen is None and not self.is_set_up

    @override
    def setup_environment(self) -> None:
        """Plan on rank 0 before the processes communicate, so that it can still fork processes for dry runs."""
        if self._is_open and self.node_rank == 0 and self.local_rank == 0:
            try:
                self._found = self._choice(self._plan())
            except MisconfigurationException as error:  # All ranks raise it, once they communicate.
                self._found = error, None
            except Exception as error:  # It may hold what cannot be sent to other ranks, which would wait for it.
                self._found = RuntimeError(f"auto_parallel cannot plan: {type(error).__name__}: {error}"), None
        super().setup_environment()

    @override
    def settle_layout(self) -> None:
        """Use the choice of rank 0 on all ranks, or raise its error on all of them."""
        if not self._is_open:
            return
        text, chosen = self.broadcast(self._found)
        if isinstance(text, Exception):
            raise text
        rank_zero_info(text)
        if self._dry_run:
            raise SystemExit(0)
        self._chosen = chosen
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, PredictionReport) for callback in callbacks):
            callbacks.insert(0, PredictionReport())  # Checkpoint callbacks stay behind it.
        for callback in callbacks:
            if isinstance(callback, PredictionReport):
                callback.use(chosen)
        layout = chosen.layout
        self._layout = ParallelLayout.resolve(self.num_nodes * self.num_processes, **layout.sizes, ep=self.layout.ep)
        if layout.options:
            options = {name: value for name, value in self._options.items() if name in _names_of_options(self)}
            arguments = options_from({**options, **dict(layout.options)})
            self._config = ParallelConfig(self._config.units, arguments)
        check_run(self)

    def _plan(self) -> list[Planned]:
        backend = "gloo" if self.root_device.type == "cpu" else "nccl"
        layouts = layouts_of(self.num_nodes, self.num_processes, **self._given_sizes)
        if not layouts:
            given = ", ".join(f"{axis}_size={size}" for axis, size in self._given_sizes.items())
            raise MisconfigurationException(
                f"auto_parallel: no layout of {self.num_nodes} x {self.num_processes} devices has {given}."
            )
        num_ranks = self.num_nodes * self.num_processes
        rank_zero_info(f"auto_parallel: predicting {_count(len(layouts), 'layout')} of {_count(num_ranks, 'rank')}")
        where = find_where(self.num_processes, backend, None, self._profile)
        memory = self._memory or memory_of(self.root_device, self.num_processes)
        set_by_user = names_of_set(self._options)
        self._memory = memory
        by_memory = self._objective == "memory"
        trained, num_devices = Trained.of(self, self._options), self.num_processes
        return plan(trained, layouts, memory, backend, where, set_by_user, by_memory, num_devices)

    def _choice(self, planned: Sequence[Planned]) -> tuple[Exception | str, Planned | None]:
        """Return what is printed, or the text of an error, and the layout that is used; None: there is none."""
        memory = self._memory
        fitting = [one for one in planned if one.fits(memory)]
        if not fitting:
            return MisconfigurationException(_why_none(planned, memory)), None
        best = fitting[0]
        by_memory = self._objective == "memory" or best.time is None
        reason = f"{'with the least memory' if by_memory else 'the fastest'} of {len(fitting)} that fit"
        reason = "the only layout" if len(planned) == 1 else f"{reason}, of {len(planned)} layouts"
        lines = [f"auto_parallel: {best.layout}, {reason}"]
        lines += [f"  {_line(one, memory)}" for one in fitting[:_NUM_SHOWN]]
        if best.time is not None:
            lines.append(f"  times: {best.time.source}")
        saved = self._saved_layout()
        if saved is not None and saved != str(best.layout):
            lines.append(f"  The checkpoint was saved with {saved}; the run goes on with {best.layout}.")
        return "\n".join(lines), best

    def _saved_layout(self) -> str | None:
        """Return the layout of the checkpoint that is resumed; None: there is none, or it was not planned."""
        path = self.resumes_from
        if path is None:
            return None
        for found in candidates(path) if isinstance(path, ResumePath) else [path]:
            try:
                settings = read_manifest(str(found)).about.get("settings", {})
            except (CheckpointError, OSError):
                continue
            return settings.get("planned_layout")
        return None


def _names_of_options(strategy: NDParallelStrategy) -> set[str]:
    return {name for options in strategy.config.arguments.options for name in options.names()}


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 2)


def _line(planned: Planned, memory: int | None) -> str:
    of_device = "" if memory is None else f" ({(planned.peak or 0) / memory:.0%} of the device)"
    text = f"{planned.layout}: {_mib(planned.peak or 0):,.1f} MiB{of_device}"
    if planned.time is None:
        return text
    rate, of = (planned.tokens_per_s, "tokens") if planned.tokens_per_s else (planned.samples_per_s, "samples")
    mfu = f", MFU {planned.mfu:.0%}" if planned.mfu else ""
    return f"{text}, {1e3 * planned.time.total:,.1f} ms a step, {rate:,.0f} {of}/s{mfu}"


def _why_none(planned: Sequence[Planned], memory: int | None) -> str:
    known = [one for one in planned if one.peak is not None]
    if not known:
        reasons = "; ".join(dict.fromkeys(one.why_not for one in planned))
        return f"auto_parallel: no layout can be predicted: {reasons}"
    closest = min(known, key=lambda one: one.peak or 0)
    return (
        f"auto_parallel: no layout needs at most 90% of {_mib(memory or 0):,.1f} MiB. The closest is {closest.layout},"
        f" which needs {_mib(closest.peak or 0):,.1f} MiB. Smaller batches, offload or more devices would help."
    )
