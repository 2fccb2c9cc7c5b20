"""A mixture-of-experts layer: route, send, compute, bring back.

Shape legend: s local sequence, b microbatch, h hidden, T local tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.tensor_parallel.mappings import (
    gather_replicated_along_first_dim,
    scatter_along_first_dim,
)
from megatron.core.transformer.moe.dispatcher import DISPATCHERS
from megatron.core.transformer.moe.journey import journeys_of
from megatron.core.transformer.moe.router import Router, Routing
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.build import Build


@dataclass(frozen=True)
class MoESubmodules:
    """The experts, and the one that every token passes, if there is one."""

    experts: ModuleSpec
    shared_experts: ModuleSpec | None = None


class MoELayer(nn.Module):
    """Takes the place of the MLP in a transformer layer.

    Every rank routes tokens of its own. Tensor-parallel ranks that all hold the whole sequence
    take a part of it each, so that no token is counted, or computed, twice.

    Args:
        build: Configuration, mesh, path and the rest that the parts need.
        submodules: Specifications of the experts.
        layer_number: 1-based number of the layer in the whole model.

    Attributes:
        precision_rows: Lines of the precision table about what travels.
    """

    shared_experts: nn.Module | None

    def __init__(self, *, build: Build, submodules: MoESubmodules, layer_number: int) -> None:
        super().__init__()
        config, mesh = build.config, build.mesh
        self._auxiliary, self._tp = build.auxiliary, mesh.tp
        self._is_split = config.sequence_parallel and mesh.tp.size > 1
        self._fills_up = config.moe_pad_expert_input_to_capacity
        self.router = Router(build=build.at("router"), layer_number=layer_number)
        journeys, self.precision_rows = journeys_of(build)
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.dispatcher = dispatcher(mesh, config.num_experts, journeys)
        self.experts = build_module(
            submodules.experts,
            build=build.at("experts"),
            num_local_experts=config.num_experts // mesh.ep.size,
        )
        self.shared_experts = None
        if submodules.shared_experts is not None:
            self.shared_experts = build_module(
                submodules.shared_experts, build=build.at("shared_experts")
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """`[s or s/tp, b, h]` to the same shape, without the residual."""
        if self._is_split or self._tp.size == 1:
            output = self._route(hidden, self.router(hidden))
        else:
            output = self._route_in_parts(hidden)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden)
        return output

    def _route_in_parts(self, hidden: Tensor) -> Tensor:
        """Run the experts on a sequence that all tensor-parallel ranks hold."""
        s = hidden.shape[0]
        missing = -s % self._tp.size  # in generation any length may come along
        if missing:
            hidden = nn.functional.pad(hidden, (0, 0, 0, 0, 0, missing))
        part = scatter_along_first_dim(hidden, self._tp)
        routing = self.router(part)
        if missing:
            routing = self._without_filling(routing, s - self._tp.rank * part.shape[0], part)
        output = gather_replicated_along_first_dim(self._route(part, routing), self._tp)
        return output[:s]

    def _without_filling(self, routing: Routing, real: int, part: Tensor) -> Routing:
        """Send no tokens behind the first `real` positions of this rank's part anywhere."""
        experts = routing.experts.view(*part.shape[:2], -1).clone()
        experts[max(real, 0) :] = self.router.num_experts
        return replace(routing, experts=experts.flatten(0, 1))

    def _route(self, hidden: Tensor, routing: Routing) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        fill = None
        if self._fills_up:
            capacity = self.router.capacity(tokens.shape[0])
            fill = None if capacity is None else min(capacity, tokens.shape[0])
        sent = self.dispatcher.dispatch(tokens, routing, fill)
        results = self.experts(sent.rows, sent.tokens_per_expert, sent.weights, sent.arrivals)
        output = self.dispatcher.combine(results, sent).view(hidden.shape)
        return self._auxiliary.attach(output, routing.loss)
