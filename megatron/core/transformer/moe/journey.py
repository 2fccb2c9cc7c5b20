"""In which form tokens travel to their experts, and gradients to the experts' results.

There are four journeys. On two of them a rank's tokens are copied to rows: the tokens themselves
and, in the backward pass, the gradients of the output. Those may travel in FP8: each token is
quantized once, on the rank that has it, and its bytes are copied. On the other two, rows are summed
to tokens: the experts' results and the gradients of the rows. Sums are not quantized.

A token is quantized even where all experts are on its rank and nothing travels, so that the layout
does not change what a model computes.

Shape legend: T local tokens, h hidden, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.comm_log import Packing
from megatron.core.fp8.grouped import NOTHING, Arrivals
from megatron.core.fp8.precision import PrecisionRow, dtype_name
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.row_codec import Arrival, CameRows, RowCodec, row_codec, values_of
from megatron.core.transformer.moe.permutation import RowPlan

if TYPE_CHECKING:
    from megatron.core.build import Build
    from megatron.core.fp8 import Fp8State


class Route(ABC):
    """The way from tokens to rows and back. Both directions can be differentiated."""

    @property
    @abstractmethod
    def plans(self) -> tuple[RowPlan, ...]:
        """Where rows come from, at every stage."""

    @abstractmethod
    def along(self, plans: Sequence[RowPlan]) -> Route:
        """The same way with its plans replaced."""

    @abstractmethod
    def packed(self, packing: Packing) -> Route:
        """The same way for what is packed."""

    @abstractmethod
    def spread(self, tokens: Tensor) -> Tensor:
        """Copy tokens `[T, ...]` to the rows `[R, ...]` of this rank's experts, any type."""

    @abstractmethod
    def collect(self, rows: Tensor) -> Tensor:
        """Sum rows `[R, h]` to tokens `[T, h]`."""


@dataclass(frozen=True)
class Journeys:
    """The form of each journey of one layer.

    Attributes:
        tokens: How tokens are packed; None for as they are.
        gradients: How gradients of the output are packed.
        fp8: Says whether FP8 is switched on, in a run that uses it; None in one that does not.
    """

    tokens: RowCodec | None = None
    gradients: RowCodec | None = None
    fp8: Fp8State | None = None

    def there(self, tokens: Tensor, route: Route) -> tuple[Tensor, Arrivals]:
        """Tokens `[T, h]` to rows `[R, h]`; and where to leave what comes in FP8."""
        if self.fp8 is not None and not self.fp8.enabled:
            return route.spread(tokens), NOTHING
        arrivals = Arrivals(_arrival_for(self.tokens), _arrival_for(self.gradients))
        if self.tokens is None:
            return route.spread(tokens), arrivals
        return _spread(tokens, route, self.tokens, arrivals.x), arrivals

    def back(self, results: Tensor, route: Route, arrivals: Arrivals) -> Tensor:
        """Results `[R, h]` to tokens `[T, h]`.

        Args:
            results: Of the experts.
            route: The way the tokens came.
            arrivals: What `there` returned.
        """
        if arrivals.grad is None:
            return route.collect(results)
        return _collect(results, route, self.gradients, arrivals.grad)


PLAIN = Journeys()


def _arrival_for(codec: RowCodec | None) -> Arrival | None:
    return None if codec is None else Arrival()


def _send(x: Tensor, route: Route, codec: RowCodec, arrival: Arrival) -> Tensor:
    """Quantize `x` `[T, h]`, copy it to rows, leave them in `arrival`, return their values."""
    lines = route.packed(codec.packing(x)).spread(codec.pack(x))
    rows = codec.unpack(lines, x.shape[1])
    values = values_of(rows, x.dtype)
    arrival.put(CameRows(rows, codec), values)
    return values


def _keep_route(ctx: Any, route: Route) -> None:
    """Keep the way back where recomputation can drop it: among the saved tensors.

    To be called behind the exchange, for the reason that `permutation` gives.
    """
    tensors = [t for plan in route.plans for t in (plan.slot_of_row, plan.row_of_slot)]
    ctx.save_for_backward(*tensors)
    nothing = tensors[0].new_empty(0)
    ctx.route = route.along(
        [replace(p, slot_of_row=nothing, row_of_slot=nothing) for p in route.plans]
    )


def _kept_route(ctx: Any) -> Route:
    route: Route = ctx.route
    saved = ctx.saved_tensors
    pairs = zip(saved[::2], saved[1::2], strict=True)
    return route.along(
        [
            replace(plan, slot_of_row=slots, row_of_slot=rows)
            for plan, (slots, rows) in zip(route.plans, pairs, strict=True)
        ]
    )


class _Spread(torch.autograd.Function):
    """Tokens in FP8; their gradients come back as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, codec: RowCodec, arrival: Arrival) -> Tensor:
        rows = _send(x, route, codec, arrival)
        _keep_route(ctx, route)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _kept_route(ctx).collect(grads[0]), None, None, None


class _Collect(torch.autograd.Function):
    """Results as they are; their gradients come in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, codec: RowCodec, arrival: Arrival) -> Tensor:
        tokens = route.collect(x)
        _keep_route(ctx, route)
        ctx.codec, ctx.arrival = codec, arrival
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _send(grads[0], _kept_route(ctx), ctx.codec, ctx.arrival), None, None, None


_spread: Callable[..., Tensor] = _Spread.apply
_collect: Callable[..., Tensor] = _Collect.apply


def journeys_of(build: Build) -> tuple[Journeys, list[PrecisionRow]]:
    """The journeys of one layer, and their lines in the precision table.

    A layer whose experts the FP8 policy keeps in high precision sends in high precision, too.

    Args:
        build: Of the layer.
    """
    config = build.config
    there, why_there = _codec(build, config.moe_dispatch_fwd_dtype, Role.INPUT)
    back, why_back = _codec(build, config.moe_combine_bwd_dtype, Role.GRAD_OUTPUT)
    rows = []
    for name, wanted, codec, why in (
        ("dispatch", config.moe_dispatch_fwd_dtype, there, why_there),
        ("combine backward", config.moe_combine_bwd_dtype, back, why_back),
    ):
        if wanted != "bf16":
            plain = dtype_name(build.params_dtype)
            sent = plain if codec is None else f"fp8 {codec.fmt.name} {wanted}"
            rows.append(PrecisionRow(f"{build.path}.dispatcher", name, sent, sent, "bytes", why))
    return Journeys(there, back, build.fp8 if build.fp8.recipe is not None else None), rows


# The product that reads the rows of each role.
_READERS = {Role.INPUT: ("linear_fc1", "fprop"), Role.GRAD_OUTPUT: ("linear_fc2", "dgrad")}


def _codec(build: Build, name: str, role: Role) -> tuple[RowCodec | None, str]:
    """How rows for the experts are packed, and why not in FP8 although asked for."""
    fp8, (layer, gemm) = build.fp8, _READERS[role]
    decision = fp8.policy.decide(f"{build.path}.experts.{layer}")
    if fp8.recipe is not None and not decision.runs(gemm):
        return None, decision.why(gemm)
    return row_codec(name, decision.recipe, role, fold=fp8.emulation == "fast"), ""
