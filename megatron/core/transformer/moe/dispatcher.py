"""How tokens travel to the ranks that hold their experts, and back.

Both ways give the same result:

- `allgather`: every rank gathers the tokens of all ranks that hold the experts of a layer, picks
  out those of its own experts, and the results are summed back. Few large messages; memory for all
  tokens.
- `alltoall`: every rank sends a copy of a token to each rank that holds one of its experts, and
  gets the results back. Less to send with few experts a token.

With expert tensor parallelism the ranks that share an expert need the same tokens, and each has a
partial sum of the result.

Shape legend: T local tokens, h hidden, E experts, e local experts, k experts a token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core import wire
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.mappings import (
    all_gather,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from megatron.core.tensor_parallel.row_exchange import (
    exchange_rows,
    gather_rows,
    reduce_scatter_rows,
)
from megatron.core.transformer.moe.permutation import (
    RowPlan,
    plan_regrouping,
    plan_rows,
    to_rows,
    to_tokens,
    weights_of_rows,
)
from megatron.core.transformer.moe.router import Routing


@dataclass(frozen=True)
class Traffic:
    """How many rows an all-to-all moves.

    Attributes:
        sent: Rows for each expert-parallel rank.
        received: Rows from each of them.
        gathered: Rows of each expert tensor-parallel rank.
        regrouping: Brings what arrived into the order of the experts.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    regrouping: RowPlan


@dataclass(frozen=True)
class Dispatched:
    """What the local experts get, and how to send their results back.

    Attributes:
        rows: `[R, h]`, sorted by local expert.
        tokens_per_expert: Rows of each local expert.
        weights: fp32 `[R]`.
        plan: Where the rows come from.
        traffic: How they came here; None if they were gathered.
    """

    rows: Tensor
    tokens_per_expert: list[int]
    weights: Tensor
    plan: RowPlan
    traffic: Traffic | None = None


class Dispatcher(Protocol):
    """Moves tokens to their experts and back."""

    def dispatch(self, tokens: Tensor, routing: Routing, fill: int | None) -> Dispatched:
        """Bring tokens to their experts.

        Args:
            tokens: `[T, h]`, as many on every rank.
            routing: Their experts and weights.
            fill: Fill each expert's rows up to this number for each rank that sends.
        """

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the experts' results `[R, h]` of each token to `[T, h]`.

        With expert tensor parallelism they are partial sums over its ranks.
        """


class AllGatherDispatcher:
    """Every rank gathers all tokens.

    Args:
        mesh: The process mesh.
        num_experts: E.
    """

    def __init__(self, mesh: ParallelState, num_experts: int) -> None:
        self.axis, self.num_experts = mesh.ep_etp, num_experts
        self.local = num_experts // mesh.ep.size
        self.first = mesh.ep.rank * self.local

    def dispatch(self, tokens: Tensor, routing: Routing, fill: int | None) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        tokens = gather_along_first_dim(tokens, self.axis)
        weights = gather_along_first_dim(routing.weights, self.axis)
        experts = all_gather(routing.experts, self.axis)
        fill = None if fill is None else fill * self.axis.size
        last = self.first + self.local
        plan = plan_rows(experts, self.first, last, fill, self.num_experts)
        return Dispatched(to_rows(tokens, plan), plan.counts, weights_of_rows(weights, plan), plan)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        return reduce_scatter_along_first_dim(to_tokens(results, dispatched.plan), self.axis)


class AllToAllDispatcher:
    """Every rank sends tokens to where their experts are.

    Args:
        mesh: The process mesh.
        num_experts: E.
    """

    def __init__(self, mesh: ParallelState, num_experts: int) -> None:
        self.ep, self.etp, self.both = mesh.ep, mesh.etp, mesh.ep_etp
        self.num_experts, self.local = num_experts, num_experts // mesh.ep.size

    def dispatch(self, tokens: Tensor, routing: Routing, fill: int | None) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        plan = plan_rows(routing.experts, 0, self.num_experts, fill)
        rows, weights = to_rows(tokens, plan), weights_of_rows(routing.weights, plan)
        if self.both.size == 1:
            return Dispatched(rows, plan.counts, weights, plan)
        traffic = self._traffic(plan.counts, fill, tokens.device)
        order = traffic.regrouping
        rows = to_rows(self._send(rows, traffic), order)
        weights = self._send(weights, traffic).index_select(0, order.slot_of_row)
        return Dispatched(rows, order.counts, weights, plan, traffic)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        traffic = dispatched.traffic
        if traffic is not None:
            results = to_tokens(results, traffic.regrouping)
            results = reduce_scatter_rows(results, traffic.gathered, self.etp)
            results = exchange_rows(results, traffic.received, traffic.sent, self.ep)
        return to_tokens(results, dispatched.plan)

    def _send(self, x: Tensor, traffic: Traffic) -> Tensor:
        x = exchange_rows(x, traffic.sent, traffic.received, self.ep)
        return gather_rows(x, traffic.gathered, self.etp)

    def _traffic(self, own: list[int], fill: int | None, device: torch.device) -> Traffic:
        """Find out how many rows come from where.

        Args:
            own: Rows of each expert among this rank's tokens.
            fill: The number if it is the same for all, so that nobody has to be asked.
            device: Where the rows are.
        """
        # On paper, where others send what this rank sends, these numbers are real all the same.
        counts = torch.tensor(own, device="cpu" if device.type == "meta" else device)
        counts = counts.repeat(self.both.size)
        if fill is None:
            wire.all_gather(counts, counts[: self.num_experts].clone(), self.both)
        # [sending rank, its place among those that share an expert, receiving rank, its expert]
        table = counts.cpu().view(self.ep.size, self.etp.size, self.ep.size, self.local)
        arriving = table[:, :, self.ep.rank].transpose(0, 1)  # [etp, ep, e]
        batches: list[list[int]] = arriving.flatten(0, 1).tolist()
        return Traffic(
            sent=table[self.ep.rank, self.etp.rank].sum(-1).tolist(),
            received=arriving[self.etp.rank].sum(-1).tolist(),
            gathered=arriving.sum((1, 2)).tolist(),
            regrouping=plan_regrouping(batches, device),
        )


DISPATCHERS: dict[str, Callable[[ParallelState, int], Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
