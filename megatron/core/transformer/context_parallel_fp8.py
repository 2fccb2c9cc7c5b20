"""FP8 attention over sequences that several ranks share.

How a sequence is cut and who meets whom is as in `context_parallel`; here it is quantized tensors
that travel, as bytes of FP8. All ranks of a sequence have the same scales, so none travels. Nothing
is quantized for the transfer: what arrives is what would have been multiplied without it. Sums over
ranks (gradients of keys and values) travel in fp32, as ever.

A ring goes around twice in the forward pass: with keys for the sums of the rows, then with keys and
values for the products.

Shape legend: S whole sequence, s local sequence, b microbatch, n local heads, g local key/value
groups, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from megatron.core.comm_log import BECAUSE_OF_FP8, Packing
from megatron.core.fp8.attention import Pieces
from megatron.core.fp8.comm import from_wire
from megatron.core.fp8.gemm import Operand
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter
from megatron.core.transformer.attention_fp8 import (
    Gradients,
    Operands,
    Placement,
    Results,
    Whole,
    add_products,
    add_row_sums,
    empty_results,
    zero_gradients,
)
from megatron.core.transformer.attention_kernel import Block, Rounding, accumulate_gradients
from megatron.core.transformer.context_parallel import (
    ContextBlock,
    Transfer,
    heads_to_tokens,
    ring_steps,
    row_blocks,
    to_ranks,
    to_sequence,
    tokens_to_heads,
    visible_pairs,
)


@dataclass(frozen=True)
class Exchange:
    """How a quantized tensor travels.

    Attributes:
        in_fp8: As bytes; otherwise as the same values in bf16.
        itemsize: For the log: bytes of an element if it were not quantized.
    """

    in_fp8: bool = True
    itemsize: int = 2

    def along(self, axis: Axis, *, added: bool = False) -> Axis:
        """The axis for what `pack` returns.

        Args:
            axis: Ranks that take part.
            added: Whether nothing would be sent here without FP8.
        """
        if added:
            return axis.packed(BECAUSE_OF_FP8)
        return axis.packed(Packing(1 if self.in_fp8 else 2, 0, self.itemsize))

    def pack(self, x: QuantizedTensor) -> Tensor:
        """What is sent of a tensor with one scale."""
        if self.in_fp8:
            return x.to_fp8().data.view(torch.uint8)
        return x.hold().data

    def unpack(self, sent: Tensor, like: QuantizedTensor) -> QuantizedTensor:
        """The tensor that `sent` stands for, in the form and with the scale of `like`."""
        if self.in_fp8:
            return cast(QuantizedTensor, from_wire(sent, like))
        made = replace(like, data=sent)
        return made if like.is_held else made.to_fp8()


def _to_heads(x: Operand, axis: Axis, exchange: Exchange) -> Operand:
    """`[s, b, n, d]` of some tokens to `[S, b, n / P, d]` of some heads."""
    if isinstance(x, QuantizedTensor):
        return exchange.unpack(tokens_to_heads(exchange.pack(x), exchange.along(axis)), x)
    return tokens_to_heads(x, axis)


def _to_tokens(x: Operand, axis: Axis, exchange: Exchange) -> Operand:
    """The way back."""
    if isinstance(x, QuantizedTensor):
        return exchange.unpack(heads_to_tokens(exchange.pack(x), exchange.along(axis)), x)
    return heads_to_tokens(x, axis)


@dataclass(frozen=True)
class HeadShards(Whole):
    """Ranks exchange tokens for heads, and each has whole sequences of some heads.

    Attributes:
        exchange: How tensors travel.
    """

    exchange: Exchange = Exchange()

    def enter(self, x: Operand) -> Operand:
        """See the base class."""
        return _to_heads(x, self.axis, self.exchange)

    def leave(self, x: Operand) -> Operand:
        """See the base class."""
        return _to_tokens(x, self.axis, self.exchange)


@dataclass(frozen=True)
class Gathered(Placement):
    """Keys and values of all ranks come together, in the backward pass once more.

    Attributes:
        axis: See the base class.
        job: Scale, documents, dropout.
        exchange: How tensors travel.
    """

    axis: Axis
    job: ContextBlock
    exchange: Exchange = Exchange()

    def _whole(self, x: Operands) -> Operands:
        size, axis = self.axis.size, self.exchange.along(self.axis)
        key, value = (
            self.exchange.unpack(
                to_sequence(all_gather(self.exchange.pack(part), axis), size), part
            )
            for part in (x.key, x.value)
        )
        return Operands(x.query, key, value)

    def _blocks(self, x: Operands) -> Iterator[tuple[slice, slice, Block]]:
        """Rows of queries, the keys that they see, and how."""
        chunk = x.query.shape[0] // 2
        for rows, block in row_blocks(self.job, chunk):
            yield rows, slice(0, block.offset + chunk), block

    def attend(self, x: Operands, softmax: Pieces, *, for_backward: bool) -> Results:
        """See the base class."""
        del for_backward
        x = self._whole(x)
        out, lse = empty_results(x.query)
        for rows, keys, block in self._blocks(x):
            add_products(x.part(rows, keys), block, softmax, out[rows], lse[rows], whole=True)
        return Results(out, lse)

    def gradients(
        self, x: Operands, d_out: Operand, lse: Tensor, exact: Tensor | None, rounding: Rounding
    ) -> Gradients:
        """See the base class."""
        del exact
        x = self._whole(x)
        d_query, d_key, d_value = zero_gradients(x)
        for rows, keys, block in self._blocks(x):
            accumulate_gradients(
                x.part(rows, keys),
                block,
                rows_of(d_out, rows),
                lse[rows],
                None,
                (d_query[rows], d_key[keys], d_value[keys]),
                rounding,
            )
        size, axis = self.axis.size, self.axis
        d_key, d_value = (reduce_scatter(to_ranks(g, size), axis) for g in (d_key, d_value))
        return d_query, d_key, d_value


@dataclass(frozen=True)
class Ring(Placement):
    """Keys and values travel around a ring; below it, ranks may exchange tokens for heads.

    Attributes:
        axis: See the base class.
        job: Ranks of the ring, ranks below it, scale, documents, dropout.
        exchange: How tensors travel.
    """

    axis: Axis
    job: ContextBlock
    exchange: Exchange = Exchange()

    def enter(self, x: Operand) -> Operand:
        """See the base class."""
        inner = self.job.inner
        return x if inner is None else _to_heads(x, inner, self.exchange)

    def leave(self, x: Operand) -> Operand:
        """See the base class."""
        inner = self.job.inner
        return x if inner is None else _to_tokens(x, inner, self.exchange)

    def _steps(
        self, x: Operands, *parts: QuantizedTensor, added: bool = False
    ) -> Iterator[tuple[int, Operands]]:
        """Yield (owner, this rank's queries with the owner's keys and perhaps values)."""
        sent = torch.stack([self.exchange.pack(part) for part in parts])
        for owner, arrived in ring_steps(sent, self.exchange.along(self.job.axis, added=added)):
            one = [
                self.exchange.unpack(data, part) for data, part in zip(arrived, parts, strict=True)
            ]
            yield owner, Operands(x.query, one[0], one[-1])

    def attend(self, x: Operands, softmax: Pieces, *, for_backward: bool) -> Results:
        """See the base class."""
        out, lse = empty_results(x.query)
        exact = torch.zeros_like(out) if for_backward else None
        chunk = x.query.shape[0] // 2
        for owner, y in self._steps(x, x.key, added=True):
            for rows, seen, block in visible_pairs(self.job, owner, chunk):
                z = y.part(rows, seen)
                add_row_sums(z.query, z.key, block, lse[rows])
        for owner, y in self._steps(x, x.key, x.value):
            for rows, seen, block in visible_pairs(self.job, owner, chunk):
                add_products(
                    y.part(rows, seen),
                    block,
                    softmax,
                    out[rows],
                    lse[rows],
                    exact=None if exact is None else exact[rows],
                )
        return Results(out, lse, exact)

    def gradients(
        self, x: Operands, d_out: Operand, lse: Tensor, exact: Tensor | None, rounding: Rounding
    ) -> Gradients:
        """See the base class."""
        if exact is None:
            raise TypeError("Ring.gradients: needs the result of unrounded probabilities.")
        chunk, kv = x.query.shape[0] // 2, x.key.shape
        plain = d_out.dequantize() if isinstance(d_out, QuantizedTensor) else d_out.float()
        delta = (plain * exact).sum(-1, keepdim=True)
        d_query = torch.zeros(x.query.shape, dtype=torch.float32, device=lse.device)
        travelling: Transfer | None = None
        for owner, y in self._steps(x, x.key, x.value):
            d_kv = torch.zeros((2, *kv), dtype=torch.float32, device=lse.device)
            for rows, seen, block in visible_pairs(self.job, owner, chunk):
                accumulate_gradients(
                    y.part(rows, seen),
                    block,
                    rows_of(d_out, rows),
                    lse[rows],
                    delta[rows],
                    (d_query[rows], d_kv[0, seen], d_kv[1, seen]),
                    rounding,
                )
            if travelling is not None:
                d_kv += travelling.wait()  # what earlier holders of these keys found
            travelling = Transfer(d_kv, self.job.axis, tag=1)
        if travelling is not None:
            d_kv = travelling.wait()  # back home
        return d_query, d_kv[0], d_kv[1]


def rows_of(x: Operand, rows: slice) -> Operand:
    """Some rows of a tensor, quantized or not."""
    return replace(x, data=x.data[rows]) if isinstance(x, QuantizedTensor) else x[rows]


def placement(
    comm: str, axis: Axis, job: ContextBlock, in_fp8: bool, itemsize: int = 2
) -> Placement:
    """How the ranks of a sequence meet.

    Args:
        comm: `p2p`, `all_gather`, `a2a` or `a2a+p2p`.
        axis: All ranks of a sequence.
        job: What their attention needs.
        in_fp8: Whether quantized tensors travel as bytes.
        itemsize: See `Exchange`.
    """
    exchange = Exchange(in_fp8, itemsize)
    if comm == "a2a":
        block = Block(job.scale, 0, job.starts, job.dropout, job.seed)
        return HeadShards(block, axis, exchange)
    if comm == "all_gather":
        return Gathered(axis, job, exchange)
    return Ring(axis, job if comm == "a2a+p2p" else replace(job, inner=None), exchange)
