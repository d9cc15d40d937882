"""Load weights from Hugging Face's safetensors files: each rank reads only its shards of the tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.consensus import raise_on_all_ranks
from lightning_dist.shard_slices import ShardSlices, local_part
from lightning_dist.tensor_state import is_uninitialized

__all__ = ["load_safetensors"]

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_safetensors(module: nn.Module, folder: str | Path, prefix: str = "") -> None:
    """Fill parameters and persistent buffers of ``module`` from a folder that ``save_pretrained`` wrote.

    This is a collective over all processes. The values are copied in place into this rank's shards and cast to the
    parameter's dtype. A tied parameter is read once, under whichever of its names the files have. Names and shapes are
    checked on all ranks before anything changes.

    Args:
        module: Module whose parameters are DTensors of any placement, or plain tensors, on any device but meta. All
            processes have the same module.
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
        files = _stored(Path(folder).expanduser())
        to_read = _match(_targets(module, prefix), files, prefix, folder)
    # Sanity checks run in inference mode, in which views of parameters could be used for inference only.
    with (
        raise_on_all_ranks(f"reading the pretrained weights in {folder}"),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        _read(to_read)


@dataclass(frozen=True)
class _Stored:
    """Describe a tensor in a safetensors file.

    Args:
        file: File that has the tensor.
        shape: Shape of the whole tensor.
    """

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Targets:
    """Hold the tensors to fill, with the names that they have in the files.

    Args:
        tensors: Parameters and persistent buffers by name; a tied parameter has several names.
        optional: Names of non-persistent buffers, which files of older versions of a model may have.
    """

    tensors: Mapping[str, Tensor]
    optional: Collection[str]


def _targets(module: nn.Module, prefix: str) -> _Targets:
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    persistent = buffers.keys() & module.state_dict().keys()
    tensors |= {name: buffers[name] for name in buffers if name in persistent}
    return _Targets(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        {name.removeprefix(prefix) for name in buffers if name not in persistent and name.startswith(prefix)},
    )


def _stored(folder: Path) -> dict[str, _Stored]:
    """Return the tensors in the files of ``folder``, by name."""
    result = {}
    for file in _files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open returns no dict
                result[name] = _Stored(file, tuple(tensors.get_slice(name).get_shape()))
    return result


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: pass a local folder that save_pretrained wrote, or to which a model was"
            " downloaded (huggingface_hub.snapshot_download)."
        )
    if (folder / FILE).is_file():
        return [folder / FILE]
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {FILE} nor {INDEX}. Convert weights of other formats by loading the model with"
            f" from_pretrained and saving it with save_pretrained."
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files ({error!r}): download it again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{index} lists {_some(missing)}, missing from the folder: download the missing files.")
    return [folder / name for name in names]


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}): download it again.") from error


def _match(
    targets: _Targets, stored: Mapping[str, _Stored], prefix: str, folder: str | Path
) -> list[tuple[str, _Stored, Tensor]]:
    """Match targets with stored tensors, and return name, stored tensor and target of each; a tied tensor appears once.

    Raises:
        ValueError: If names are missing or unknown, a shape differs, or a target is on the meta device.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in targets.tensors.items():
        names[id(tensor)].append(name)
    missing = [tied[0] for tied in names.values() if not any(name in stored for name in tied)]
    unknown = [name for name in stored if name not in targets.tensors and name not in targets.optional]
    if not targets.tensors:
        raise ValueError(f"prefix={prefix!r}: the module has no parameter whose name begins with this prefix.")
    if missing or unknown:
        lacking = f"The files lack {_some(missing)}. " if missing else ""
        surplus = f"The module lacks {_some(unknown)}. " if unknown else ""
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
        if is_uninitialized(tensor):
            raise ValueError(
                f"{prefix}{name} is on the meta device: load the weights after the strategy has materialized it."
            )
    found = [next(name for name in tied if name in stored) for tied in names.values()]
    return [(name, stored[name], targets.tensors[name]) for name in found]


def _read(to_read: Collection[tuple[str, _Stored, Tensor]]) -> None:
    by_file = defaultdict(list)
    for name, stored, tensor in to_read:
        by_file[stored.file].append((name, tensor))
    layouts = ShardSlices()
    for file, wanted in by_file.items():
        with _open(file) as tensors:
            for name, tensor in wanted:
                part = local_part(tensor)
                for box in layouts.of(tensor) if part.numel() else ():
                    if not tensor.ndim:
                        part.copy_(tensors.get_tensor(name))
                        continue
                    ends = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
                    where = tuple(slice(start, end) for start, end in zip(box.offsets, ends, strict=True))
                    part[box.in_part].copy_(tensors.get_slice(name)[where])


def _some(names: Collection[str], number: int = 5) -> str:
    """Return a text with the first ``number`` of ``names`` and, if there are more, how many there are."""
    first = ", ".join(sorted(names)[:number])
    return first if len(names) <= number else f"{len(names)} tensors ({first}, ...)"
