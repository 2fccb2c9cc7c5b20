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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.core import wire
from megatron.core.comm_log import Packing
from megatron.core.fp8.grouped import NOTHING, Arrivals
from megatron.core.mesh import Axis, ParallelState
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
from megatron.core.transformer.moe.journey import PLAIN, Journeys, Route
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
class GatherRoute(Route):
    """All ranks' tokens are gathered, and results summed.

    Attributes:
        axis: The ranks.
        plan: Rows of this rank's experts.
    """

    axis: Axis
    plan: RowPlan

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """See the base class."""
        return (self.plan,)

    def along(self, plans: Sequence[RowPlan]) -> GatherRoute:
        """See the base class."""
        return replace(self, plan=plans[0])

    def packed(self, packing: Packing) -> GatherRoute:
        """See the base class."""
        return replace(self, axis=self.axis.packed(packing))

    def spread(self, tokens: Tensor) -> Tensor:
        """See the base class."""
        return to_rows(gather_along_first_dim(tokens, self.axis), self.plan)

    def collect(self, rows: Tensor) -> Tensor:
        """See the base class."""
        return reduce_scatter_along_first_dim(to_tokens(rows, self.plan), self.axis)


@dataclass(frozen=True)
class Traffic:
    """How many rows an all-to-all moves.

    Attributes:
        ep: Ranks that hold different experts.
        etp: Ranks that share experts.
        sent: Rows for each expert-parallel rank.
        received: Rows from each of them.
        gathered: Rows of each expert tensor-parallel rank.
        regrouping: Brings what arrived into the order of the experts.
    """

    ep: Axis
    etp: Axis
    sent: list[int]
    received: list[int]
    gathered: list[int]
    regrouping: RowPlan

    def there(self, x: Tensor) -> Tensor:
        """Rows, sorted by expert, to the ranks of their experts."""
        x = exchange_rows(x, self.sent, self.received, self.ep)
        return gather_rows(x, self.gathered, self.etp)

    def back(self, x: Tensor) -> Tensor:
        """Sum the rows of ranks that share experts, and send them back."""
        x = reduce_scatter_rows(x, self.gathered, self.etp)
        return exchange_rows(x, self.received, self.sent, self.ep)


@dataclass(frozen=True)
class ExchangeRoute(Route):
    """A copy of a token goes to each of its experts.

    Attributes:
        plan: Rows of all experts that this rank's tokens chose.
        traffic: How they travel; None if all experts are here.
    """

    plan: RowPlan
    traffic: Traffic | None

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """See the base class."""
        return (self.plan,) if self.traffic is None else (self.plan, self.traffic.regrouping)

    def along(self, plans: Sequence[RowPlan]) -> ExchangeRoute:
        """See the base class."""
        traffic = self.traffic
        if traffic is not None:
            traffic = replace(traffic, regrouping=plans[1])
        return ExchangeRoute(plans[0], traffic)

    def packed(self, packing: Packing) -> ExchangeRoute:
        """See the base class."""
        traffic = self.traffic
        if traffic is None:
            return self
        ep, etp = traffic.ep.packed(packing), traffic.etp.packed(packing)
        return replace(self, traffic=replace(traffic, ep=ep, etp=etp))

    def spread(self, tokens: Tensor) -> Tensor:
        """See the base class."""
        rows = to_rows(tokens, self.plan)
        if self.traffic is None:
            return rows
        return to_rows(self.traffic.there(rows), self.traffic.regrouping)

    def collect(self, rows: Tensor) -> Tensor:
        """See the base class."""
        if self.traffic is not None:
            rows = self.traffic.back(to_tokens(rows, self.traffic.regrouping))
        return to_tokens(rows, self.plan)


@dataclass(frozen=True)
class Dispatched:
    """What the local experts get, and how to send their results back.

    Attributes:
        rows: `[R, h]`, sorted by local expert.
        tokens_per_expert: Rows of each local expert.
        weights: fp32 `[R]`.
        route: How they came here.
        arrivals: What came, or comes on the way back, in FP8.
    """

    rows: Tensor
    tokens_per_expert: list[int]
    weights: Tensor
    route: Route
    arrivals: Arrivals = NOTHING


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
        journeys: In which form tokens and gradients travel.
    """

    def __init__(self, mesh: ParallelState, num_experts: int, journeys: Journeys = PLAIN) -> None:
        self.axis, self.num_experts, self.journeys = mesh.ep_etp, num_experts, journeys
        self.local = num_experts // mesh.ep.size
        self.first = mesh.ep.rank * self.local

    def dispatch(self, tokens: Tensor, routing: Routing, fill: int | None) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        weights = gather_along_first_dim(routing.weights, self.axis)
        experts = all_gather(routing.experts, self.axis)
        fill = None if fill is None else fill * self.axis.size
        last = self.first + self.local
        plan = plan_rows(experts, self.first, last, fill, self.num_experts)
        route = GatherRoute(self.axis, plan)
        rows, arrivals = self.journeys.there(tokens, route)
        return Dispatched(rows, plan.counts, weights_of_rows(weights, plan), route, arrivals)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.journeys.back(results, dispatched.route, dispatched.arrivals)


class AllToAllDispatcher:
    """Every rank sends tokens to where their experts are.

    Args:
        mesh: The process mesh.
        num_experts: E.
        journeys: In which form tokens and gradients travel.
    """

    def __init__(self, mesh: ParallelState, num_experts: int, journeys: Journeys = PLAIN) -> None:
        self.ep, self.etp, self.both = mesh.ep, mesh.etp, mesh.ep_etp
        self.num_experts, self.local = num_experts, num_experts // mesh.ep.size
        self.journeys = journeys

    def dispatch(self, tokens: Tensor, routing: Routing, fill: int | None) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        plan = plan_rows(routing.experts, 0, self.num_experts, fill)
        weights, counts, traffic = weights_of_rows(routing.weights, plan), plan.counts, None
        if self.both.size > 1:
            traffic = self._traffic(plan.counts, fill, tokens.device)
            order = traffic.regrouping
            weights = traffic.there(weights).index_select(0, order.slot_of_row)
            counts = order.counts
        route = ExchangeRoute(plan, traffic)
        rows, arrivals = self.journeys.there(tokens, route)
        return Dispatched(rows, counts, weights, route, arrivals)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.journeys.back(results, dispatched.route, dispatched.arrivals)

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
            ep=self.ep,
            etp=self.etp,
            sent=table[self.ep.rank, self.etp.rank].sum(-1).tolist(),
            received=arriving[self.etp.rank].sum(-1).tolist(),
            gathered=arriving.sum((1, 2)).tolist(),
            regrouping=plan_regrouping(batches, device),
        )


DISPATCHERS: dict[str, Callable[..., Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
