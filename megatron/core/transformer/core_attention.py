"""Causal softmax attention of the native backend.

On CUDA this is torch's scaled-dot-product attention. On a CPU the rows are taken in chunks, each
against only the keys it may see, and the gradients recompute the probabilities: memory grows with
the sequence, not with its square. Scores, softmax and sums are fp32 whatever the inputs are, so the
only roundings are those of the inputs and of the results. Forward and backward together took 0.36
of the time of torch's CPU flash attention (bf16, one thread, 512 to 4096 tokens, heads of 64).

Shape legend: s queries, t keys, b microbatch, g key/value groups, r query heads per group
(n = g * r), d head dimension. Key/value heads are never repeated: the r heads of a group are rows
of one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.build import Build

# Rows of a chunk, and the largest chunk of fp32 scores. Measured on a CPU with 2 MiB of L2 cache:
# smaller chunks pay for dispatch, larger ones leave the cache.
_CHUNK_ROWS = 64
_CHUNK_BYTES = 2**20
_MAX_BATCH = 8


class NativeCoreAttention(nn.Module):
    """Attention of one layer's local heads.

    Args:
        build: Supplies head sizes, dropout and its random stream.
        layer_number: 1-based number of the layer; only names the layer.
    """

    def __init__(self, *, build: Build, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale = 1.0 / math.sqrt(build.config.kv_channels)
        self.dropout = build.config.attention_dropout
        self._rng = build.rng
        self._path = build.path

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            query: `[s, b, n, d]`.
            key: `[t, b, g, d]`, t >= s; the queries are the last s of the t positions.
            value: `[t, b, g, d]`.

        Returns:
            `[s, b, n * d]`.
        """
        if not (self.training and self.dropout > 0.0):
            return causal_attention(query, key, value, scale=self.scale)
        # Heads are split over tensor-parallel ranks, so each rank draws its own masks.
        seed = self._rng.generator(self._path, axis="tp").initial_seed()
        return causal_attention(
            query, key, value, scale=self.scale, dropout=self.dropout, seed=seed
        )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"layer_number={self.layer_number}, scale={self.scale:.4g}, dropout={self.dropout}"


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Causal attention; the last query sees every key.

    Args:
        query: `[s, b, n, d]`, any strides.
        key: `[t, b, g, d]` with g dividing n and t >= s.
        value: `[t, b, g, d]`.
        scale: Factor on the scores.
        dropout: Probability with which an attention weight is dropped.
        seed: Of the dropout masks; the backward pass draws the same masks again.

    Returns:
        `[s, b, n * d]` in the dtype of `query`.
    """
    if query.is_cuda:
        return _library_attention(query, key, value, scale, dropout, seed)
    return _chunked_attention(query, key, value, scale, dropout, seed)


def _library_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, seed: int
) -> Tensor:
    s, b, n, d = query.shape
    t, g = key.shape[0], key.shape[2]
    mask = None
    if s != t:
        # torch aligns its causal mask with the first key; cached keys need it at the last one.
        rows = torch.arange(t - s, t, device=query.device)
        mask = torch.arange(t, device=query.device) <= rows[:, None]
    # Its dropout draws from the device's default generator, which is put back afterwards.
    forked = torch.random.fork_rng([query.device]) if dropout > 0.0 else nullcontext()
    with forked:
        if dropout > 0.0:
            torch.cuda.manual_seed(seed)
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=g != n,
        )
    return context.permute(2, 0, 1, 3).reshape(s, b, n * d)


class _ChunkedAttention(torch.autograd.Function):
    """Row-chunked causal attention with recomputed probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        s, b, n, d = query.shape
        ctx.save_for_backward(query, key, value)
        ctx.settings = (scale, dropout, seed)
        context = query.new_empty(s, b, n * d)
        plan = _Plan(query, key, dropout, seed)
        out = plan.grouped(context.view(s, b, n, d))
        for part in plan.parts():
            q = plan.load(query, part).mul_(scale)
            k, v = plan.load(key, part), plan.load(value, part)
            for rows, seen in plan.chunks():
                weights, keep = plan.probabilities(q, k, rows, seen)
                if keep is not None:
                    weights.mul_(keep)
                plan.store(out, part, rows, torch.bmm(weights, v[:, :seen]))
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        scale, dropout, seed = ctx.settings
        plan = _Plan(query, key, dropout, seed)
        d_context = grads[0].reshape(query.shape)
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        d_q_out = plan.grouped(d_query)
        for part in plan.parts():
            q = plan.load(query, part).mul_(scale)
            k, v = plan.load(key, part), plan.load(value, part)
            d_out = plan.load(d_context, part)
            d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
            for rows, seen in plan.chunks():
                weights, keep = plan.probabilities(q, k, rows, seen)
                d_o = d_out[:, rows]
                d_weights = torch.bmm(d_o, v[:, :seen].mT)
                dropped = weights
                if keep is not None:
                    d_weights.mul_(keep)
                    dropped = weights * keep
                d_v[:, :seen].baddbmm_(dropped.mT, d_o)
                d_scores = torch.ops.aten._softmax_backward_data(
                    d_weights, weights, -1, weights.dtype
                )
                plan.store(d_q_out, part, rows, torch.bmm(d_scores, k[:, :seen]).mul_(scale))
                d_k[:, :seen].baddbmm_(d_scores.mT, q[:, rows])  # q carries the scale
            plan.store(plan.grouped(d_key), part, slice(None), d_k)
            plan.store(plan.grouped(d_value), part, slice(None), d_v)
        return d_query, d_key, d_value, None, None, None


_chunked_attention: Callable[..., Tensor] = _ChunkedAttention.apply


class _Plan:
    """How one attention call is cut up, and the few operations both passes share."""

    def __init__(self, query: Tensor, key: Tensor, dropout: float, seed: int) -> None:
        self.s, self.b, n, self.d = query.shape
        self.t, self.g = key.shape[0], key.shape[2]
        self.r = n // self.g
        self.dropout = dropout
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.step = max(1, _CHUNK_ROWS // self.r)
        row_bytes = 4 * self.step * self.r * self.t
        self.batch = max(1, min(_MAX_BATCH, _CHUNK_BYTES // row_bytes))
        self.generator: torch.Generator | None = None
        if dropout > 0.0:
            self.generator = torch.Generator(query.device).manual_seed(seed)
        # Within a chunk, key j of the last `step` may come after query i of the `step` queries.
        later = torch.ones(self.step, self.step, dtype=torch.bool, device=query.device).triu(1)
        self.later = later.repeat_interleave(self.r, dim=0)

    def grouped(self, x: Tensor) -> Tensor:
        """`[x, b, n or g, d]` as `[b, g, x, r or 1, d]`, a view."""
        length, heads = x.shape[0], x.shape[2] // self.g
        split = x.view(length, self.b, self.g, heads, self.d)
        return split.permute(1, 2, 0, 3, 4)

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Slices of (b, g) that are worked on together."""
        some_b = max(1, self.batch // self.g)
        some_g = min(self.g, self.batch)
        for i in range(0, self.b, some_b):
            for j in range(0, self.g, some_g):
                yield slice(i, i + some_b), slice(j, j + some_g)

    def chunks(self) -> Iterator[tuple[slice, int]]:
        """Slices of rows (query positions x r), each with the number of keys it may see."""
        for first in range(0, self.s, self.step):
            last = min(first + self.step, self.s)
            yield slice(first * self.r, last * self.r), self.t - self.s + last

    def load(self, x: Tensor, part: tuple[slice, slice]) -> Tensor:
        """One part as a contiguous `[batch, x * (r or 1), d]` in the working dtype."""
        view = self.grouped(x)[part]
        out = torch.empty(view.shape, dtype=self.dtype, device=x.device).copy_(view)
        return out.view(-1, view.shape[2] * view.shape[3], self.d)

    def store(self, out: Tensor, part: tuple[slice, slice], rows: slice, x: Tensor) -> None:
        """Round `x [batch, rows, d]` into the rows of a grouped view."""
        target = out[part]
        heads = target.shape[3]
        if rows.start is not None:
            target = target[:, :, rows.start // heads : rows.stop // heads]
        target.copy_(x.view(target.shape))

    def probabilities(
        self, q: Tensor, k: Tensor, rows: slice, seen: int
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax of a chunk's scores, and the dropout factors (0 or 1/(1-p)) if there are any.

        `q` already carries the scale.
        """
        scores = torch.bmm(q[:, rows], k[:, :seen].mT)
        count = (rows.stop - rows.start) // self.r
        later = self.later[: count * self.r, :count]
        scores[:, :, seen - count :].masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, dim=-1, out=scores)
        if self.generator is None:
            return weights, None
        keep = torch.empty_like(weights).bernoulli_(1.0 - self.dropout, generator=self.generator)
        return weights, keep.div_(1.0 - self.dropout)
