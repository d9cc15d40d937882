"""Define a precision plugin that computes large linear layers in float8."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist._compat import own_parameters
from lightning_dist.mesh.layout import ParallelLayout

__all__ = ["Float8Precision", "use_precision_again"]

Recipe = Literal["tensorwise", "rowwise"]

Base = Literal["bf16-mixed", "bf16-true"]

_HEADS = ("*head", "output")
"""Names of the layers that compute logits, in which rounding errors directly change the loss."""

_MULTIPLE_OF = 16
"""Both sizes of a matrix in float8 must be multiples of this number, for the matrix units of GPUs."""


class Float8Precision(Precision):
    """Compute the large linear layers in float8 by torchao, and everything else as ``base`` does.

    The layer's input, weight and the gradient of its output are scaled and rounded to float8 in every step (dynamic
    scaling), before matrices are multiplied; the results are in bfloat16. Parameters, optimizer states and checkpoints
    are those of ``base``, so that a checkpoint can be loaded with and without this plugin.

    Args:
        recipe: How numbers are scaled into the range of float8. ``"tensorwise"``: by one factor for each tensor, which
            is the fastest. ``"rowwise"``: by one factor for each row or column, a power of two, which is more accurate.
        exclude: Patterns such as ``"encoder.*"`` for the full names of layers, or for the last part of the names, that
            do not compute in float8. None: ``("*head", "output")``, the layers that compute logits.
        min_size: Smallest number of input and of output features of a layer that computes in float8; smaller ones are
            faster in bfloat16. Layers whose features are not multiples of 16 never compute in float8.
        base: Precision of everything else: ``"bf16-mixed"`` or ``"bf16-true"``.
        float8_all_gather: Whether sharded weights in blocks are sent in float8, half as many bytes as in bfloat16. It
            needs ``"tensorwise"``. Where nothing is sharded, it has no effect. While a block is gathered, a step can
            only multiply by these weights, and not read or change them.
        emulate: Whether to multiply in float32 after rounding to float8, on any device. This shows the effect of the
            rounding on a training without the hardware, and is slower than ``base``.

    Raises:
        ValueError: If an argument has none of these values.
        MisconfigurationException: If torchao is not installed. When the training starts: if the device cannot multiply
            in float8, a pattern of ``exclude`` matches no linear layer, or no layer is left.
    """

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
        exclude: Sequence[str] | None = None,
        min_size: int = 1024,
        base: Base = "bf16-mixed",
        float8_all_gather: bool = False,
        emulate: bool = False,
    ) -> None:
        for name, value, choices in (("recipe", recipe, get_args(Recipe)), ("base", base, get_args(Base))):
            if value not in choices:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        if isinstance(exclude, str):
            raise ValueError(f"exclude={exclude!r} must be a list of patterns: use [{exclude!r}].")
        if float8_all_gather and recipe != "tensorwise":
            raise ValueError(
                f"float8_all_gather=True with recipe={recipe!r}: ranks that each have some rows of a weight must agree"
                " on one factor. Use recipe='tensorwise', or leave float8_all_gather out."
            )
        if find_spec("torchao") is None:
            raise MisconfigurationException(
                f"Float8Precision(recipe={recipe!r}) computes by torchao, which is not installed: run"
                " `pip install 'lightning-dist[float8]'`, or use precision='bf16-mixed'."
            )
        self.precision = base
        self.recipe = recipe
        self.exclude = exclude
        self.min_size = min_size
        self.float8_all_gather = float8_all_gather
        self.emulate = emulate
        self.base = HalfPrecision("bf16-true") if base == "bf16-true" else MixedPrecision("bf16-mixed", "cpu")
        self._arguments = {
            "recipe": recipe,
            "exclude": exclude,
            "min_size": min_size,
            "base": base,
            "float8_all_gather": float8_all_gather,
            "emulate": emulate,
        }
        self._layers: list[nn.Linear] = []
        self._num_layers = self._num_linears = 0
        self._num_splits = 1
        self._is_prepared = False

    def prepare(self, device: torch.device, layout: ParallelLayout | None = None) -> None:
        """Take the device and the layout of the run, and check that both allow what was asked for.

        Args:
            device: The device of this rank.
            layout: The sizes of the mesh's axes; None: those of a strategy of Lightning are unknown.

        Raises:
            MisconfigurationException: If the device cannot multiply in float8, or if weights cannot be gathered in
                float8.
        """
        self._is_prepared, self._num_splits = True, 1 if layout is None else layout.tp
        if isinstance(self.base, MixedPrecision):
            self.base.device = device.type
        if self.emulate:
            rank_zero_warn(
                "Float8Precision(emulate=True) rounds to float8 and multiplies in float32, which is slower than"
                f" {self.precision}: use it to try out the effect of the rounding only."
            )
        elif why_not := _missing_hardware(device):
            raise MisconfigurationException(
                f"Float8Precision(recipe={self.recipe!r}) needs matrix units for float8 (NVIDIA GPUs of compute"
                f" capability 8.9 or higher, AMD MI300 or newer), and {why_not}. Use precision={self.precision!r}; or"
                " emulate=True, which is slow, to try out the effect of the rounding."
            )
        if not self.float8_all_gather:
            return
        if layout is None or layout.tp > 1:
            found = "strategies of Lightning" if layout is None else f"tp_size={layout.tp}"
            raise MisconfigurationException(
                f"float8_all_gather=True does not work with {found}: leave it out; weights are then sent in bfloat16,"
                " and matrices are multiplied in float8 all the same."
            )
        if layout.num_shards == 1:
            rank_zero_warn("float8_all_gather=True has no effect: dp_shard_size is 1, so that nothing is sharded.")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let the large linear layers of ``module`` compute in float8, in place.

        Raises:
            MisconfigurationException: If a pattern of ``exclude`` matches no linear layer, or no layer is left.
        """
        if not self._is_prepared:
            self.prepare(cast(LightningModule, module).trainer.strategy.root_device)
        self.base.convert_module(module)
        self._convert_layers(module)
        return module

    def use_again(self, module: nn.Module) -> None:
        """Let the layers of a module compute in float8 that an earlier Trainer with this plugin has made parallel."""
        self._convert_layers(module)

    @override
    def teardown(self) -> None:
        """Let layers compute as before they were converted, so that a Trainer without this plugin does not use float8.

        They stay of the class that computes in float8, because techniques may have kept their forward.
        """
        for layer in self._layers:
            layer.computes_in_float8 = False  # type: ignore[assignment]
        self._layers.clear()

    def _convert_layers(self, module: nn.Module) -> None:
        layers = import_module("lightning_dist.plugins.precision.float8_linear")
        linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        for pattern in self.exclude or ():
            if not any(_matches(name, pattern) for name in linears):
                raise MisconfigurationException(
                    f"Float8Precision(exclude={list(self.exclude or ())!r}): {pattern!r} matches none of the"
                    f" {len(linears)} linear layers of {type(module).__name__}{_some(linears)}. Remove or correct it."
                )
        reasons = {name: self._why_not(name, layer, layers) for name, layer in linears.items()}
        chosen = [layer for name, layer in linears.items() if not reasons[name]]
        if not chosen:
            listed = "".join(f"\n  {name}: {reason}" for name, reason in list(reasons.items())[:_MAX_LISTED])
            raise MisconfigurationException(
                f"Float8Precision: none of the {len(linears)} linear layers of {type(module).__name__} would compute in"
                f" float8. Set min_size or exclude otherwise, or use precision={self.precision!r}.{listed}"
            )
        config = layers.float8_config(self.recipe, self.emulate)
        for layer in chosen:
            layers.compute_in_float8(layer, config)
        self._layers += chosen
        self._num_layers, self._num_linears = len(chosen), len(linears)
        _arguments_of[module] = self._arguments

    def _why_not(self, name: str, layer: nn.Linear, layers: ModuleType) -> str | None:
        """Return why a linear layer does not compute in float8; None: it does."""
        sizes = layer.in_features, layer.out_features
        text = f"{sizes[0]} to {sizes[1]} features"
        if any(_matches(name, pattern) for pattern in (_HEADS if self.exclude is None else self.exclude)):
            return "excluded by its name"
        if not layers.can_compute_in_float8(layer):
            return f"{type(layer).__name__} does not run the forward of nn.Linear"
        if own_parameters(layer).get("weight") is None:
            return "its weight is computed"
        if min(sizes) < self.min_size:
            return f"{text}, below min_size={self.min_size}"
        if any(size % (_MULTIPLE_OF * self._num_splits) for size in sizes):
            split = f" times tp_size={self._num_splits}" if self._num_splits > 1 else ""
            return f"{text}, not multiples of {_MULTIPLE_OF}{split}"
        return None

    def gather_as(self, module: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return how the parameter ``name`` of ``module`` is gathered in float8; None: it is gathered as it is."""
        wrap: Callable[[Tensor, Tensor], Tensor] | None
        wrap = import_module("lightning_dist.plugins.precision.float8_linear").wrap_shard(module, name)
        return wrap

    def describe(self) -> str:
        """Return which layers compute in float8, for the table at the start."""
        options = [self.recipe, *(["emulated, which is slow"] if self.emulate else [])]
        return f"{self._num_layers} of {self._num_linears} linear layers compute in float8 ({', '.join(options)})"

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return the context of ``base`` in which tensors are created."""
        return self.base.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        """Return the context of ``base`` in which modules are created."""
        return self.base.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Return the context of ``base`` for a step."""
        with self.base.forward_context():
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        """Convert a batch as ``base`` does."""
        return self.base.convert_input(data)


_arguments_of: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The arguments of the Float8Precision that has converted a module."""


def use_precision_again(module: nn.Module, plugin: Precision) -> None:
    """Let a module that an earlier Trainer has made parallel compute in float8 if ``plugin`` asks for it.

    Args:
        module: The user's module.
        plugin: Precision plugin of the Trainer that uses the module now.

    Raises:
        MisconfigurationException: If that would need other weights or layers than those of the earlier Trainer.
    """
    before = _arguments_of.get(module)
    now = plugin._arguments if isinstance(plugin, Float8Precision) else None
    if isinstance(plugin, Float8Precision) and now == before:
        plugin.use_again(module)
    elif now is not None or (before is not None and before["float8_all_gather"]):

        def shown(arguments: dict[str, Any] | None) -> str:
            listed = ", ".join(f"{name}={value!r}" for name, value in (arguments or {}).items())
            return f"Float8Precision({listed})" if arguments else "no Float8Precision"

        raise MisconfigurationException(
            f"An earlier Trainer has made this {type(module).__name__} parallel with {shown(before)}, which cannot be"
            f" changed to {shown(now)}. Make a new one, and load the weights from a checkpoint."
        )


_MAX_LISTED = 8


def _some(names: dict[str, nn.Linear]) -> str:
    """Return the first names in brackets; empty if there are none."""
    listed = list(names)[:_MAX_LISTED]
    return f" ({', '.join(listed)}{', ...' if len(names) > len(listed) else ''})" if listed else ""


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` matches the full name of a layer, or the last part of the name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _missing_hardware(device: torch.device) -> str | None:
    """Return why ``device`` cannot multiply matrices in float8; None: it can."""
    if device.type != "cuda":
        return f"this run is on the device {device.type!r}"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.partition(":")[0]
        return None if name.startswith(("gfx94", "gfx95", "gfx12")) else f"{properties.name} is of {name}"
    if (properties.major, properties.minor) < (8, 9):
        return f"{properties.name} has {properties.major}.{properties.minor}"
    return None
