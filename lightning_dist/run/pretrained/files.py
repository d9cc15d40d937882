"""Find the safetensors files in a folder, and describe the tensors in them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Piece", "StoredTensor", "open_file", "some", "stored_tensors"]

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Piece:
    """Describe a tensor in a safetensors file, and where it lies in a tensor of a module.

    Args:
        file: File that has the tensor.
        name: Name of the tensor in the file.
        offsets: Index of its first element in the module's tensor, for each dimension of the module's tensor.
        sizes: Its shape, with a dimension of size one where tensors are stacked.
        stacked: The dimension that the tensor in the file lacks, or None if it lacks none.
    """

    file: Path
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stacked: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """Describe a tensor of a module that consists of one or several tensors in files.

    Args:
        shape: Shape of the whole tensor.
        pieces: The tensors in the files. They do not overlap, and together they fill the whole tensor.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        """Return the file that has the first piece."""
        return self.pieces[0].file


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the files of ``folder``, by their names in the files.

    Raises:
        ValueError: If the folder has no such files, or one is missing or damaged.
    """
    result = {}
    for file in _files(folder):
        with open_file(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open returns no dict
                shape = tuple(tensors.get_slice(name).get_shape())
                result[name] = StoredTensor(shape, (Piece(file, name, (0,) * len(shape), shape),))
    return result


def open_file(file: Path) -> Any:
    """Return a context in which tensors of ``file`` can be read.

    Raises:
        ValueError: If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}): download it again.") from error


def some(names: Collection[str], number: int = 5) -> str:
    """Return a text with the first ``number`` of ``names`` and, if there are more, how many there are."""
    first = ", ".join(sorted(names)[:number])
    return first if len(names) <= number else f"{len(names)} tensors ({first}, ...)"


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
        raise ValueError(f"{index} lists {some(missing)}, missing from the folder: download the missing files.")
    return [folder / name for name in names]
