"""Contiguous buffers for gradients and, when they are sharded, for parameters.

The parameters of a buffer are summed over the same ranks. They lie in reverse order, which is
roughly the order in which backward finishes them, and are cut into buckets, each of which is one
collective. With sharding every rank owns one contiguous range of every bucket: the gradients are
reduced into it, the optimizer updates it, and the parameters are gathered from all ranges. A range
may begin and end in the middle of a parameter. Where the ranks are cut into groups that each share
all ranges, the sums of a range are then added up over the ranks that own it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.bucket import Bucket, Wire
from megatron.core.distributed.fp8_params import Fp8Bucket, store
from megatron.core.distributed.fp8_reduction import BLOCK
from megatron.core.distributed.reduction import Ranks, share
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.primary import Fp8Weight
from megatron.core.mesh import Axis
from megatron.core.shards import FlatRange

# So that no two parameters share a cache line, and vectorized arithmetic meets the same elements
# together whoever owns them.
_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


def default_bucket_size(num_ranks: int) -> int:
    """Return the elements of a bucket: enough that latency does not matter on many ranks."""
    return max(40_000_000, 1_000_000 * num_ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Where parameters and buckets lie in a buffer.

    Attributes:
        offsets: First element of each parameter, in buffer order.
        buckets: (first element, end, first parameter, end of parameters) of each bucket.
        elements: Length of the buffer, padding included.
    """

    offsets: tuple[int, ...]
    buckets: tuple[tuple[int, int, int, int], ...]
    elements: int


def plan_layout(
    sizes: Sequence[int],
    bucket_size: int,
    *,
    num_shards: int | None = None,
    alone: Sequence[bool] = (),
    block: int = 1,
) -> Layout:
    """Place parameters one after the other and cut between them.

    Args:
        sizes: Elements of each parameter, in buffer order.
        bucket_size: A bucket ends after the parameter with which it reaches this many elements.
        num_shards: Ranks that share each bucket in equal ranges; None for no sharding, which needs
            no padding.
        alone: For each parameter whether it has a bucket to itself.
        block: Elements of which each range and each parameter gets a whole number.
    """
    param_step = math.lcm(block, 1 if num_shards is None else _PARAM_ALIGNMENT)
    bucket_step = block
    if num_shards is not None:
        bucket_step = math.lcm(num_shards * block, _BUCKET_ALIGNMENT)
    offsets: list[int] = []
    buckets: list[tuple[int, int, int, int]] = []
    position = start = first = 0
    for index, size in enumerate(sizes):
        lone = bool(alone) and alone[index]
        if lone and index > first:
            position = _round_up(position, bucket_step)
            buckets.append((start, position, first, index))
            start, first = position, index
        position = _round_up(position, param_step)
        offsets.append(position)
        position += size
        if lone or position - start >= bucket_size or index == len(sizes) - 1:
            position = _round_up(position, bucket_step)
            buckets.append((start, position, first, index + 1))
            start, first = position, index + 1
    return Layout(tuple(offsets), tuple(buckets), position)


class GradBuffer:
    """Gradients of parameters that are summed over the same ranks, in one flat tensor.

    Each parameter gets `main_grad`, a view of its range. With sharding the parameters themselves
    move into a flat tensor of the same layout.

    Args:
        params: Parameters of one type, in model order.
        axis: Ranks that hold copies of them; with several groups, those of this group.
        reduce_dtype: Type of gradients on the wire; an FP8 one for `Fp8Reduction`.
        outer: Ranks of other groups that own the same ranges; None for one group.
        bucket_size: Elements of a bucket; None for the default.
        sharded: Whether each rank owns a range of every bucket.
        feedback: See `Wire`.
        fp8_weights: If the parameters are weights that may rest in FP8, the precision of the layer
            of each of them.

    Attributes:
        flat: All gradients, fp32 `[elements]`.
        params: The parameters, in buffer order.
        buckets: The buckets, in the order in which backward completes them.
        fp8_weights: Weights that may rest in FP8; all parameters, or none.
        codes: A place for their codes, uint8 `[elements]`; None without any.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        axis: Axis,
        reduce_dtype: torch.dtype,
        *,
        outer: Axis | None = None,
        bucket_size: int | None = None,
        sharded: bool = False,
        feedback: bool = True,
        fp8_weights: Mapping[nn.Parameter, LinearPrecision] | None = None,
    ) -> None:
        wire = Wire(reduce_dtype, feedback)
        self.params = list(reversed(params))
        self.axis, self.sharded = axis, sharded
        self.outer = outer or Axis.single("outer")
        # Two pipeline stages may hold copies of one embedding, and sum its gradient range by range:
        # in a bucket of its own it is cut at the same places on both.
        ranks = Ranks(axis, self.outer, sharded)
        num_shards = axis.size if sharded else None
        if wire.is_fp8 and not ranks.alone:
            # Of the exchange, that is; see `Fp8Reduction`.
            num_shards = axis.size if axis.size > 1 else self.outer.size
        layout = plan_layout(
            [p.numel() for p in self.params],
            bucket_size or default_bucket_size(axis.size),
            num_shards=num_shards,
            alone=[sharded and getattr(p, "shared_embedding", False) for p in self.params],
            block=BLOCK if wire.is_fp8 else 1,
        )
        device = self.params[0].device if self.params else None
        self.flat = torch.zeros(layout.elements, dtype=torch.float32, device=device)
        self._values: torch.Tensor | None = None
        self.codes: torch.Tensor | None = None
        self.fp8_weights = [Fp8Weight(p, fp8_weights[p]) for p in self.params if fp8_weights]
        if self.fp8_weights:
            self.codes = torch.zeros(layout.elements, dtype=torch.uint8, device=device)
        elif sharded and self.params:
            dtype = self.params[0].dtype
            self._values = torch.zeros(layout.elements, dtype=dtype, device=device)
        for param, start in zip(self.params, layout.offsets, strict=True):
            stop = start + param.numel()
            param.main_grad = self.flat[start:stop].view(param.shape)  # type: ignore[attr-defined]
            if self._values is not None:
                _move(param, self._values[start:stop])
        self._layout = layout
        self.buckets = [self._bucket(number, ranks, wire) for number in range(len(layout.buckets))]
        self._places = {
            self.params[index]: (bucket, slice(begin, begin + self.params[index].numel()))
            for bucket, (start, _, first, last) in zip(self.buckets, layout.buckets, strict=True)
            for index, begin in ((i, layout.offsets[i] - start) for i in range(first, last))
        }
        self._owned = self.ranges_of(axis.rank)

    def _bucket(self, number: int, ranks: Ranks, wire: Wire) -> Bucket:
        start, stop, first, last = self._layout.buckets[number]
        values = self._values if self.codes is None else self.codes
        common: dict[str, Any] = {
            "grads": self.flat[start:stop],
            "values": None if values is None else values[start:stop],
            "params": self.params[first:last],
            "ranks": ranks,
            "wire": wire,
        }
        if not self.fp8_weights:
            return Bucket(**common)
        offsets = (offset - start for offset in self._layout.offsets[first:last])
        weights = self.fp8_weights[first:last]
        places = [
            (weight, slice(begin, begin + weight.weight.numel()))
            for weight, begin in zip(weights, offsets, strict=True)
        ]
        return Fp8Bucket(places, self.params[0].dtype, **common)

    def store_masters(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make new codes of weights that may rest in FP8; gathering follows. Collective.

        Args:
            masters: Of the elements that this rank owns, flat fp32.
        """
        buckets = [bucket for bucket in self.buckets if isinstance(bucket, Fp8Bucket)]
        if buckets:
            store(buckets, self.axis, self._owned, masters)

    def ranges_of(self, rank: int) -> dict[nn.Parameter, FlatRange]:
        """Return which elements of every parameter a rank of the axis owns: all if not sharded."""
        owned = {}
        for start, stop, first, last in self._layout.buckets:
            own = slice(0, stop - start)
            if self.sharded:
                own = share(stop - start, self.axis, rank)
            for index in range(first, last):
                param, offset = self.params[index], self._layout.offsets[index] - start
                low = min(max(own.start - offset, 0), param.numel())
                high = max(min(own.stop - offset, param.numel()), low)
                owned[param] = FlatRange(low, high)
        return owned

    def owned(self, param: nn.Parameter) -> FlatRange:
        """Return which elements of a parameter this rank reduces and updates; maybe none."""
        return self._owned[param]

    def zero(self, factor: float) -> None:
        """Forget the gradients of the last step; see `Reduction.clear`."""
        for bucket in self.buckets:
            bucket.reduction.clear(factor)

    def place(self, param: nn.Parameter) -> tuple[Bucket, slice]:
        """Return the bucket of a parameter and where the parameter lies in it."""
        return self._places[param]

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that this rank keeps."""
        for bucket in self.buckets:
            bucket.scale(factor)


def _move(param: nn.Parameter, place: torch.Tensor) -> None:
    """Let a parameter live in a range of a flat tensor; it stays the same object."""
    with torch.no_grad():
        place.copy_(param.reshape(-1))
        param.set_(place.view(param.shape))  # type: ignore[call-overload]
