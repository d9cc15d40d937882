"""Convert from and to single safetensors files, which have weights alone."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.run.convert.formats import Checkpoint, Options, unfinished, with_bookkeeping
from lightning_dist.run.pretrained.files import open_file

__all__ = ["SafetensorsFile", "separate"]


class SafetensorsFile:
    """Read and write a safetensors file with the names of the module's state dict."""

    name = "safetensors"
    about = "safetensors file, weights alone"
    has_weights_alone = True

    def is_at(self, path: str) -> bool:
        """Return whether there is a file that ends in ``.safetensors``."""
        return Path(path).suffix == ".safetensors" and Path(path).is_file()

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the weights, which are mapped from the file."""
        with open_file(Path(path)) as file:
            return with_bookkeeping({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write the tensors of the state dict."""
        from safetensors.torch import save_file

        weights = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, torch.Tensor)}
        with unfinished(Path(path)) as new:
            save_file(separate(weights, mapped), new, metadata={"format": "pt"})
        return {"state_dict": weights}


def separate(weights: dict[str, torch.Tensor], mapped: MappedTensors) -> dict[str, torch.Tensor]:
    """Return the weights as contiguous tensors that share no storage, which the format needs."""
    seen: set[int] = set()
    result = {}
    for name, tensor in weights.items():
        storage = tensor.untyped_storage()
        is_alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        result[name] = tensor.detach() if is_alone and tensor.is_contiguous() else mapped.copy_of(tensor)
    return result
