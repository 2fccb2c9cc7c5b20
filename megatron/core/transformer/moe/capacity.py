"""Which tokens an expert drops when it has a capacity.

The capacity belongs to a microbatch of one replica: `ceil(T * k / E * factor)` of its T tokens,
over all its tensor- and context-parallel ranks, which agree on what is dropped. So neither the
model's layout nor the number of replicas changes a result; the size of a microbatch does.

Shape legend: s local sequence, S whole sequence, b microbatch, E experts, k experts a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.mappings import all_gather, split
from megatron.core.transformer import context_parallel


def capacity_of(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return how many of a microbatch's `num_tokens` tokens an expert accepts, at most all."""
    return math.ceil(min(num_tokens, num_tokens * topk / num_experts * factor))


@torch.no_grad()
def drop_beyond(
    capacity: int,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    policy: str,
    mesh: ParallelState,
) -> Tensor:
    """Take tokens away from experts that were chosen too often.

    Args:
        capacity: Tokens that an expert accepts.
        experts: `[s, b, k]` of this rank's tokens.
        weights: `[s, b, k]`, their weights.
        num_experts: E.
        policy: `probs` keeps the tokens of highest weight, and of equal ones the earliest;
            `position` keeps the earliest. Positions of a sequence come before its neighbours'.
        mesh: For the ranks that share the sequence.

    Returns:
        `experts` with E where a token was dropped.
    """
    every = _whole_sequence(experts, mesh)
    chosen = every.reshape(-1)
    order = torch.arange(chosen.numel(), device=chosen.device)
    if policy == "probs":
        order = _whole_sequence(weights, mesh).reshape(-1).argsort(descending=True, stable=True)
    order = order[chosen[order].argsort(stable=True)]  # by expert, the dearest first
    counts = chosen.new_zeros(num_experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
    first = counts.cumsum(0) - counts
    place = torch.arange(chosen.numel(), device=chosen.device) - first[chosen[order]]
    kept = torch.empty_like(chosen, dtype=torch.bool)
    kept[order] = place < capacity
    kept = _own_part(kept.view(every.shape), mesh)
    return experts.masked_fill(~kept, num_experts)


def _whole_sequence(x: Tensor, mesh: ParallelState) -> Tensor:
    """`[s, b, k]` of this rank to `[S, b, k]`, in the order of the sequence."""
    gathered = all_gather(all_gather(x.detach().contiguous(), mesh.tp), mesh.cp)
    if mesh.cp.size == 1:
        return gathered
    return context_parallel.to_sequence(gathered, mesh.cp.size)


def _own_part(x: Tensor, mesh: ParallelState) -> Tensor:
    """The inverse of `_whole_sequence`."""
    return split(context_parallel.take_local(x, mesh.cp, dim=0), mesh.tp)
