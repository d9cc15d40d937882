"""Split ``nn.MultiheadAttention`` by its heads (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3).

The module computes with its packed weights by one function of torch, which takes the number of features from the query.
A rank with some of the heads therefore computes the same by :func:`attend`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist._compat import own_parameters
from lightning_dist.mesh import autograd_collectives
from lightning_dist.model.randomness import RankRng
from lightning_dist.techniques.tensor_parallel.plan import Entry
from lightning_dist.tracing.step_graph import Dataflow

__all__ = ["attend", "attention_modules", "is_inferred_attention", "parameters_of_heads", "why_whole"]


def attention_modules(root: nn.Module, dataflow: Dataflow, num_ranks: int) -> dict[str, Entry]:
    """Return entries for the modules of ``nn.MultiheadAttention`` that can be split by heads, by full name.

    Args:
        root: The model with whole parameters.
        dataflow: The record of a step of the model on fake tensors.
        num_ranks: Number of ranks that heads are split over.
    """
    entries: dict[str, Entry] = {}
    names = {param: name for name, param in root.named_parameters()}
    for name in sorted(dataflow.called):
        module = root.get_submodule(name)
        if why_whole(module, num_ranks):
            continue
        readers = [dataflow.readers[names[param]] for param in module.parameters()]
        if all(name in found and found <= {name, ""} for found in readers):
            entries[name] = Entry("attention_heads", "inferred")
    return entries


def is_inferred_attention(entry: Entry) -> bool:
    """Return whether ``entry`` is one of :func:`attention_modules`."""
    return entry.style == "attention_heads" and entry.source == "inferred"


def why_whole(module: nn.Module, num_ranks: int) -> str:
    """Return why a module cannot be split by heads, as the end of a sentence; empty: it can.

    Args:
        module: A module of any kind.
        num_ranks: Number of ranks that heads are split over.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return f"is a {type(module).__name__}, and attention_heads splits nn.MultiheadAttention only"
    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        return f"is a {type(module).__name__} with a forward of its own, which attention_heads would replace"
    if any(key not in own_parameters(owner) for owner, key, _, _ in parameters_of_heads(module)):
        return (
            "has weights that are computed and not stored, such as those of an adapter, and attention_heads splits"
            " stored ones only"
        )
    if module.num_heads % num_ranks:
        return f"has {module.num_heads} heads, which do not divide by tp_size={num_ranks}"
    if module.bias_k is not None or module.add_zero_attn:
        return "has add_bias_kv or add_zero_attn, which attention_heads does not split"
    return ""


def parameters_of_heads(module: nn.MultiheadAttention) -> Iterator[tuple[nn.Module, str, int, int]]:
    """Yield the parameters of which each rank has a part, with the module that holds each of them.

    Yields:
        The module, the parameter's name in it, the dimension of the heads' features, and how many matrices are packed
        along it.
    """
    for key, num_packed in (("in_proj_weight", 3), ("q_proj_weight", 1), ("k_proj_weight", 1), ("v_proj_weight", 1),
                            ("in_proj_bias", 3)):  # fmt: skip
        if getattr(module, key) is not None:
            yield module, key, 0, num_packed
    yield module.out_proj, "weight", 1, 1


def attend(
    module: nn.MultiheadAttention,
    group: dist.ProcessGroup,
    random: RankRng | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute what ``module`` computes, with this rank's heads, and sum the results of all ranks.

    Args:
        module: The module, which holds this rank's part of its parameters.
        group: Process group of the ranks over which heads are split.
        random: Object that lets ranks draw different random numbers for dropout; None: the model draws none.
        query: Queries, whose shape and those of the other arguments are as for the module's own forward. All arguments
            are the same on all ranks.
        key: Keys, laid out as the queries are.
        value: Values, one for each key.
        key_padding_mask: Mask of the keys of each sample, which hides keys where it is True.
        need_weights: Whether to return the weights of attention.
        attn_mask: Mask of queries and keys, which hides keys where it is True, or is added to the scores.
        average_attn_weights: Whether the weights are averaged over all heads.
        is_causal: Whether ``attn_mask`` is known to hide all later tokens, and nothing else.

    Returns:
        The output of attention, and the weights of attention or None, as of ``nn.MultiheadAttention``.

    Raises:
        RuntimeError: If ``is_causal`` is set without ``attn_mask``.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal=True is only a hint about attn_mask, which must be given as well.")
    is_batched = query.dim() == 3
    swaps = is_batched and not module.batch_first
    heads = module.num_heads // group.size()
    given = {id(tensor): tensor for tensor in (query, key, value)}
    copied = {known: autograd_collectives.copy_to(tensor, group) for known, tensor in given.items()}
    whole = {known: _samples_first(tensor, is_batched, swaps) for known, tensor in copied.items()}
    projected = _projected(module, [whole[id(tensor)] for tensor in (query, key, value)])
    q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in projected)  # type: ignore[no-untyped-call]
    only_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if only_causal else _joined_mask(attn_mask, key_padding_mask, q, group)
    dropout = module.dropout if module.training else 0.0
    with _other_numbers(random if dropout else None):
        if need_weights:
            output, weights = _with_weights(q, k, v, mask, dropout)
        else:
            output = functional.scaled_dot_product_attention(q, k, v, mask, dropout, only_causal)
    output = _summed_output(module, output, group)
    output = output.transpose(0, 1) if swaps else output if is_batched else output.squeeze(0)
    if not need_weights:
        return output, None
    weights = _of_all_heads(weights, group, module.num_heads if average_attn_weights else None)
    return output, weights if is_batched else weights.squeeze(0)


def _samples_first(tensor: Tensor, is_batched: bool, swaps: bool) -> Tensor:
    """Return a tensor of the shape (samples, tokens, features)."""
    return tensor.transpose(0, 1) if swaps else tensor if is_batched else tensor.unsqueeze(0)


def _summed_output(module: nn.MultiheadAttention, output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the output of all ranks' heads, of the shape (samples, tokens, features), given that of this rank's."""
    output = functional.linear(output.transpose(1, 2).flatten(2), module.out_proj.weight)
    output = autograd_collectives.sum_from(output, group)
    return output if module.out_proj.bias is None else output + module.out_proj.bias


def _with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return the output and the weights of attention, both of this rank's heads."""
    scores = (q * math.sqrt(1.0 / q.size(-1))) @ k.transpose(-2, -1)
    weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ v, weights


def _of_all_heads(weights: Tensor, group: dist.ProcessGroup, num_averaged: int | None) -> Tensor:
    """Return the weights of attention of all ranks' heads, averaged over ``num_averaged`` heads unless it is None."""
    if num_averaged is None:
        return autograd_collectives.gather(weights, group, 1)
    return autograd_collectives.sum_from(weights.sum(1), group) / num_averaged


@contextmanager
def _other_numbers(random: RankRng | None) -> Iterator[None]:
    """Let ranks draw different random numbers in this context."""
    has_entered = random is not None and random.enter()
    try:
        yield
    finally:
        if random is not None and has_entered:
            random.leave()


def _projected(module: nn.MultiheadAttention, inputs: list[Tensor]) -> list[Tensor]:
    """Return queries, keys and values of this rank's heads, each of the shape (samples, tokens, features)."""
    bias = module.in_proj_bias
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    elif inputs[0] is inputs[1] is inputs[2]:
        return list(functional.linear(inputs[0], module.in_proj_weight, bias).chunk(3, -1))
    else:
        weights = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [functional.linear(*arguments) for arguments in zip(inputs, weights, biases, strict=True)]


def _joined_mask(
    mask: Tensor | None, padding: Tensor | None, queries: Tensor, group: dist.ProcessGroup
) -> Tensor | None:
    """Return the sum of both masks, as numbers that are added to the scores of this rank's heads; None: there is none.

    Args:
        mask: Mask of the shape (queries, keys), or (samples times all heads, queries, keys); True hides a key.
        padding: Mask of the shape (samples, keys), or (keys,) of a single sample.
        queries: The queries of this rank's heads, of the shape (samples, heads, queries, features).
        group: Process group of the ranks over which heads are split, which sum the gradients of the masks.
    """
    mask, padding = (
        autograd_collectives.copy_to(given, group) if given is not None and given.requires_grad else given
        for given in (mask, padding)
    )
    samples, heads = queries.shape[:2]
    found = None
    if mask is not None:
        found = _as_numbers(mask, queries.dtype)
        if found.dim() == 3:
            of_samples: Tensor = found.unflatten(0, (samples, -1))  # type: ignore[no-untyped-call]
            found = of_samples.narrow(1, group.rank() * heads, heads)
    if padding is not None:
        of_keys = _as_numbers(padding, queries.dtype).view(samples, 1, 1, -1)
        found = of_keys if found is None else found + of_keys
    return found


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
