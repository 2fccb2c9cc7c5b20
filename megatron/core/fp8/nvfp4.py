"""NVFP4: four-bit operands with scales in two levels.

Values are E2M1. 16 of them share a scale in E4M3, and one fp32 scale stands above these, so that
the largest block scale of a tensor is the largest E4M3 number. Three measures keep training whole:
weights have square blocks, so both products that read them see the same numbers; gradients are
rounded at random, so their errors average out; and both operands of the weight gradient are mixed
by a Hadamard matrix along the tokens, which spreads single large values over their blocks.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); formulas of
Transformer Engine's recipe.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch

from megatron.core.comm_log import AMAX
from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E2M1, Format, Fp8Format
from megatron.core.fp8.gemm import Operand
from megatron.core.fp8.kernels import fp4
from megatron.core.fp8.quantizers import Quantizer
from megatron.core.fp8.recipe import Recipe, Role
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce

_ROWS, _COLUMNS = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """E2M1 with a scale in E4M3 for each 16 elements, and one for the tensor.

    Attributes:
        disable_rht: Do not mix the operands of the weight gradient.
        disable_stochastic_rounding: Round gradients to nearest.
        disable_2d_quantization: Give weights blocks of 16 in a row, not 16 x 16; then the two
            products that read a weight see different roundings.
        fp4_format: Format of values; E2M1.
        fp8_format: Format of block scales; E4M3.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3

    name = "nvfp4"
    family = "fp4"

    def __post_init__(self) -> None:
        for field, only in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            value = getattr(self, field)
            if isinstance(value, str) and value.upper() == only.name:
                object.__setattr__(self, field, only)
            self._require(field, (only,), "Values are E2M1 and block scales E4M3")

    @property
    def format_name(self) -> str:
        """See the base class."""
        return self.fp4_format.name.lower()

    @property
    def is_random(self) -> bool:
        """See the base class."""
        return not self.disable_stochastic_rounding

    def format_of(self, role: Role) -> Fp8Format:
        """See the base class."""
        del role
        return E2M1


class NVFP4Quantizer(Quantizer):
    """Scales in two levels.

    Blocks lie along the dimension that a product sums over, as with other recipes for blocks, and
    each direction has a tensor scale of its own, because mixing changes magnitudes.

    Args:
        recipe: What to do.
        role: The tensor's role.
        fold: Whether operands are multiplied by the inverse scales of their blocks at once.

    Attributes:
        seed: Of random roundings; every seed gives other numbers.
    """

    def __init__(self, recipe: NVFP4BlockScaling, role: Role, *, fold: bool = True) -> None:
        super().__init__(E2M1, role)
        self.fold = fold
        self.square = role is Role.WEIGHT and not recipe.disable_2d_quantization
        self.mixes = role is not Role.WEIGHT and not recipe.disable_rht
        self.is_random = role is Role.GRAD_OUTPUT and recipe.is_random
        self.transposable = self.square
        self.seed = 0

    def seeded(self, seed: int) -> Quantizer:
        """See the base class."""
        if not self.is_random:
            return self
        other = copy(self)
        other.seed = seed
        return other

    def cast(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """See the base class."""
        block = (fp4.BLOCK if self.square else 1, fp4.BLOCK)
        return self._blocks(x, block, axis, _ROWS), None

    def colwise(self, x: torch.Tensor) -> QuantizedTensor:
        """As in the base class; where rows are mixed, their number is rounded up to 16."""
        if self.square:
            return self.rowwise(x).t()
        return self._columns(x, None).t()

    def keep(self, x: torch.Tensor, row: QuantizedTensor, *, axis: Axis | None = None) -> Operand:
        """`x` quantized along its rows, or `x` itself if other ranks hold parts of its blocks."""
        if self.square:
            return row
        if axis is not None and x.shape[0] % fp4.BLOCK:
            return x
        return self._columns(x, axis)

    def transposed(self, row: QuantizedTensor) -> QuantizedTensor:
        """The transpose of square blocks, or of what `keep` made.

        Raises:
            ValueError: For blocks along the rows of `x`, whose transpose is no operand.
        """
        if row.block == (1, fp4.BLOCK):
            raise ValueError("NVFP4Quantizer.transposed: got rows of blocks. Use keep and column.")
        return row.t()

    def _columns(self, x: torch.Tensor, axis: Axis | None) -> QuantizedTensor:
        """`x` with blocks along its columns, mixed first if that is wanted."""
        values = fp4.hadamard(x) if self.mixes else x
        return self._blocks(values, (fp4.BLOCK, 1), axis, _COLUMNS)

    def _blocks(
        self, x: torch.Tensor, block: tuple[int, int], axis: Axis | None, stream: int
    ) -> QuantizedTensor:
        amax, first_row = kernels.amax(x), 0
        if axis is not None and axis.size > 1:
            amax = all_reduce(amax.view(1), axis, op="max", part=AMAX).view(())
            first_row = axis.rank * x.shape[0]
        scale = fp4.global_scale(amax)
        draw = fp4.Draw(self.seed, stream, first_row) if self.is_random else None
        data, scale_inv = fp4.round_blocks(x, block, scale, fold=self.fold, draw=draw)
        return QuantizedTensor(
            data, scale_inv, E2M1, block, folded=self.fold, tensor_inv=scale.reciprocal()
        )
