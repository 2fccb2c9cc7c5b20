"""Causal softmax attention in plain torch, whole or one block of keys at a time.

On CUDA whole attention is torch's scaled-dot-product attention. On a CPU the rows are taken in
chunks, each against only the keys it may see, and the gradients recompute the probabilities: memory
grows with the sequence, not with its square. Scores, softmax and sums are fp32 whatever the inputs
are, so the only roundings are those of the inputs and of the results. Forward and backward together
took 0.36 of the time of torch's CPU flash attention (bf16, one thread, 512 to 4096 tokens, heads of
64).

Where several documents share a sequence, every query brings the first key that it may see. Keys
before the first one of a chunk of rows are not touched, so the cost follows the documents' lengths,
and a key that is hidden enters as an exact zero: what it holds cannot change a bit of the result.

Shape legend: s queries, t keys, b microbatch, g key/value groups, r query heads per group
(n = g * r), d head dimension. Key/value heads are never repeated: the r heads of a group are rows
of one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fp8.gemm import Operand
from megatron.core.fp8.tensor import QuantizedTensor

# Rows of a chunk, and the largest chunk of fp32 scores. Measured on a CPU with 2 MiB of L2 cache:
# smaller chunks pay for dispatch, larger ones leave the cache. An accelerator wants larger ones.
_CHUNK_ROWS = {"cpu": 64}
_CHUNK_BYTES = {"cpu": 2**20}
_ACCELERATOR_ROWS, _ACCELERATOR_BYTES = 1024, 2**28
_MAX_BATCH = 8


@dataclass(frozen=True)
class Block:
    """Where the keys of a call lie relative to its queries, and how scores become weights.

    Attributes:
        scale: Factor on the scores.
        offset: Position of the first query minus that of the first key; query i sees keys
            0 .. i + offset.
        starts: `[b, s]` on the CPU: number of the first key that each query sees; None for 0.
        dropout: Probability with which an attention weight is dropped.
        seed: Of the dropout masks; a call with the same seed and shapes draws the same masks.
    """

    scale: float
    offset: int = 0
    starts: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    seed: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Causal attention; the last query sees every key of its document.

    Args:
        query: `[s, b, n, d]`, any strides.
        key: `[t, b, g, d]` with g dividing n and t >= s.
        value: `[t, b, g, d]`.
        scale: Factor on the scores.
        dropout: Probability with which an attention weight is dropped.
        seed: Of the dropout masks; the backward pass draws the same masks again.
        starts: `[b, s]` integers on the CPU, the position at which each query's document starts;
            None if a sequence is one document.

    Returns:
        `[s, b, n * d]` in the dtype of `query`.
    """
    offset = key.shape[0] - query.shape[0]
    if query.is_meta:
        return _attention_on_paper(query, key, value)
    if not query.is_cuda:
        block = Block(scale, offset, starts, dropout, seed)
        return _chunked_attention(query, key, value, block)
    if starts is None:
        return _library_attention(query, key, value, scale, dropout, seed)
    return _attention_by_document(query, key, value, starts, Block(scale, 0, None, dropout, seed))


def documents(starts: Tensor) -> list[tuple[int, int, int]]:
    """Every document of a batch as (row of the batch, first position, position after the last).

    Args:
        starts: `[b, s]`, the position at which each position's document starts.
    """
    found = []
    for row, positions in enumerate(starts):
        firsts = [*torch.unique_consecutive(positions).tolist(), positions.numel()]
        found += [(row, a, b) for a, b in zip(firsts, firsts[1:], strict=False)]
    return found


def _attention_by_document(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, block: Block
) -> Tensor:
    """The library's attention once for every document; the queries are the whole sequence."""
    rows: list[list[Tensor]] = [[] for _ in range(query.shape[1])]
    for number, (row, first, last) in enumerate(documents(starts)):
        q, k, v = (x[first:last, row : row + 1] for x in (query, key, value))
        out = _library_attention(q, k, v, block.scale, block.dropout, block.seed + number)
        rows[row].append(out)
    return torch.cat([torch.cat(parts) for parts in rows], dim=1)


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


class _AttentionOnPaper(torch.autograd.Function):
    """What a fused kernel keeps: its inputs, its result and the logarithm of each row's sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        s, b, n, d = query.shape
        context = query.new_empty(s, b, n * d)
        sums = query.new_empty(b, n, s, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, context, sums)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


_attention_on_paper: Callable[..., Tensor] = _AttentionOnPaper.apply


class _ChunkedAttention(torch.autograd.Function):
    """Row-chunked causal attention with recomputed probabilities."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        s, b, n, d = query.shape
        ctx.save_for_backward(query, key, value)
        ctx.block = block
        context = query.new_empty(s, b, n * d)
        plan = Plan(query, key, block)
        out = plan.grouped(context.view(s, b, n, d))
        for part in plan.parts():
            q = plan.load(query, part).mul_(block.scale)
            k, v = plan.load(key, part), plan.load(value, part)
            for chunk in plan.chunks(part):
                weights, keep = plan.probabilities(q, k, chunk)
                if keep is not None:
                    weights.mul_(keep)
                plan.store(out, part, chunk.rows, torch.bmm(weights, v[:, chunk.keys]))
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        block = ctx.block
        plan = Plan(query, key, block)
        d_context = grads[0].reshape(query.shape)
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        d_q_out = plan.grouped(d_query)
        for part in plan.parts():
            q = plan.load(query, part).mul_(block.scale)
            k, v = plan.load(key, part), plan.load(value, part)
            d_out = plan.load(d_context, part)
            d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
            for chunk in plan.chunks(part):
                rows, keys = chunk.rows, chunk.keys
                weights, keep = plan.probabilities(q, k, chunk)
                d_o = d_out[:, rows]
                d_weights = torch.bmm(d_o, v[:, keys].mT)
                dropped = weights
                if keep is not None:
                    d_weights.mul_(keep)
                    dropped = weights * keep
                d_v[:, keys].baddbmm_(dropped.mT, d_o)
                d_scores = torch.ops.aten._softmax_backward_data(
                    d_weights, weights, -1, weights.dtype
                )
                plan.store(d_q_out, part, rows, torch.bmm(d_scores, k[:, keys]).mul_(block.scale))
                d_k[:, keys].baddbmm_(d_scores.mT, q[:, rows])  # q carries the scale
            plan.store(plan.grouped(d_key), part, slice(None), d_k)
            plan.store(plan.grouped(d_value), part, slice(None), d_v)
        return d_query, d_key, d_value, None


_chunked_attention: Callable[..., Tensor] = _ChunkedAttention.apply


def accumulate(
    query: Tensor, key: Tensor, value: Tensor, block: Block, out: Tensor, lse: Tensor
) -> None:
    """Fold one more block of keys into attention results, by the online softmax.

    Args:
        query: `[s, b, n, d]`.
        key: `[t, b, g, d]`.
        value: `[t, b, g, d]`.
        block: Where the keys lie; rows that see none of them are left alone.
        out: `[s, b, n, d]` in the working dtype, the result over the keys so far; 0 at first.
        lse: `[s, b, n, 1]`, logarithm of the sum of exponentials so far; -inf at first.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """
    plan = Plan(query, key, block)
    out, lse = plan.grouped(out), plan.grouped(lse)
    for part in plan.parts():
        chunks = list(plan.chunks(part))
        if not chunks:
            continue
        q = plan.load(query, part).mul_(block.scale)
        k, v = plan.load(key, part), plan.load(value, part)
        for chunk in chunks:
            scores = plan.scores(q, k, chunk)
            new = torch.logsumexp(scores, dim=-1, keepdim=True)
            weights = scores.sub_(finite(new)).exp_()
            keep = plan.keep(weights)
            if keep is not None:
                weights.mul_(keep)
            found = torch.bmm(weights, v[:, chunk.keys])
            old = plan.take(lse, part, chunk.rows)
            total = torch.logaddexp(old, new)
            safe = finite(total)
            before = plan.take(out, part, chunk.rows).mul_((old - safe).exp_())
            plan.store(out, part, chunk.rows, before.addcmul_(found, (new - safe).exp_()))
            plan.store(lse, part, chunk.rows, total)


@dataclass(frozen=True)
class Rounding:
    """What the backward pass does to a piece of P and to a piece of the scores' gradient."""

    softmax: Callable[[Tensor], Tensor]
    scores: Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def accumulate_gradients(
    inputs: tuple[Operand, Operand, Operand],
    block: Block,
    d_out: Operand,
    lse: Tensor,
    delta: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    rounding: Rounding = Rounding(as_it_is, as_it_is),
) -> None:
    """Add what one block of keys contributes to the gradients.

    Args:
        inputs: `query [s, b, n, d]`, `key [t, b, g, d]`, `value [t, b, g, d]`.
        block: As in the forward pass.
        d_out: `[s, b, n, d]`.
        lse: `[s, b, n, 1]` over all keys.
        delta: `[s, b, n, 1]`, sum of `d_out * out` over d, with the result of unrounded
            probabilities; None if the block has all keys of its rows.
        gradients: Of the inputs, in the working dtype; added to.
        rounding: Of P and of the scores' gradient.
    """
    query, key, value = inputs
    plan = Plan(query, key, block)
    d_query, d_key, d_value = (plan.grouped(x) for x in gradients)
    lse = plan.grouped(lse)
    offsets = None if delta is None else plan.grouped(delta)
    for part in plan.parts():
        chunks = list(plan.chunks(part))
        if not chunks:
            continue
        q = plan.load(query, part).mul_(block.scale)
        k, v, d_rows = plan.load(key, part), plan.load(value, part), plan.load(d_out, part)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        for chunk in chunks:
            rows, keys = chunk.rows, chunk.keys
            weights = plan.scores(q, k, chunk).sub_(plan.take(lse, part, rows)).exp_()
            d_o = d_rows[:, rows]
            d_weights = torch.bmm(d_o, v[:, keys].mT)
            keep, dropped = plan.keep(weights), weights
            if keep is not None:
                d_weights.mul_(keep)
                dropped = weights * keep
            d_v[:, keys].baddbmm_(rounding.softmax(dropped).mT, d_o)
            if offsets is None:
                offset = (weights * d_weights).sum(-1, keepdim=True)
            else:
                offset = plan.take(offsets, part, rows)
            d_scores = rounding.scores(d_weights.sub_(offset).mul_(weights))
            d_q = plan.take(d_query, part, rows)
            plan.store(d_query, part, rows, d_q.baddbmm_(d_scores, k[:, keys], alpha=block.scale))
            d_k[:, keys].baddbmm_(d_scores.mT, q[:, rows])  # q carries the scale
        d_key[part].add_(d_k.view(d_key[part].shape))
        d_value[part].add_(d_v.view(d_value[part].shape))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores, weights and sums are held."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """0 in place of -inf, which a row without keys has: its exponentials are then 0, not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


@dataclass(frozen=True)
class Chunk:
    """Rows (query positions x r) and the keys that at least one of them sees."""

    rows: slice
    keys: slice
    starts: Tensor | None


class Plan:
    """How one attention call is cut up, and the few operations both passes share."""

    def __init__(self, query: Operand, key: Operand, block: Block) -> None:
        query, key = (x.data if isinstance(x, QuantizedTensor) else x for x in (query, key))
        self.s, self.b, n, self.d = query.shape
        self.t, self.g = key.shape[0], key.shape[2]
        self.r = n // self.g
        self.block, self.device = block, query.device
        self.dtype = working_dtype(query.dtype)
        kind = query.device.type
        self.step = max(1, _CHUNK_ROWS.get(kind, _ACCELERATOR_ROWS) // self.r)
        row_bytes = 4 * self.step * self.r * self.t
        self.batch = max(
            1, min(_MAX_BATCH, _CHUNK_BYTES.get(kind, _ACCELERATOR_BYTES) // row_bytes)
        )
        self.generator: torch.Generator | None = None
        if block.dropout > 0.0 and not query.is_meta:
            self.generator = torch.Generator(query.device).manual_seed(block.seed)
        # Within a chunk, key j of the last `step` may come after query i of the `step` queries.
        later = torch.ones(self.step, self.step, dtype=torch.bool, device=query.device).triu(1)
        self.later = later.repeat_interleave(self.r, dim=0)

    def grouped(self, x: Tensor) -> Tensor:
        """`[x, b, n or g, d]` as `[b, g, x, r or 1, d]`, a view."""
        length, heads = x.shape[0], x.shape[2] // self.g
        split = x.view(length, self.b, self.g, heads, x.shape[3])
        return split.permute(1, 2, 0, 3, 4)

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Slices of (b, g) that are worked on together; on paper none, for they only fill in."""
        if self.device.type == "meta":
            return
        # Sequences whose documents differ see different keys.
        some_b = 1 if self.block.starts is not None else max(1, self.batch // self.g)
        some_g = min(self.g, self.batch)
        for i in range(0, self.b, some_b):
            for j in range(0, self.g, some_g):
                yield slice(i, i + some_b), slice(j, j + some_g)

    def chunks(self, part: tuple[slice, slice]) -> Iterator[Chunk]:
        """The rows of a part that see keys, a few at a time."""
        starts = None if self.block.starts is None else self.block.starts[part[0].start]
        for i in range(0, self.s, self.step):
            last = min(i + self.step, self.s)
            seen = min(self.block.offset + last, self.t)
            first = 0
            mine = None if starts is None else starts[i:last]
            if mine is not None:
                low, high = (max(0, int(x)) for x in mine.aminmax())
                first, mine = low, mine if high > low else None
            if first < seen:
                yield Chunk(slice(i * self.r, last * self.r), slice(first, seen), mine)

    def load(self, x: Operand, part: tuple[slice, slice]) -> Tensor:
        """One part as a contiguous `[batch, x * (r or 1), d]` in the working dtype."""
        if isinstance(x, QuantizedTensor):
            return self.load(x.data, part).mul_(x.scale_inv)
        view = self.grouped(x)[part]
        out = torch.empty(view.shape, dtype=self.dtype, device=x.device).copy_(view)
        return out.view(-1, view.shape[2] * view.shape[3], self.d)

    def _rows(self, x: Tensor, part: tuple[slice, slice], rows: slice) -> Tensor:
        target = x[part]
        heads = target.shape[3]
        if rows.start is None:
            return target
        return target[:, :, rows.start // heads : rows.stop // heads]

    def take(self, x: Tensor, part: tuple[slice, slice], rows: slice) -> Tensor:
        """A copy `[batch, rows, d]` of rows of a grouped view."""
        view = self._rows(x, part, rows)
        return view.clone(memory_format=torch.contiguous_format).view(
            -1, rows.stop - rows.start, x.shape[-1]
        )

    def store(self, out: Tensor, part: tuple[slice, slice], rows: slice, x: Tensor) -> None:
        """Round `x [batch, rows, d]` into the rows of a grouped view."""
        target = self._rows(out, part, rows)
        target.copy_(x.view(target.shape))

    def scores(self, q: Tensor, k: Tensor, chunk: Chunk) -> Tensor:
        """`[batch, rows, keys]` of a chunk, -inf where a row does not see a key.

        `q` already carries the scale.
        """
        scores = torch.bmm(q[:, chunk.rows], k[:, chunk.keys].mT)
        first, seen = chunk.keys.start, chunk.keys.stop
        diagonal = self.block.offset + chunk.rows.start // self.r  # last key of the first row
        low = max(diagonal, first)
        if low < seen:
            count = chunk.rows.stop - chunk.rows.start
            later = self.later[:count, low - diagonal : seen - diagonal]
            scores[:, :, low - first :].masked_fill_(later, float("-inf"))
        if chunk.starts is not None:
            starts = chunk.starts.to(self.device).repeat_interleave(self.r)
            keys = torch.arange(first, seen, device=self.device)
            scores.masked_fill_(keys < starts[:, None], float("-inf"))
        return scores

    def keep(self, weights: Tensor) -> Tensor | None:
        """The dropout factors (0 or 1/(1-p)) of the next chunk, if there are any."""
        if self.generator is None:
            return None
        kept = 1.0 - self.block.dropout
        return torch.empty_like(weights).bernoulli_(kept, generator=self.generator).div_(kept)

    def probabilities(self, q: Tensor, k: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Softmax of a chunk's scores, and its dropout factors."""
        scores = self.scores(q, k, chunk)
        weights = torch.softmax(scores, dim=-1, out=scores)
        return weights, self.keep(weights)
