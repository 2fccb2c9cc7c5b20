"""Block quantization as compiled loops for CPU tensors. Bitwise the results of `plain_blocks.py`.

Slices, not offsets, in the inner loops: an index that is a sum keeps them from vectorising.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.compiled import (
    I16,
    I32,
    bits_of,
    compile_loop,
    emit_grid_value,
    intrinsic,
    max_magnitude,
    rounding,
    run_parts,
    widened,
)
from megatron.core.fp8.scales import ScaleRule

_STRIP = 512  # columns whose magnitudes and scales are kept at once


@intrinsic
def block_value(
    typingctx: Any, raw: Any, scale: Any, factor: Any, top: Any, floor: Any, offset: Any
) -> Any:
    """bf16 bits of a grid value times a factor: the inverse scale, or 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw_bits, scale, factor, *constants = args
        value = widened(builder, raw_bits)
        rounded, bits = emit_grid_value(builder, value, (scale, *constants))
        q = builder.bitcast(builder.fmul(rounded, factor), I32)
        q = builder.or_(q, builder.and_(bits, ir.Constant(I32, 0x80000000)))
        return builder.trunc(builder.lshr(q, ir.Constant(I32, 16)), I16)

    kinds = (types.float32, types.float32, types.float32, types.uint32, types.uint32)
    return types.uint16(raw, *kinds), codegen


@intrinsic
def float_of(typingctx: Any, raw: Any) -> Any:
    """The value of bf16 or fp32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widened(builder, args[0])

    return types.float32(raw), codegen


@intrinsic
def _as_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.uint32(value), codegen


@compile_loop
def _power_of_two(biased: Any) -> Any:
    if biased > 0:
        return float_of(np.uint32(np.uint32(biased) << np.uint32(23)))
    return float_of(np.uint32(0x400000))


@compile_loop
def _scales(amax: Any, top: Any, cap: Any, rule: Any) -> Any:
    """Scale and inverse; see `scales.block_scale`."""
    one = np.float32(1.0)
    if rule == 2:
        bits = _as_bits(amax * np.float32(one / top))
        exponent, mantissa = np.int32(bits >> np.uint32(23)), bits & np.uint32(0x7FFFFF)
        if mantissa > 0 and not (exponent == 0 and mantissa <= 0x400000):
            exponent += np.int32(1)
        exponent = min(exponent, np.int32(254))
        return _power_of_two(np.int32(254) - exponent), _power_of_two(exponent)
    if amax == 0 or amax == np.float32(np.inf):
        return one, one
    scale = np.float32(top / amax)
    if scale == np.float32(np.inf):
        scale = cap
    if rule == 1:
        scale = float_of(np.uint32(_as_bits(scale) & np.uint32(0x7F800000)))
    return scale, np.float32(one / scale)


@compile_loop
def _tile_loop(
    src: np.ndarray,
    dst: np.ndarray,
    inverse: np.ndarray,
    high: int,
    wide: int,
    zero: Any,
    fold: bool,
    rule: int,
    cap: Any,
    top: Any,
    floor: Any,
    offset: Any,
) -> None:
    rows, cols = src.shape
    for b in range(inverse.shape[0]):
        first, last = b * high, min(b * high + high, rows)
        for k in range(inverse.shape[1]):
            left, right = k * wide, min(k * wide + wide, cols)
            largest = zero
            for r in range(first, last):
                source = src[r, left:right]
                for i in range(source.size):
                    largest = max_magnitude(largest, source[i])
            scale, inv = _scales(float_of(largest), top, cap, rule)
            inverse[b, k] = inv
            factor = inv if fold else np.float32(1.0)
            for r in range(first, last):
                source, out = src[r, left:right], dst[r, left:right]
                for i in range(source.size):
                    out[i] = block_value(source[i], scale, factor, top, floor, offset)


@compile_loop
def _column_loop(
    src: np.ndarray,
    dst: np.ndarray,
    inverse: np.ndarray,
    high: int,
    zero: Any,
    fold: bool,
    rule: int,
    cap: Any,
    top: Any,
    floor: Any,
    offset: Any,
) -> None:
    """Blocks of one column: magnitudes and scales of a strip of columns at once."""
    rows, cols = src.shape
    largest = np.empty(_STRIP, src.dtype)
    scales, factors = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    for b in range(inverse.shape[0]):
        first, last = b * high, min(b * high + high, rows)
        for left in range(0, cols, _STRIP):
            right = min(left + _STRIP, cols)
            for i in range(right - left):
                largest[i] = zero
            for r in range(first, last):
                source = src[r, left:right]
                for i in range(source.size):
                    largest[i] = max_magnitude(largest[i], source[i])
            for i in range(right - left):
                scale, inv = _scales(float_of(largest[i]), top, cap, rule)
                inverse[b, left + i] = inv
                scales[i], factors[i] = scale, inv if fold else np.float32(1.0)
            for r in range(first, last):
                source, out = src[r, left:right], dst[r, left:right]
                for i in range(source.size):
                    out[i] = block_value(source[i], scales[i], factors[i], top, floor, offset)


@cache
def _cap(dtype: torch.dtype) -> Any:
    return np.float32(torch.finfo(dtype).max)


def round_blocks(
    x: torch.Tensor, fmt: Fp8Format, block: tuple[int, int], rule: ScaleRule, fold: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.round_blocks`."""
    source = x.detach().contiguous()
    (rows, cols), (high, wide) = source.shape, block
    out = torch.empty_like(source, dtype=torch.bfloat16)
    scale_inv = torch.empty(-(-rows // high), -(-cols // wide), dtype=torch.float32)
    src, dst = bits_of(source).reshape(rows, cols), bits_of(out).reshape(rows, cols)
    inverse = scale_inv.numpy()
    common = (src.dtype.type(0), fold, rule.value, _cap(x.dtype), *rounding(fmt))

    def part(start: int, stop: int) -> None:
        span = slice(start * high, stop * high)
        if wide == 1:
            _column_loop(src[span], dst[span], inverse[start:stop], high, *common)
        else:
            _tile_loop(src[span], dst[span], inverse[start:stop], high, wide, *common)

    run_parts(inverse.shape[0], source.numel(), part)
    return out, scale_inv
