"""Gradients that travel in FP8, each rounded once, with the rounding errors sent later.

Every rank sends every other one its part of that rank's range as E4M3 bytes, with a power of two
for each 128 elements (one byte: 1.008 bytes an element in all). The owner adds the parts up in rank
order in fp32. Its own part never travels and is not rounded. Blocks never reach over the end of a
range or of a parameter, so what a gradient becomes depends on its parameter alone: ranks that hold
a copy of a parameter beside parameters that differ still agree about it.

Where every rank needs all sums (no distributed optimizer) the owners' sums travel back in bf16.

*Error feedback.* What rounding took away of a rank's gradients is added to its gradients of the
next step, so that over many steps what arrives is what was to be sent: at any time the sum of all
that was to be sent is the sum of all that arrived and of what the ranks keep. Where a rank needs
the sums of its own range only, the rest of the gradient buffer is of no use after the exchange, and
what is kept rests there, where the next step's gradients are added to it: it takes no memory.
Otherwise it needs an fp32 tensor like the gradients, in which the owner keeps what bf16 took away
of its sums. What rounding takes away is exact in fp32.

A gradient that is no number arrives as one: NaN has a code of its own, and an infinity gets the
largest scale, with which 448 is infinite in fp32. Nothing is kept of a step that is not taken.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, for the error feedback;
Tang et al., "DoubleSqueeze", ICML 2019, for errors kept on both ways.
"""

from __future__ import annotations

import torch

from megatron.core import wire
from megatron.core.comm_log import GRADIENT_SYNC, Packing
from megatron.core.distributed.reduction import Ranks, share
from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3
from megatron.core.fp8.scales import ScaleRule, from_e8m0, to_e8m0
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.core.wire import Pending

BLOCK = 128
# Of gradients there, and of sums back; without FP8 both travel in fp32.
_CODES = Packing(sent=BLOCK + 1, scales=1, plain=4 * BLOCK)
_SUMS = Packing(sent=2, scales=0, plain=4)


def packed_size(elements: int) -> int:
    """Bytes of so many elements (whole blocks) on the wire."""
    return elements + elements // BLOCK


def pack(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round values to E4M3 with a scale for each block.

    Args:
        values: fp32 `[n]`, whole blocks.
        out: uint8 `[packed_size(n)]`, written: codes, then scales.

    Returns:
        What `out` stands for, fp32 `[n]`.
    """
    held, inverse = kernels.round_blocks(values.view(-1, BLOCK), E4M3, (1, BLOCK), ScaleRule.E8M0)
    out[: values.numel()].copy_(kernels.encode(held, E4M3).view(-1))
    out[values.numel() :].copy_(to_e8m0(inverse).view(-1))
    return held.float().mul_(inverse).view(-1)


def unpack(packed: torch.Tensor, elements: int) -> torch.Tensor:
    """The values that `pack` wrote, fp32 `[elements]`."""
    held = kernels.decode(packed[:elements].view(-1, BLOCK), E4M3)
    return held.float().mul_(from_e8m0(packed[elements:]).unsqueeze(1)).view(-1)


class Fp8Reduction:
    """Sums of gradients that are sent in FP8.

    Args:
        grads: fp32 `[elements]`, whole blocks for each rank; reduced in place.
        ranks: Who takes part. With groups that share out ranges, gradients travel in FP8 inside a
            group, and the owners' sums in fp32 between groups; with groups of one rank in FP8
            between groups.
        feedback: Whether to send later what rounding takes away.

    Attributes:
        residual: What is kept of every element, fp32 `[elements]`; None where it rests in `grads`
            or nothing is kept.
    """

    def __init__(self, grads: torch.Tensor, ranks: Ranks, feedback: bool = True) -> None:
        self._grads, self._feedback = grads, feedback
        within = ranks.inner.size > 1
        self._axis = ranks.inner if within else ranks.outer
        self._outer = ranks.outer if within else None
        # Every rank needs all sums of `_axis`.
        self._whole = not (ranks.sharded and within)
        self._mine = share(grads.numel(), self._axis)
        self._keeps = feedback and not ranks.alone
        self.residual: torch.Tensor | None = None
        if self._keeps and self._whole:
            self.residual = torch.zeros_like(grads)
        self._settled = self._dropped = False
        self._arrived = grads.new_empty(0, dtype=torch.uint8)
        self._sums: torch.Tensor | None = None
        self._sending: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._to_proceed = False

    # -- a step ---------------------------------------------------------------------------------

    def clear(self, factor: float) -> None:
        """See `Reduction`; what is kept of the last step stays, unless it was not taken."""
        settled, self._settled = self._settled, False
        dropped, self._dropped = self._dropped, False
        if self.residual is not None:
            self._grads.zero_()
            if dropped:
                self.residual.zero_()
        elif dropped or not (settled or self._keeps):
            self._grads.zero_()
        elif not settled:
            self._grads[self._mine].zero_()  # the last step's sums
        if factor != 1.0:
            self._kept().mul_(factor)

    def start(self) -> None:
        """See `Reduction`."""
        axis, elements = self._axis, self._grads.numel() // self._axis.size
        if self.residual is not None:
            self._grads.add_(self.residual)
        shape, device = (axis.size, packed_size(elements)), self._grads.device
        sent = torch.empty(shape, dtype=torch.uint8, device=device)
        for rank in range(axis.size):
            if rank != axis.rank:
                self._pack(share(self._grads.numel(), axis, rank), sent[rank])
            else:
                sent[rank].zero_()
        self._arrived = torch.empty_like(sent)
        self._sending = sent  # a transport need not keep it alive
        packed = axis.packed(_CODES)
        self._pending = wire.all_to_all(
            self._arrived, sent, packed, part=GRADIENT_SYNC, background=True
        )
        self._to_proceed = True

    def proceed(self) -> None:
        """See `Reduction`: add up, and send the sums to whom else they concern."""
        if not self._to_proceed:
            return
        self._to_proceed = False
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._sending = None
        total = self._add_up()
        if self._whole:
            self._send_back(total)
            return
        own = self._grads[self._mine].copy_(total)
        if self._outer is not None and self._outer.size > 1:
            self._pending = start_all_reduce(own, self._outer, GRADIENT_SYNC)

    def finish(self) -> None:
        """See `Reduction`."""
        self.proceed()
        if self._pending is not None:
            self._pending.wait()
        if self._sums is not None:
            self._grads.copy_(self._sums)
        self._pending = self._sums = None

    def _pack(self, place: slice, out: torch.Tensor) -> None:
        part = self._grads[place]
        arrives = pack(part, out)
        if not self._feedback:
            return
        if self.residual is None:
            part.sub_(arrives)
        else:
            torch.sub(part, arrives, out=self.residual[place])

    def _add_up(self) -> torch.Tensor:
        """The sum of this rank's range over all ranks, in rank order."""
        own = self._grads[self._mine]
        total: torch.Tensor | None = None
        for rank in range(self._axis.size):
            mine = rank == self._axis.rank
            addend = own if mine else unpack(self._arrived[rank], own.numel())
            if total is None:
                total = addend.clone() if mine else addend
            else:
                total.add_(addend)
        self._arrived = self._arrived.new_empty(0)
        return own if total is None else total

    def _send_back(self, total: torch.Tensor) -> None:
        self._sums = torch.empty_like(self._grads, dtype=torch.bfloat16)
        own = self._sums[self._mine].copy_(total)
        if self.residual is not None:
            torch.sub(total, own.float(), out=self.residual[self._mine])
        packed = self._axis.packed(_SUMS)
        self._pending = start_all_gather(self._sums, own, packed, GRADIENT_SYNC)

    # -- what is kept ---------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget what was kept of this step, because it is not taken."""
        self._dropped = True

    def expose(self) -> torch.Tensor | None:
        """What this rank keeps of the bucket, `[elements]`, to be read; None if nothing."""
        if not (self._keeps or self._settled):
            return None
        if self._dropped:
            self.clear(1.0)
        elif self.residual is None and not self._settled:
            self._grads[self._mine].zero_()  # the last step's sums
        return self._kept()

    def expect(self) -> torch.Tensor | None:
        """A place for what a rank kept, zeros; the next step takes it from there."""
        if not self._feedback:
            return None
        self._settled, self._dropped = True, False
        return self._kept().zero_()

    def add_up(self) -> None:
        """Let what all ranks keep be in the range of its owner, and nothing elsewhere. Collective.

        Owners in several groups (`copies`) have the same; all but one of them must clear it.
        """
        kept = self.expose()
        if kept is None:
            return
        self._settled, own = True, kept[self._mine]
        if self._axis.size > 1:
            start_reduce_scatter(own, kept, self._axis, GRADIENT_SYNC).wait()
        if self._outer is not None and self._outer.size > 1:
            start_all_reduce(own, self._outer, GRADIENT_SYNC).wait()
        kept[: self._mine.start].zero_()
        kept[self._mine.stop :].zero_()

    @property
    def owned(self) -> slice:
        """The range of the bucket whose sums this rank makes. It sends nothing of its own there."""
        return self._mine

    @property
    def copies(self) -> Axis:
        """Ranks that make the same sums, in several groups."""
        return self._outer or Axis.single("outer")

    def _kept(self) -> torch.Tensor:
        return self._grads if self.residual is None else self.residual
