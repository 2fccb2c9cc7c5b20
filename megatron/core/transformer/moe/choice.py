"""How a token chooses its experts: from the router's logits to experts and their weights.

Everything is computed in the type of the logits, which is fp32 or wider.

Shape legend: T tokens, E experts, G groups of experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.mesh import Axis
from megatron.core.paper import number
from megatron.core.tensor_parallel.mappings import all_reduce

if TYPE_CHECKING:
    from megatron.config import RunConfig

_EPSILON = 1e-20  # in the sum of the chosen scores, as published models have it
_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_ROUNDS = 100


@dataclass(frozen=True)
class Choice:
    """The rule by which experts are chosen.

    Attributes:
        topk: Experts a token.
        score_function: `softmax`, `sigmoid` or `sqrtsoftplus`.
        pre_softmax: Whether the softmax covers all experts rather than the chosen ones.
        scaling_factor: Multiplies the weights.
        num_groups: Groups of experts; None for no groups.
        group_topk: Groups that a token may use.
    """

    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling_factor: float | None = None
    num_groups: int | None = None
    group_topk: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Choice:
        """The rule that a configuration asks for."""
        return cls(
            topk=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            scaling_factor=config.moe_router_topk_scaling_factor,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
        )


def choose(logits: Tensor, rule: Choice, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token.

    Args:
        logits: `[T, E]`.
        rule: How.
        bias: `[E]`, added to the scores for the choice only; not with softmax.

    Returns:
        Experts `[T, k]`, and their weights `[T, k]`.
    """
    if rule.score_function == "softmax":
        scores = logits.softmax(-1) if rule.pre_softmax else logits
        experts = _best(scores, rule)
        weights = scores.gather(1, experts)
        if not rule.pre_softmax:
            weights = weights.softmax(-1)
    else:
        scores = _independent_scores(logits, rule.score_function)
        experts = _best(scores if bias is None else scores + bias, rule)
        weights = scores.gather(1, experts)
        if rule.topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return experts, weights if rule.scaling_factor is None else weights * rule.scaling_factor


def _best(scores: Tensor, rule: Choice) -> Tensor:
    """The experts of the `k` best scores, all from the best groups if there are groups."""
    scores = scores.detach()
    if rule.num_groups is None or rule.group_topk is None:
        return scores.topk(rule.topk, dim=-1).indices
    grouped = scores.view(scores.shape[0], rule.num_groups, -1)  # [T, G, E/G]
    rank = grouped.topk(rule.topk // rule.group_topk, dim=-1).values.sum(-1)
    groups = rank.topk(rule.group_topk, dim=-1).indices
    allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, groups, True)
    grouped = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf"))
    return grouped.flatten(1).topk(rule.topk, dim=-1).indices


def _independent_scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "sigmoid":
        return logits.sigmoid()
    return _log_score(logits, score_function).exp()


def _log_score(logits: Tensor, score_function: str) -> Tensor:
    """Logarithm of the score, exact where the score itself would be 0."""
    if score_function == "sigmoid":
        return F.logsigmoid(logits)
    # log(softplus(x)) tends to x - exp(x) / 2 as x falls.
    low = logits.clamp(max=-15.0)
    high = logits.clamp(min=-15.0)
    return 0.5 * torch.where(logits < -15.0, low - 0.5 * low.exp(), F.softplus(high).log())


def balanced_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores of all experts that sum up to 1 for each token, `[T, E]`; for balancing losses.

    Independent scores are normalised from their logarithms: with a small number in the sum instead,
    a router could escape the loss by making all its scores smaller than that number.
    """
    if score_function == "softmax":
        return logits.softmax(-1)
    return _log_score(logits, score_function).softmax(-1)


def sinkhorn_choice(logits: Tensor, topk: int, axis: Axis, training: bool) -> tuple[Tensor, Tensor]:
    """Choose experts so that all get about the same number of tokens.

    In training the choice comes from `sinkhorn`, in evaluation from the scores themselves. The
    weights are those of the scores in both: a sigmoid for one expert a token, else a softmax over
    all experts.

    Args:
        logits: `[T, E]` of this rank's tokens.
        topk: Experts a token.
        axis: Ranks that hold the other tokens of the microbatch.
        training: Whether to balance.

    Returns:
        Experts `[T, k]`, and their weights `[T, k]`.
    """
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    basis = sinkhorn(logits.detach(), axis) if training else scores.detach()
    experts = basis.topk(topk, dim=-1).indices
    return experts, scores.gather(1, experts)


@torch.no_grad()
def sinkhorn(
    logits: Tensor,
    axis: Axis,
    tolerance: float = _SINKHORN_TOLERANCE,
    rounds: int = _SINKHORN_ROUNDS,
) -> Tensor:
    """Scale the rows and columns of `exp(logits)` until each token and each expert has its share.

    Rows (tokens) sum up to 1 / tokens and columns (experts) to 1 / experts, in turn. It stops when
    the experts' factors changed by at most `tolerance` in the mean over the experts, or after
    `rounds` turns. Tokens of all ranks count, so every rank stops at the same turn.

    Args:
        logits: `[T, E]` of this rank's tokens.
        axis: Ranks that hold the other tokens.
        tolerance: When to stop.
        rounds: When to stop at the latest.

    Returns:
        `[T, E]`.

    Source: Sinkhorn, 1964; Clark et al., Unified Scaling Laws for Routed Language Models, 2022.
    """
    # A factor on a row changes nothing, and keeps the exponential finite.
    cost = (logits - logits.amax(-1, keepdim=True)).exp()
    tokens, experts = cost.shape[0] * axis.size, cost.shape[1]
    column = cost.new_ones(experts)
    row = cost.new_ones(cost.shape[0])
    tiny = torch.finfo(cost.dtype).tiny
    for _ in range(rounds):
        row = 1.0 / (tokens * (cost @ column)).clamp(min=tiny)
        share = all_reduce(row @ cost, axis)
        before, column = column, 1.0 / (experts * share).clamp(min=tiny)
        if number((column - before).abs().mean()) <= tolerance:
            break
    return cost * column * row.unsqueeze(1)


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, logits: Tensor, others: Tensor) -> Tensor:
        return others

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


_pass_through: Callable[[Tensor, Tensor], Tensor] = _PassThrough.apply


def random_logits(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random numbers in place of the logits, which get their gradient all the same."""
    return _pass_through(logits, torch.empty_like(logits).normal_(generator=generator))
