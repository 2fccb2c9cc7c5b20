"""Quantizers: one for each tensor role of a layer, behind one small interface.

A layer asks for the operand it needs and never learns which recipe made it: `rowwise(x)` is `x`
quantized along its last dimension, `colwise(x)` is the *transposed* tensor quantized along its own
last dimension (the rows of `x`). With one scale a tensor the two are the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.core.comm_log import AMAX
from megatron.core.fp8 import kernels
from megatron.core.fp8.amax import Slot
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.gemm import Operand
from megatron.core.fp8.kernels import Normed
from megatron.core.fp8.recipe import BlockRecipe, Float8CurrentScaling, Role
from megatron.core.fp8.scales import ScaleRule
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce


class Quantizer(ABC):
    """Turns a high-precision matrix `[rows, cols]` into FP8 operands.

    Attributes:
        fmt: Target format.
        role: The tensor's role.
        hardware: Whether operands are made in the FP8 type (for FP8 hardware) or held in bf16.
        wants_fp32: Whether a normalisation should hand over its fp32 output, unrounded.
        transposable: Whether `colwise(x)` is `rowwise(x)` transposed: one cast serves both.
        mixes: Whether `colwise(x)` is of another tensor, of which only a product is that of `x`.
        casts_norms: Whether there is a `cast_norm`.

    A forward keeps for the backward what `keep` returns; `column` makes the operand of it.
    """

    wants_fp32 = False
    transposable = True
    mixes = False
    casts_norms = False

    def __init__(self, fmt: Fp8Format, role: Role, *, hardware: bool = False) -> None:
        self.fmt, self.role, self.hardware = fmt, role, hardware

    @abstractmethod
    def cast(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """`x` quantized along its last dimension, and its magnitude where the recipe records it.

        Args:
            x: `[rows, cols]`, bf16, fp16 or fp32.
            axis: Ranks whose shards will be gathered and so must share their scales.
        """

    def seeded(self, seed: int) -> Quantizer:
        """This quantizer, rounding with the random numbers of `seed` if it rounds at random."""
        del seed
        return self

    def record(self, amax: torch.Tensor | None) -> None:
        """Note the magnitude of a cast tensor for later scales, if the recipe has a memory."""
        del amax

    def rowwise(self, x: torch.Tensor, *, axis: Axis | None = None) -> QuantizedTensor:
        """`x` quantized along its last dimension; its magnitude is recorded."""
        made, amax = self.cast(x, axis=axis)
        self.record(amax)
        return made

    def colwise(self, x: torch.Tensor) -> QuantizedTensor:
        """`x` transposed, `[cols, rows]`, quantized along the rows of `x`."""
        return self.transposed(self.rowwise(x))

    def both(self, x: torch.Tensor, *, axis: Axis | None = None) -> tuple[QuantizedTensor, Operand]:
        """`rowwise(x)`, and what `keep` keeps; with one kernel for both where there is one."""
        row, kept, amax = self.cast_both(x, axis=axis)
        self.record(amax)
        return row, kept

    def cast_both(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, Operand, torch.Tensor | None]:
        """As `both`, and as `cast` it returns the magnitude instead of recording it."""
        row, amax = self.cast(x, axis=axis)
        return row, self.keep(x, row, axis=axis), amax

    def cast_norm(
        self, norm: Callable[[torch.Tensor | None], Normed], *, axis: Axis | None = None
    ) -> QuantizedTensor:
        """`rowwise` of what a norm returns, by a kernel that norms and casts at once.

        Args:
            norm: Takes the scale to cast with, or None to round to the layer's type instead.
            axis: As for `cast`.

        Raises:
            TypeError: Without `casts_norms`.
        """
        raise TypeError(f"{type(self).__name__}.cast_norm: there is none. Ask casts_norms first.")

    def transposed(self, row: QuantizedTensor) -> QuantizedTensor:
        """The transpose, laid out for a product: FP8 hardware wants it contiguous."""
        turned = row.t()
        if not self.hardware or turned.data.is_contiguous():
            return turned
        return replace(turned, data=kernels.turn(row.data))

    def keep(self, x: torch.Tensor, row: QuantizedTensor, *, axis: Axis | None = None) -> Operand:
        """What `column` needs of `x` later: here what is cast already.

        Args:
            x: `[rows, cols]`, what `row` was made from.
            row: `rowwise(x)`.
            axis: Ranks whose rows are gathered before `column` sees them.
        """
        return row

    def column(self, kept: Operand) -> QuantizedTensor:
        """`colwise(x)`, `[cols, rows]`, from `x` itself or from what was kept of it."""
        if isinstance(kept, QuantizedTensor):
            return self.transposed(kept)
        return self.colwise(kept)

    def _make(
        self, x: torch.Tensor, scale: torch.Tensor, *, want_amax: bool, turn: bool = False
    ) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor | None]:
        """Cast with one scale for the tensor, and what to keep; the result owns its `scale_inv`."""
        if not self.hardware:
            data, amax = kernels.round_to_grid(x, scale, self.fmt, want_amax=want_amax)
            row = QuantizedTensor(data, scale.reciprocal(), self.fmt)
            return row, row, amax
        made = kernels.cast_once(x, scale, self.fmt, want_amax=want_amax, want_turned=turn)
        row = QuantizedTensor(made.data, scale.reciprocal(), self.fmt)
        # The transpose of a transpose in memory: `column` then has nothing to copy.
        kept = row if made.turned is None else replace(row, data=made.turned.t())
        return row, kept, made.amax

    def _turns(self, axis: Axis | None) -> bool:
        """Whether to transpose in the cast: not what is gathered first."""
        return self.hardware and (axis is None or axis.size == 1)


class DelayedQuantizer(Quantizer):
    """Scale from the book; the magnitude is recorded for the next update.

    Args:
        slot: The tensor's column.
        recording: Asked at every cast: record this magnitude?
    """

    wants_fp32 = True
    casts_norms = True

    def __init__(
        self,
        fmt: Fp8Format,
        role: Role,
        slot: Slot,
        recording: Callable[[], bool],
        *,
        hardware: bool = False,
    ) -> None:
        super().__init__(fmt, role, hardware=hardware)
        self.slot, self.recording = slot, recording

    def cast(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """See the base class. Every rank casts with the same scale, so `axis` needs nothing."""
        row, _, amax = self._make(x, self.slot.scale, want_amax=True)
        return row, amax

    def cast_both(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, Operand, torch.Tensor | None]:
        """See the base class."""
        if not self._turns(axis):
            return super().cast_both(x, axis=axis)
        return self._make(x, self.slot.scale, want_amax=True, turn=True)

    def cast_norm(
        self, norm: Callable[[torch.Tensor | None], Normed], *, axis: Axis | None = None
    ) -> QuantizedTensor:
        """See the base class. The scale is known, so the norm's fp32 result is cast at once."""
        made = norm(self.slot.scale)
        self.record(made.amax)
        return QuantizedTensor(made.data, self.slot.scale.reciprocal(), self.fmt)

    def record(self, amax: torch.Tensor | None) -> None:
        """See the base class."""
        if amax is not None and self.recording():
            self.slot.record(amax)


class CurrentQuantizer(Quantizer):
    """Scale from the tensor itself: one pass for the magnitude, one for the cast."""

    casts_norms = True

    def __init__(self, recipe: Float8CurrentScaling, role: Role, *, hardware: bool = False) -> None:
        super().__init__(recipe.format_of(role), role, hardware=hardware)
        self.recipe = recipe

    def cast(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """See the base class."""
        row, _, amax = self._make(x, self._scale(kernels.amax(x), axis), want_amax=False)
        return row, amax

    def cast_both(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, Operand, torch.Tensor | None]:
        """See the base class."""
        if not self._turns(axis):
            return super().cast_both(x, axis=axis)
        return self._make(x, self._scale(kernels.amax(x), axis), want_amax=False, turn=True)

    def cast_norm(
        self, norm: Callable[[torch.Tensor | None], Normed], *, axis: Axis | None = None
    ) -> QuantizedTensor:
        """See the base class. The norm finds the magnitude of what it rounds."""
        made = norm(None)
        return self._make(made.data, self._scale(made.amax, axis), want_amax=False)[0]

    def _scale(self, amax: torch.Tensor, axis: Axis | None) -> torch.Tensor:
        if axis is not None and axis.size > 1:
            amax = all_reduce(amax.view(1), axis, op="max", part=AMAX).view(())
        return self.recipe.scale(amax, self.fmt.max)


class BlockQuantizer(Quantizer):
    """A scale for each block of a row of `x`, or for each square.

    Blocks lie along the dimension that a product sums over, so a matrix that two products use
    along different dimensions is cast twice, both times from high precision. Square blocks serve
    both.

    Args:
        recipe: Formats, blocks and scale rule.
        role: The tensor's role.
        fold: Whether operands are multiplied by their inverse scales at once, where that is exact.
            Not in hardware, which multiplies by the scales itself.
        hardware: As in the base class.
    """

    def __init__(
        self, recipe: BlockRecipe, role: Role, *, fold: bool, hardware: bool = False
    ) -> None:
        super().__init__(recipe.format_of(role), role, hardware=hardware)
        self.blocks = recipe.blocks_of(role)
        self.transposable = self.blocks.square
        self.power_of_two = self.blocks.rule is not ScaleRule.FP32
        self.fold = fold and self.power_of_two and not hardware

    def cast(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """See the base class. Blocks of a row never reach into another rank's rows."""
        return self._blocks(x, self.blocks.row), None

    def cast_both(
        self, x: torch.Tensor, *, axis: Axis | None = None
    ) -> tuple[QuantizedTensor, Operand, torch.Tensor | None]:
        """See the base class."""
        if not self.hardware or self.transposable or self._cuts_blocks(x, axis):
            return super().cast_both(x, axis=axis)
        length = self.blocks.length
        row, col = kernels.cast_blocks_both(x, self.fmt, length, self.blocks.rule)
        return self._operand(*row, (1, length)), self._operand(*col, (length, 1)), None

    def colwise(self, x: torch.Tensor) -> QuantizedTensor:
        """See the base class."""
        return self.transposed(self._blocks(x, self.blocks.row[::-1]))

    def keep(self, x: torch.Tensor, row: QuantizedTensor, *, axis: Axis | None = None) -> Operand:
        """`x` quantized along its rows, or `x` itself.

        Where the rows of several ranks are gathered, blocks are those of the gathered matrix: a
        rank can make its own only if its rows are whole blocks.
        """
        if self.transposable:
            return row
        if self._cuts_blocks(x, axis):
            return x
        return self._blocks(x, self.blocks.row[::-1])

    def transposed(self, row: QuantizedTensor) -> QuantizedTensor:
        """The transpose of square blocks, or of what `keep` made.

        Raises:
            ValueError: For blocks along the rows of `x`, whose transpose is no operand.
        """
        if row.block == (1, self.blocks.length):
            raise ValueError("BlockQuantizer.transposed: got rows of blocks. Use keep and column.")
        return super().transposed(row)

    def _cuts_blocks(self, x: torch.Tensor, axis: Axis | None) -> bool:
        """Whether blocks along the rows of the gathered matrix reach beyond this rank's rows."""
        return axis is not None and x.shape[0] % self.blocks.length != 0

    def _blocks(self, x: torch.Tensor, block: tuple[int, int]) -> QuantizedTensor:
        rule = self.blocks.rule
        if self.hardware:
            return self._operand(*kernels.cast_blocks(x, self.fmt, block, rule), block)
        data, scale_inv = kernels.round_blocks(x, self.fmt, block, rule, fold=self.fold)
        return self._operand(data, scale_inv, block)

    def _operand(
        self, data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]
    ) -> QuantizedTensor:
        return QuantizedTensor(data, scale_inv, self.fmt, block, self.power_of_two, self.fold)
