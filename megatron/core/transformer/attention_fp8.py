"""Causal attention whose matrix products take FP8 operands, in plain torch.

Operands are quantized and read back, products and softmax are fp32: what FP8 tensor cores with fp32
accumulation compute, up to the order of additions. The places are those of Transformer Engine:

* forward: Q, K, V with one scale; `P = softmax(Q K^T)` after dropout; the result `O`.
* backward: `dO`; the scores' gradient `dP`; P once more, with the scale of the forward pass; the
  gradients of Q, K, V with one scale.

The softmax itself is differentiated as if nothing had been rounded. P is rounded when its row is
complete, so the bits do not depend on how keys are cut into blocks: a ring of ranks goes around
once for the sums of the rows and once more for the products.

With `backward` off the backward products are of high precision: of the values that the forward
pass multiplied, with nothing else quantized.

Shape legend: s queries, t keys, b microbatch, n heads, g key/value groups, d head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fp8.attention import AttentionPrecision, AttentionTensor, Pieces
from megatron.core.fp8.gemm import Operand
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.transformer.attention_kernel import (
    Block,
    Plan,
    Rounding,
    accumulate_gradients,
    as_it_is,
    finite,
)

Gradients = tuple[Tensor, Tensor, Tensor]


class Operands(NamedTuple):
    """Quantized `query [s, b, n, d]`, `key [t, b, g, d]` and `value [t, b, g, d]`."""

    query: QuantizedTensor
    key: QuantizedTensor
    value: QuantizedTensor

    def part(self, rows: slice, keys: slice) -> Operands:
        """Some of the queries with some of the keys."""
        return Operands(
            *(
                replace(x, data=x.data[some])
                for x, some in ((self.query, rows), (self.key, keys), (self.value, keys))
            )
        )


@dataclass(frozen=True)
class Results:
    """What the forward products give.

    Attributes:
        out: `[s, b, n, d]`, fp32.
        lse: `[s, b, n, 1]`, fp32: logarithm of each row's sum of exponentials.
        exact: `out` with unrounded probabilities; None where the backward pass sees whole rows.
    """

    out: Tensor
    lse: Tensor
    exact: Tensor | None = None


def empty_results(query: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Results over no keys: `[s, b, n, d]` zeros and `[s, b, n, 1]` -inf, fp32."""
    shape, device = query.shape, query.data.device
    out = torch.zeros(shape, dtype=torch.float32, device=device)
    return out, torch.full((*shape[:3], 1), float("-inf"), dtype=torch.float32, device=device)


def add_row_sums(query: QuantizedTensor, key: QuantizedTensor, block: Block, lse: Tensor) -> None:
    """Add the exponentials of one more block of keys to the rows' sums, in `lse`."""
    plan = Plan(query, key, replace(block, dropout=0.0))
    lse = plan.grouped(lse)
    for part in plan.parts():
        q, k = plan.load(query, part).mul_(block.scale), plan.load(key, part)
        for chunk in plan.chunks(part):
            new = torch.logsumexp(plan.scores(q, k, chunk), dim=-1, keepdim=True)
            old = plan.take(lse, part, chunk.rows)
            plan.store(lse, part, chunk.rows, torch.logaddexp(old, new))


def add_products(
    x: Operands,
    block: Block,
    softmax: Pieces,
    out: Tensor,
    lse: Tensor,
    *,
    exact: Tensor | None = None,
    whole: bool = False,
) -> None:
    """`out += round(P) V` for one block of keys.

    Args:
        x: Queries, and the keys and values of the block.
        block: Where the keys lie; rows that see none of them are left alone.
        softmax: Rounds P.
        out: `[s, b, n, d]`, fp32.
        lse: `[s, b, n, 1]`, fp32, over all keys; filled in if `whole`.
        exact: As `out`, for `P V` without rounding.
        whole: Whether the block has all keys of its rows.
    """
    plan = Plan(x.query, x.key, block)
    out, lse = plan.grouped(out), plan.grouped(lse)
    unrounded = None if exact is None else plan.grouped(exact)
    for part in plan.parts():
        q, k = plan.load(x.query, part).mul_(block.scale), plan.load(x.key, part)
        v = plan.load(x.value, part)
        for chunk in plan.chunks(part):
            rows, values = chunk.rows, v[:, chunk.keys]
            scores = plan.scores(q, k, chunk)
            if whole:
                plan.store(lse, part, rows, torch.logsumexp(scores, dim=-1, keepdim=True))
            weights = scores.sub_(finite(plan.take(lse, part, rows))).exp_()
            keep = plan.keep(weights)
            if keep is not None:
                weights.mul_(keep)
            if unrounded is not None:
                before = plan.take(unrounded, part, rows)
                plan.store(unrounded, part, rows, before.baddbmm_(weights, values))
            before = plan.take(out, part, rows)
            plan.store(out, part, rows, before.baddbmm_(softmax(weights), values))


class Placement(ABC):
    """Where queries and keys of one attention call are, and how they meet.

    Attributes:
        axis: Ranks that hold the other tokens of the sequences.
    """

    axis: Axis

    def enter(self, x: Operand) -> Operand:
        """This rank's tokens `[s, b, n, d]` as they take part in the products."""
        return x

    def leave(self, x: Operand) -> Operand:
        """The way back."""
        return x

    @abstractmethod
    def attend(self, x: Operands, softmax: Pieces, *, for_backward: bool) -> Results:
        """The forward products."""

    @abstractmethod
    def gradients(
        self, x: Operands, d_out: Operand, lse: Tensor, exact: Tensor | None, rounding: Rounding
    ) -> Gradients:
        """The backward products: gradients of query, key and value, fp32."""


@dataclass(frozen=True)
class Whole(Placement):
    """This rank has whole sequences.

    Attributes:
        block: How queries see keys.
        axis: See the base class.
    """

    block: Block
    axis: Axis = Axis.single("cp")

    def attend(self, x: Operands, softmax: Pieces, *, for_backward: bool) -> Results:
        """See the base class."""
        del for_backward
        out, lse = empty_results(x.query)
        add_products(x, self.block, softmax, out, lse, whole=True)
        return Results(out, lse)

    def gradients(
        self, x: Operands, d_out: Operand, lse: Tensor, exact: Tensor | None, rounding: Rounding
    ) -> Gradients:
        """See the base class."""
        del exact
        found = zero_gradients(x)
        accumulate_gradients(x, self.block, d_out, lse, None, found, rounding)
        return found


def zero_gradients(x: Operands) -> Gradients:
    """Gradients of operands, fp32, zero."""
    query, key, value = (
        torch.zeros(part.shape, dtype=torch.float32, device=part.data.device)
        for part in (x.query, x.key, x.value)
    )
    return query, key, value


class _Fp8Attention(torch.autograd.Function):
    """Quantization around the products of a placement."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        precision: AttentionPrecision,
        place: Placement,
    ) -> Tensor:
        parts = precision.together(AttentionTensor.QKV, (query, key, value), place.axis)
        x = Operands(*(_quantized(place.enter(part)) for part in parts))
        softmax = precision.pieces(AttentionTensor.SOFTMAX)
        found = place.attend(x, softmax, for_backward=any(ctx.needs_input_grad))
        precision.record(AttentionTensor.SOFTMAX, softmax)
        exact = None if found.exact is None else found.exact.to(query.dtype)
        ctx.save_for_backward(
            x.query.data, x.key.data, x.value.data, x.query.scale_inv, found.lse, exact,
            softmax.scale,
        )  # fmt: skip
        ctx.form, ctx.precision, ctx.place, ctx.dtype = x.query.form, precision, place, query.dtype
        ctx.in_fp8 = precision.choice.backward
        (out,) = _leave(precision, place, AttentionTensor.OUTPUT, [found.out], query.dtype)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, scale_inv, lse, exact, scale = ctx.saved_tensors
        precision, place = ctx.precision, ctx.place
        x = Operands(*(QuantizedTensor(p, scale_inv, *ctx.form) for p in (query, key, value)))
        # Of all heads of this rank, whichever of them it attended with.
        d_out: Operand = grads[0].reshape(*grads[0].shape[:2], -1, query.shape[3])
        if not ctx.in_fp8:
            plain = Rounding(as_it_is, as_it_is)
            found = place.gradients(x, place.enter(d_out), lse, exact, plain)
            gradients = [place.leave(gradient.to(ctx.dtype)) for gradient in found]
            return *gradients, None, None
        (d_out,) = precision.together(AttentionTensor.GRAD_OUTPUT, [d_out], place.axis)
        softmax = precision.again(scale, AttentionTensor.SOFTMAX)
        scores = precision.pieces(AttentionTensor.GRAD_SCORES)
        rounding = Rounding(softmax, scores)
        found = place.gradients(x, place.enter(d_out), lse, exact, rounding)
        precision.record(AttentionTensor.GRAD_SCORES, scores)
        gradients = _leave(precision, place, AttentionTensor.GRAD_QKV, found, ctx.dtype)
        return *gradients, None, None


_fp8_attention: Callable[..., Tensor] = _Fp8Attention.apply


def _quantized(x: Operand) -> QuantizedTensor:
    if not isinstance(x, QuantizedTensor):
        raise TypeError("Placement.enter: a quantized tensor stays one.")
    return x


def _leave(
    precision: AttentionPrecision,
    place: Placement,
    tensor: AttentionTensor,
    values: Any,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Results back where they belong, in `dtype`; quantized on the way where the recipe does."""
    if not precision.quantizes(tensor):
        return [_plain(place.leave(x.to(dtype)), dtype) for x in values]
    made = precision.together(tensor, values, place.axis)
    return [_plain(place.leave(x), dtype) for x in made]


def _plain(x: Operand, dtype: torch.dtype) -> Tensor:
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x


def fp8_attention(
    query: Tensor, key: Tensor, value: Tensor, precision: AttentionPrecision, place: Placement
) -> Tensor:
    """Causal attention in FP8. Collective over the ranks of `place`.

    Args:
        query: `[s, b, n, d]`, this rank's tokens, any strides.
        key: `[t, b, g, d]` with g dividing n.
        value: `[t, b, g, d]`.
        precision: Casts and their scales; active.
        place: Where the tokens are.

    Returns:
        `[s, b, n * d]` in the dtype of `query`.
    """
    return _fp8_attention(query, key, value, precision, place)
