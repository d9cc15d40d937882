"""Manage one parameter that FSDP2 shards: its shard, its gathered copy, and which of them modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from lightning_dist._compat import local_of, put_parameter, replace_local
from lightning_dist.parameters.on_use import prepare_write
from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.sharding._compat.wrapped import WrappedParam
from lightning_dist.techniques.sharding.data_writes import DataWrites

__all__ = ["MakeStandIn", "ShardedParam", "let_gathers_wait"]

MakeStandIn = Callable[[torch.Tensor, torch.dtype | None, Callable[[], None]], torch.Tensor]
"""A function that creates the stand-in of a sharded parameter, given the parameter, the dtype that it is computed in
(None: its own), and a function that must be called when a backward computes its gradient."""


class ShardedParam:
    """Manage one parameter of a unit that FSDP2 shards (its ``FSDPParam``).

    Args:
        param: FSDP2's object for the parameter.
        group: FSDP2's group that the parameter is in.
        on_stand_in: Function that is called with the parameter's name when a backward computes a gradient of its
            stand-in, which is averaged over the ranks at once.
    """

    def __init__(self, param: FSDPParam, group: FSDPParamGroup, on_stand_in: Callable[[str], None]) -> None:
        self._param = param
        self._group = group
        self._on_stand_in = on_stand_in
        self._stand_in: nn.Parameter | None = None
        self._stands_for: nn.Parameter | None = None
        """The shard that the stand-in stands for; load_state_dict(assign=True) makes a new shard."""
        self._version = 0
        self._shard_version: tuple[int, int] | None = None
        """The version of the shard when it was gathered; if it differs now, the shard is newer than the copy."""
        self._compared: _Compared | None = None
        self._data_writes: DataWrites | None = None
        """The tensors that :meth:`write_back` compares, which are the same ones in nearly all steps; None: unknown."""
        self._requires_grad: bool | None = None
        """The last value of ``requires_grad`` that the shard and the gathered copy had in common."""
        self.is_used = False
        """Whether a backward gave the parameter a gradient on this rank."""
        # After load_state_dict, FSDP2 assumes that the parameters in the modules are the shards, and does not check
        # this. Replaced by: a check in FSDP2.
        param.reset_sharded_param = self._take_shard  # type: ignore[method-assign]

    @property
    def shard(self) -> nn.Parameter:
        """Return the sharded parameter, which the optimizer sees."""
        return self._param.sharded_param

    @property
    def gathered(self) -> nn.Parameter | None:
        """Return the gathered parameter, whose memory may be freed; None if it has never been gathered."""
        return getattr(self._param, "_unsharded_param", None)

    @property
    def whole(self) -> nn.Parameter:
        """Return the gathered parameter, which must exist."""
        return self._param._unsharded_param

    @property
    def wrapped(self) -> WrappedParam | None:
        """Return FSDP2's object if the gathered copy is a tensor of another class now, which nothing can change."""
        return self._param if isinstance(self._param, WrappedParam) and self._param.is_wrapped else None

    @property
    def num_gathered_bytes(self) -> int:
        """Return the size of the gathered copy, which must exist."""
        if self.wrapped is not None:
            return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self._param.all_gather_outputs)
        return local_of(self.whole).numel() * self.whole.dtype.itemsize

    @property
    def gathered_memory(self) -> torch.Tensor:
        """Return the gathered copy, which must exist, as a plain tensor; if it is of another class, as its bytes."""
        if self.wrapped is not None:
            return self._param.all_gather_outputs[0].view(torch.uint8)
        return local_of(self.whole.detach())

    @property
    def name(self) -> str:
        """Return the parameter's full name in the user's module."""
        return (self._param._param_fqn or "").removeprefix("module.")

    @property
    def place(self) -> tuple[nn.Module, str]:
        """Return the module that holds the parameter, and its name there."""
        return self._param._module_info.module, self._param._module_info.param_name

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank contributes when the parameter is gathered, in the dtype of the gather."""
        sent = self._param._sharded_param_data
        return sent.numel() * (self._param.param_dtype or sent.dtype).itemsize

    # What modules hold

    def put_into(self, modules: list[tuple[nn.Module, str]]) -> None:
        """Register further modules that hold the parameter; they get the shard now.

        Args:
            modules: The modules, and the parameter's names in them.
        """
        info = self._param._module_info
        for module, name in modules:
            info.shared_modules.append(module)
            info.shared_param_names.append(name)
        self._put(self.shard)

    def _put(self, tensor: torch.Tensor) -> None:
        for module, name, _ in self.held():
            put_parameter(module, name, tensor)

    def begin_stand_in(self, make: MakeStandIn) -> None:
        """Create a stand-in for the shard, if there is none, which modules may hold while the parameter is sharded."""
        if self._stand_in is None or self._stands_for is not self.shard:
            self._stands_for = self.shard
            self._stand_in = cast(nn.Parameter, make(self.shard, self._param.param_dtype, self._set_used))

    def _set_used(self) -> None:
        self.is_used = True
        self._on_stand_in(self.name)

    def put_stand_in(self) -> None:
        """Put the stand-in into the modules."""
        assert self._stand_in is not None
        self._put(self._stand_in)

    def put_shard(self) -> None:
        """Put the shard into the modules."""
        self._put(self.shard)

    def held(self) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
        """Yield each module that holds the parameter, the name in it, and the tensor that the module holds now."""
        info = self._param._module_info
        for module, name in (
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ):
            yield module, name, module._parameters.get(name)

    def is_own(self, held: torch.Tensor | None) -> bool:
        """Return whether ``held`` is a form of the parameter, rather than a tensor of other code.

        ``torch.func.functional_call`` puts such tensors into modules. None, for an empty place, counts as a form.
        """
        return (
            held is None
            or held is self.shard
            or held is self.gathered
            or held is self._stand_in
            or held is getattr(self._param, "_sharded_post_forward_param", None)
        )

    def _take_shard(self) -> None:
        """Take the tensor that a module holds as the new shard, unless it is the gathered parameter or a stand-in."""
        _, _, held = next(self.held())
        is_stand_in = self._stand_in is not None and held is self._stand_in
        if self._group.is_sharded and not is_stand_in:
            self._compared = None  # It would keep the old shard.
            FSDPParam.reset_sharded_param(self._param)  # type: ignore[no-untyped-call]

    def keep_what_numpy_shares(self) -> None:
        """Never free the gathered copy if a NumPy array shares its memory, because torch cannot resize such memory."""
        tensors = (*self._param.all_gather_outputs, *self._param._unsharded_inner_tensors)
        if not all(tensor.untyped_storage().resizable() for tensor in tensors):
            self._param.free_unsharded_param = _do_nothing  # type: ignore[method-assign]

    # Values

    def move_shard(self, memory: ShardMemory) -> None:
        """Move the shard, and the padding that FSDP2 sends with it, into ``memory``."""
        sent, local = self._param._sharded_param_data, local_of(self.shard)
        placed = memory.place(sent)
        if placed is not sent:
            begin = local.storage_offset() - sent.storage_offset()
            self._param._sharded_param_data = placed
            replace_local(cast(DTensor, self.shard), torch.as_strided(placed, local.size(), local.stride(), begin))

    def gather_in(self, dtype: torch.dtype | None) -> None:
        """Gather the parameter in a dtype of its own, and reduce its gradient in the dtype of the group's policy.

        Replaced by: an FSDP2 that takes a mixed-precision policy for each parameter.

        Args:
            dtype: The dtype; None: that of the policy.
        """

        def init_dtype_attrs(policy: MixedPrecisionPolicy) -> None:
            own = policy if dtype is None else replace(policy, param_dtype=dtype)
            FSDPParam.init_dtype_attrs(self._param, own)
            # FSDP2 leaves it None if it equals the dtype of the parameter, and then refuses the group.
            self._param.reduce_dtype = policy.reduce_dtype or policy.param_dtype

        self._param.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign, assignment]

    def take_converted(self) -> None:
        """Let FSDP2 gather the memory that the shard has now, if the module was converted or moved since.

        FSDP2 does so itself for parameters of modules that it was given, when these are converted.
        """
        if not self._has_sent_memory():
            self._compared = None  # It would keep the old memory.
            FSDPParam.reset_sharded_param(self._param)  # type: ignore[no-untyped-call]

    def _has_sent_memory(self) -> bool:
        """Return whether the memory that FSDP2 gathers is that of the shard."""
        shard, sent = local_of(self.shard), self._param._sharded_param_data
        return shard.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()

    def was_gathered(self) -> None:
        """Record the shard's version, and check that FSDP2 has gathered the memory that the shard has now.

        Raises:
            RuntimeError: If the shard has got new memory in a way that FSDP2 does not notice.
        """
        self._shard_version = self._version_of_shard()
        if not self._has_sent_memory():
            raise RuntimeError(
                f"The parameter {self.name!r} was converted or moved after it was sharded, by a call such as"
                " self.layer.float() in a hook of the run, and would not be trained any more. Convert the layer in"
                " __init__ or configure_model."
            )

    def _version_of_shard(self) -> tuple[int, int]:
        """Return a value that changes when the shard is changed in place, as a DTensor or as a plain tensor."""
        return self.shard._version, local_of(self.shard)._version

    def write_back(self, is_changed: bool) -> bool:
        """Write a step's changes of the gathered copy into the shard.

        Values are compared, because a change through ``param.data`` does not increase the version counter of a tensor.
        Shards that are offloaded from an accelerator are not compared, since the host would have to wait for each copy:
        the audit of the first step reports such changes.

        Args:
            is_changed: Whether the copy is known to have changed.

        Returns:
            Whether the step has changed the copy other than through ``param.data``.
        """
        if self.wrapped is not None or (not is_changed and self._is_unchanged()):
            return False
        whole = local_of(self.whole)
        outputs = self._param.all_gather_outputs
        memory = outputs[0] if len(outputs) == 1 else whole
        version = whole._version
        is_replaced = whole.data_ptr() != memory.data_ptr()
        is_changed |= is_replaced or version != self._version
        self._version = version
        if is_replaced:
            gathered = torch.as_strided(memory, whole.size(), whole.stride())
            gathered.data.copy_(whole)  # The graph was computed with these values: the version must not change.
            whole.data = gathered
        is_offloaded = self._param.offload_to_cpu and whole.device.type != "cpu"
        shard, own = self._own_part()
        is_current = not is_offloaded and self._shard_version in (None, self._version_of_shard())
        if is_current and not is_changed and whole.device.type != "cpu":
            self._data_writes = self._data_writes or DataWrites(self.name)
            is_current = self._data_writes.is_written_back(shard, own, self.place[0].training)
        if is_changed or is_current:
            _store(shard, own)
            let_gathers_wait(getattr(self._group, "comm_ctx", None), self._group.device)
            self._shard_version = self._version_of_shard()
            shard, own = self._own_part()
        # On other devices, the host would have to wait for a comparison.
        can_compare = shard.device.type == own.device.type == "cpu" and shard.dtype is own.dtype
        self._compared = (
            _Compared(self.whole, whole, memory, self.shard, shard, *_in_words(shard, own)) if can_compare else None
        )
        return is_changed

    def _is_unchanged(self) -> bool:
        """Return whether neither the gathered copy nor the shard has changed since the gather, and nothing is to do.

        This runs for every parameter each time it is freed, and is therefore kept short.
        """
        compared = self._compared
        if compared is None:
            return False
        gathered, whole, memory, shard, local, words, own_words = compared
        return (
            gathered is self._param._unsharded_param
            and shard is self._param.sharded_param
            and local is local_of(shard)
            and local.data_ptr() == words.data_ptr()
            and whole._version == self._version
            and whole.data_ptr() == memory.data_ptr()
            and (shard._version, local._version) == self._shard_version
            and torch.equal(words, own_words)
        )

    def is_written(self) -> bool:
        """Return whether the shard has the values of the gathered copy."""
        if self.wrapped is not None:
            return True
        shard, own = self._own_part()
        return torch.equal(shard.to(own.device, own.dtype), own)

    def _own_part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard, and the part of the gathered copy that has the same elements."""
        shard, whole = local_of(self.shard), local_of(self.whole)
        info, dim = self._param.mesh_info, self._param.fsdp_placement.dim
        rank = info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0
        start = min(rank * self._param.padded_sharded_param_size[dim], whole.size(dim))
        return shard, whole.narrow(dim, start, shard.size(dim))

    # Gradients

    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the shard to the gathered copy, or back if a step has set it on the copy."""
        self.take_requires_grad()
        if self.whole.requires_grad != self.shard.requires_grad:
            self.whole.requires_grad_(self.shard.requires_grad)
        self._requires_grad = self.shard.requires_grad

    def take_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the gathered copy to the shard if a step has set it."""
        before = self._requires_grad
        if before is None:
            return
        gathered = self.whole.requires_grad
        if gathered != before and self.shard.requires_grad == before:
            self.shard.requires_grad_(gathered)
        self._requires_grad = None

    @property
    def has_unreduced_gradient(self) -> bool:
        """Return whether a backward left a gradient on the gathered copy, which may have been freed since."""
        gathered = self.gathered
        return self._param.unsharded_accumulated_grad is not None or (
            gathered is not None and gathered.grad is not None
        )

    def unreduced(self) -> torch.Tensor | None:
        """Return the gradient of this rank that is reduced next, with that of earlier backwards; None: there is none.

        It is whole, or this rank's part of a parameter that is split over ``tp``.
        """
        param, gathered = self._param, self.gathered
        if gathered is None:
            return None
        param.accumulate_unsharded_grad_if_needed()
        if param.unsharded_accumulated_grad is not None:
            return param.unsharded_accumulated_grad_data
        return None if gathered.grad is None else param.unsharded_grad_data

    @property
    def has_accumulated_gradient(self) -> bool:
        """Return whether FSDP2 holds a gradient of earlier backwards, in the dtype of the reduction."""
        return self._param.unsharded_accumulated_grad is not None

    def to_accumulated_gradient(self, with_zeros: bool) -> None:
        """Convert the gradient on the gathered copy to the dtype of the reduction, as that of earlier backwards is.

        Args:
            with_zeros: Whether a trainable parameter without a gradient gets zeros.
        """
        param, gathered = self._param, self.gathered
        if param.unsharded_accumulated_grad is not None or gathered is None:
            return
        param.to_accumulated_grad_if_needed()
        is_without = param.unsharded_accumulated_grad is None and gathered.grad is None
        if is_without and with_zeros and gathered.requires_grad and param.reduce_dtype is not None:
            param.unsharded_accumulated_grad = torch.zeros(
                gathered.shape, dtype=param.reduce_dtype, device=gathered.device
            )

    def is_reduced(self, with_zeros: bool) -> bool:
        """Return whether FSDP2 reduces a gradient of this parameter when it next reduces its group.

        Args:
            with_zeros: Whether zeros are reduced for a trainable parameter without a gradient.
        """
        gathered = self.gathered
        return gathered is not None and (self.has_unreduced_gradient or (with_zeros and gathered.requires_grad))

    def gradient_in(self, flat: torch.Tensor, begin: int) -> tuple[torch.Tensor, int]:
        """Return this parameter's shard of the gradient in FSDP2's flat tensor, and the size with padding.

        Args:
            flat: The shards of the gradients of all reduced parameters of a group.
            begin: Position of this parameter's shard in ``flat``.
        """
        param = self._param
        view = torch.as_strided(flat, param.sharded_size, param.contiguous_sharded_stride, begin)
        return view, param.padded_sharded_param_size.numel()

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Return the dtype in which the gradient is reduced; None: that in which it is computed."""
        return self._param.reduce_dtype

    def takes_gradient_as_it_is(self, dtype: torch.dtype) -> bool:
        """Return whether FSDP2 makes a view of its flat tensor the gradient, and neither adds it nor calls a hook.

        Args:
            dtype: The dtype of the flat tensor.
        """
        is_alone = self.shard.grad is None and not getattr(self.shard, "_post_accumulate_grad_hooks", None)
        return is_alone and self._param.orig_dtype == dtype

    def drop_unreduced(self) -> None:
        """Drop the gradient that a backward left on the gathered copy."""
        self._param.unsharded_accumulated_grad = None
        if self.gathered is not None:
            self.gathered.grad = None


class _Compared(NamedTuple):
    """Hold the tensors of a sharded parameter that are compared when it is freed."""

    gathered: nn.Parameter
    """The gathered parameter."""
    whole: torch.Tensor
    """The gathered parameter as a plain tensor."""
    memory: torch.Tensor
    """The tensor that FSDP2 gathers into."""
    shard: nn.Parameter
    """The sharded parameter."""
    local: torch.Tensor
    """The sharded parameter as a plain tensor."""
    words: torch.Tensor
    """The elements of ``local``, if possible as words of 8 bytes, which are compared in half the time of float32."""
    own_words: torch.Tensor
    """The same elements of ``whole``, of the same dtype as :attr:`words`."""


def _in_words(shard: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of two tensors of one dtype and shape as words of 8 bytes, or the tensors if they have none."""
    for tensor in (shard, own):
        if not tensor.is_contiguous() or tensor.nbytes % 8 or tensor.storage_offset() * tensor.itemsize % 8:
            return shard, own
    return shard.detach().view(-1).view(torch.int64), own.detach().view(-1).view(torch.int64)


def _store(shard: torch.Tensor, own: torch.Tensor) -> None:
    """Copy those elements of ``own`` into ``shard`` that differ; the others keep their precision."""
    if shard.data_ptr() == own.data_ptr():
        return
    own = own.to(shard.device)
    # On other devices, the host would have to wait for the result of a comparison.
    if shard.device.type == "cpu" and torch.equal(shard.to(own.dtype), own):
        return
    prepare_write()
    if shard.dtype == own.dtype:
        shard.copy_(own)
    else:
        shard.copy_(torch.where(shard.to(own.dtype) == own, shard, own))


def let_gathers_wait(streams: Any, device: torch.device) -> None:
    """Let the stream that reads shards for later gathers wait for writes of the current stream to a shard.

    FSDP2 lets it wait only when a step begins, since it expects no writes in a step. Replaced by: an FSDP2 that does.

    Args:
        streams: FSDP2's object with the streams of all groups of a root; None: it does not exist yet.
        device: Device of the shards.
    """
    if device.type != "cpu" and hasattr(streams, "all_gather_copy_in_stream"):
        streams.all_gather_copy_in_stream.wait_stream(torch.get_device_module(device.type).current_stream())


def _do_nothing() -> None:
    pass
