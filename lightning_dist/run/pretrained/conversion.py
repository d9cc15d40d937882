"""Find out of which tensors in the files transformers would build a tensor of the module.

Files of many models have other names than the module, and tensors for each expert that the module stacks into one.
transformers lists for each architecture how its ``from_pretrained`` renames, stacks and concatenates the tensors in the
files. Here the same list says where each tensor of the files lies in those of the module, without reading it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_dist.run.pretrained.files import Piece, StoredTensor

__all__ = ["converted", "reverted"]


def converted(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], model: nn.Module | None
) -> dict[str, StoredTensor]:
    """Return the tensors in the files by the names that they have in the module.

    Args:
        stored: The tensors in the files, by their names there.
        shapes: The shapes of the module's tensors, by their names in the module.
        model: The module. Unless it is a model of transformers, whose version has such a list, names stay the same.

    Returns:
        The tensors by name. A tensor whose name the module has stays as it is, and so does one for which no name of the
        module is found.

    Raises:
        ValueError: If transformers would compute a tensor otherwise than by stacking and concatenating.
    """
    unknown = [name for name in stored if name not in shapes]
    result = {name: tensor for name, tensor in stored.items() if name in shapes}
    transforms = _transforms(model) if unknown else []
    by_target: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in unknown:
        target, pattern = _renamed(name, transforms)
        if target not in shapes:
            result[name] = stored[name]
        elif pattern is None:
            result[target] = stored[name]
        else:
            by_target[target].append((pattern, name))
    for target, sources in by_target.items():
        converter = next(one for one in transforms if sources[0][0] in one.source_patterns and _operations(one))
        result[target] = _built(target, converter, sources, stored)
    return result


def reverted(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a model by the names that ``save_pretrained`` gives them in files.

    Args:
        model: The model of Hugging Face to which the weights belong.
        weights: Weights by their names in the module; all those of a layer, because several can make one in the files.
    """
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # The files of versions before 5 have the names of the module.
        return weights
    if not isinstance(model, PreTrainedModel):
        return weights
    result: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return result


def _transforms(model: nn.Module | None) -> list[Any]:
    """Return what transformers does with the tensors in the files of ``model``, in order."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except (
        ImportError
    ):  # transformers is not installed, or is older than its version 5, whose files need no conversion.
        return []
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def _renamed(name: str, transforms: Sequence[Any]) -> tuple[str, str | None]:
    """Return the name in the module, and the pattern of the tensors of which it is one if several make the tensor."""
    if not transforms:
        return name, None
    from transformers.core_model_loading import rename_source_key

    names = [one for one in transforms if not _operations(one)]
    converters = [one for one in transforms if _operations(one)]
    return rename_source_key(name, names, converters)


def _operations(transform: Any) -> Sequence[Any]:
    return getattr(transform, "operations", ())


def _built(
    target: str, converter: Any, sources: Sequence[tuple[str, str]], stored: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Return the tensor that ``converter`` builds of ``sources``, which are pairs of a pattern and a name."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, dot_natural_key

    of_pattern: dict[str, list[StoredTensor]] = defaultdict(list)
    for pattern, name in sorted(sources, key=lambda source: dot_natural_key(source[1])):
        of_pattern[pattern].append(stored[name])
    operations = list(_operations(converter))
    if operations and isinstance(operations[0], MergeModulelist):
        dim = operations.pop(0).dim
        of_pattern = {pattern: [_stacked(tensors, dim)] for pattern, tensors in of_pattern.items()}
    tensors = [tensor for pattern in converter.source_patterns for tensor in of_pattern.get(pattern, ())]
    if operations and isinstance(operations[0], Concatenate):
        tensors = [_joined(tensors, operations.pop(0).dim)]
    if operations or len(tensors) != 1:
        what = ", ".join(type(operation).__name__ for operation in _operations(converter))
        raise ValueError(
            f"{target} would be computed of {sources[0][1]} by {what} of transformers, but only stacked and"
            " concatenated tensors can be read in parts. Load the model with from_pretrained in one process, save its"
            " state_dict with safetensors.torch.save_file as model.safetensors in a new folder, and use that folder."
        )
    return tensors[0]


def _stacked(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    return _joined(
        [
            StoredTensor(_inserted(tensor.shape, dim, 1), tuple(_with_dimension(piece, dim) for piece in tensor.pieces))
            for tensor in tensors
        ],
        dim,
    )


def _with_dimension(piece: Piece, dim: int) -> Piece:
    return replace(piece, offsets=_inserted(piece.offsets, dim, 0), sizes=_inserted(piece.sizes, dim, 1), stacked=dim)


def _inserted(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])


def _joined(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Return the concatenation of ``tensors`` along ``dim``.

    Raises:
        ValueError: If their other dimensions differ.
    """
    first, pieces, length = tensors[0].shape, [], 0
    for tensor in tensors:
        if len(tensor.shape) != len(first) or any(
            size != other for axis, (size, other) in enumerate(zip(tensor.shape, first, strict=True)) if axis != dim
        ):
            raise ValueError(
                f"{tensor.pieces[0].name} in {tensor.file} has shape {list(tensor.shape)}, which does not fit"
                f" {list(first)} of {tensors[0].pieces[0].name}: download the files again."
            )
        for piece in tensor.pieces:
            pieces.append(replace(piece, offsets=_shifted(piece.offsets, dim, length)))
        length += tensor.shape[dim]
    return StoredTensor((*first[:dim], length, *first[dim + 1 :]), tuple(pieces))


def _shifted(offsets: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :])
