"""Losses that balance the experts' loads and keep the router's logits small.

One definition, whatever the layout. Let a microbatch have T tokens (of one replica; over all its
tensor- and context-parallel ranks), E experts, k experts a token, p_ti the router's score of expert
i for token t (over all experts they sum up to 1), and f_i the number of tokens whose k best scores
include expert i. Every token counts, also those that the loss mask leaves out.

- `aux_loss`: E / (k T^2) * sum_i f_i sum_t p_ti (Fedus et al., Switch Transformers, 2021). It is 1
  when the load is even.
- `seq_aux_loss`: the same for each sequence, averaged over the sequences of the microbatch.
- `global_aux_loss`: the same over the microbatches of all replicas together, with f_i the mean of
  this and the earlier microbatches of the step.
- `z_loss`: the mean of logsumexp(logits)^2 (Zoph et al., ST-MoE, 2022).

The step's gradient holds `coefficient` times the mean of a term over microbatches and replicas, for
every layer. Ranks need the loads of each other (one small sum in the forward pass); scores stay at
home, since each rank adds its own tokens' part.

Shape legend: s local sequence, b microbatch, T = s * b local tokens, E experts, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.mappings import all_reduce

# Names in the log, as Megatron-LM has them.
LOG_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens chose each expert, fp32 `[E]`, of `experts [T, k]`."""
    chosen = experts.reshape(-1)
    counts = torch.zeros(num_experts, dtype=torch.float32, device=experts.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float32))


def balance_loss(scores: Tensor, loads: Tensor, num_tokens: int, topk: int) -> Tensor:
    """Return this rank's part of `aux_loss`.

    Args:
        scores: `[T, E]` of this rank's tokens.
        loads: `[E]` of all tokens.
        num_tokens: All tokens.
        topk: Experts a token.
    """
    factor = scores.shape[1] / (topk * float(num_tokens) ** 2)
    return (scores.sum(0) * loads).sum() * factor


def sequence_balance_loss(
    scores: Tensor, experts: Tensor, shape: tuple[int, int], mesh: ParallelState
) -> Tensor:
    """Return this rank's part of `seq_aux_loss`.

    Args:
        scores: `[T, E]` of this rank's tokens.
        experts: `[T, k]`, their best experts.
        shape: `(s, b)`.
        mesh: For the ranks that share a sequence.
    """
    (s, b), (num_experts, topk) = shape, (scores.shape[1], experts.shape[1])
    sequence = torch.arange(b, device=experts.device).repeat(s).unsqueeze(1)  # of each token
    loads = count_tokens(experts + sequence * num_experts, b * num_experts)
    loads = all_reduce(loads, mesh.tp_cp).view(b, num_experts)
    sums = scores.view(s, b, num_experts).sum(0)
    factor = num_experts / (topk * float(s * mesh.tp_cp.size) ** 2 * b)
    return (sums * loads).sum() * factor


def z_loss(logits: Tensor, num_tokens: int) -> Tensor:
    """Return this rank's part of `z_loss`, of `logits [T, E]` among `num_tokens` tokens."""
    return logits.logsumexp(-1).square().sum() / num_tokens
