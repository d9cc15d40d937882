"""Make the manifests that a training of Llama 3 8B with AdamW would save under ``full_shard``."""

from __future__ import annotations

from lightning_dist.checkpoint import Manifest
from lightning_dist.checkpoint.manifest import FileEntry
from lightning_dist.checkpoint.parts import OfRank, Written, merged_sections
from lightning_dist.checkpoint.sections import Cut, Layout, Section

_OF_LAYER = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "mlp.gate_proj.weight": (14336, 4096),
    "mlp.up_proj.weight": (14336, 4096),
    "mlp.down_proj.weight": (4096, 14336),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (128256, 4096),
    **{f"model.layers.{index}.{name}": shape for index in range(32) for name, shape in _OF_LAYER.items()},
    "model.norm.weight": (4096,),
    "lm_head.weight": (128256, 4096),
}
"""The 291 parameters of the model."""


def of_ranks_of_8b(num_ranks: int) -> list[OfRank]:
    """Return what the first rank gathers of all ranks when 873 tensors are saved: the weights and two moments of each.

    Args:
        num_ranks: Number of ranks over which each tensor is sharded along its first dimension.
    """
    prefixes = ("optimizer_states/0/state/{}/exp_avg", "optimizer_states/0/state/{}/exp_avg_sq", "state_dict/{}")
    shape_of = {prefix.format(name): shape for prefix in prefixes for name, shape in SHAPES.items()}
    layouts = [Layout(shape, "float32", (Cut(0, 0),), 0) for shape in dict.fromkeys(shape_of.values())]
    number_of = {layout.shape: number for number, layout in enumerate(layouts)}
    tensors = {name: number_of[shape_of[name]] for name in sorted(shape_of)}
    written = Written({}, [Section((num_ranks,), (tuple(range(num_ranks)),), tuple(layouts), tensors)])
    keys, sent = written.keys(), written.to_send(0)
    entry = FileEntry(123_456_789, 32 * "0")
    return [
        OfRank({f"rank_{rank}.bin": entry, f"rank_{rank}.pt": entry}, {}, keys, b"" if rank else sent)
        for rank in range(num_ranks)
    ]


def merged_manifest(of_ranks: list[OfRank]) -> Manifest:
    """Return the manifest of what the first rank has gathered."""
    files = {name: entry for of_rank in of_ranks for name, entry in of_rank.files.items()}
    return Manifest(files, {}, len(of_ranks), 0.0, {}, merged_sections(of_ranks))


def manifest_of_8b(num_ranks: int) -> Manifest:
    """Return the manifest of a save of ``num_ranks`` ranks."""
    return merged_manifest(of_ranks_of_8b(num_ranks))
