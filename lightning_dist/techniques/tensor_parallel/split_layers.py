"""Exchange hidden states and logits before and after the forwards of split layers, as each style of a plan needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist._compat import assert_on_device, own_parameters, simulated_backend
from lightning_dist.mesh import autograd_collectives
from lightning_dist.model.layers import convolution
from lightning_dist.model.randomness import RankRng
from lightning_dist.techniques.tensor_parallel.async_matmul import (
    TokensToGather,
    gather_and_multiply,
    is_plain_linear,
    multiply_and_scatter,
)
from lightning_dist.techniques.tensor_parallel.sequence import SequenceParallel
from lightning_dist.techniques.tensor_parallel.split_logits import SplitLogits

__all__ = ["SplitLayers"]

BeforeForward = Callable[[Any, Any], Any]
"""Function that takes a layer and its arguments, and returns other arguments, or None to keep them."""

AfterForward = Callable[[Any, Any], Any]
"""Function that takes a layer and its output (no tensor if the forward has raised an error), and returns the output."""


class SplitLayers:
    """Run the communication of split layers before and after their forwards.

    Column-wise layers have the same input on all ranks, and each rank computes its own output features. The outputs of
    row-wise layers are summed over the ranks (Shoeybi et al., 2019). With sequence parallelism, inputs are gathered and
    outputs scattered along the tokens instead (Korthikanti et al., 2022).

    Args:
        group: Process group of the ranks of ``tp``.
        sequence: Object that knows where hidden states are split along the sequence; None: they are not split.
        random: Object that lets ranks draw different random numbers, for dropout between split layers; None: the model
            draws no random numbers.
    """

    def __init__(self, group: dist.ProcessGroup, sequence: SequenceParallel | None, random: RankRng | None) -> None:
        self._group = group
        self._sequence = sequence
        self._random = random
        # _overlapping: The layers whose forward can exchange tokens while it multiplies.
        # _exchanging: The layer whose forward runs next, and is to do so.
        # _exchanged: The row-wise layer whose forward has just done so.
        self._overlapping: set[nn.Module] = set()
        self._exchanging: nn.Module | None = None
        self._exchanged: nn.Module | None = None
        # These are the last input of a split layer, the result of its exchange, and whether gradients were enabled.
        self._entered: tuple[Tensor, Tensor, bool] | None = None

    def around(self, style: str, keeps_split: bool = False) -> tuple[BeforeForward, AfterForward]:
        """Return the functions to call before and after the forward of a layer.

        Args:
            style: Style of the layer.
            keeps_split: Whether the output of a ``colwise_gather_output`` layer, which are logits, stays split along
                the vocabulary until a function needs the whole.
        """
        return {
            "colwise": (self._copy_input, self._enter_own_features),
            "packed_colwise": (self._copy_input, self._enter_own_features),
            "colwise_gather_output": (self._copy_input, self._split_logits if keeps_split else self._gather_output),
            "rowwise": (self._set_bias_aside, self._sum_output),
            "embedding_rowwise": (self._look_up_own_rows, self._sum_rows),
        }[style]

    def overlap(self, layer: nn.Module, style: str) -> bool:
        """Let a split layer exchange tokens while it multiplies, wherever tokens are split when it is called.

        Args:
            layer: The layer, whose forward is replaced if it is a plain linear layer that exchanges tokens.
            style: The style by which the layer was split.

        Returns:
            Whether the forward was replaced.
        """
        if self._sequence is None or not self._sequence.exchanges_in(layer, style) or not is_plain_linear(layer):
            return False
        self._overlapping.add(layer)
        self._sequence.gathers_in_layers = True
        # torch.compile breaks the graph at the hooks of this layer anyway.
        disable = cast(Callable[[Any], Any], torch.compiler.disable)
        layer.forward = disable(partial(self._forward, layer))
        return True

    def _forward(self, layer: Any, given: Tensor) -> Tensor:
        exchanges, self._exchanging = self._exchanging is layer, None
        if not exchanges:
            return nn.functional.linear(given, layer.weight, layer.bias)
        if "_tensor_parallel_bias" in vars(layer):  # The layer is row-wise.
            self._exchanged = layer
            return multiply_and_scatter(given, layer, self._group)
        shard = given.local if isinstance(given, TokensToGather) else given
        output, gathered = gather_and_multiply(shard, layer, self._group)
        if isinstance(given, TokensToGather):
            given.set_gathered(gathered)
        else:
            self._entered = given, gathered, torch.is_grad_enabled()
        return output

    def reset(self) -> None:
        """Reset the state that an error in the last step may have left behind."""
        self._entered = self._exchanging = self._exchanged = None
        if self._random is not None:
            self._random.forget()
        if self._sequence is not None:
            self._sequence.forget()

    def _copy_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the input of a ``colwise`` layer, gathered if tokens are split, with its gradient summed over ranks.

        Layers that are given the same tensor, such as query, key and value, share one exchange.
        """
        given = args[0]
        if isinstance(given, TokensToGather):
            if not given.is_gathered and module in self._overlapping:
                self._exchanging = module
                return args
            return given.gathered(), *args[1:]
        if self._sequence is not None and self._sequence.has_gathered(given):
            return args
        if self._entered is None or self._entered[0] is not given or self._entered[2] != torch.is_grad_enabled():
            if self._sequence is not None and self._sequence.gathers(module):
                if module in self._overlapping:
                    self._exchanging = module
                    return args
                entered = autograd_collectives.gather_to(given, self._group, -2)
            else:
                entered = autograd_collectives.copy_to(given, self._group)
            self._entered = given, entered, torch.is_grad_enabled()
        return self._entered[1], *args[1:]

    def _enter_own_features(self, module: nn.Module, output: Any) -> Any:
        """Let ranks draw different random numbers up to the next ``rowwise`` layer, because their features differ."""
        if self._random is not None and module.training and not self._tokens_are_split(module):
            self._random.enter()
        return output

    def _tokens_are_split(self, module: nn.Module) -> bool:
        return self._sequence is not None and self._sequence.is_active_in(module)

    def _gather_output(self, module: nn.Module, output: Any) -> Any:
        self._entered = None
        if not isinstance(output, Tensor):  # The forward has raised an error.
            return output
        channels = convolution(module)
        return autograd_collectives.gather(output, self._group, -1 if channels is None else channels.feature_dim)

    def _split_logits(self, module: nn.Module, output: Any) -> Any:
        self._entered = None
        return SplitLogits(output, self._group) if isinstance(output, Tensor) else output

    def _set_bias_aside(self, module: nn.Module, args: Any) -> None:
        """Set the bias aside until the outputs are summed, because every rank would add it."""
        bias = own_parameters(module).get("bias")
        module.__dict__["_tensor_parallel_bias"] = bias
        if bias is not None:
            own_parameters(module)["bias"] = (
                None if isinstance(module, nn.Linear) else cast(nn.Parameter, torch.zeros_like(bias))
            )
        if self._tokens_are_split(module) and module in self._overlapping:
            self._exchanging = module

    def _sum_output(self, module: nn.Module, output: Any) -> Any:
        self._entered = None
        bias = module.__dict__.pop("_tensor_parallel_bias", None)
        if bias is not None:
            own_parameters(module)["bias"] = bias
        if not isinstance(output, Tensor):  # The forward has raised an error, or its recomputation has ended early.
            if self._random is not None and not self._tokens_are_split(module):
                self._random.leave()
            return output
        if self._exchanged is module:
            self._exchanged = None
        elif self._tokens_are_split(module):
            output = autograd_collectives.scatter_from(output, self._group, -2)
        else:
            if self._random is not None:
                self._random.leave()
            output = autograd_collectives.sum_from(output, self._group)
        if bias is None:
            return output
        channels = convolution(module)
        return output + (bias if channels is None else bias.view(-1, *(1,) * (-1 - channels.feature_dim)))

    def _look_up_own_rows(self, module: nn.Embedding, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return indices into this rank's rows of the vocabulary; those of other ranks' rows become 0.

        Raises:
            IndexError: If an index is out of range. On other devices than the CPU, this is an assertion on the device.
        """
        (indices,) = args
        num_own = module.weight.size(0)
        num_all = num_own * self._group.size()
        is_index = (indices >= 0) & (indices < num_all)
        if indices.device.type != "cpu":
            assert_on_device(is_index.all())
        elif simulated_backend() is None and not is_index.all():
            raise IndexError(f"Index {int(indices[~is_index][0])} is out of range: the embedding has {num_all} rows.")
        own = indices - self._group.rank() * num_own
        is_others = (own < 0) | (own >= num_own)
        module.__dict__["_is_others"] = is_others
        return (own.masked_fill(is_others, 0),)

    def _sum_rows(self, module: nn.Module, output: Any) -> Any:
        is_others = module.__dict__.pop("_is_others", None)
        if is_others is None or not isinstance(output, Tensor):
            return output
        return autograd_collectives.sum_from(output.masked_fill(is_others.unsqueeze(-1), 0.0), self._group)
