"""`linear`: y = x w^T + b with the precision of its layer. The project's one linear autograd node.

Three products: `y = nt(x, w)`, `dx = nt(dy, w^T)`, `dw = nt(dy^T, x^T)`. In FP8 each operand is
quantized once: the input and the weight in the forward, the output gradient in the backward. The
bias gradient sums the output gradient as it arrived.

Weight gradients accumulate into `weight.main_grad` where a parameter has that attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.capability import gemm_dtype
from megatron.core.fp8.comm import gather_rows
from megatron.core.fp8.gemm import Operand, gemm_nt, gemm_nt_accumulate
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: LinearPrecision,
    *,
    gather: Axis | None = None,
    is_first_microbatch: bool | None = None,
    after_backward: Callable[[], None] | None = None,
    later: WeightGradQueue | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` in the layer's precision.

    Args:
        x: `[..., in]`, any float type. With `gather`, this rank's part of the first dimension.
        weight: `[out, in]`. With an attribute `main_grad` (same shape) its gradient is added
            there and autograd gets none.
        bias: `[out]` or None; `main_grad` as for the weight.
        precision: How the layer computes.
        gather: Axis along which the first dimension of `x` is gathered (sequence parallelism).
            Quantized bytes travel, again in backward, where the input gradient is
            reduce-scattered.
        is_first_microbatch: Hint on weight caching; see `LinearPrecision.quantize_weight`.
        after_backward: Called when the FP8 backward of this call has finished.
        later: Takes the product of the weight's gradient while it is collecting, if there is a
            `main_grad`.

    Returns:
        `[..., out]` in the type of `weight`.
    """
    if gather is not None and gather.size == 1:
        gather = None
    if precision.active:
        return _fp8_linear(
            x, weight, bias, precision, gather, is_first_microbatch, after_backward, later
        )
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    native = gemm_dtype(weight.dtype, weight.device) == weight.dtype
    if gather is None and native and not _accumulates(weight) and not _accumulates(bias):
        return F.linear(x, weight, bias)
    return _plain_linear(x, weight, bias, gather, later)


def _accumulates(parameter: torch.Tensor | None) -> bool:
    return getattr(parameter, "main_grad", None) is not None


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`[..., k]` as `[rows, k]`."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _output_shape(x: torch.Tensor, width: int, gather: Axis | None) -> tuple[int, ...]:
    lead = list(x.shape[:-1])
    if gather is not None:
        lead[0] *= gather.size
    return (*lead, width)


def _bias_grad(dy: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Column sums of the unquantized output gradient."""
    if _accumulates(bias):
        main_grad: torch.Tensor = bias.main_grad  # type: ignore[attr-defined]
        main_grad.add_(dy.sum(0))
        bias.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    return dy.sum(0).to(bias.dtype)


def _weight_grad(
    dy_col: Operand, x_col: Operand, weight: torch.Tensor, emulation: str
) -> torch.Tensor | None:
    """`dy^T x`, added to `main_grad` or returned."""
    if _accumulates(weight):
        main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
        gemm_nt_accumulate(dy_col, x_col, main_grad, emulation=emulation)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None
    return gemm_nt(dy_col, x_col, out_dtype=weight.dtype, emulation=emulation)


def _now_or_later(
    job: Callable[[], torch.Tensor | None], weight: torch.Tensor, later: WeightGradQueue | None
) -> torch.Tensor | None:
    """Compute a weight's gradient, or leave that to the queue."""
    if later is None or not later.is_collecting or not _accumulates(weight):
        return job()
    later.put(weight, job)
    return None


def _input_grad(dx: torch.Tensor, ctx: Any) -> torch.Tensor:
    """Back to the shape, shard and type of the input."""
    if ctx.gather is not None:
        shape = list(ctx.x_shape)
        shape[0] *= ctx.gather.size
        dx = reduce_scatter(dx.view(shape), ctx.gather)
    return dx.view(ctx.x_shape).to(ctx.x_dtype)


class _PlainLinear(torch.autograd.Function):
    """High precision, with gradient accumulation and gathering."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gather: Axis | None,
        later: WeightGradQueue | None,
    ) -> torch.Tensor:
        local = _flat(x)
        whole = _flat(all_gather(x, gather)) if gather is not None else local
        # The weight is saved too so that autograd notices if it is changed before the backward.
        ctx.save_for_backward(local if weight.requires_grad else None, weight)
        _keep_parameters(ctx, weight, bias)
        ctx.gather, ctx.x_shape, ctx.x_dtype = gather, x.shape, x.dtype
        ctx.later = later
        y = gemm_nt(whole, weight, out_dtype=weight.dtype, bias=bias)
        return y.view(_output_shape(x, weight.shape[0], gather))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        weight, bias = ctx.weight, ctx.bias
        dy = _flat(grad)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _input_grad(gemm_nt(dy, weight.t(), out_dtype=dy.dtype), ctx)
        if ctx.needs_input_grad[1]:
            job = partial(_plain_weight_grad, dy, x, ctx.x_shape, weight, ctx.gather)
            dw = _now_or_later(job, weight, ctx.later)
        if ctx.needs_input_grad[2]:
            db = _bias_grad(dy, bias)
        return dx, dw, db, None, None


def _plain_weight_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    x_shape: torch.Size,
    weight: torch.Tensor,
    gather: Axis | None,
) -> torch.Tensor | None:
    if gather is not None:
        x = _flat(all_gather(x.view(x_shape), gather))
    return _weight_grad(dy.t(), x.t(), weight, "fast")


class _Fp8Linear(torch.autograd.Function):
    """FP8 by the layer's quantizers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        precision: LinearPrecision,
        gather: Axis | None,
        hint: bool | None,
        after_backward: Callable[[], None] | None,
        later: WeightGradQueue | None,
    ) -> torch.Tensor:
        local = _flat(x)
        quantized = precision.quantizer(Role.INPUT).rowwise(local, axis=gather)
        whole = quantized if gather is None else gather_rows(quantized, gather)
        weight_row, weight_col = precision.quantize_weight(weight, hint)
        emulation = precision.state.emulation
        y = gemm_nt(
            whole,
            weight_row,
            out_dtype=weight.dtype,
            bias=bias,
            emulation=emulation,
            fast_accum=True,
        )
        ctx.precision, ctx.gather, ctx.emulation = precision, gather, emulation
        ctx.after_backward, ctx.later = after_backward, later
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.wgrad_in_fp8 = precision.decision.wgrad
        saved_x: Operand | None = None
        if weight.requires_grad:
            saved_x = quantized if ctx.wgrad_in_fp8 else local.to(weight.dtype)
        _keep_parameters(ctx, weight, bias)
        _save_operands(ctx, saved_x, weight_col if ctx.needs_input_grad[0] else None)
        return y.view(_output_shape(x, weight.shape[0], gather))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_col = _saved_operands(ctx)
        weight, bias = ctx.weight, ctx.bias
        precision: LinearPrecision = ctx.precision
        dy = _flat(grad)
        dx = dw = db = None
        quantizer = precision.quantizer(Role.GRAD_OUTPUT)
        dy_row: Any = None
        if ctx.needs_input_grad[0] or (ctx.needs_input_grad[1] and ctx.wgrad_in_fp8):
            dy_row = quantizer.rowwise(dy)
        if ctx.needs_input_grad[0]:
            dx = gemm_nt(dy_row, weight_col, out_dtype=weight.dtype, emulation=ctx.emulation)
            dx = _input_grad(dx, ctx)
        if ctx.needs_input_grad[1]:
            kept = dy_row if ctx.wgrad_in_fp8 else dy
            job = partial(_fp8_weight_grad, kept, x, weight, precision, ctx.gather)
            dw = _now_or_later(job, weight, ctx.later)
        if bias is not None and ctx.needs_input_grad[2]:
            db = _bias_grad(dy, bias)
        if ctx.after_backward is not None:
            ctx.after_backward()
        return dx, dw, db, None, None, None, None, None


def _fp8_weight_grad(
    dy: Any,
    x: Any,
    weight: torch.Tensor,
    precision: LinearPrecision,
    gather: Axis | None,
) -> torch.Tensor | None:
    """Of quantized operands, or of plain ones where the weight's gradient is not in FP8."""
    emulation = precision.state.emulation
    if isinstance(dy, QuantizedTensor):
        whole = x if gather is None else gather_rows(x, gather)
        x_col = precision.quantizer(Role.INPUT).transposed(whole)
        dy_col = precision.quantizer(Role.GRAD_OUTPUT).transposed(dy)
        return _weight_grad(dy_col, x_col, weight, emulation)
    whole = x if gather is None else _flat(all_gather(x, gather))
    return _weight_grad(dy.to(weight.dtype).t(), whole.t(), weight, emulation)


def _keep_parameters(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Keep the parameters themselves: recomputation hands back saved tensors as new objects.

    Those would have no `main_grad`.
    """
    ctx.weight, ctx.bias = weight, bias


def _save_operands(ctx: Any, x: Operand | None, weight_col: QuantizedTensor | None) -> None:
    """Keep operands where activation recomputation can drop them: among the saved tensors."""
    ctx.x_like = ctx.weight_like = None
    x_data = x_inv = col_data = col_inv = None
    if isinstance(x, QuantizedTensor):
        x_data, x_inv, ctx.x_like = x.data, x.scale_inv, (x.fmt, x.block)
    elif x is not None:
        x_data = x
    if weight_col is not None:
        col_data, col_inv = weight_col.data, weight_col.scale_inv
        ctx.weight_like = (weight_col.fmt, weight_col.block)
    ctx.save_for_backward(x_data, x_inv, col_data, col_inv)


def _saved_operands(ctx: Any) -> tuple[Any, Any]:
    x, x_inv, col, col_inv = ctx.saved_tensors
    if ctx.x_like is not None:
        x = QuantizedTensor(x, x_inv, *ctx.x_like)
    if ctx.weight_like is not None:
        col = QuantizedTensor(col, col_inv, *ctx.weight_like)
    return x, col


_plain_linear: Callable[..., torch.Tensor] = _PlainLinear.apply
_fp8_linear: Callable[..., torch.Tensor] = _Fp8Linear.apply
