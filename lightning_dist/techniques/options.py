"""Define what the options of a technique are: arguments of strategies, and everything that follows from them.

A technique with arguments has a class of options, a frozen dataclass whose fields are arguments of the strategies. It
is one entry of ``OPTIONS`` in :mod:`lightning_dist.parallelize`, or is added from outside by
:func:`~lightning_dist.parallelize.register_options`. The strategies, the command, the start-up table, the parameters of
a run and its checkpoints loop over these classes and name none of them. The docstring's ``Args`` explain the arguments
to users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.mesh.groups import MeshGroups
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.units import Unit
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = [
    "Arguments",
    "Build",
    "FirstStep",
    "Fit",
    "PrecisionPolicy",
    "Run",
    "Step",
    "StepOnMicrobatch",
    "StepSource",
    "TechniqueOptions",
    "argument",
    "refuse_without_blocks",
]

_Options = TypeVar("_Options", bound="TechniqueOptions")


def argument(default: Any, *, only_with: str) -> Any:
    """Return a field of options that only those strategies have as an argument that offer ``only_with``.

    Args:
        default: Default value of the argument.
        only_with: An axis of the mesh, or another name in ``offers`` of a strategy.
    """
    return field(default=default, metadata={"only_with": only_with})


@dataclass(frozen=True)
class Run:
    """Describe a run before its processes start, for checks of arguments.

    Args:
        strategy: Name of the strategy, for errors.
        layout: The sizes of the mesh's axes.
        device_type: Type of the device on which steps run.
        num_devices: Number of processes on a node.
        precision: Name of the precision, such as ``"bf16-mixed"``.
        scales_losses: Whether losses are scaled, so that float16 can hold their gradients.
        gathers_float8: Whether shards of parameters are gathered in float8.
    """

    strategy: str
    layout: ParallelLayout
    device_type: str
    num_devices: int
    precision: str
    scales_losses: bool
    gathers_float8: bool


@dataclass(frozen=True)
class Fit:
    """Describe a fit when the module is known, for checks of arguments.

    Args:
        module: Name of the module's class.
        is_automatic: Whether the loops step the optimizers (automatic optimization), and not the module.
        accumulate_grad_batches: Number of batches whose gradients are added up.
        changes_accumulation: Whether this number changes in the run.
        gradient_clip_val: Largest norm or value to which gradients are clipped; None: they are not.
        master_weights: Name of the precision plugin's class if it keeps master weights, else "".
        overridden: Function of the names of hooks that returns which of them the module and the callbacks override,
            such as ``"Model.on_after_backward"``.
    """

    module: str
    is_automatic: bool
    accumulate_grad_batches: int
    changes_accumulation: bool
    gradient_clip_val: float | None
    master_weights: str
    overridden: Callable[[Sequence[str]], list[str]]


class Arguments(Mapping[str, Any]):
    """Hold the options of all techniques, and the value of each argument by its name.

    Args:
        options: The options, one for each technique, in the order in which techniques are built.

    Raises:
        ValueError: If two techniques have an argument of the same name.
    """

    def __init__(self, options: Iterable[TechniqueOptions]) -> None:
        self.options = tuple(options)
        self._owners: dict[str, TechniqueOptions] = {}
        for one in self.options:
            for name in one.names():
                if name in self._owners:
                    raise ValueError(
                        f"{type(self._owners[name]).__name__} and {type(one).__name__} both have an argument {name!r}."
                        " Rename one of them."
                    )
                self._owners[name] = one

    def of(self, kind: type[_Options]) -> _Options:
        """Return the options of the class ``kind``, or of a class derived from it.

        Raises:
            KeyError: If there are none.
        """
        for one in self.options:
            if isinstance(one, kind):
                return one
        raise KeyError(kind.__name__)

    @property
    def recomputes(self) -> bool:
        """Return whether blocks do not simply keep their activations for the backward."""
        return any(one.recomputes for one in self.options)

    @property
    def reduces_every_batch(self) -> bool:
        """Return whether the backward of each batch of an accumulation reduces its gradients."""
        return any(one.reduces_every_batch for one in self.options)

    @property
    def lets_replicas_differ(self) -> bool:
        """Return whether replicas train on their own between two synchronizations."""
        return any(one.lets_replicas_differ for one in self.options)

    def is_given(self, name: str) -> bool:
        """Return whether the argument ``name`` differs from its default."""
        return name in self._owners[name].given()

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owners[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Hold the two dtypes of FSDP2's mixed-precision policy, and what does not follow it.

    Args:
        param_dtype: Dtype in which parameters are gathered and computed; None: the dtype in which they are stored.
        reduce_dtype: Dtype in which gradients are reduced; None: the dtype in which they are computed.
        keep_fp32: Patterns of names or classes of modules that are gathered and computed in float32.
        gather_as: Function of a module and a parameter's name in it, which returns how the parameter is gathered as a
            tensor of another class, in fewer bytes; None: as it is.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_fp32: Sequence[str] = ()
    gather_as: Callable[[nn.Module, str], Any] | None = None


Step = Callable[..., Any]
"""Function that runs a step of the module on fakes, for :mod:`lightning_dist.tracing.step_graph`.

It is given a function that makes a fake tensor of a real one, and passes each tensor of the batch through it."""


class FirstStep(NamedTuple):
    """Hold the step that a run begins with, from which plans are made."""

    run: Step | None
    """Function that runs it on fakes; None: no batch could be made."""

    why_not: str
    """The reason why there is no step; "" if there is one."""


@dataclass(frozen=True)
class StepOnMicrobatch:
    """Describe the step that a pipeline is cut by.

    Args:
        num_microbatches: Number of microbatches that a rank's batch is split into.
        step: Function that runs the step on one microbatch; None: no step can be run (see ``why_no_step``).
        step_in_run: The same step after the hooks that precede it in a run, which may set attributes that it reads.
        why_no_step: The reason why there is no step.
        has_loss: Whether the step must return a loss.
        in_turn: Whether steps run their own backwards, so that stages work in turn on whole batches.
    """

    num_microbatches: int
    step: Step | None = None
    step_in_run: Step | None = None
    why_no_step: str = ""
    has_loss: bool = True
    in_turn: bool = False


class StepSource(Protocol):
    """Provide the first step of the run, from which plans are made."""

    def whole(self) -> FirstStep:
        """Return the step that the run begins with. This is a collective over all processes."""

    def on_microbatch(self, wanted: int | None, most: int) -> StepOnMicrobatch:
        """Return the step on one microbatch. This is a collective over all processes.

        Args:
            wanted: Number of microbatches that the user asks for; None: it is chosen.
            most: Largest number that is chosen.

        Raises:
            ValueError: If the batch cannot be split, or the module cannot run in a pipeline.
        """


@dataclass(frozen=True)
class Build:
    """Hold what techniques are built from.

    Args:
        module: The user's module.
        units: All units of the module.
        layout: The sizes of the mesh's axes.
        groups: The mesh with all axes, and the groups of ranks.
        sharding_mesh: The mesh of the ranks that share parameters, with the axes ``(dp_shard,)`` or ``(dp_replicate,
            dp_shard)``.
        parameter_mesh: The same mesh, and ``tp`` as its last axis if layers are split.
        arguments: The options of all techniques.
        steps: The first step of the run.
        copied: The parallel module whose module this one is a copy of; None: it is no copy.
        precision: The dtypes that parameters are computed and gradients are reduced in.
        scales_losses: Whether losses are scaled.
        is_automatic: Whether the loops step the optimizers, and not the module.
        claimed: Style of each module that an earlier technique manages, and a remark for the start-up table, by the
            module's full name.
    """

    module: nn.Module
    units: Sequence[Unit]
    layout: ParallelLayout
    groups: MeshGroups
    sharding_mesh: DeviceMesh
    parameter_mesh: DeviceMesh
    arguments: Arguments
    steps: StepSource
    copied: Parallel | None
    precision: PrecisionPolicy
    scales_losses: bool
    is_automatic: bool
    claimed: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh with all axes."""
        return self.groups.mesh

    @property
    def device(self) -> torch.device:
        """Return the device of the mesh, without an index."""
        return torch.device(self.mesh.device_type)


@dataclass(frozen=True)
class TechniqueOptions:
    """Hold the arguments of strategies that belong to a technique. The methods here ask for nothing and refuse nothing.

    A derived class is a frozen dataclass whose fields have defaults, and whose ``__post_init__`` raises ``ValueError``
    if a value is wrong.
    """

    @classmethod
    def fields(cls, offers: Iterable[str] | None = None) -> list[Field[Any]]:
        """Return the fields that are arguments of a strategy.

        Args:
            offers: The axes and other features of the strategy; None: all fields.
        """
        found = [one for one in fields(cls) if one.init]
        return [one for one in found if offers is None or one.metadata.get("only_with") in (None, *offers)]

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all arguments."""
        return [one.name for one in cls.fields()]

    @classmethod
    def parameters(cls, offers: Iterable[str]) -> list[inspect.Parameter]:
        """Return the arguments of a strategy as parameters of a signature, with types and defaults."""
        hints = get_type_hints(cls)
        return [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one), annotation=hints[one.name]
            )
            for one in cls.fields(offers)
        ]

    def given(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        values = {one.name: (getattr(self, one.name), _default(one)) for one in self.fields()}
        return {name: value for name, (value, default) in values.items() if value != default}

    lets_replicas_differ: ClassVar[bool] = False
    """Whether replicas train on their own between two synchronizations; a property may say so."""

    keeps_states_elsewhere: ClassVar[bool] = False
    """Whether the states of optimizers are kept elsewhere than on the device; a property may say so."""

    recomputes: ClassVar[bool] = False
    """Whether blocks do not simply keep their activations for the backward; a property may say so."""

    is_for_training: ClassVar[bool] = False
    """Whether the arguments have an effect on training steps alone."""

    reduces_every_batch: ClassVar[bool] = False
    """Whether the backward of each batch of an accumulation reduces its gradients; a property may say so."""

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse what cannot be combined, before processes start.

        Raises:
            ValueError: If the arguments do not fit the run or other arguments; the text names them and the fix.
        """

    def check_fit(self, run: Run, fit: Fit, arguments: Arguments) -> None:
        """Refuse what does not fit a fit, when its module is known.

        Raises:
            ValueError: If the arguments do not fit; the text names them and the fix.
        """

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether any of the arguments can have an effect with these sizes."""
        return True

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence that says which arguments have no effect with these sizes, and why; "" if all have one."""
        return ""

    def chosen(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return what the technique has chosen for arguments that leave it open by their defaults.

        Args:
            parallel: The parallel module, whose techniques are built.
        """
        return {}

    def compared(self) -> Mapping[str, Any]:
        """Return the arguments in a form in which two spellings of the same are equal."""
        return {name: getattr(self, name) for name in self.names()}

    def changes(self, before: Self, parallel: Parallel) -> Iterator[tuple[str, Any, Any]]:
        """Yield the arguments that ask for something else than a module was made parallel with.

        Args:
            before: The options with which it was made parallel.
            parallel: The parallel module, whose techniques are built.

        Returns:
            Iterator over the arguments' names, values before and values now.
        """
        chosen, given = before.chosen(parallel), self.given()
        values = before.compared(), self.compared()
        for name in self.names():
            then, now = getattr(before, name), getattr(self, name)
            if values[0][name] == values[1][name] or (name in chosen and (name not in given or now == chosen[name])):
                continue
            yield name, chosen.get(name, then), now

    def check_comparison(self) -> None:
        """Refuse a comparison of the first steps with those of one process.

        Raises:
            ValueError: If gradients differ from those of one process by design, or cannot be read.
        """

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return what is logged about the technique with a run, and saved in checkpoints; None: it is not in use.

        Args:
            parallel: The parallel module, whose techniques are built.
        """
        given = self.given()
        return {name: given.get(name) for name in self.names()}

    def backend(self, backend: str | None, device: torch.device) -> str | None:
        """Return the backend of the process group.

        Args:
            backend: The one that is used otherwise; None: the default for the device.
            device: The device on which steps run.
        """
        return backend

    def needs_shards(self, device: torch.device, is_asked: bool) -> str:
        """Return the argument, with its value, that needs optimizers to step on shards; "" if there is none.

        Args:
            device: The device on which steps run.
            is_asked: Whether the user asks for steps on whole parameters; otherwise, an optimizer may need them.
        """
        return ""

    def memory_traits(self, device: torch.device) -> Mapping[str, bool]:
        """Return fields of :class:`~lightning_dist.parameters.memory_use.RunSize` that these options set.

        Args:
            device: The device on which steps run.
        """
        return {}

    def techniques(self, build: Build) -> Iterable[Technique]:
        """Build the techniques that these options ask for, from the outside in.

        This is a collective over all processes.
        """
        return ()


def refuse_without_blocks(name: str, build: Build) -> None:
    """Refuse an argument that works on repeated blocks for a model that has none.

    Args:
        name: Name of the argument.
        build: What techniques are built from.

    Raises:
        ValueError: If the model has no blocks.
    """
    if all(unit.kind != "block" for unit in build.units):
        raise ValueError(
            f"{name} works on the model's repeated blocks, and {type(build.module).__name__} has none that could be"
            " found: name their classes as units=[...]."
        )


def _default(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    if one.default_factory is not MISSING:
        return one.default_factory()
    raise TypeError(f"The argument {one.name!r} of a technique must have a default, with which it does nothing.")
