"""Convert from and to folders of Hugging Face models, which have weights in safetensors files and a config.json."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.run.convert.formats import Checkpoint, Options, unfinished, with_bookkeeping
from lightning_dist.run.convert.safetensors_file import separate
from lightning_dist.run.pretrained.conversion import converted, reverted
from lightning_dist.run.pretrained.files import FILE, INDEX, StoredTensor, open_file, some, stored_tensors

__all__ = ["HuggingFaceFolder"]

_CONFIG = "config.json"
_SHARD_SIZE = "5GB"
"""Size of the files into which larger models are split."""


class HuggingFaceFolder:
    """Read and write the folders of ``save_pretrained`` and ``from_pretrained``."""

    name = "huggingface"
    about = "folder of transformers, weights alone"
    has_weights_alone = True

    def is_at(self, path: str) -> bool:
        """Return whether there is a folder with a config.json and safetensors files."""
        folder = Path(path)
        return (folder / _CONFIG).is_file() and any((folder / name).is_file() for name in (FILE, INDEX))

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the weights by the names that they have in a LightningModule with this model."""
        model = _model_of(Path(path), options.trust)
        tensors = dict(model.state_dict(keep_vars=True))
        stored = converted(stored_tensors(Path(path)), {name: tuple(t.shape) for name, t in tensors.items()}, model)
        buffers = {name for name, _ in model.named_buffers()} - tensors.keys()
        if unknown := [name for name in stored if name not in tensors and name not in buffers]:
            raise ValueError(f"{path} has {some(unknown)}, which {type(model).__name__} of its {_CONFIG} lacks.")
        weights: dict[str, Tensor] = {}
        for names in _tied(tensors):
            found = next((name for name in names if name in stored), None)
            if found is None:
                raise ValueError(f"{path} lacks {names[0]}, which {type(model).__name__} of its {_CONFIG} has.")
            tensor = _read(stored[found], mapped)
            weights |= {f"{options.prefix}{name}": tensor for name in names}
        return with_bookkeeping({name: weights[name] for name in (f"{options.prefix}{one}" for one in tensors)})

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write the weights of the model by the names that ``save_pretrained`` gives them, and its configuration."""
        if options.config is None:
            raise ValueError(
                f"The folder {path} of a Hugging Face model needs its configuration: add --config with a config.json or"
                " a folder that has it."
            )
        model = _model_of(options.config, options.trust)
        state = checkpoint["state_dict"]
        weights = {name.removeprefix(options.prefix): state[name] for name in state if name.startswith(options.prefix)}
        tensors = dict(model.state_dict(keep_vars=True))
        _refuse_others(weights, tensors, options, type(model).__name__)
        once = {}
        for first, *others in _tied(tensors):
            once[first] = weights[first]
            for other in others:
                if not torch.equal(weights[first], weights[other]):
                    raise ValueError(f"{first} and {other} are tied in {options.config}, and have different values.")
        files: dict[str, Tensor] = {}
        for part in _by_layer(once):
            for name, tensor in reverted(model, part).items():
                is_new = not any(tensor is one for one in part.values())
                files[name] = mapped.copy_of(tensor) if is_new else tensor
        with unfinished(Path(path)) as new:
            new.mkdir()
            _save(files, new, mapped)
            _copy_configuration(options.config, new)
        return {"state_dict": {f"{options.prefix}{name}": weights[name] for name in tensors}}


def _model_of(path: Path, trust: bool) -> nn.Module:
    """Return the model of a configuration, without values.

    Raises:
        ValueError: If transformers has no such model, or is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "Folders of Hugging Face models need transformers: pip install 'lightning-dist[hf]'."
        ) from error
    if not (path.is_file() or (path / _CONFIG).is_file()):
        raise ValueError(f"There is no {_CONFIG} at {path}.")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust)
        name = (config.architectures or [None])[0]
        kind = getattr(transformers, name, None) if name else None
        with torch.device("meta"):
            model: Any = _by_config(transformers.AutoModel, config) if kind is None else kind(config)
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} has no configuration that transformers can build a model of: {first}") from error
    model.tie_weights()
    found: nn.Module = model
    return found


def _by_config(kind: Any, config: Any) -> Any:
    return kind.from_config(config)


def _tied(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of each tensor; a tied one has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    yield from names.values()


def _read(stored: StoredTensor, mapped: MappedTensors) -> Tensor:
    """Return a tensor of the model, which is mapped from its file if it is there as a whole."""
    first = stored.pieces[0]
    with open_file(first.file) as file:
        tensor: Tensor = file.get_tensor(first.name)
    if len(stored.pieces) == 1 and tuple(tensor.shape) == stored.shape:
        return tensor
    whole = mapped.empty(stored.shape, tensor.dtype)
    for piece in stored.pieces:
        with open_file(piece.file) as file:
            values = file.get_tensor(piece.name)
        box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
        whole[box] = values.reshape(piece.sizes)
    return whole


def _refuse_others(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], options: Options, kind: str) -> None:
    """Check that the weights are those of the model.

    Raises:
        ValueError: If names are missing or unknown, or a shape differs.
    """
    missing, unknown = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or unknown:
        what = f"lacks {some([options.prefix + name for name in missing])}" if missing else f"has {some(unknown)}"
        raise ValueError(
            f"The checkpoint {what}, unlike {kind} of {options.config}. Give the configuration of its model, and set"
            f" --prefix (now {options.prefix!r}) to what names in the checkpoint have before those of the model."
        )
    for name, tensor in tensors.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"{options.prefix}{name} has shape {list(weights[name].shape)}, and {list(tensor.shape)} in"
                f" {options.config}: give the configuration of the checkpoint's model."
            )


def _by_layer(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of one layer after the other, so that what is computed of them needs little memory."""
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        parts = name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        layers[".".join(parts[: number + 1])][name] = tensor
    yield from layers.values()


def _save(files: dict[str, Tensor], folder: Path, mapped: MappedTensors) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    files = separate(files, mapped)
    split = split_torch_state_dict_into_shards(files, max_shard_size=_SHARD_SIZE)
    for file, names in split.filename_to_tensors.items():
        save_file({name: files[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _copy_configuration(source: Path, folder: Path) -> None:
    """Copy the configuration and, from a folder, what belongs to it, such as the tokenizer; but no weights."""
    if source.is_file():
        shutil.copy(source, folder / _CONFIG)
        return
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja") and file.name != INDEX:
            shutil.copy(file, folder / file.name)
