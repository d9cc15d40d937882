"""Define a precision plugin with options that Lightning's names do not have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_dist._compat import own_buffers
from lightning_dist.plugins._compat import ShardedGradScaler, clip_after_closure
from lightning_dist.plugins.precision.master_weights import MasterWeights, updates_in_float32

__all__ = ["MeshPrecision"]

ParamDtype = Literal["bfloat16", "float16", "float32"]
ReduceDtype = Literal["float32", "float64", "bfloat16"]

_NAMES = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}
"""Lightning's name of the precision that each ``param_dtype`` extends."""


class MeshPrecision(MixedPrecision):
    """Choose the dtypes of mixed precision one by one, or train in bfloat16 without losing small updates.

    Without ``master_weights``, parameters are stored and updated in float32. Steps compute in ``param_dtype`` under
    autocast, as with ``precision="bf16-mixed"`` or ``"16-mixed"``. With float16, losses are scaled, and all ranks skip
    a step that overflows on any of them.

    With ``master_weights``, parameters, activations and gradients are in bfloat16, as with ``precision="bf16-true"``,
    and optimizers compute in float32. For each parameter, a rank keeps these bytes with AdamW, besides its shards'
    gradients of 2 bytes:

    ================ ========== ============== =======
    master_weights   parameter  kept besides   moments
    ================ ========== ============== =======
    (``bf16-true``)  2          0              4
    ``stochastic``   2          0              8
    ``kahan``        2          2              8
    ``fp32``         2          4              8
    (``bf16-mixed``) 4          0              8
    ================ ========== ============== =======

    During an optimizer step, 8 bytes more are used for each of the rank's parameters.

    Args:
        master_weights: ``"fp32"``: exact updates of copies in float32. ``"kahan"``: what rounding removes is kept in
            bfloat16, and added before the next update, which gives 16 significant bits. ``"stochastic"``: updated
            parameters are rounded up or down at random, with the right mean; the same on all replicas. None: parameters
            are stored in float32.
        seed: Seed of the random rounding.
        param_dtype: Dtype in which parameters are gathered and steps compute: ``"bfloat16"``, ``"float16"`` or
            ``"float32"``.
        reduce_dtype: Dtype in which gradients are reduced: ``"float32"``, ``"float64"`` or ``"bfloat16"``. None:
            that of the strategy's argument of the same name, else float32.
        output_dtype: Dtype to which the floating-point tensors are cast that validation, test and predict steps return.
            The loss of a training step is not cast. None: outputs keep their dtypes.
        buffer_dtype: Dtype in which floating-point buffers are kept. None: that of the parameters, as they are stored.
        keep_fp32: Patterns of modules that run in float32 with all modules inside them: without autocast, on inputs
            that are cast to float32, and with parameters that are gathered in float32. A pattern in the style of a
            shell matches a module by its class's name (``"LayerNorm"``), by its full name (``"model.blocks.*.router"``)
            or by the end of its full name from a dot on (``"lm_head"``).

    Raises:
        ValueError: If an argument has none of its values, or if two of them contradict each other.
    """

    def __init__(
        self,
        master_weights: MasterWeights | None = None,
        seed: int = 0,
        *,
        param_dtype: ParamDtype = "bfloat16",
        reduce_dtype: ReduceDtype | None = None,
        output_dtype: ParamDtype | None = None,
        buffer_dtype: ParamDtype | None = None,
        keep_fp32: Sequence[str] = (),
    ) -> None:
        for name, value, known in (
            ("master_weights", master_weights, get_args(MasterWeights)),
            ("param_dtype", param_dtype, get_args(ParamDtype)),
            ("reduce_dtype", reduce_dtype, get_args(ReduceDtype)),
            ("output_dtype", output_dtype, get_args(ParamDtype)),
            ("buffer_dtype", buffer_dtype, get_args(ParamDtype)),
        ):
            if value not in known and (value is not None or name == "param_dtype"):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}.")
        if isinstance(keep_fp32, str):
            raise ValueError(f"keep_fp32={keep_fp32!r} must be a list of patterns: write [{keep_fp32!r}].")
        if master_weights is not None and param_dtype != "bfloat16":
            raise ValueError(
                f"param_dtype={param_dtype!r} with master_weights={master_weights!r}, which stores parameters in"
                " bfloat16 and computes in it: leave one of the two out."
            )
        if keep_fp32 and (master_weights is not None or param_dtype == "float32"):
            why = (
                f"master_weights={master_weights!r}, which stores all parameters in bfloat16"
                if master_weights is not None
                else "param_dtype='float32', with which all modules compute in float32"
            )
            raise ValueError(f"keep_fp32={list(keep_fp32)!r} with {why}: leave one of the two out.")
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self._stored: Precision = Precision() if master_weights is None else HalfPrecision("bf16-true")
        name = _NAMES[param_dtype] if master_weights is None else "bf16-true"
        self.precision = name  # type: ignore[assignment]  # Lightning's class knows the names of autocast only.
        self.master_weights = master_weights
        self.seed = seed
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.output_dtype = output_dtype
        self.buffer_dtype = buffer_dtype
        self.keep_fp32 = tuple(keep_fp32)
        self._is_in_mesh = False
        self._num_steps = 0

    def use_device(self, device_type: str) -> None:
        """Let steps run under autocast of ``device_type``, and create the scaler of losses if there is to be one.

        The strategies of this package call it as soon as the device is known.
        """
        self._is_in_mesh = True
        self._set_device(device_type)

    def _set_device(self, device_type: str) -> None:
        self.device = device_type
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = ShardedGradScaler(device_type) if self._is_in_mesh else torch.amp.GradScaler(device_type)

    def table_text(self) -> str:
        """Return the options that differ from their defaults, except the dtypes that the table at the start has."""
        texts = {
            "updated in float32 ({})": self.master_weights,
            "buffers in {}": self.buffer_dtype,
            "outputs in {}": self.output_dtype,
        }
        return "".join(f", {text.format(value)}" for text, value in texts.items() if value is not None)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Check buffers that the model has created since it was converted, and follow it to its device.

        Raises:
            MisconfigurationException: If a buffer is not in ``buffer_dtype``.
        """
        if not self._is_in_mesh:
            self._set_device(next((param.device.type for param in model.parameters()), "cpu"))
        wanted = None if self.buffer_dtype is None else getattr(torch, self.buffer_dtype)
        for name, buffer in model.named_buffers():
            if wanted is not None and buffer.is_floating_point() and buffer.dtype != wanted:
                raise MisconfigurationException(
                    f"buffer_dtype={self.buffer_dtype!r}: the buffer {name!r} was created in {buffer.dtype} after the"
                    " module had been converted, by reset_parameters or a hook. Create it in that dtype there, or leave"
                    " buffer_dtype out."
                )
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers to the dtypes in which they are stored.

        Raises:
            MisconfigurationException: If the run's strategy is Lightning's, and an option needs one of this package.
            ValueError: If the device does not compute in the dtype.
        """
        options = {"reduce_dtype": self.reduce_dtype, "output_dtype": self.output_dtype, "keep_fp32": self.keep_fp32}
        asked = [f"{name}={value!r}" for name, value in options.items() if value]
        if asked and not self._is_in_mesh:
            raise MisconfigurationException(
                f"MeshPrecision({', '.join(asked)}) needs a strategy of lightning_dist, such as 'full_shard' or"
                " 'data_parallel': Lightning's own strategies would ignore it."
            )
        is_emulated = self.device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if self.param_dtype == "bfloat16" and is_emulated:
            raise ValueError(
                f"param_dtype={self.param_dtype!r}: {torch.cuda.get_device_name()} does not compute in bfloat16. Use"
                " param_dtype='float16'."
            )
        buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        module = self._stored.convert_module(module)
        if self.buffer_dtype is not None:
            for owner, name, buffer in buffers:
                own_buffers(owner)[name] = buffer.to(getattr(torch, self.buffer_dtype))
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        """Convert a batch to bfloat16 if parameters are stored in it."""
        return self._stored.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        """Cast the floating-point tensors that a step without a backward returns to ``output_dtype``."""
        if self.output_dtype is None:
            return data
        dtype = getattr(torch, self.output_dtype)

        def converted(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, converted)

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return the context in which parameters are created in the dtype in which they are stored."""
        return self._stored.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        """Return the same context as :meth:`tensor_init_context`."""
        return self._stored.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Run a step in this context: under autocast, unless the parameters are stored in the dtype that it runs in."""
        is_mixed = self.precision in ("bf16-mixed", "16-mixed")
        with super().forward_context() if is_mixed else self._stored.forward_context():
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run ``closure`` and step ``optimizer``; with master weights, let it update the parameters in float32."""
        if self.master_weights is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"MeshPrecision(master_weights={self.master_weights!r}) with LBFGS, which computes losses within its"
                " step: use another optimizer."
            )
        result = closure()
        clip_after_closure(self, model, optimizer)
        self._num_steps += 1
        with updates_in_float32(optimizer, self.master_weights, self.seed * 1_000_003 + self._num_steps):
            optimizer.step(**kwargs)
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, on which the random rounding depends, or the state of the scaler."""
        return super().state_dict() if self.master_weights is None else {"num_steps": self._num_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._num_steps = state_dict.get("num_steps", 0)
        if "scale" in state_dict:  # It is absent if the run that saved it had other dtypes.
            super().load_state_dict(state_dict)
