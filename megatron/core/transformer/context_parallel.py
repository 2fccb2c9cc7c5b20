"""Attention over sequences that several ranks share, and how a sequence is cut for them.

A sequence is cut into 2 * P chunks for P context-parallel ranks, and rank r holds chunks r and
2 * P - 1 - r: under the causal mask a late chunk costs more than an early one, and each such pair
costs the same. Everything but attention works on each token alone, so only this file communicates.

- `p2p`: keys and values travel around a ring while the rank attends to those it holds; the results
  are joined by the online softmax. Memory grows with the local sequence.
- `all_gather`: every rank gathers all keys and values, in the forward and again in the backward
  pass. Fewer, larger messages; keys and values of the whole sequence exist for a while.
- `a2a`: ranks exchange sequence shards for head shards, so each attends to whole sequences with
  some of the heads. Needs at least as many local key/value groups as ranks.
- `a2a+p2p`: both. Groups of neighbours exchange as in `a2a`; the chunks that a group of A ranks
  holds then lie in one row, A early and A late ones, so the group's members are ranks of a ring of
  P / A, each with its own heads.

Shape legend: S whole sequence, s = S / P local sequence, c = s / 2 chunk, b microbatch, n local
heads, g local key/value groups, d head dimension, P context-parallel size.

Source: Liu et al., Ring Attention (2023); Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core import wire
from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter, with_adjoint
from megatron.core.tensor_parallel.random import derive_seed
from megatron.core.transformer.attention_kernel import (
    Block,
    accumulate,
    accumulate_gradients,
    causal_attention,
    working_dtype,
)

if TYPE_CHECKING:
    from megatron.config import RunConfig


def comm_type(config: RunConfig, layer_number: int) -> str:
    """How a layer's attention communicates: `--cp-comm-type` has one value, or one per layer."""
    kinds = config.cp_comm_type
    kind: str = kinds[0] if len(kinds) == 1 else kinds[layer_number - 1]
    return kind


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two of the `2 * size` chunks that a rank holds, in this order."""
    return rank, 2 * size - 1 - rank


def take_local(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """This rank's part of a whole sequence.

    Args:
        x: The sequence along `dim`, the same on every rank.
        axis: Context-parallel ranks; on an axis of size 1 `x` is returned as it is.
        dim: Dimension of the sequence.

    Raises:
        MeshError: The sequence has no 2 * P equal chunks.
    """
    if axis.size == 1:
        return x
    if x.shape[dim] % (2 * axis.size):
        raise MeshError(
            complaint(
                "sequence length",
                x.shape[dim],
                f"{axis.size} context-parallel ranks hold two chunks each",
                f"Make it a multiple of {2 * axis.size}",
            )
        )
    size = x.shape[dim] // (2 * axis.size)
    parts = [x.narrow(dim, i * size, size) for i in chunks_of(axis.rank, axis.size)]
    return torch.cat(parts, dim)


@lru_cache(maxsize=8)
def _chunk_order(size: int) -> tuple[int, ...]:
    """Chunk numbers as the ranks hold them, rank after rank."""
    return tuple(chunk for rank in range(size) for chunk in chunks_of(rank, size))


def to_sequence(x: Tensor, size: int) -> Tensor:
    """Put `[S, ...]` that was laid end to end rank after rank into the order of the sequence."""
    order = _chunk_order(size)
    place = sorted(range(len(order)), key=order.__getitem__)
    return _reordered(x, place)


def to_ranks(x: Tensor, size: int) -> Tensor:
    """The inverse of `to_sequence`."""
    return _reordered(x, _chunk_order(size))


def _reordered(x: Tensor, order: list[int] | tuple[int, ...]) -> Tensor:
    parts = x.view(len(order), x.shape[0] // len(order), *x.shape[1:])
    return torch.cat([parts[i] for i in order])


@dataclass(frozen=True)
class ContextBlock:
    """What one attention call of a rank needs besides its tensors.

    Attributes:
        axis: Context-parallel ranks; those of the ring where there are two levels.
        scale: Factor on the scores.
        starts: `[b, S]` on the CPU, where each position's document starts; None for one document.
        dropout: Probability with which an attention weight is dropped.
        seed: Of this rank's dropout masks.
        inner: Ranks that exchange tokens for heads below the ring, with `a2a+p2p`.
    """

    axis: Axis
    scale: float
    starts: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    inner: Axis | None = None

    def block(self, queries: int, first_key: int, chunk: int) -> Block:
        """How chunk `queries` (of `chunk` positions) sees keys from position `first_key` on."""
        at = queries * chunk
        starts = None
        if self.starts is not None:
            starts = self.starts[:, at : at + chunk] - first_key
        seed = derive_seed(self.seed, queries, first_key) if self.dropout > 0.0 else 0
        return Block(self.scale, at - first_key, starts, self.dropout, seed)


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, job: ContextBlock, comm: str = "p2p"
) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        query: `[s, b, n, d]`, this rank's two chunks of the sequence.
        key: `[s, b, g, d]` with g dividing n.
        value: `[s, b, g, d]`.
        job: Ranks, scale, documents, dropout.
        comm: `p2p`, `all_gather`, `a2a` or `a2a+p2p`.

    Returns:
        `[s, b, n * d]` in the dtype of `query`.

    Raises:
        MeshError: The local sequence does not have two equal chunks, or the heads do not divide.
    """
    check_shards(query, key, job, comm)
    if comm == "a2a":
        return _head_shard_attention(query, key, value, job)
    if comm == "a2a+p2p":
        return _two_level_attention(query, key, value, job)
    function = _gathered_attention if comm == "all_gather" else _ring_attention
    s, b, n, d = query.shape
    return function(query, key, value, job).reshape(s, b, n * d)


def check_shards(query: Tensor, key: Tensor, job: ContextBlock, comm: str) -> None:
    """Refuse what cannot be shared out.

    Args:
        query: `[s, b, n, d]`.
        key: `[s, b, g, d]`.
        job: As in `context_attention`, as is `comm`.
        comm: How the ranks communicate.

    Raises:
        MeshError: The local sequence does not have two equal chunks, or the heads do not divide.
    """
    if query.shape[0] % 2 or query.shape[0] != key.shape[0]:
        raise MeshError(
            complaint(
                "local sequence",
                f"{query.shape[0]} queries and {key.shape[0]} keys",
                "A context-parallel rank holds two chunks of a sequence, queries and keys alike",
                "Cut the batch with Batch.context_shard",
            )
        )
    if comm == "a2a":
        _check_heads(key, job.axis)
    if comm == "a2a+p2p" and job.inner is not None:
        _check_heads(key, job.inner)


# -- p2p ------------------------------------------------------------------------------------------


class Transfer:
    """A tensor on its way to the next rank, and the one that arrives from the previous rank."""

    def __init__(self, x: Tensor, axis: Axis, tag: int) -> None:
        before, after = (axis.ranks[(axis.rank + step) % axis.size] for step in (-1, 1))
        self._sent, self._arriving = x, torch.empty_like(x)
        self._work = wire.exchange(x, self._arriving, axis, after, before, tag=tag)

    def wait(self) -> Tensor:
        """Wait for both directions; the tensor that was sent may be reused after it."""
        for work in self._work:
            work.wait()
        return self._arriving


def ring_steps(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, its keys and values) for every rank, this rank first.

    The next pair is under way while the caller works on the current one.
    """
    for step in range(axis.size):
        transfer = Transfer(kv, axis, tag=0) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, kv
        if transfer is not None:
            kv = transfer.wait()


def visible_pairs(
    job: ContextBlock, owner: int, chunk: int
) -> Iterator[tuple[slice, slice, Block]]:
    """Rows of queries, rows of the owner's keys, and how they see each other."""
    size = job.axis.size
    for i, queries in enumerate(chunks_of(job.axis.rank, size)):
        for j, keys in enumerate(chunks_of(owner, size)):
            if queries < keys:
                continue
            rows, seen = (slice(x * chunk, (x + 1) * chunk) for x in (i, j))
            yield rows, seen, job.block(queries, keys * chunk, chunk)


class _RingAttention(torch.autograd.Function):
    """Keys and values travel; in the backward pass their gradients travel with them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: ContextBlock) -> Tensor:
        out, lse = _empty_results(query)
        chunk = query.shape[0] // 2
        for owner, (k, v) in ring_steps(torch.stack([key, value]), job.axis):
            for rows, seen, block in visible_pairs(job, owner, chunk):
                accumulate(query[rows], k[seen], v[seen], block, out[rows], lse[rows])
        return _finish(ctx, job, query, key, value, out, lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        job, axis = ctx.job, ctx.job.axis
        chunk = query.shape[0] // 2
        d_out, delta = _delta(grads[0], out, lse)
        d_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        travelling: Transfer | None = None
        for owner, (k, v) in ring_steps(torch.stack([key, value]), axis):
            d_kv = torch.zeros((2, *k.shape), dtype=lse.dtype, device=k.device)
            for rows, seen, block in visible_pairs(job, owner, chunk):
                accumulate_gradients(
                    (query[rows], k[seen], v[seen]),
                    block,
                    d_out[rows],
                    lse[rows],
                    delta[rows],
                    (d_query[rows], d_kv[0, seen], d_kv[1, seen]),
                )
            if travelling is not None:
                d_kv += travelling.wait()  # what earlier holders of these keys found
            travelling = Transfer(d_kv, axis, tag=1)
        if travelling is not None:
            d_kv = travelling.wait()  # back home
        return d_query.to(query.dtype), d_kv[0].to(key.dtype), d_kv[1].to(value.dtype), None


_ring_attention: Callable[..., Tensor] = _RingAttention.apply


# -- all_gather -----------------------------------------------------------------------------------


class _GatheredAttention(torch.autograd.Function):
    """All keys and values come together, in the backward pass once more."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: ContextBlock) -> Tensor:
        out, lse = _empty_results(query)
        k, v = _gather_keys(key, value, job.axis)
        for rows, block in row_blocks(job, query.shape[0] // 2):
            end = block.offset + query.shape[0] // 2
            accumulate(query[rows], k[:end], v[:end], block, out[rows], lse[rows])
        return _finish(ctx, job, query, key, value, out, lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        job, axis = ctx.job, ctx.job.axis
        d_out, delta = _delta(grads[0], out, lse)
        k, v = _gather_keys(key, value, axis)
        d_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        d_key, d_value = (torch.zeros(k.shape, dtype=lse.dtype, device=k.device) for _ in (k, v))
        for rows, block in row_blocks(job, query.shape[0] // 2):
            end = block.offset + query.shape[0] // 2
            accumulate_gradients(
                (query[rows], k[:end], v[:end]),
                block,
                d_out[rows],
                lse[rows],
                delta[rows],
                (d_query[rows], d_key[:end], d_value[:end]),
            )
        d_k, d_v = (reduce_scatter(to_ranks(x, axis.size), axis) for x in (d_key, d_value))
        return d_query.to(query.dtype), d_k.to(key.dtype), d_v.to(value.dtype), None


_gathered_attention: Callable[..., Tensor] = _GatheredAttention.apply


def _gather_keys(key: Tensor, value: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    k, v = (to_sequence(all_gather(x, axis), axis.size) for x in (key, value))
    return k, v


def row_blocks(job: ContextBlock, chunk: int) -> Iterator[tuple[slice, Block]]:
    """Rows of queries, and how they see the keys of the whole sequence."""
    for i, queries in enumerate(chunks_of(job.axis.rank, job.axis.size)):
        yield slice(i * chunk, (i + 1) * chunk), job.block(queries, 0, chunk)


# -- shared by p2p and all_gather -----------------------------------------------------------------


def _empty_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """Results over no keys: `[s, b, n, d]` zeros and `[s, b, n, 1]` -inf."""
    dtype = working_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = torch.full((*query.shape[:3], 1), float("-inf"), dtype=dtype, device=query.device)
    return out, lse


def _finish(
    ctx: Any,
    job: ContextBlock,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Tensor:
    result = out.to(query.dtype)
    ctx.job = job
    ctx.save_for_backward(query, key, value, result, lse)
    return result


def _delta(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in the inputs' shape, and its product with the result, summed over d."""
    d_out = grad.reshape(out.shape)
    return d_out, (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)


# -- a2a ------------------------------------------------------------------------------------------


def _check_heads(key: Tensor, axis: Axis) -> None:
    """Refuse heads that cannot be shared out."""
    if key.shape[2] % axis.size:
        raise MeshError(
            complaint(
                "--cp-comm-type",
                f"a2a with {key.shape[2]} key/value groups on {axis.size} ranks",
                "Each context-parallel rank attends with whole groups",
                "Use --cp-comm-type p2p or all_gather",
            )
        )


def _two_level_attention(query: Tensor, key: Tensor, value: Tensor, job: ContextBlock) -> Tensor:
    inner = job.inner
    if inner is None:
        raise TypeError("ContextBlock: a2a+p2p needs the ranks of both levels.")
    q, k, v = (_to_heads(x, inner) for x in (query, key, value))
    return _to_tokens(_ring_attention(q, k, v, job), inner).flatten(2)


def _head_shard_attention(query: Tensor, key: Tensor, value: Tensor, job: ContextBlock) -> Tensor:
    axis = job.axis
    q, k, v = (_to_heads(x, axis) for x in (query, key, value))
    context = causal_attention(
        q, k, v, scale=job.scale, dropout=job.dropout, seed=job.seed, starts=job.starts
    )
    return _to_tokens(context.view(q.shape), axis).flatten(2)


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    """Send part i of `x [P, ...]` to rank i, receive part i from rank i."""
    x = x.contiguous()
    out = torch.empty_like(x)
    wire.all_to_all(out, x, axis)
    return out


def tokens_to_heads(x: Tensor, axis: Axis) -> Tensor:
    """`[s, b, n, d]` of some tokens to `[S, b, n / P, d]` of some heads."""
    s, b, n, d = x.shape
    parts = x.reshape(s, b, axis.size, n // axis.size, d).movedim(2, 0)
    return to_sequence(_exchange(parts, axis).flatten(0, 1), axis.size)


def heads_to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """The way back."""
    parts = to_ranks(x.contiguous(), axis.size)
    received = _exchange(parts.view(axis.size, -1, *parts.shape[1:]), axis)
    return received.movedim(0, 2).flatten(2, 3)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    """As `tokens_to_heads`, for autograd."""
    return with_adjoint(x, axis, tokens_to_heads, heads_to_tokens)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """As `heads_to_tokens`, for autograd."""
    return with_adjoint(x, axis, heads_to_tokens, tokens_to_heads)
