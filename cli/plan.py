"""Run ``lightning-dist plan``, which predicts what each layout of a training needs, in one process."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_dist.cli.trainer import TrainerCommand, run_command
from lightning_dist.plugins.planning import Layout, Planned, find_where, layouts_of, plan
from lightning_dist.plugins.planning.choices import names_of_set
from lightning_dist.plugins.planning.figures import memory_of_sheet
from lightning_dist.plugins.planning.memory_of import parse_memory
from lightning_dist.plugins.planning.picture import draw_plan, frontier
from lightning_dist.plugins.strategies import NDParallelStrategy
from lightning_dist.run.doctor.profile import MachineProfile

__all__ = ["PlanCommand", "run"]

_STRATEGY = "lightning_dist.plugins.strategies.NDParallelStrategy"
_NOTHING_FITS = 1
_OF_GROUPS = {"process_group_backend"}
"""Arguments that say how ranks are connected, which the plan knows from its devices."""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist plan``.

    Args:
        arguments: Words of the command line after ``plan``.

    Returns:
        The exit code: 0 if a layout fits, 1 if none does, 2 for a bad configuration.
    """
    return run_command(PlanCommand, ["plan", *arguments])


class _Options(Trainer):
    """Declare the options of the command for its parser; no instance of it is made."""

    def plan(
        self,
        model: LightningModule,
        datamodule: Any = None,
        nodes: int | None = None,
        devices: int | None = None,
        memory: str | None = None,
        device: str | None = None,
        profile: str | None = None,
        write: str | None = None,
        png: str | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Predict the memory and the time of each layout.

        Args:
            model: The module of the configuration.
            datamodule: The datamodule of the configuration.
            nodes: Number of nodes; by default, trainer.num_nodes.
            devices: Number of devices of a node; by default, trainer.devices.
            memory: Memory of a device, such as 80GiB; by default, that of the device, and no limit on CPUs.
            device: Device that the plan is for, such as h100, if it is not that of this machine.
            profile: File with measured figures of the machines, from lightning-dist doctor --write.
            write: File to which the first layout that fits is written, as a configuration for a further -c.
            png: File to which a picture is written: memory and speed, the parts of steps, and the best layout.
            ckpt_path: Accepted because configurations of a fit may have it; it is not read.
            weights_only: Accepted in the same way.
        """


class PlanCommand(TrainerCommand):
    """Predict the memory of layouts with the classes of the configuration, which forked processes make."""

    _trainer_class = _Options
    _saves_config = False
    _makes_classes = False

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {"plan": {"model", "datamodule"}}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--json", action="store_true", help="Print the results as JSON.")

    @override
    def read_checkpoint_hparams(self, path: str) -> None:
        """Leave the checkpoint of the configuration unread."""

    @override
    def instantiate_classes(self) -> None:
        """Make no class here, but in the processes of dry runs, where a model takes no memory."""
        if self._makes_classes:
            super().instantiate_classes()
            return
        self.config_init, self.model, self.datamodule, self.trainer = self.config, None, None, cast(Trainer, self)

    @override
    def after_instantiate_classes(self) -> None:
        if self._makes_classes:
            super().after_instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Keep the arguments of the Trainers of dry runs, and return this command, whose method runs them."""
        self._trainer_arguments = dict(self.config_init.plan.trainer)
        return cast(Trainer, self)

    def plan(
        self,
        model: None,
        nodes: int | None,
        devices: int | None,
        memory: str | None,
        device: str | None,
        profile: str | None,
        write: str | None,
        png: str | None,
        **unused: Any,
    ) -> None:
        """Predict the memory and the time of all layouts, print them, and exit.

        Args:
            model: None, since the module is made in the processes of dry runs.
            nodes: Number of nodes; None: as configured.
            devices: Number of devices of a node; None: as configured.
            memory: Memory of a device, such as ``"80GiB"``; None: that of the data sheet, of the profile, or of this
                machine's GPU; no limit on CPUs.
            device: Name of a device that need not be here; None: that of this machine.
            profile: File of doctor with figures of the machines; None: links are assumed.
            write: File for the first layout that fits; None: none is written.
            png: File for the picture; None: none is written.
            unused: Options that other commands have.

        Raises:
            SystemExit: With the exit code.
            ValueError: If an option has none of its accepted values.
        """
        trainer = self.config.plan.trainer
        num_nodes = _positive("nodes", nodes if nodes is not None else trainer.num_nodes, "--nodes=1")
        num_devices = _positive("devices", devices if devices is not None else trainer.devices, "--devices=8")
        figures = None if profile is None else MachineProfile.read(profile)
        backend = "nccl" if device is not None or _is_for_gpus(trainer.accelerator, figures) else "gloo"
        limit = parse_memory(memory, "--memory") if memory is not None else _memory_of_device(backend, device, figures)
        given = names_of_set(self._given_arguments())
        as_json: bool = self.config.plan.json
        self._warn_of_left_out()
        layouts = layouts_of(num_nodes, num_devices)
        where = find_where(num_devices, backend, device, figures)
        show = _show_progress
        planned = plan(self._make, layouts, limit, backend, where, given, num_devices=num_devices, on_progress=show)
        fitting = [one for one in planned if one.fits(limit)]
        if as_json:
            print(json.dumps([_as_dict(one, limit) for one in planned], indent=2))
        else:
            _print(planned, num_nodes, num_devices, limit)
        if png is not None:
            draw_plan(planned, limit, num_devices, Path(png))
        if write is not None and fitting:
            Path(write).write_text(self._overlay(fitting[0].layout, num_nodes, num_devices))
            print(f"{write} has the configuration of {fitting[0].layout}.", file=sys.stderr)
        raise SystemExit(0 if fitting else _NOTHING_FITS)

    def _make(self, layout: Layout) -> tuple[LightningModule, Any, Mapping[str, Any]]:
        """Make the module, the datamodule, and the arguments of a Trainer, for a layout."""
        self._makes_classes = True
        self.config.plan.trainer.strategy = Namespace(
            class_path=_STRATEGY, init_args=Namespace(**{**self._given_arguments(), **layout.arguments})
        )
        self.instantiate_classes()
        self.after_instantiate_classes()
        return self.model, self.datamodule, self._trainer_arguments

    def _given_arguments(self) -> dict[str, Any]:
        """Return the arguments of the configured strategy that a layout leaves as they are."""
        accepted = set(inspect.signature(NDParallelStrategy).parameters) - set(Layout().arguments)
        return {name: value for name, value in self._configured().items() if name in accepted - _OF_GROUPS}

    def _configured(self) -> dict[str, Any]:
        """Return the arguments that the configured strategy has."""
        strategy = self.config.plan.trainer.strategy
        if not isinstance(strategy, Namespace) or strategy.get("init_args") is None:
            return {}
        return {name: value for name, value in strategy.init_args.items(branches=True) if value is not None}

    def _warn_of_left_out(self) -> None:
        """Say which arguments of the configured strategy the plan leaves out, because its own has none such."""
        left_out = set(self._configured()) - set(inspect.signature(NDParallelStrategy).parameters) - _OF_GROUPS
        for name in sorted(left_out - {"memory", "objective", "profile", "dry_run"}):
            argument = f"{name}={self._configured()[name]}"
            print(f"{argument} is left out: the plan is for nd_parallel, which has no such argument.", file=sys.stderr)

    def _overlay(self, layout: Layout, num_nodes: int, num_devices: int) -> str:
        strategy = {"class_path": _STRATEGY, "init_args": layout.arguments}
        return yaml.safe_dump(
            {"trainer": {"num_nodes": num_nodes, "devices": num_devices, "strategy": strategy}}, sort_keys=False
        )


def _positive(name: str, value: Any, example: str) -> int:
    number = len(value) if isinstance(value, list) else value
    if not str(number).isdecimal() or int(number) < 1:
        raise ValueError(f"--{name}={value}: a plan needs a number of at least 1, such as {example}.")
    return int(number)


def _memory_of_device(backend: str, device: str | None, profile: MachineProfile | None) -> int | None:
    """Return the bytes of memory of a device that the plan is for; None: it has no limit, as on CPUs."""
    if backend == "gloo":
        return None
    if device is not None:
        return memory_of_sheet(device)
    if profile is not None and profile.backend == backend:
        return min(one.memory_bytes for one in profile.devices)
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _is_for_gpus(accelerator: Any, profile: MachineProfile | None) -> bool:
    is_here = torch.cuda.is_available() or (profile is not None and profile.backend == "nccl")
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and is_here)


def _show_progress(done: int, all_: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {all_} dry runs", end="\n" if done == all_ else "", file=sys.stderr, flush=True)


def _as_dict(planned: Planned, memory: int | None) -> dict[str, Any]:
    time = planned.time
    return {
        **planned.layout.arguments,
        "peak_bytes": planned.peak,
        "resident_bytes": planned.resident,
        "fits": planned.fits(memory),
        "why_not": planned.why_not,
        "step_s": None if time is None else time.total,
        "step_parts_s": None if time is None else asdict(time),
        "samples_per_s": planned.samples_per_s,
        "tokens_per_s": planned.tokens_per_s,
        "model_flops": planned.model_flops,
        "mfu": planned.mfu or None,
    }


def _print(planned: Sequence[Planned], num_nodes: int, num_devices: int, memory: int | None) -> None:
    """Print the layouts that fit, those that do not, and those that cannot be used, with the reason."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH_OF_FILE)
    where = f"{num_nodes} node{'s' * (num_nodes > 1)} with {num_devices} device{'s' * (num_devices > 1)}"
    limit = "" if memory is None else f", of which each has {_mib(memory)} MiB"
    known = [one for one in planned if one.peak is not None]
    is_timed = any(one.time is not None for one in known)
    console.print(f"Predicted memory of a rank, in MiB{' and time of a step, in ms,' * is_timed} on {where}{limit}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    times = (*_TIMES, *(["MFU"] if any(one.mfu for one in known) else [])) if is_timed else ()
    columns = ["layout", "options", "in a step", "between steps", *times, ""]
    for title in columns:
        table.add_column(title, justify="left" if title in ("layout", "options", "") else "right", no_wrap=True)
    for one in known:
        fits, options = one.fits(memory), ", ".join(f"{name}={value}" for name, value in one.layout.options)
        remark = "" if memory is None else "fits" if fits else f"{(one.peak or 0) / memory:.0%} of the device"
        cells = [
            f"{'≈ ' * one.is_estimated}{one.layout.axes}",
            options,
            _mib(one.peak),
            _mib(one.resident),
            *_times(one)[: len(times)],
        ]
        table.add_row(*cells, Text(remark, "" if fits else "dim"))
    console.print(table)
    if is_timed:
        _print_frontier(console, frontier(planned, memory))
        if any(one.is_estimated for one in known):
            console.print("≈ is estimated from dry runs of other layouts.")
        console.print(f"Times: {known[0].time.source if known[0].time else None}.")
    reasons: dict[str, list[str]] = {}
    for one in planned:
        if one.peak is None:
            reasons.setdefault(one.why_not, []).append(str(one.layout))
    for reason, refused in reasons.items():
        console.print(f"not possible: {refused[0]}{f' and {len(refused) - 1} more' if refused[1:] else ''}: {reason}")
    if known and not any(one.fits(memory) for one in known):
        closest = min(known, key=lambda one: one.peak or 0)
        console.print(
            f"No layout needs at most 90% of a device. The closest is {closest.layout}, which needs"
            f" {_mib(closest.peak)} MiB. Smaller batches, offload or more devices would help."
        )


_BAR_WIDTH = 40
_WIDTH_OF_FILE = 240
"""Number of characters of a line, where the output is no terminal."""


def _print_frontier(console: Console, best: Sequence[Planned]) -> None:
    """Print a bar for each layout than which none is faster with as little memory."""
    if not best or not best[-1].samples_per_s:
        return
    console.print("Fastest with as much memory, in samples per second:")
    most = best[-1].samples_per_s
    for one in best:
        bar = "█" * max(round(_BAR_WIDTH * one.samples_per_s / most), 1)
        console.print(f"  {_mib(one.peak):>12} MiB  {bar:<{_BAR_WIDTH}}  {one.samples_per_s:,.0f}  {one.layout}")


_TIMES = ("step", "compute", "sending", "other", "samples/s")


def _times(planned: Planned) -> list[str]:
    time = planned.time
    if time is None:
        return [""] * (len(_TIMES) + 1)
    sending = sum(time.communication.values())
    seconds = (time.total, time.compute, sending, time.total - time.compute - sending)
    return [*(f"{1e3 * one:,.1f}" for one in seconds), f"{planned.samples_per_s:,.0f}", f"{planned.mfu:.0%}"]


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"
