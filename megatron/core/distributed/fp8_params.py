"""Buckets of weights that rest in FP8: owners make codes of their ranges, and codes are gathered.

One byte an element travels. Scales do not: all ranks find them from largest magnitudes, on which
they agree beforehand in one small reduction for a whole buffer. Where not all layers of a bucket
run in FP8, or codes cannot be made of parts (see `Fp8Weight`), the weights travel in their 16-bit
type, and each rank makes the same codes for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.comm_log import AMAX
from megatron.core.distributed.bucket import Bucket
from megatron.core.fp8.primary import Fp8Weight
from megatron.core.mesh import Axis
from megatron.core.shards import FlatRange
from megatron.core.tensor_parallel.mappings import all_reduce_

Masters = Mapping[nn.Parameter, torch.Tensor]


class Fp8Bucket(Bucket):
    """A bucket of weights that may rest in FP8.

    Args:
        weights: Each of its weights, and where it lies.
        dtype: Their 16-bit type.
        values: The codes, uint8 `[elements]`; this and the others as for `Bucket`.
    """

    def __init__(
        self, weights: Sequence[tuple[Fp8Weight, slice]], dtype: torch.dtype, **others: Any
    ) -> None:
        super().__init__(**others)
        self.weights = list(weights)
        self._dtype = dtype
        # Tensors of their own, on the same memory: what a forward keeps of one weight is not
        # invalid when another one arrives.
        self._places = [
            _alias(self._codes()[place].view(weight.weight.shape)) for weight, place in weights
        ]
        self._whole: torch.Tensor | None = None

    @property
    def as_codes(self) -> bool:
        """Whether codes travel."""
        return all(weight.in_parts for weight, _ in self.weights)

    def place(self, index: int, own: FlatRange) -> torch.Tensor:
        """Where the owned elements of a weight go before they are sent."""
        whole = self._travelling()
        begin = self.weights[index][1].start
        return whole[begin + own.start : begin + own.stop]

    def start_store(self) -> bool:
        """Prepare for new weights; returns whether codes of them are wanted."""
        self._whole = None
        if self.as_codes:
            return True
        like = self._codes()
        self._whole = torch.zeros(like.numel(), dtype=self._dtype, device=like.device)
        return False

    def _codes(self) -> torch.Tensor:
        return super()._travelling()

    def _travelling(self) -> torch.Tensor:
        return self._codes() if self._whole is None else self._whole

    @torch.no_grad()
    def _announce(self) -> None:
        whole, self._whole = self._whole, None
        # Views keep all of `whole`: only if all of it is needed.
        shared = not any(weight.precision.active for weight, _ in self.weights)
        for (weight, place), codes in zip(self.weights, self._places, strict=True):
            torch.autograd.graph.increment_version(codes)
            if whole is None:
                weight.take_codes(codes)
                continue
            values = whole[place].view(weight.weight.shape)
            keeps = not weight.precision.active and not shared
            weight.take_values(values.clone() if keeps else values, codes)
        super()._announce()


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with a version of its own."""
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    made.set_(x)  # type: ignore[call-overload]
    return made


@torch.no_grad()
def store(
    buckets: Sequence[Fp8Bucket],
    axis: Axis,
    owned: Mapping[nn.Parameter, FlatRange],
    masters: Masters,
) -> None:
    """Round masters and put them where they are gathered from. Collective.

    Args:
        buckets: Of one buffer.
        axis: Ranks that share it.
        owned: Elements of each weight that this rank has a master of.
        masters: Flat fp32 masters; of weights of which this rank owns nothing there are none.
    """

    def part(weight: Fp8Weight) -> torch.Tensor:
        master = masters.get(weight.weight)
        if master is None:
            return torch.empty(0, dtype=weight.weight.dtype, device=weight.weight.device)
        return master.to(weight.weight.dtype)

    in_parts: list[tuple[Fp8Weight, FlatRange, torch.Tensor]] = []
    for bucket in buckets:
        as_codes = bucket.start_store()
        for index, (weight, _) in enumerate(bucket.weights):
            own = owned[weight.weight]
            place = bucket.place(index, own)
            if as_codes:
                in_parts.append((weight, own, place))
            elif own.size:
                place.copy_(part(weight))
    if not in_parts:
        return
    found = torch.cat([weight.magnitudes(part(weight), own.start) for weight, own, _ in in_parts])
    all_reduce_(found, axis, "max", AMAX)
    agreed = torch.split(found, [weight.num_magnitudes for weight, _, _ in in_parts])
    for (weight, own, place), magnitudes in zip(in_parts, agreed, strict=True):
        weight.agree(magnitudes)
        if own.size:
            place.copy_(weight.encode(part(weight), own.start))
