"""How the gradients of a bucket are summed over ranks, in three steps that other work fits between.

`start` sends, `proceed` goes on with what has arrived (a second transfer, if there is one),
`finish` waits. Afterwards the sums are in this rank's range, or everywhere if all need them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.comm_log import GRADIENT_SYNC
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import start_all_reduce, start_reduce_scatter
from megatron.core.wire import Pending


@dataclass(frozen=True)
class Ranks:
    """Ranks that add up a bucket.

    Attributes:
        inner: Those that share out its ranges, or all that hold a copy.
        outer: With several groups that share out the ranges: those that own the same one.
        sharded: Whether ranges are shared out, so that a rank needs the sums of its own only.
    """

    inner: Axis
    outer: Axis
    sharded: bool

    @property
    def alone(self) -> bool:
        """Whether there is nothing to add."""
        return self.inner.size == 1 and self.outer.size == 1

    def own(self, elements: int) -> slice:
        """The range of this rank: everything where ranges are not shared out."""
        return share(elements, self.inner) if self.sharded else slice(0, elements)


def share(elements: int, axis: Axis, rank: int | None = None) -> slice:
    """Return the range that a rank of an axis, or this one, has of a bucket."""
    size = elements // axis.size
    index = axis.rank if rank is None else rank
    return slice(index * size, (index + 1) * size)


class Reduction(Protocol):
    """One way to sum a bucket."""

    def clear(self, factor: float) -> None:
        """Forget the gradients of the last step.

        Args:
            factor: By how much the loss of the coming step is scaled more than that of the last.
        """

    def start(self) -> None:
        """Start to sum the gradients."""

    def proceed(self) -> None:
        """Go on, when what `start` sent has arrived."""

    def finish(self) -> None:
        """Wait for the sums."""


class PlainReduction:
    """Sums as the transport makes them.

    Args:
        grads: fp32 `[elements]`, reduced in place.
        ranks: Who takes part.
        dtype: Type of gradients on the wire.
    """

    def __init__(self, grads: torch.Tensor, ranks: Ranks, dtype: torch.dtype) -> None:
        self._grads, self._ranks, self._dtype = grads, ranks, dtype
        self._own = ranks.own(grads.numel())
        self._wire: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._is_inner_sum = False

    def clear(self, factor: float) -> None:
        """See `Reduction`."""
        self._grads.zero_()

    def start(self) -> None:
        """See `Reduction`."""
        inner, outer = self._ranks.inner, self._ranks.outer
        self._wire = wire = self._grads.to(self._dtype)  # itself in fp32
        self._is_inner_sum = outer.size > 1
        if inner.size == 1:
            self.proceed()
        elif not self._ranks.sharded:
            self._pending = start_all_reduce(wire, inner, GRADIENT_SYNC)
        else:
            self._pending = start_reduce_scatter(wire[self._own], wire, inner, GRADIENT_SYNC)

    def proceed(self) -> None:
        """See `Reduction`: add up the sums of several groups."""
        if not self._is_inner_sum or self._wire is None:
            return
        if self._pending is not None:
            self._pending.wait()
        self._is_inner_sum = False
        self._pending = start_all_reduce(self._wire[self._own], self._ranks.outer, GRADIENT_SYNC)

    def finish(self) -> None:
        """See `Reduction`."""
        self.proceed()
        if self._pending is not None:
            self._pending.wait()
        if self._wire is not None and self._wire is not self._grads:
            self._grads[self._own].copy_(self._wire[self._own])
        self._pending = self._wire = None
