"""`linear`: y = x w^T + b with the precision of its layer. The project's one linear autograd node.

Three products: `y = nt(x, w)`, `dx = nt(dy, w^T)`, `dw = nt(dy^T, x^T)`. In FP8 each operand is
quantized once: the input and the weight in the forward, the output gradient in the backward. The
bias gradient sums the output gradient as it arrived. Each product may be in high precision instead
(`Decision.runs`); an operand is then quantized for the others only.

Weight gradients accumulate into `weight.main_grad` where a parameter has that attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.capability import gemm_dtype
from megatron.core.fp8.calibrate import measure_forward, measure_gradient
from megatron.core.fp8.comm import PLAIN, Sharding, Transfers, gather_rows, tensor_of
from megatron.core.fp8.gemm import Operand, Product, gemm_nt, gemm_nt_accumulate, ready
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.primary import check_readable
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor, put_together, taken_apart
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import Axis


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: LinearPrecision,
    *,
    gather: Axis | None = None,
    scatter: Axis | None = None,
    transfers: Transfers = PLAIN,
    is_first_microbatch: bool | None = None,
    after_backward: Callable[[], None] | None = None,
    later: WeightGradQueue | None = None,
    row: QuantizedTensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` in the layer's precision.

    Args:
        x: `[..., in]`, any float type. With `gather`, this rank's part of the first dimension.
        weight: `[out, in]`. With an attribute `main_grad` (same shape) its gradient is added
            there and autograd gets none.
        bias: `[out]` or None; `main_grad` as for the weight. None with `scatter`: it belongs
            behind the sum.
        precision: How the layer computes.
        gather: Axis along which the first dimension of `x` is gathered (sequence parallelism).
            Quantized bytes travel, again in backward, where the input gradient is
            reduce-scattered.
        scatter: Axis over which the output is summed; this rank keeps its part of the first
            dimension. In backward the output gradient is gathered, as quantized bytes where both
            products that read it are in FP8. Not together with `gather`.
        transfers: How rows travel with `gather` or `scatter`.
        is_first_microbatch: Hint on weight caching; see `LinearPrecision.quantize_weight`.
        after_backward: Called when the FP8 backward of this call has finished.
        later: Takes the product of the weight's gradient while it is collecting, if there is a
            `main_grad`.
        row: The input as it was quantized already, in place of the values of `x`.

    Returns:
        `[..., out]` in the type of `weight`.
    """
    gather = None if gather is None or gather.size == 1 else gather
    scatter = None if scatter is None or scatter.size == 1 else scatter
    sharding = Sharding(gather, scatter, transfers)
    hint = is_first_microbatch
    y = _multiply(x, weight, bias, precision, sharding, hint, after_backward, later, row)
    if precision.state.ranges is not None:
        precision.state.ranges.backward(precision.path, precision, y)
    return y


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: LinearPrecision,
    sharding: Sharding,
    hint: bool | None,
    after_backward: Callable[[], None] | None,
    later: WeightGradQueue | None,
    row: QuantizedTensor | None,
) -> torch.Tensor:
    """`linear`, in the precision of now."""
    if precision.active:
        seed = precision.rounding_seed() if torch.is_grad_enabled() else 0
        return _fp8_linear(
            x, weight, bias, precision, sharding, hint, after_backward, later, seed, row
        )
    check_readable(weight)
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    measure_forward(precision, x, weight)
    native = gemm_dtype(weight.dtype, weight.device) == weight.dtype
    if sharding.is_local and native and not accumulates(weight) and not accumulates(bias):
        y = F.linear(x, weight, bias)
    else:
        y = _plain_linear(x, weight, bias, sharding, later)
    measure_gradient(precision, y)
    return y


def accumulates(parameter: torch.Tensor | None) -> bool:
    """Whether the gradient of a parameter is added to its `main_grad`."""
    return getattr(parameter, "main_grad", None) is not None


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`[..., k]` as `[rows, k]`."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _output_shape(x: torch.Tensor, width: int, sharding: Sharding) -> tuple[int, ...]:
    lead = list(x.shape[:-1])
    if sharding.gather is not None:
        lead[0] *= sharding.gather.size
    if sharding.scatter is not None:
        lead[0] //= sharding.scatter.size
    return (*lead, width)


def _bias_grad(dy: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Column sums of the unquantized output gradient."""
    if accumulates(bias):
        main_grad: torch.Tensor = bias.main_grad  # type: ignore[attr-defined]
        main_grad.add_(dy.sum(0))
        bias.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    return dy.sum(0).to(bias.dtype)


def weight_grad(
    dy_col: Operand, x_col: Operand, weight: torch.Tensor, emulation: str
) -> torch.Tensor | None:
    """`dy^T x`, added to `main_grad` or returned."""
    if accumulates(weight):
        main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
        gemm_nt_accumulate(dy_col, x_col, main_grad, emulation=emulation)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    return gemm_nt(dy_col, x_col, out_dtype=weight.dtype, emulation=emulation)


class _PlainLinear(torch.autograd.Function):
    """High precision, with gradient accumulation and gathering."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sharding: Sharding,
        later: WeightGradQueue | None,
    ) -> torch.Tensor:
        local = _flat(x)
        # The weight is saved too so that autograd notices if it is changed before the backward.
        ctx.save_for_backward(local if weight.requires_grad else None, weight)
        _keep_parameters(ctx, weight, bias)
        ctx.sharding, ctx.later, ctx.x_shape, ctx.x_dtype = sharding, later, x.shape, x.dtype
        y = sharding.multiply(local, Product(weight, weight.dtype, bias))
        return y.view(_output_shape(x, weight.shape[0], sharding))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        weight, bias, sharding = ctx.weight, ctx.bias, ctx.sharding
        dy = _flat(grad)
        dx = dw = db = None
        queue = _open_queue(ctx)
        fetch_x = _start_gather(ctx, x, queue)
        finish_dx, fetch_dy = None, partial(_all_rows, dy, sharding.scatter)
        if ctx.needs_input_grad[0]:
            rows = ready(dy) if sharding.scatter is None and queue is None else dy
            finish_dx, fetch_dy = sharding.input_grad(rows, Product(weight.t(), dy.dtype))
        if ctx.needs_input_grad[1]:
            job = partial(_weight_grad_of, fetch_dy, fetch_x, weight)
            dw = _now_or_later(job, weight, queue)
        if ctx.needs_input_grad[2]:
            db = _bias_grad(dy, bias)
        if finish_dx is not None:
            dx = finish_dx().view(ctx.x_shape).to(ctx.x_dtype)
        return dx, dw, db, None, None


class _Fp8Linear(torch.autograd.Function):
    """FP8 by the layer's quantizers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        precision: LinearPrecision,
        sharding: Sharding,
        hint: bool | None,
        after_backward: Callable[[], None] | None,
        later: WeightGradQueue | None,
        seed: int,
        row: QuantizedTensor | None,
    ) -> torch.Tensor:
        local = _flat(x)
        rows, saved_x = input_operands(local, weight, precision, sharding.gather, row)
        weight_row, weight_col = weight_operands(weight, precision, hint)
        emulation = precision.state.emulation
        y = sharding.multiply(
            rows, Product(weight_row, weight.dtype, bias, emulation, fast_accum=True)
        )
        ctx.precision, ctx.sharding, ctx.emulation = precision, sharding, emulation
        ctx.after_backward, ctx.later, ctx.seed = after_backward, later, seed
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.wgrad_in_fp8 = precision.decision.wgrad
        _keep_parameters(ctx, weight, bias)
        _save_operands(ctx, saved_x, weight_col if ctx.needs_input_grad[0] else None)
        return y.view(_output_shape(x, weight.shape[0], sharding))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_col = _saved_operands(ctx)
        weight, bias = ctx.weight, ctx.bias
        dy = _flat(grad)
        dx = dw = db = None
        queue = _open_queue(ctx)
        fetch_x = _start_gather(ctx, x, queue)
        finish_dx, fetch_dy = _fp8_input_grad(ctx, dy, weight_col, queue is None)
        if ctx.needs_input_grad[1]:
            make_dw = _fp8_weight_grad_of if ctx.wgrad_in_fp8 else _plain_weight_grad_of
            job = partial(make_dw, fetch_dy, fetch_x, weight, ctx.precision, ctx.seed)
            dw = _now_or_later(job, weight, queue)
        if bias is not None and ctx.needs_input_grad[2]:
            db = _bias_grad(dy, bias)
        if finish_dx is not None:
            dx = finish_dx().view(ctx.x_shape).to(ctx.x_dtype)
        if ctx.after_backward is not None:
            ctx.after_backward()
        return dx, dw, db, None, None, None, None, None, None, None


def input_operands(
    local: torch.Tensor,
    weight: torch.Tensor,
    precision: LinearPrecision,
    axis: Axis | None = None,
    made: QuantizedTensor | None = None,
) -> tuple[Operand, Operand | None]:
    """The input as the forward product takes it, and what the weight's gradient needs of it.

    Args:
        local: This rank's `[rows, in]`.
        weight: `[out, in]`.
        precision: Of the layer.
        axis: Ranks whose rows are gathered.
        made: `local` as its quantizer makes it, if it came like that.

    Returns:
        Each quantized or as it is; the second is None if the weight needs no gradient.
    """
    decision, quantizer = precision.decision, precision.quantizer(Role.INPUT)
    plain = local if decision.fprop and decision.wgrad else local.to(weight.dtype)
    if decision.fprop and decision.wgrad and weight.requires_grad and made is None:
        return precision.both(Role.INPUT, local, axis=axis)
    quantized: QuantizedTensor | None = None
    if decision.fprop or (decision.wgrad and weight.requires_grad):
        quantized = precision.rowwise(Role.INPUT, local, axis=axis) if made is None else made
    rows = quantized if decision.fprop and quantized is not None else plain
    if not weight.requires_grad:
        return rows, None
    if decision.wgrad and quantized is not None:
        return rows, quantizer.keep(local, quantized, axis=axis)
    return rows, plain


def weight_operands(
    weight: torch.Tensor, precision: LinearPrecision, hint: bool | None = None
) -> tuple[Operand, Operand]:
    """The weight as forward product and input gradient take it: quantized, or as it is.

    Args:
        weight: `[out, in]`.
        precision: Of the layer.
        hint: See `LinearPrecision.quantize_weight`.

    Returns:
        `[out, in]`, and `[in, out]` if quantized, else the weight itself.
    """
    decision = precision.decision
    if not (decision.fprop or decision.dgrad):
        return weight, weight
    row, col = precision.quantize_weight(weight, hint)
    return row if decision.fprop else weight, col if decision.dgrad else weight


def _fp8_input_grad(
    ctx: Any, dy: torch.Tensor, weight_col: Operand | None, soon: bool
) -> tuple[Callable[[], torch.Tensor] | None, Callable[[], Operand]]:
    """Quantize the output's gradient and start on the input's.

    Args:
        ctx: Of the backward.
        dy: The output's gradient as autograd hands it over, `[rows, out]`.
        weight_col: `[in, out]`, or the plain weight, `[out, in]`; None if the input wants no
            gradient.
        soon: Whether the weight's gradient follows at once.

    Returns:
        The input's gradient, and all rows of the output's for the weight's gradient: quantized if
        one cast serves both.
    """
    sharding, precision = ctx.sharding, ctx.precision
    if isinstance(weight_col, torch.Tensor):
        return _plain_input_grad(ctx, dy, weight_col, soon)
    plain: torch.Tensor | None = None
    quantizer = precision.quantizer(Role.GRAD_OUTPUT)
    one_cast = ctx.wgrad_in_fp8 and quantizer.transposable
    if weight_col is not None and _one_kernel(ctx, quantizer.hardware):
        rows, kept = precision.both(Role.GRAD_OUTPUT, dy, seed=ctx.seed)
        product = Product(weight_col, ctx.weight.dtype, emulation=ctx.emulation)
        return sharding.input_grad(rows, product)[0], lambda: kept
    if ctx.needs_input_grad[1] and not one_cast:
        # Both forms are needed whole. They travel as one, the wider one.
        plain = tensor_of(_all_rows(dy, sharding.scatter))
        sharding = replace(sharding, scatter=None)
    if weight_col is None:
        if plain is not None or not ctx.needs_input_grad[1]:
            return None, lambda: dy if plain is None else plain
        rows = precision.rowwise(Role.GRAD_OUTPUT, dy, axis=sharding.scatter, seed=ctx.seed)
        return None, partial(_all_rows, rows, sharding.scatter, ctx.weight.dtype.itemsize)
    whole = dy if plain is None else plain
    rows = precision.rowwise(Role.GRAD_OUTPUT, whole, axis=sharding.scatter, seed=ctx.seed)
    if sharding.scatter is None and soon:
        rows = ready(rows)
    product = Product(weight_col, ctx.weight.dtype, emulation=ctx.emulation)
    finish_dx, fetch_dy = sharding.input_grad(rows, product)
    return finish_dx, fetch_dy if plain is None else lambda: plain


def _one_kernel(ctx: Any, hardware: bool) -> bool:
    """Whether one kernel casts the output's gradient for both products that want it."""
    both = ctx.needs_input_grad[1] and ctx.wgrad_in_fp8
    return bool(both and hardware and ctx.sharding.scatter is None)


def _plain_input_grad(
    ctx: Any, dy: torch.Tensor, weight: torch.Tensor, soon: bool
) -> tuple[Callable[[], torch.Tensor], Callable[[], Operand]]:
    """As `_fp8_input_grad`, for an input gradient in high precision."""
    rows = ready(dy) if ctx.sharding.scatter is None and soon and not ctx.wgrad_in_fp8 else dy
    finish_dx, fetch_dy = ctx.sharding.input_grad(rows, Product(weight.t(), weight.dtype))
    if not ctx.wgrad_in_fp8:
        return finish_dx, fetch_dy
    # Transfers widen what they multiply; the cast sees the gradient as autograd made it.
    return finish_dx, lambda: tensor_of(fetch_dy()).to(dy.dtype)


def _weight_grad_of(
    fetch_dy: Callable[[], Operand], fetch_x: Callable[[], Operand], weight: torch.Tensor
) -> torch.Tensor | None:
    return weight_grad(fetch_dy().t(), fetch_x().t(), weight, "fast")


def _fp8_weight_grad_of(
    fetch_dy: Callable[[], Operand],
    fetch_x: Callable[[], Operand],
    weight: torch.Tensor,
    precision: LinearPrecision,
    seed: int,
) -> torch.Tensor | None:
    """Of quantized operands."""
    dy_col = precision.column(Role.GRAD_OUTPUT, fetch_dy(), seed=seed)
    x_col = precision.quantizer(Role.INPUT).column(fetch_x())
    return weight_grad(dy_col, x_col, weight, precision.state.emulation)


def _plain_weight_grad_of(
    fetch_dy: Callable[[], Operand],
    fetch_x: Callable[[], Operand],
    weight: torch.Tensor,
    precision: LinearPrecision,
    seed: int,
) -> torch.Tensor | None:
    """Where the weight's gradient is not in FP8, but the input's is."""
    del seed
    dy = tensor_of(fetch_dy()).to(weight.dtype)
    return weight_grad(dy.t(), fetch_x().t(), weight, precision.state.emulation)


def _now_or_later(
    job: Callable[[], torch.Tensor | None], weight: torch.Tensor, queue: WeightGradQueue | None
) -> torch.Tensor | None:
    """Compute a weight's gradient, or leave that to the queue."""
    if queue is None:
        return job()
    queue.put(weight, job)
    return None


def _open_queue(ctx: Any) -> WeightGradQueue | None:
    """The queue that takes the weight's gradient; None to compute it at once."""
    later: WeightGradQueue | None = ctx.later
    if later is None or not later.is_collecting or not accumulates(ctx.weight):
        return None
    return later


def _start_gather(ctx: Any, x: Operand, queue: WeightGradQueue | None) -> Callable[[], Operand]:
    """All rows of the layer's input: on their way, unless they are wanted later only."""
    sharding: Sharding = ctx.sharding
    if sharding.gather is None or not ctx.needs_input_grad[1]:
        return lambda: x
    if queue is not None:
        return partial(gather_rows, x, sharding.gather, ctx.weight.dtype.itemsize)
    return sharding.transfers.start_gather(x, sharding.gather, ctx.weight.dtype.itemsize)


def _all_rows(rows: Operand, axis: Axis | None, itemsize: int = 2) -> Operand:
    return rows if axis is None else gather_rows(rows, axis, itemsize)


def _keep_parameters(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Keep the parameters themselves: recomputation hands back saved tensors as new objects.

    Those would have no `main_grad`.
    """
    ctx.weight, ctx.bias = weight, bias


def _save_operands(ctx: Any, x: Operand | None, weight_col: Operand | None) -> None:
    """Keep operands where activation recomputation can drop them: among the saved tensors."""
    x_tensors, ctx.x_form = taken_apart(x)
    weight_tensors, ctx.weight_form = taken_apart(weight_col)
    ctx.save_for_backward(*x_tensors, *weight_tensors)


def _saved_operands(ctx: Any) -> tuple[Any, Any]:
    saved = ctx.saved_tensors
    return put_together(saved[:3], ctx.x_form), put_together(saved[3:], ctx.weight_form)


_plain_linear: Callable[..., torch.Tensor] = _PlainLinear.apply
_fp8_linear: Callable[..., torch.Tensor] = _Fp8Linear.apply
