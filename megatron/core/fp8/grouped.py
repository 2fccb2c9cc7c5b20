"""`grouped_linear`: one linear layer for each expert, on the tokens that were sent to it.

The rows of the input are sorted by expert. Each expert multiplies as `linear` does, with scales and
a weight cache of its own, so an expert is bit for bit the dense layer of the same path. An expert
without tokens does nothing: it records no magnitude and keeps its scales.

One autograd node serves all experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8.calibrate import measure, measure_forward
from megatron.core.fp8.gemm import Operand, gemm_nt, ready
from megatron.core.fp8.linear import accumulates, input_operands, weight_grad, weight_operands
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.primary import check_readable
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.row_codec import Arrival
from megatron.core.fp8.tensor import QuantizedTensor, put_together, taken_apart
from megatron.core.fp8.weight_grads import WeightGradQueue


@dataclass(frozen=True)
class Arrivals:
    """What may come quantized to a group of experts.

    Attributes:
        x: The input.
        grad: The gradient of the output.
    """

    x: Arrival | None = None
    grad: Arrival | None = None


NOTHING = Arrivals()


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    precisions: Sequence[LinearPrecision],
    tokens_per_expert: Sequence[int],
    later: WeightGradQueue | None = None,
    arrivals: Arrivals = NOTHING,
) -> torch.Tensor:
    """`x_e @ weight_e.T` for the rows of every expert, in its precision.

    Args:
        x: `[T, in]`, rows sorted by expert. T may be 0.
        weights: One `[out, in]` for each expert; `main_grad` as for `linear`.
        precisions: How each expert computes.
        tokens_per_expert: Rows of each expert, in order; any may be 0.
        later: As for `linear`.
        arrivals: Rows that came quantized, which are not quantized again if every expert would
            make the same of them.

    Returns:
        `[T, out]` in the type of the weights.

    Raises:
        MegatronError: The counts do not fit the experts or the rows.
    """
    counts = list(tokens_per_expert)
    check_counts(counts, len(weights), x)
    seeds = [p.rounding_seed() if torch.is_grad_enabled() else 0 for p in precisions]
    y = _grouped_linear(x, tuple(precisions), counts, later, arrivals, seeds, *weights)
    if precisions and precisions[0].state.ranges is not None:
        group = precisions[0].path.rpartition(".")[0]
        precisions[0].state.ranges.backward(group, precisions[0], y)
    return y


def check_counts(counts: Sequence[int], num_experts: int, x: torch.Tensor) -> None:
    """Refuse counts that do not fit.

    Args:
        counts: Rows of each expert.
        num_experts: Experts of this rank.
        x: `[T, in]`.

    Raises:
        MegatronError: They are not one count for each expert, or not all rows together.
    """
    if len(counts) != num_experts or sum(counts) != x.shape[0]:
        raise MegatronError(
            complaint(
                "tokens_per_expert",
                list(counts),
                f"There are {num_experts} experts and {x.shape[0]} rows",
                "Pass one count for each local expert; together they are all rows",
            )
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        precisions: tuple[LinearPrecision, ...],
        counts: list[int],
        later: WeightGradQueue | None,
        arrivals: Arrivals,
        seeds: list[int],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        made = _as_they_came(arrivals.x, x, precisions, counts, Role.INPUT)
        y = x.new_empty(x.shape[0], weights[0].shape[0], dtype=weights[0].dtype)
        kept = _Kept(ctx.needs_input_grad[0])
        parts, outputs = torch.split(x, counts), torch.split(y, counts)
        experts = zip(parts, outputs, weights, precisions, made, strict=True)
        for part, out, weight, precision, row in experts:
            if part.shape[0]:
                kept.add(*_forward(part, out, weight, precision, row))
            else:
                kept.add(None, None)
        # The parameters themselves: recomputation hands back saved tensors as new objects, and
        # those would have no main_grad.
        ctx.weights, ctx.precisions, ctx.counts = weights, precisions, counts
        ctx.shape, ctx.dtype, ctx.later, ctx.grad = x.shape, x.dtype, later, arrivals.grad
        ctx.seeds = seeds
        kept.save(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wants_dx, wants_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        made = _as_they_came(ctx.grad, grad, ctx.precisions, ctx.counts, Role.GRAD_OUTPUT)
        dx = grad.new_empty(ctx.shape, dtype=ctx.dtype) if wants_dx else None
        dx_parts = torch.split(dx, ctx.counts) if dx is not None else (None,) * len(ctx.counts)
        operands, weight_grads = _Kept.load(ctx), []
        soon = ctx.later is None or not ctx.later.is_collecting
        for i, dy in enumerate(torch.split(grad, ctx.counts)):
            weight, precision = ctx.weights[i], ctx.precisions[i]
            parts = (dy, made[i], dx_parts[i])
            job = _backward(parts, operands[i], weight, precision, wants_dw[i], soon, ctx.seeds[i])
            weight_grads.append(None if job is None else _now_or_later(job, weight, ctx.later))
        return dx, None, None, None, None, None, *weight_grads


def _as_they_came(
    arrival: Arrival | None,
    x: torch.Tensor,
    precisions: Sequence[LinearPrecision],
    counts: Sequence[int],
    role: Role,
) -> list[QuantizedTensor | None]:
    """Each expert's rows of `x` as they came, where it would quantize them the same way."""
    made: list[QuantizedTensor | None] = [None] * len(counts)
    start = 0
    rows = None if arrival is None else arrival.take(x)
    for i, (count, precision) in enumerate(zip(counts, precisions, strict=True)):
        if rows is not None and precision.active and rows.fits(precision.quantizer(role)):
            made[i] = rows.between(start, start + count)
        start += count
    return made


def _forward(
    x: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    precision: LinearPrecision,
    row: QuantizedTensor | None,
) -> tuple[Operand | None, Operand]:
    """One expert's product into `out`; returns what its backward needs of input and weight.

    `row` is the quantized input if it came like that.
    """
    if not precision.active:
        check_readable(weight)
        plain = x.to(weight.dtype)
        measure_forward(precision, plain, weight)
        out.copy_(gemm_nt(plain, weight, out_dtype=weight.dtype))
        return plain if weight.requires_grad else None, weight
    rows, kept = input_operands(x, weight, precision, made=row)
    weight_row, weight_col = weight_operands(weight, precision)
    out.copy_(
        gemm_nt(
            rows,
            weight_row,
            out_dtype=weight.dtype,
            emulation=precision.state.emulation,
            fast_accum=True,
        )
    )
    return kept, weight_col


def _backward(
    parts: tuple[torch.Tensor, QuantizedTensor | None, torch.Tensor | None],
    operands: tuple[Any, Any],
    weight: torch.Tensor,
    precision: LinearPrecision,
    wants_dw: bool,
    soon: bool,
    seed: int,
) -> Callable[[], torch.Tensor | None] | None:
    """One expert's gradient of its input, into `dx`, and how to compute that of its weight.

    What the forward kept says in which precision it ran. `soon` says that the weight's gradient
    follows at once, so both products may share a converted operand. `parts` are the gradient of the
    output, the same quantized if it came like that, and `dx`. `seed` is for random roundings.
    """
    (dy, made, dx), (x, weight_col) = parts, operands
    if not dy.shape[0]:
        return partial(_no_weight_grad, weight) if wants_dw else None
    rows: Any = dy
    dgrad_in_fp8, wgrad_in_fp8 = (isinstance(o, QuantizedTensor) for o in (weight_col, x))
    one_cast = dgrad_in_fp8 == wgrad_in_fp8
    if not (dgrad_in_fp8 or wgrad_in_fp8):
        measure(precision, Role.GRAD_OUTPUT, dy)
    kept: Any = None
    if dgrad_in_fp8:
        quantizer = precision.quantizer(Role.GRAD_OUTPUT)
        one_cast = wgrad_in_fp8 and quantizer.transposable
        if made is None and wants_dw and wgrad_in_fp8 and quantizer.hardware:
            rows, kept = precision.both(Role.GRAD_OUTPUT, dy, seed=seed)
        else:
            rows = precision.rowwise(Role.GRAD_OUTPUT, dy, seed=seed) if made is None else made
    if soon and wants_dw and one_cast:
        rows = ready(rows)
    if kept is None:
        kept = rows if one_cast else dy
    if dx is not None:
        if isinstance(weight_col, QuantizedTensor):
            emulation = precision.state.emulation
            dx.copy_(gemm_nt(rows, weight_col, out_dtype=weight.dtype, emulation=emulation))
        else:
            dx.copy_(gemm_nt(rows, weight_col.t(), out_dtype=dy.dtype))
    if not wants_dw:
        return None
    if isinstance(x, QuantizedTensor):
        return partial(_fp8_weight_grad, kept, x, weight, precision, seed)
    plain = dy if isinstance(rows, QuantizedTensor) else rows
    return partial(_plain_weight_grad, plain, x, weight)


def _fp8_weight_grad(
    dy: Operand, x: QuantizedTensor, weight: torch.Tensor, precision: LinearPrecision, seed: int
) -> torch.Tensor | None:
    dy_col = precision.column(Role.GRAD_OUTPUT, dy, seed=seed)
    x_col = precision.quantizer(Role.INPUT).column(x)
    return weight_grad(dy_col, x_col, weight, precision.state.emulation)


def _plain_weight_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor | None:
    return weight_grad(dy.t(), x.t(), weight, "fast")


def _now_or_later(
    job: Callable[[], torch.Tensor | None], weight: torch.Tensor, later: WeightGradQueue | None
) -> torch.Tensor | None:
    """Compute a weight's gradient, or leave that to the queue."""
    if later is None or not later.is_collecting or not accumulates(weight):
        return job()
    later.put(weight, job)
    return None


def _no_weight_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The zero gradient of an expert without tokens."""
    if accumulates(weight):
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    return torch.zeros_like(weight)


class _Kept:
    """What the backward needs of every expert, kept where recomputation can drop it.

    That is among the saved tensors; beside them only formats remain.

    Args:
        weights: Whether weights are needed at all.
    """

    def __init__(self, weights: bool) -> None:
        self.weights = weights
        self.tensors: list[torch.Tensor | None] = []
        self.forms: list[Any] = []

    def add(self, x: Operand | None, weight: Operand | None) -> None:
        """Keep the operands of the next expert; None where it has none."""
        for operand in (x, weight if self.weights else None):
            tensors, form = taken_apart(operand)
            self.tensors += tensors
            self.forms.append(form)

    def save(self, ctx: Any) -> None:
        """Hand the operands to autograd."""
        ctx.forms = self.forms
        ctx.save_for_backward(*self.tensors)

    @staticmethod
    def load(ctx: Any) -> list[tuple[Operand | None, Operand | None]]:
        """Input and weight operand of every expert."""
        saved = ctx.saved_tensors
        threes = zip(saved[::3], saved[1::3], saved[2::3], strict=True)
        operands = [
            put_together(tensors, form) for tensors, form in zip(threes, ctx.forms, strict=True)
        ]
        return list(zip(operands[::2], operands[1::2], strict=True))


_grouped_linear: Callable[..., torch.Tensor] = _GroupedLinear.apply
