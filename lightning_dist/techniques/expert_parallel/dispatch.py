"""Send tokens to the ranks that have their experts, and the results back.

The exchanges are all-to-alls with unequal parts, as in GShard (Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668),
but without a limit on the tokens of an expert, so that none is left out; ``capacity`` has such a limit. A layer
exchanges the routed tokens twice in the forward and twice in the backward; before that, ranks tell each other how many
tokens each expert gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dist._compat import FakeTensor
from lightning_dist.mesh.autograd_collectives import exchange
from lightning_dist.mesh.traffic import count_sent

__all__ = [
    "Compute",
    "Pairs",
    "Routed",
    "add_up_weighted",
    "all_to_all",
    "compute_dense",
    "compute_routed",
    "count_tokens",
    "outputs_of",
    "select",
]

Compute = Callable[..., Tensor]
"""The forward of a module with this rank's experts."""


class Routed(NamedTuple):
    """Hold the result of experts and how many tokens they got."""

    output: Tensor
    """The output of the module, on the rank of each token."""
    num_tokens: Tensor
    """For each expert of the whole module, the number of this rank's tokens that it got, on the device."""


class Pairs(NamedTuple):
    """Say which token, for which of its experts, has each row of a tensor.

    Args:
        numbers: The number of each row's pair of a token and an expert, ``token * k + choice``, of shape ``(m,)``. No
            pair is there twice.
        shape: The shape ``(n, k)`` of the experts of all tokens.
        has_gaps: Whether some of the numbers are ``n * k``, which stands for no pair.
    """

    numbers: Tensor
    shape: torch.Size
    has_gaps: bool = False


def compute_routed(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    compute: Compute,
    params: Sequence[Tensor],
    num_experts: int,
    group: dist.ProcessGroup,
) -> Routed:
    """Compute the weighted sum of the outputs of each token's experts. This is a collective over ``group``.

    Args:
        hidden: This rank's tokens, of shape ``(n, features)``.
        index: The experts of each token, of shape ``(n, k)``. An index of ``num_experts`` or more stands for no expert,
            as in Hugging Face's models.
        weights: The weights of these experts, of shape ``(n, k)``.
        compute: Function of ``m`` tokens, of their experts among this rank's, of shape ``(m, 1)``, and of weights of 1,
            of the same shape. It returns the outputs of these experts, of the shape of the tokens.
        params: The parameters with which ``compute`` computes. They get gradients of zero if no token comes.
        num_experts: Number of experts on all ranks together, which divides by the number of ranks.
        group: Process group of the ranks of ``ep``; each has as many experts as the others, in the order of the ranks.
    """
    ranks = group.size()
    with torch.no_grad():
        sent = count_tokens(index, num_experts)
        received = torch.empty_like(sent)
        count_sent(sent.nbytes * (ranks - 1) / ranks, group)
        counts = dist.all_to_all_single(received, sent, group=group, async_op=True)
        places = index.reshape(-1).argsort(stable=True)
    assert counts is not None
    if hidden.device.type == "cpu":  # Tokens are selected while the counts are under way.
        per_expert = _read(sent, index.numel())
        pairs = Pairs(places[: sum(per_expert)], index.shape)
        selected = select(hidden, pairs, group)
        counts.wait()
        from_experts = _read(received, index.numel())
    else:  # The host waits for the device once.
        counts.wait()
        both = _read(torch.stack((sent, received)).view(-1), 2 * index.numel())
        per_expert, from_experts = both[:num_experts], both[num_experts:]
        pairs = Pairs(places[: sum(per_expert)], index.shape)  # Pairs of a token and no expert come last in the order.
        selected = select(hidden, pairs, group)
    to_ranks = [sum(part) for part in _chunks(per_expert, ranks)]
    from_ranks = [sum(part) for part in _chunks(from_experts, ranks)]
    there = partial(all_to_all, sent=to_ranks, received=from_ranks)
    back = partial(all_to_all, sent=from_ranks, received=to_ranks)
    tokens = exchange(selected, group, 0, there, back)
    local = torch.arange(num_experts // ranks, device=index.device).repeat(ranks)
    local = local.repeat_interleave(received, output_size=sum(from_ranks))
    ones = torch.ones((len(tokens), 1), dtype=weights.dtype, device=weights.device)
    results = outputs_of(compute, params, tokens, local.to(index.dtype)[:, None], ones)
    results = exchange(results, group, 0, back, there)
    return Routed(add_up_weighted(results, weights, pairs, group), sent)


def compute_dense(
    hidden: Tensor, compute: Compute, params: Sequence[Tensor], num_experts: int, group: dist.ProcessGroup
) -> Routed:
    """Compute each expert's outputs of tokens that are grouped by expert. This is a collective over ``group``.

    Args:
        hidden: This rank's tokens, of shape ``(num_experts * n, features)``: first those of the first expert.
        compute: Function of tokens that are grouped by this rank's experts, which returns outputs of the same shape.
        params: As for :func:`compute_routed`.
        num_experts: As for :func:`compute_routed`.
        group: As for :func:`compute_routed`.
    """
    ranks, per_expert = group.size(), len(hidden) // num_experts
    of_each = torch.full((num_experts,), per_expert, device=hidden.device)
    own = num_experts // ranks
    with torch.no_grad():
        sent = torch.full((ranks,), per_expert, device=hidden.device)
        received = torch.empty_like(sent)
        count_sent(sent.nbytes * (ranks - 1) / ranks, group)
        dist.all_to_all_single(received, sent, group=group)
        lengths = _read(received, per_expert * ranks)
    to_ranks, from_ranks = [own * per_expert] * ranks, [own * length for length in lengths]
    there = partial(all_to_all, sent=to_ranks, received=from_ranks)
    back = partial(all_to_all, sent=from_ranks, received=to_ranks)
    tokens = exchange(hidden, group, 0, there, back)
    if not len(tokens):
        results = outputs_of(compute, params, tokens)
        return Routed(exchange(results, group, 0, back, there), of_each)
    parts = [
        part.reshape(own, length, -1) for part, length in zip(torch.split(tokens, from_ranks), lengths, strict=True)
    ]
    results = compute(torch.cat(parts, 1).flatten(0, 1)).view(own, sum(lengths), -1)
    returned = torch.cat([part.flatten(0, 1) for part in torch.split(results, lengths, 1)])
    return Routed(exchange(returned, group, 0, back, there), of_each)


def _read(counts: Tensor, total: int) -> list[int]:
    """Return the numbers of tokens in ``counts``, or equal ones if the tensor has no values.

    Args:
        counts: One-dimensional tensor of numbers of tokens.
        total: Their sum if all ranks have as many tokens.
    """
    if not isinstance(counts, FakeTensor):
        numbers: list[int] = counts.tolist()
        return numbers
    share, rest = divmod(total, len(counts))
    return [share + (place < rest) for place in range(len(counts))]


def count_tokens(index: Tensor, num_experts: int) -> Tensor:
    """Return for each expert the number of tokens that it gets, of shape ``(num_experts,)``.

    Args:
        index: The experts of each token, of any shape. An index of ``num_experts`` or more stands for no expert.
        num_experts: Number of experts.
    """
    # torch.bincount would wait for an accelerator, to find the largest index.
    flat = index.reshape(-1).clamp(max=num_experts).to(torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def _chunks(values: Sequence[int], number: int) -> list[Sequence[int]]:
    size = len(values) // number
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def select(tokens: Tensor, pairs: Pairs, group: dist.ProcessGroup) -> Tensor:
    """Return the token of each pair of a token and an expert, of shape ``(m, features)``; no pair gets zeros.

    The gradient of a token is the sum over its pairs, in the same order on all ranks.

    Args:
        tokens: Tokens of shape ``(n, features)``.
        pairs: The pairs whose tokens are selected.
        group: Process group of the ranks, which exchange nothing here.
    """
    return exchange(tokens, group, 0, lambda each, *_: _rows_of(each, pairs), lambda each, *_: _add_up(each, pairs))


def _rows_of(tokens: Tensor, pairs: Pairs) -> Tensor:
    """Return what :func:`select` returns, without a backward."""
    rows = pairs.numbers // pairs.shape[-1]
    if not pairs.has_gaps:
        return tokens.index_select(0, rows)
    if not len(tokens):
        return tokens.new_zeros((len(rows), *tokens.shape[1:]))
    is_gap = (rows == len(tokens))[:, None]
    return tokens.index_select(0, rows.clamp(max=len(tokens) - 1)).masked_fill_(is_gap, 0)


def add_up_weighted(values: Tensor, weights: Tensor, pairs: Pairs, group: dist.ProcessGroup) -> Tensor:
    """Return for each token the weighted sum of ``values`` of its experts, of shape ``(n, features)``.

    The order of the sum is always the same, so that ranks which compute the same tokens get the same bits.
    ``index_add`` does not promise this on a GPU.

    Args:
        values: A row for each of ``pairs``, of shape ``(m, features)``.
        weights: The weights of all tokens' experts, of shape ``(n, k)``. Those without a row add nothing.
        pairs: The pairs of a token and an expert that has computed it.
        group: As for :func:`select`.
    """
    result: Tensor = _WeightedSum.apply(values, weights, pairs, group)  # type: ignore[no-untyped-call]
    return result


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, pairs: Pairs, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(values, weights, pairs.numbers)
        ctx.has_gaps, ctx.group = pairs.has_gaps, group
        return _add_up(values, pairs, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        values, weights, numbers = ctx.saved_tensors
        pairs = Pairs(numbers, weights.shape, ctx.has_gaps)
        of_pairs = select(gradient, pairs, ctx.group)
        of_values = (of_pairs * _weights_of(pairs, weights)).to(values.dtype)
        if not ctx.needs_input_grad[1]:
            return of_values, None, None, None
        products = (of_pairs * values).sum(-1).to(weights.dtype)
        of_weights = products.new_zeros(weights.numel() + pairs.has_gaps).index_copy(0, numbers, products)
        return of_values, of_weights[: weights.numel()].view_as(weights), None, None


def _weights_of(pairs: Pairs, weights: Tensor) -> Tensor:
    """Return the weight of each pair, of shape ``(m, 1)``; no pair gets 0."""
    flat = functional.pad(weights.reshape(-1), (0, 1)) if pairs.has_gaps else weights.reshape(-1)
    return flat[pairs.numbers][:, None]


def _add_up(values: Tensor, pairs: Pairs, weights: Tensor | None = None) -> Tensor:
    """Return what :func:`add_up_weighted` returns, without a backward; ``weights`` of None are all 1."""
    numbers, number = pairs.numbers, pairs.shape.numel()
    is_every = len(numbers) == number and not pairs.has_gaps
    if is_every and (weights is None or weights.dtype == values.dtype):
        rows = torch.empty_like(numbers)
        rows[numbers] = torch.arange(number, device=numbers.device)
        # This reads the values once, where a product and a sum would write them again.
        return functional.embedding_bag(rows.view(pairs.shape), values, mode="sum", per_sample_weights=weights)
    if weights is not None:
        values = (values * _weights_of(pairs, weights)).to(values.dtype)
    every = values.new_zeros((number + pairs.has_gaps, values.size(-1)))
    return every.index_copy_(0, numbers, values)[:number].view(*pairs.shape, values.size(-1)).sum(1)


def outputs_of(compute: Compute, params: Sequence[Tensor], tokens: Tensor, *routing: Tensor) -> Tensor:
    """Return what this rank's experts compute, also if there are no tokens for them.

    Without tokens, the backward must still reach all that it reaches on other ranks: its collectives would otherwise
    wait for this rank, and the experts would get no gradient. The result must have the dtype that it has on other
    ranks, which exchange it with this one. It is found by a run with tokens of zeros.

    Args:
        compute: As for :func:`compute_routed`, or for :func:`compute_dense`.
        params: The parameters with which ``compute`` computes.
        tokens: The tokens, of shape ``(m, features)``.
        routing: What ``compute`` takes besides tokens: their experts and weights, of shape ``(m, 1)``; or nothing.
    """
    if len(tokens):
        return compute(tokens, *routing)
    number = 1 if routing else len(params[0])
    with torch.no_grad():
        zeros = [tensor.new_zeros((number, *tensor.shape[1:])) for tensor in (tokens, *routing)]
        dtype = compute(*zeros).dtype
    reached = [param.reshape(-1)[:0].sum() for param in params if param.requires_grad]
    return (tokens + sum(reached).to(tokens.dtype) if reached else tokens).to(dtype)  # type: ignore[union-attr]


def all_to_all(
    tensor: Tensor, group: dist.ProcessGroup, dim: int, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send rows of ``tensor`` to each rank, and return the rows of all ranks in their order.

    Args:
        tensor: The rows, in the order of the ranks that receive them.
        group: Process group of the ranks.
        dim: Ignored; rows are exchanged.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
    """
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    others = sum(sent) - sent[group.rank()]
    count_sent(others * tensor[:1].nbytes, group)
    dist.all_to_all_single(result, tensor.contiguous(), list(received), list(sent), group=group)
    return result
