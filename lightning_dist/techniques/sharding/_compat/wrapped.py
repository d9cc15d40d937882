"""Let FSDP2 gather a parameter as a tensor of another class, which needs fewer bytes, such as one in float8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["MaxOverRanks", "WrapShard", "WrappedParam", "gather_wrapped"]

WrapShard = Callable[[Tensor, Tensor], Tensor]
"""A function of a shard and of the largest absolute value of the whole parameter, a scalar in float32. It returns a
tensor with FSDP2's methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``."""

MaxOverRanks = Callable[[Tensor], Tensor]
"""A function that returns the elementwise maximum of a tensor over the ranks that gather together."""


class WrappedParam(FSDPParam):
    """Wrap the shard while FSDP2 gathers it, so that the shard itself stays an ordinary tensor everywhere else.

    FSDP2 expects the wrapped tensor to be the shard of the parameter. Replaced by: an argument of ``fully_shard`` that
    says how a parameter is gathered.
    """

    is_wrapped: bool
    """Whether the shard is wrapped now."""
    _wrap: WrapShard
    _largest: Tensor
    _first_of: _LargestValues | None
    """The object that finds the largest values of all parameters of the group, if this is the first one."""
    _other_form: tuple[Any, ...]
    """What FSDP2 keeps of the gathered copy that is not in use: the wrapped or the ordinary one."""

    @property
    def _sharded_local_tensor(self) -> Tensor:
        shard = super()._sharded_local_tensor
        return self._wrap(shard, self._largest) if self.is_wrapped else shard

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """Return what this rank sends. This is a collective for the first wrapped parameter of a group."""
        if self.is_wrapped and self._first_of is not None:
            self._first_of.find()
        return super().all_gather_inputs

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        """Return a gradient of zeros; the gathered copy is of a class that may have no ``zeros_like``."""
        whole = self.unsharded_param
        return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)

    def set_wrapped(self, is_wrapped: bool) -> None:
        """Choose whether the parameter is gathered as the wrapped tensor; it must be sharded now.

        The gathered copy of the other form is kept with its gradient, and its memory is free.
        """
        if is_wrapped == self.is_wrapped:
            return
        self.is_wrapped = is_wrapped
        now = (getattr(self, "_unsharded_param", None), self.all_gather_outputs, self._unsharded_inner_tensors)
        whole, self.all_gather_outputs, self._unsharded_inner_tensors = self._other_form
        self._other_form = now
        if whole is not None:
            self._unsharded_param = whole
        elif hasattr(self, "_unsharded_param"):
            del self._unsharded_param


def gather_wrapped(
    params: Sequence[FSDPParam], wrap_of: Callable[[nn.Module, str], WrapShard | None], over_ranks: MaxOverRanks
) -> None:
    """Let FSDP2 gather those of ``params`` wrapped for which this is possible; the parameters must be sharded now.

    It is possible for a parameter that one module holds, and that is cut into equal parts along its first dimension.

    Args:
        params: FSDP2's objects for the parameters of a group.
        wrap_of: Function of a module and a parameter's name in it, which returns how the shard is wrapped; None: it is
            not.
        over_ranks: Function that finds the maximum over the ranks of the group.
    """
    chosen: list[WrappedParam] = []
    for param in params:
        info = param._module_info
        is_even = param.sharded_size == param.padded_sharded_param_size and param.fsdp_placement.dim == 0
        has_equal_parts = param._orig_size[0] == param.sharded_size[0] * param.shard_mesh.size() if is_even else False
        wrap = wrap_of(info.module, info.param_name)
        if wrap is None or info.shared_modules or not has_equal_parts:
            continue
        param.__class__ = WrappedParam
        wrapped = cast(WrappedParam, param)
        wrapped.is_wrapped, wrapped._wrap, wrapped._first_of = True, wrap, None
        wrapped._largest = torch.zeros((), device=param.device)
        wrapped._other_form = (None, [], [])
        chosen.append(wrapped)
    if chosen:
        chosen[0]._first_of = _LargestValues(chosen, over_ranks)


class _LargestValues:
    """Find the largest absolute values of the parameters of a group, in one collective.

    Args:
        params: The parameters of the group that are gathered as tensors of another class.
        over_ranks: Function that finds the maximum over the ranks of the group.
    """

    def __init__(self, params: Sequence[WrappedParam], over_ranks: MaxOverRanks) -> None:
        self._params = params
        self._over_ranks = over_ranks

    @torch.no_grad()
    def find(self) -> None:
        """Give each parameter its largest value. This is a collective."""
        shards = [param._sharded_param_data for param in self._params]
        own = torch.stack([torch.linalg.vector_norm(shard, torch.inf) for shard in shards]).to(torch.float32)
        for param, value in zip(self._params, self._over_ranks(own), strict=True):
            param._largest = value
