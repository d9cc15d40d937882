"""Compare the tensors in safetensors files with a module's, and read this rank's part of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.model.tensor_state import is_remote, is_uninitialized
from lightning_dist.parallel_module import parallelized
from lightning_dist.parameters.shard_slices import ShardSlice, ShardSlices, local_part
from lightning_dist.run.pretrained.conversion import converted
from lightning_dist.run.pretrained.files import Piece, StoredTensor, open_file, some, stored_tensors

__all__ = ["load_safetensors"]


def load_safetensors(module: nn.Module, folder: str | Path, prefix: str = "") -> None:
    """Fill parameters and persistent buffers of ``module`` from a folder that ``save_pretrained`` wrote.

    This is a collective over all processes. The values are copied in place into this rank's shards and cast to the
    parameter's dtype. A tied parameter is read once, under whichever of its names the files have. Where a model of
    transformers stacks tensors that its files have one by one, such as weights of its experts, each rank reads those of
    which it has a part. Names and shapes are checked on all ranks before anything changes.

    Args:
        module: Module whose parameters are DTensors of any placement, or plain tensors, on any device but meta. All
            processes have the same module. If a strategy has made it parallel, the tensors that only other ranks have,
            such as those of another pipeline stage, are left to them.
        folder: Local folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that it
            lists.
        prefix: Prefix that the names in ``module`` have and those in the files lack: ``"model."`` for a LightningModule
            that holds the model as ``self.model``. Tensors without this prefix are left unchanged.

    Raises:
        ValueError: If there are no such files, a parameter or buffer is in none of them, a shape differs, or the files
            have tensors that ``module`` lacks.
        OtherRankError: On the ranks that could read the files, if another rank could not.
    """
    with raise_on_all_ranks(f"checking the pretrained weights in {folder}"):
        targets = _targets(module, prefix)
        stored = converted(stored_tensors(Path(folder).expanduser()), targets.shapes(), _at(module, prefix))
        to_read = _match(targets, stored, prefix, folder)
        if parallelized(module) is None:
            _refuse_uninitialized(to_read, prefix)
    # Sanity checks run in inference mode, in which views of parameters could be used for inference only.
    with (
        raise_on_all_ranks(f"reading the pretrained weights in {folder}"),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        _read([(stored[name], tensor) for name, tensor in to_read if not is_remote(tensor)])


def _at(module: nn.Module, prefix: str) -> nn.Module | None:
    """Return the module whose parameters' names begin with ``prefix``, or None if there is none."""
    try:
        return module.get_submodule(prefix.removesuffix("."))
    except AttributeError:
        return None


@dataclass(frozen=True)
class _Targets:
    """Hold the tensors to fill, with the names that they have in the files.

    Args:
        tensors: Parameters and persistent buffers by name; a tied parameter has several names.
        optional: Names of non-persistent buffers, which files of older versions of a model may have.
    """

    tensors: Mapping[str, Tensor]
    optional: Collection[str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor to fill."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def _targets(module: nn.Module, prefix: str) -> _Targets:
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    persistent = buffers.keys() & module.state_dict().keys()
    tensors |= {name: buffers[name] for name in buffers if name in persistent}
    return _Targets(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        {name.removeprefix(prefix) for name in buffers if name not in persistent and name.startswith(prefix)},
    )


def _match(
    targets: _Targets, stored: Mapping[str, StoredTensor], prefix: str, folder: str | Path
) -> list[tuple[str, Tensor]]:
    """Match targets with stored tensors, and return each target with its name in the files; a tied tensor appears once.

    Raises:
        ValueError: If names are missing or unknown, or a shape differs.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in targets.tensors.items():
        names[id(tensor)].append(name)
    missing = [tied[0] for tied in names.values() if not any(name in stored for name in tied)]
    unknown = [name for name in stored if name not in targets.tensors and name not in targets.optional]
    if not targets.tensors:
        raise ValueError(f"prefix={prefix!r}: the module has no parameter whose name begins with this prefix.")
    if missing or unknown:
        lacking = f"The files lack {some(missing)}. " if missing else ""
        surplus = f"The module lacks {some(unknown)}. " if unknown else ""
        raise ValueError(
            f"The weights in {folder} are not those of this module. {lacking}{surplus}Build the model from the"
            f" config.json in this folder, with the class that saved it, and set prefix (now {prefix!r}) to what"
            " precedes the files' names in the module's names."
        )
    for name, tensor in targets.tensors.items():
        if name in stored and stored[name].shape != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {list(stored[name].shape)} in {stored[name].file}, but {list(tensor.shape)} in the"
                " module: build the model from the config.json in this folder."
            )
    found = [next(name for name in tied if name in stored) for tied in names.values()]
    return [(name, targets.tensors[name]) for name in found]


def _refuse_uninitialized(to_read: Collection[tuple[str, Tensor]], prefix: str) -> None:
    for name, tensor in to_read:
        if is_uninitialized(tensor):
            raise ValueError(
                f"{prefix}{name} is on the meta device: load the weights after the strategy has materialized it."
            )


def _read(to_read: Collection[tuple[StoredTensor, Tensor]]) -> None:
    by_file = defaultdict(list)
    for stored, tensor in to_read:
        for piece in stored.pieces:
            by_file[piece.file].append((piece, tensor))
    layouts = ShardSlices()
    for file, wanted in by_file.items():
        with open_file(file) as tensors:
            for piece, tensor in wanted:
                part = local_part(tensor)
                for box in layouts.of(tensor) if part.numel() else ():
                    if tensor.ndim:
                        _copy(piece, tensors.get_slice(piece.name), box, part[box.in_part])
                    else:
                        part.copy_(tensors.get_tensor(piece.name))


def _copy(piece: Piece, values: Any, box: ShardSlice, into: Tensor) -> None:
    """Copy the elements of ``piece`` that lie in ``box`` from ``values`` in a file to ``into``, which is the box."""
    starts = [max(pair) for pair in zip(piece.offsets, box.offsets, strict=True)]
    ends = [
        min(offset + size, other + extent)
        for offset, size, other, extent in zip(piece.offsets, piece.sizes, box.offsets, box.sizes, strict=True)
    ]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return
    from_file = _slices(starts, ends, piece.offsets)
    if piece.stacked is None:
        found = values[from_file]
    else:
        found = values[from_file[: piece.stacked] + from_file[piece.stacked + 1 :]].unsqueeze(piece.stacked)
    into[_slices(starts, ends, box.offsets)].copy_(found)


def _slices(starts: Collection[int], ends: Collection[int], origin: Collection[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, end - zero) for start, end, zero in zip(starts, ends, origin, strict=True))
