"""Rows as bytes, for rows that travel between ranks one by one.

A row is quantized once, in blocks of its own, and travels as its bytes and their scales, powers of
two in one byte each. Where the layer that gets the rows divides them into the same blocks, it uses
what came (`Arrival`), so a value is rounded once on its whole way. Any other layer gets the values
that the bytes stand for.

How a row is quantized depends on nothing but the row, so neither where it is sent nor which others
travel with it changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron.core.comm_log import Packing
from megatron.core.fp8 import kernels
from megatron.core.fp8.comm import from_lines, to_wire
from megatron.core.fp8.formats import E4M3, Fp8Format
from megatron.core.fp8.quantizers import BlockQuantizer, Quantizer
from megatron.core.fp8.recipe import (
    BlockRecipe,
    Float8BlockScaling,
    MXFP8BlockScaling,
    Recipe,
    Role,
)
from megatron.core.fp8.scales import ScaleRule
from megatron.core.fp8.tensor import QuantizedTensor

_RECIPES: dict[str, type[BlockRecipe]] = {
    recipe.name: recipe for recipe in (MXFP8BlockScaling, Float8BlockScaling)
}


@dataclass(frozen=True)
class RowCodec:
    """How rows become bytes.

    Attributes:
        fmt: Format of the elements.
        length: Elements of a row that share a scale.
        rule: Which power of two it is.
        fold: Whether unpacked values are multiplied by their scales at once.
    """

    fmt: Fp8Format
    length: int
    rule: ScaleRule
    fold: bool

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return (1, self.length)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize rows.

        Args:
            x: `[T, h]`, any float type.

        Returns:
            Bytes `[T, h + ceil(h / length)]`: a line for each row. A line of zeros is a row of
            zeros.
        """
        data, inverse = kernels.round_blocks(x.contiguous(), self.fmt, self.block, self.rule)
        return to_wire(QuantizedTensor(data, inverse, self.fmt, self.block, power_of_two=True))

    def unpack(self, lines: torch.Tensor, cols: int) -> QuantizedTensor:
        """The rows `[T, cols]` of lines that `pack` made."""
        nothing = torch.empty(0, cols, dtype=torch.bfloat16, device=lines.device)
        like = QuantizedTensor(nothing, nothing.float(), self.fmt, self.block, True, self.fold)
        return from_lines(lines, like)

    def packing(self, x: torch.Tensor) -> Packing:
        """What the lines of `x` stand for."""
        scales = -(-x.shape[1] // self.length)
        return Packing(x.shape[1] + scales, scales, x.shape[1] * x.element_size())

    def fits(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer makes the same operands of the same rows."""
        return (
            isinstance(quantizer, BlockQuantizer)
            and not quantizer.hardware
            and (quantizer.fmt, quantizer.blocks.row) == (self.fmt, self.block)
            and (quantizer.blocks.rule, quantizer.fold) == (self.rule, self.fold)
        )


def row_codec(name: str, recipe: Recipe | None, role: Role, *, fold: bool) -> RowCodec | None:
    """The codec that a setting names.

    Args:
        name: A recipe's name, or `bf16` for none.
        recipe: What the layer that gets the rows computes in. If that is the recipe named here, the
            elements have its format for `role`, else E4M3.
        role: What the rows are to that layer.
        fold: See `RowCodec`.
    """
    if name not in _RECIPES:
        return None
    made = _RECIPES[name]
    fmt = recipe.format_of(role) if isinstance(recipe, made) else E4M3
    blocks = made().blocks_of(role)
    return RowCodec(fmt, blocks.length, blocks.rule, fold)


def values_of(rows: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """What quantized rows stand for, a tensor of its own.

    The largest value of a block may be rounded up, beyond the largest number of fp16.
    """
    values = rows.dequantize(dtype)
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        return rows.dequantize().clamp_(-largest, largest).to(dtype)
    return values.detach() if values is rows.data else values


@dataclass(frozen=True)
class CameRows:
    """Quantized rows as they came.

    Attributes:
        rows: `[R, h]`.
        codec: What unpacked them.
    """

    rows: QuantizedTensor
    codec: RowCodec

    def fits(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer would make the same of them."""
        return self.codec.fits(quantizer)

    def between(self, start: int, stop: int) -> QuantizedTensor:
        """Some of the rows."""
        data, inverse = self.rows.data[start:stop], self.rows.scale_inv[start:stop]
        return replace(self.rows, data=data, scale_inv=inverse)


class Arrival:
    """Rows as they came, left for the layer that gets their values."""

    def __init__(self) -> None:
        self._came: CameRows | None = None
        self._values: torch.Tensor | None = None

    def put(self, came: CameRows, values: torch.Tensor) -> None:
        """Leave rows here.

        Args:
            came: The rows.
            values: What they stand for, as it is handed on.
        """
        self._came, self._values = came, values.detach()

    def take(self, x: torch.Tensor) -> CameRows | None:
        """The rows if `x` is what they stand for; once."""
        came, values = self._came, self._values
        self._came = self._values = None
        if values is None:
            return None
        same = (values.data_ptr(), values.shape, values.dtype) == (x.data_ptr(), x.shape, x.dtype)
        return came if same else None
