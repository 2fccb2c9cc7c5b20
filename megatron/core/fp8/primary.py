"""Weights that rest in FP8: beside the masters of an optimizer no other copy of them exists.

Such a parameter keeps its shape, type and attributes and has no numbers: whoever reads it gets NaN.
Its layer multiplies with the operands that it has here, which are those that it would make of the
16-bit weight, bit by bit. While the layer is held in high precision, the parameter has its numbers.

Made from parts: a rank rounds its part of the weight from the master to the parameters' type and
then to FP8 codes, with a scale that all ranks find from the largest magnitudes of all parts. So a
weight may be cut anywhere, even inside a block. Blocks that are cut twice (`mxfp8`, along rows and
along columns) take more bytes than the 16-bit weight; they are made of the whole of it.

Source: NVIDIA Transformer Engine casts masters to the parameters' type first, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import kernels
from megatron.core.fp8.kernels.plain_blocks import as_blocks
from megatron.core.fp8.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    Quantizer,
)
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.scales import block_scale
from megatron.core.fp8.tensor import QuantizedTensor

if TYPE_CHECKING:
    from megatron.core.fp8.precision import LinearPrecision

_RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)


def weights_in_fp8(model: nn.Module) -> Iterator[tuple[nn.Parameter, LinearPrecision]]:
    """Yield the trained weights that FP8 layers multiply with, each with its layer's precision."""
    for module in model.modules():
        one = (getattr(module, "precision", None), getattr(module, "weight", None))
        experts = getattr(module, "precisions", ())
        weights: Any = module.weights if experts else ()
        several = zip(experts, weights, strict=True)
        for precision, weight in (one, *several):
            trained = isinstance(weight, nn.Parameter) and weight.requires_grad
            if precision is not None and trained and _multiplies_in_fp8(precision):
                yield weight, precision


def _multiplies_in_fp8(precision: LinearPrecision) -> bool:
    """Whether a layer needs its weight in FP8 only, of a kind that can be made here."""
    decision = precision.decision
    return isinstance(decision.recipe, _RECIPES) and decision.fprop and decision.dgrad


def check_readable(weight: torch.Tensor) -> None:
    """Refuse to multiply in high precision with a weight that has no numbers.

    Raises:
        PrecisionError: It rests in FP8.
    """
    resting: Fp8Weight | None = getattr(weight, "fp8_weight", None)
    if resting is not None and resting.rests:
        raise PrecisionError(
            complaint(
                "--fp8-param-gather",
                f"{resting.precision.path} in high precision",
                "Its weight exists in FP8 only, since it ran in FP8 when the weight was made",
                "Call refresh_model_params of the optimizer after precisions have changed",
            )
        )


class Fp8Weight:
    """One weight that may rest in FP8.

    Args:
        weight: `[out, in]`. It gets an attribute `fp8_weight`.
        precision: Its layer's.

    Attributes:
        rests: Whether it does now; the parameter has no numbers then.
    """

    def __init__(self, weight: nn.Parameter, precision: LinearPrecision) -> None:
        self.weight, self.precision = weight, precision
        self.rests = False
        self._scales: tuple[torch.Tensor, torch.Tensor] | None = None  # and inverses
        self._amax = weight.new_zeros((), dtype=torch.float32)
        self._row: QuantizedTensor | None = None
        self._second: QuantizedTensor | None = None  # cut along columns, where that differs
        self._turned: QuantizedTensor | None = None  # a copy for FP8 hardware
        self._stored: tuple[bool, int] | None = None
        self._recorded: tuple[int, int] | None = None
        weight.fp8_weight = self  # type: ignore[attr-defined]

    @property
    def is_current(self) -> bool:
        """Whether the weight is stored in the form, and with the scale, that its layer needs."""
        return self._stored == self._wanted()

    @property
    def in_parts(self) -> bool:
        """Whether ranks can make codes of parts; otherwise of the whole only."""
        return self.precision.active and self._quantizer.transposable

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it keeps beside the codes that it was given a place for, and copies of them."""
        kept = [operand for operand in (self._row, self._second) if operand is not None]
        return [tensor for operand in kept for tensor in _numbers(operand)][1:]

    @property
    def _quantizer(self) -> Quantizer:
        """The layer's quantizer, whose operands are not multiplied with inverse scales yet."""
        quantizer = self.precision.quantizer(Role.WEIGHT)
        if isinstance(quantizer, BlockQuantizer) and quantizer.fold:
            quantizer = copy.copy(quantizer)
            quantizer.fold = False
        return quantizer

    def _scales_in_use(self) -> int:
        slots = self.precision.slots
        return slots.book.generation_in_use if slots is not None else 0

    def _wanted(self) -> tuple[bool, int]:
        active = self.precision.active
        return active, self._scales_in_use() if active else 0

    # -- made from parts ------------------------------------------------------------------------

    @property
    def num_magnitudes(self) -> int:
        """Numbers that ranks have to agree on."""
        return self._blocks()[0] * self._blocks()[1]

    def _blocks(self) -> tuple[int, int]:
        quantizer = self.precision.quantizer(Role.WEIGHT)
        if not isinstance(quantizer, BlockQuantizer):
            return 1, 1
        rows, cols = self.weight.shape
        side = quantizer.blocks.length
        return -(-rows // side), -(-cols // side)

    def magnitudes(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """Largest magnitudes of a part, fp32 `[num_magnitudes]`, 0 where it has no element.

        Args:
            part: Elements of the weight from number `start` on, in the parameters' type; flat.
            start: Counted row by row.
        """
        quantizer = self.precision.quantizer(Role.WEIGHT)
        if not isinstance(quantizer, BlockQuantizer):
            return kernels.amax(part).view(1)
        found = torch.zeros(self._blocks(), device=part.device)
        if part.numel():
            side = quantizer.blocks.length
            slab, first = self._slab(part, start, side)
            cut = as_blocks(slab, (side, side)).abs().float().nan_to_num_(0.0, float("inf"))
            found[first : first + cut.shape[0]] = cut.amax((1, 3))
        return found.view(-1)

    def agree(self, magnitudes: torch.Tensor) -> None:
        """Find the scale from the magnitudes of all parts; every rank calls it.

        Args:
            magnitudes: The largest of what the ranks found, fp32 `[num_magnitudes]`.
        """
        quantizer = self.precision.quantizer(Role.WEIGHT)
        self._amax = magnitudes.amax()
        if isinstance(quantizer, DelayedQuantizer):
            scale = quantizer.slot.scale.clone()
            scale_inv = scale.reciprocal()
        elif isinstance(quantizer, CurrentQuantizer):
            scale = quantizer.recipe.scale(magnitudes.view(()), quantizer.fmt.max)
            scale_inv = scale.reciprocal()
        elif isinstance(quantizer, BlockQuantizer):
            cap = torch.finfo(self.weight.dtype).max
            rule, shape = quantizer.blocks.rule, self._blocks()
            scale, scale_inv = block_scale(magnitudes.view(shape), quantizer.fmt.max, rule, cap)
        else:
            raise TypeError(f"No way to make parts with {quantizer!r}.")
        self._scales = scale, scale_inv
        self._stored = self._wanted()

    def encode(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """Codes of a part, uint8, with the scale that ranks have agreed on; as `magnitudes`."""
        quantizer, (scale, _) = self.precision.quantizer(Role.WEIGHT), self._agreed()
        if not isinstance(quantizer, BlockQuantizer):
            return _codes(part, scale, quantizer)
        side, cols = quantizer.blocks.length, self.weight.shape[1]
        slab, first = self._slab(part, start, side)
        scale = scale[first : first - (-slab.shape[0] // side)]
        scale = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)
        scaled = slab.float() * scale[: slab.shape[0], :cols]
        codes = _codes(scaled, torch.ones((), device=part.device), quantizer).view(-1)
        begin = start - first * side * cols
        return codes[begin : begin + part.numel()]

    def _agreed(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scales is None:
            raise PrecisionError(
                complaint(
                    self.precision.path,
                    "a weight without a scale",
                    "Ranks have to agree on it before they cast their parts",
                    "Call agree first",
                )
            )
        return self._scales

    def _slab(self, part: torch.Tensor, start: int, side: int) -> tuple[torch.Tensor, int]:
        """The rows of blocks that a part lies in, zeros around it, and the number of the first."""
        rows, cols = self.weight.shape
        first = start // cols // side
        last = min(-(-(start + part.numel()) // (cols * side)) * side, rows)
        slab = part.new_zeros(last - first * side, cols)
        begin = start - first * side * cols
        slab.view(-1)[begin : begin + part.numel()] = part
        return slab, first

    def take_codes(self, codes: torch.Tensor) -> None:
        """Rest in FP8 with codes that have arrived.

        Args:
            codes: uint8 `[out, in]`, kept and not copied.
        """
        quantizer, (_, scale_inv) = self.precision.quantizer(Role.WEIGHT), self._agreed()
        block, power_of_two = None, False
        if isinstance(quantizer, BlockQuantizer):
            block, power_of_two = quantizer.blocks.row, quantizer.power_of_two
        data = codes.view(quantizer.fmt.torch_dtype)
        self._scales = None
        self._rest(QuantizedTensor(data, scale_inv, quantizer.fmt, block, power_of_two), None)

    # -- made of the whole ----------------------------------------------------------------------

    def take_values(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Rest in FP8, made of the whole weight; or have the numbers, in high precision.

        Args:
            values: `[out, in]`, in the parameters' type; kept in high precision.
            codes: uint8 `[out, in]`; in FP8 written and kept.
        """
        self._stored = self._wanted()
        if not self.precision.active:
            self._have(values)
            return
        quantizer, col = self._quantizer, None
        row, amax = quantizer.cast(values)
        self._amax = kernels.amax(values) if amax is None else amax
        if not quantizer.transposable:
            # Turned, so that the memory keeps the order in which products are made fastest.
            col = quantizer.column(quantizer.keep(values, row)).t().to_fp8().t()
        data = codes.copy_(row.to_fp8().data.view(torch.uint8)).view(quantizer.fmt.torch_dtype)
        self._rest(replace(row, data=data, folded=False), col)

    # -- what the layer sees --------------------------------------------------------------------

    @torch.no_grad()
    def _rest(self, row: QuantizedTensor, col: QuantizedTensor | None) -> None:
        if not self.rests:
            nothing = torch.full((), torch.nan, dtype=self.weight.dtype, device=self.weight.device)
            self.weight.set_(nothing.expand(self.weight.shape))  # type: ignore[call-overload]
        self.rests, self._recorded, self._turned = True, None, None
        self._row, self._second = _put(row, self._row), col and _put(col, self._second)

    @torch.no_grad()
    def _have(self, values: torch.Tensor) -> None:
        self.weight.set_(values.view(self.weight.shape))  # type: ignore[call-overload]
        self.rests = False
        self._row = self._second = self._turned = None

    def figures(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest magnitude of the 16-bit weight, and inverses of the scales; while it rests."""
        if self._row is None:
            raise PrecisionError(
                complaint(
                    self.precision.path,
                    "a weight that does not rest in FP8",
                    "It has no FP8 figures",
                    "Ask while the layer runs in FP8",
                )
            )
        return self._amax, self._row.scale_inv

    def operands(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """The weight as both operands; see `LinearPrecision.quantize_weight`.

        What an emulated product reads is made anew for each forward; the second operand, which is
        kept for the backward, is in the FP8 type.

        Raises:
            PrecisionError: Scales have changed since the weight was made.
        """
        if self._row is None or not self.is_current:
            raise PrecisionError(
                complaint(
                    "--fp8-param-gather",
                    f"new scales for {self.precision.path}",
                    "Its weight was made with the ones before",
                    "Call refresh_model_params of the optimizer after scales have changed",
                )
            )
        state, quantizer = self.precision.state, self.precision.quantizer(Role.WEIGHT)
        now = (state.generation, self._scales_in_use())
        if state.recording and self._recorded != now:
            quantizer.record(self._amax)
            self._recorded = now
        row = self._row
        if not quantizer.hardware:
            row = row.hold()
            row = row.fold() if isinstance(quantizer, BlockQuantizer) and quantizer.fold else row
        if self._second is not None:
            return row, self._second
        if not quantizer.hardware:
            return row, self._row.t()
        if self._turned is None:
            self._turned = quantizer.transposed(self._row)
        return row, self._turned


def _numbers(operand: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    return operand.data, operand.scale_inv


def _put(new: QuantizedTensor, old: QuantizedTensor | None) -> QuantizedTensor:
    """An operand in the memory of the one before, where there is one of its form."""
    if old is None or new.form != old.form:
        return new
    for source, place in zip(_numbers(new), _numbers(old), strict=True):
        if source is not place:
            place.copy_(source)
    return old


def _codes(values: torch.Tensor, scale: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Codes (uint8) as a layer's quantizer makes them."""
    if quantizer.hardware:
        return kernels.cast(values, scale, quantizer.fmt).view(torch.uint8)
    return kernels.encode(kernels.round_to_grid(values, scale, quantizer.fmt)[0], quantizer.fmt)
