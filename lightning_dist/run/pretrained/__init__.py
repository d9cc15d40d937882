"""Load weights from Hugging Face's safetensors files: each rank reads only its shards of the tensors.

- ``files``: Finds the files in a folder and describes the tensors in them.
- ``conversion``: Finds out of which tensors in the files transformers would build a tensor of the module.
- ``loading``: Compares the tensors with the module's, and reads this rank's part of each.
"""

from lightning_dist.run.pretrained.loading import load_safetensors

__all__ = ["load_safetensors"]
