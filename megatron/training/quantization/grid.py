"""Integer grids for weights: scales, rounding, and the packed form that other tools read.

A weight ``[out, in]`` is stored as integers and one scale for each row, or for each group of
neighbouring columns of a row; there are no zero points. The packed form and the arithmetic that
turns it back are those of the ``pack-quantized`` format of the compressed-tensors package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Scales are stored in the type of the weights that are not quantized.
SCALE_DTYPE = torch.bfloat16
_ROWS = 1024  # packed at once, in 64 bits an element


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        values: int8 ``[out, in]``.
        scales: bf16 ``[out, groups]``.
    """

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """Return the bf16 ``[out, in]`` weight that a reader of the files computes."""
        columns = self.values.shape[1]
        wide = self.scales.repeat_interleave(columns // self.scales.shape[1], dim=1)
        return self.values.to(wide.dtype) * wide


@dataclass(frozen=True)
class Grid:
    """A symmetric integer grid.

    Attributes:
        bits: 4 or 8.
        group_size: Columns that share a scale; None for a whole row.
    """

    bits: int
    group_size: int | None = None

    @property
    def lowest(self) -> int:
        """The smallest integer."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def width(self, columns: int) -> int:
        """Return how many columns share a scale in a weight that has so many."""
        return self.group_size or columns

    def scales(self, weight: Tensor) -> Tensor:
        """Return the scale ``[out, 1]`` of one group of columns, in bf16.

        The grid is not symmetric about zero (-8 to 7); half a step beyond its ends loses no more
        than rounding does, so the largest value is put there.
        """
        largest = weight.abs().amax(dim=1, keepdim=True)
        scales = (largest / (self.highest + 0.5)).to(SCALE_DTYPE)
        # A group of zeros, or of values too small for the type, is zero at any scale.
        return torch.where(scales > 0, scales, torch.ones_like(scales))

    def all_scales(self, weight: Tensor) -> Tensor:
        """Return the scales ``[out, groups]`` of a whole weight ``[out, in]``."""
        groups = torch.split(weight, self.width(weight.shape[1]), dim=1)
        return torch.cat([self.scales(group) for group in groups], dim=1)

    def round(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest integers, in the weight's own type.

        Args:
            weight: ``[out, n]``.
            scales: ``[out, 1]``, or one for each element.
        """
        return (weight / scales.to(weight.dtype)).round().clamp(self.lowest, self.highest)

    def nearest(self, weight: Tensor) -> Quantized:
        """Round every element of ``[out, in]`` to the nearest point of the grid."""
        scales = self.all_scales(weight)
        wide = scales.repeat_interleave(self.width(weight.shape[1]), dim=1)
        return Quantized(self.round(weight, wide).to(torch.int8), scales)


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack int8 ``[out, in]`` into int32 ``[out, ceil(in * bits / 32)]``.

    Element ``i`` of a row takes the bits from ``i * bits`` on, lowest first, and is stored with
    ``2 ** (bits - 1)`` added, so that it is never negative.
    """
    return torch.cat([_pack_rows(part, bits) for part in torch.split(values, _ROWS)])


def _pack_rows(values: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    rows, columns = values.shape
    raised = torch.zeros((rows, math.ceil(columns / per_word) * per_word), dtype=torch.int64)
    raised[:, :columns] = values.to("cpu", torch.int64) + (1 << (bits - 1))
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    words = (raised.view(rows, -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return what ``pack`` was given: int8 ``[out, columns]``."""
    return torch.cat([_unpack_rows(part, bits, columns) for part in torch.split(packed, _ROWS)])


def _unpack_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    per_word = 32 // bits
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    words = packed.to(torch.int64).unsqueeze(-1)
    values = ((words >> shifts) & ((1 << bits) - 1)).view(packed.shape[0], -1)[:, :columns]
    return (values - (1 << (bits - 1))).to(torch.int8)
