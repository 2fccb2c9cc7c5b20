"""NVFP4 as compiled loops for CPU tensors. Bitwise the results of `plain_fp4.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from megatron.core.fp8.formats import E2M1, E4M3
from megatron.core.fp8.kernels.compiled import (
    F32,
    I16,
    I32,
    bits_of,
    compile_loop,
    emit_grid_value,
    intrinsic,
    rounding,
    run_parts,
    widened,
)
from megatron.core.fp8.kernels.compiled_blocks import block_value, float_of
from megatron.core.fp8.kernels.plain_fp4 import BLOCK, SIGNS, Draw
from megatron.core.fp8.scales import FLT_MAX

_STRIP = 512  # columns worked on at once
_LARGEST = np.float32(FLT_MAX)
_SIGNS = np.array(SIGNS, dtype=np.float32)
# Philox4x32. Compiled code is kept on disk until this file changes, so its constants stand here.
_ROUNDS = 7
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_S0, _S1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(I32, value)


@intrinsic
def _larger(typingctx: Any, largest: Any, raw: Any) -> Any:
    """The larger of a running magnitude and a value's, as bits; NaN is larger than all numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        running, bits = args
        magnitude = 0x7FFF if bits.type == I16 else 0x7FFFFFFF
        a = builder.and_(bits, ir.Constant(bits.type, magnitude))
        return builder.select(builder.icmp_unsigned(">", a, running), a, running)

    return raw(raw, raw), codegen


@intrinsic
def _bits(typingctx: Any, value: Any, like: Any) -> Any:
    """The bits of a float32, as many as `like` has; to bf16 rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        if signature.return_type == types.uint32:
            return bits
        odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
        up = builder.add(builder.add(bits, _constant(0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        up = builder.select(is_nan, _constant(0x7FC00000), up)
        return builder.trunc(builder.lshr(up, _constant(16)), I16)

    return like(types.float32, like), codegen


@intrinsic
def _grid_value(typingctx: Any, value: Any, top: Any, floor: Any, offset: Any) -> Any:
    """A positive float32 rounded to a grid."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_grid_value(builder, args[0], (ir.Constant(F32, 1.0), *args[1:]))[0]

    return types.float32(types.float32, types.float32, types.uint32, types.uint32), codegen


@intrinsic
def _value_at_random(typingctx: Any, raw: Any, number: Any, scale: Any, factor: Any) -> Any:
    """As `block_value`, rounded up or down at random."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw_bits, number, scale, factor = args
        one, half, top = (ir.Constant(F32, c) for c in (1.0, 0.5, E2M1.max))
        v = builder.fmul(widened(builder, raw_bits), scale)
        sign = builder.and_(builder.bitcast(v, I32), _constant(0x80000000))
        a = builder.bitcast(builder.and_(builder.bitcast(v, I32), _constant(0x7FFFFFFF)), F32)
        a = builder.select(builder.fcmp_ordered(">", a, top), top, a)  # NaN stays
        field = builder.and_(builder.bitcast(a, I32), _constant(0x7F800000))
        power = builder.bitcast(field, F32)
        power = builder.select(builder.fcmp_ordered("<", power, one), one, power)
        step = builder.fmul(power, half)
        t = builder.fdiv(a, step)
        low = builder.sitofp(builder.fptosi(t, I32), F32)
        fraction = builder.fmul(builder.fsub(t, low), ir.Constant(F32, 65536.0))
        drawn = builder.fadd(builder.uitofp(builder.zext(number, I32), F32), half)
        up = builder.fcmp_ordered("<", drawn, fraction)
        q = builder.fmul(builder.fadd(low, builder.select(up, one, ir.Constant(F32, 0.0))), step)
        is_nan = builder.fcmp_unordered("uno", v, v)
        q = builder.select(is_nan, v, builder.fmul(q, factor))
        q = builder.or_(builder.bitcast(q, I32), sign)
        return builder.trunc(builder.lshr(q, _constant(16)), I16)

    return types.uint16(raw, types.uint16, types.float32, types.float32), codegen


@compile_loop
def _scales(largest: Any, unit: Any, inverse: Any, grid: Any) -> Any:
    """What a block is multiplied by, and its inverse scale relative to the tensor's."""
    inv = _grid_value(float_of(largest) * unit, grid[0], grid[1], grid[2])
    scale = np.float32(1.0) / np.float32(inv * inverse)
    if scale > _LARGEST:
        scale = _LARGEST
    return np.float32(scale), inv


@compile_loop
def _draw(words: np.ndarray, row: Any, group: Any, stream: Any, k0: Any, k1: Any) -> None:
    """Four words of Philox for each group of numbers, from the group `group` of a row on."""
    for g in range(words.size // 4):
        c0, c1, c2, c3 = np.uint64(group + g), row, stream, np.uint64(0)
        a0, a1 = k0, k1
        for _ in range(_ROUNDS):
            p, q = c0 * _M0, c2 * _M1
            c0, c2 = (q >> _HALF) ^ c1 ^ a0, (p >> _HALF) ^ c3 ^ a1
            c1, c3 = q & _WORD, p & _WORD
            a0, a1 = (a0 + _S0) & _WORD, (a1 + _S1) & _WORD
        words[4 * g] = c0
        words[4 * g + 1] = c1
        words[4 * g + 2] = c2
        words[4 * g + 3] = c3


@compile_loop
def _round_row(
    source: np.ndarray,
    out: np.ndarray,
    scales: np.ndarray,
    factors: np.ndarray,
    numbers: np.ndarray,
    random: bool,
    grid: Any,
) -> None:
    """Part of a row, whose elements have a scale and a factor each."""
    top, floor, offset = grid
    if random:
        for i in range(source.size):
            out[i] = _value_at_random(source[i], numbers[i], scales[i], factors[i])
    else:
        for i in range(source.size):
            out[i] = block_value(source[i], scales[i], factors[i], top, floor, offset)


@compile_loop
def _tile_loop(
    src: np.ndarray,
    dst: np.ndarray,
    inverses: np.ndarray,
    high: int,
    zero: Any,
    fold: bool,
    unit: Any,
    inverse: Any,
    grids: Any,
    random: bool,
    draw: Any,
) -> None:
    rows, cols = src.shape
    row, stream, k0, k1 = draw
    scales, factors = np.empty(cols, np.float32), np.empty(cols, np.float32)
    words = np.empty(4 * ((cols + 7) // 8) if random else 0, np.uint32)
    numbers = words.view(np.uint16)
    for b in range(inverses.shape[0]):
        first, last = b * high, min(b * high + high, rows)
        for k in range(inverses.shape[1]):
            left, right = k * BLOCK, min(k * BLOCK + BLOCK, cols)
            largest = zero
            for r in range(first, last):
                source = src[r, left:right]
                for i in range(source.size):
                    largest = _larger(largest, source[i])
            scale, inv = _scales(largest, unit, inverse, grids[1])
            inverses[b, k] = inv
            scales[left:right] = scale
            factors[left:right] = inv if fold else np.float32(1.0)
        for r in range(first, last):
            if random:
                _draw(words, row + np.uint64(r), 0, stream, k0, k1)
            _round_row(src[r], dst[r], scales, factors, numbers, random, grids[0])


@compile_loop
def _column_loop(
    src: np.ndarray,
    dst: np.ndarray,
    inverses: np.ndarray,
    high: int,
    zero: Any,
    fold: bool,
    unit: Any,
    inverse: Any,
    grids: Any,
    random: bool,
    draw: Any,
) -> None:
    """Blocks of one column: magnitudes and scales of a strip of columns at once."""
    rows, cols = src.shape
    row, stream, k0, k1 = draw
    largest = np.empty(_STRIP, src.dtype)
    scales, factors = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    words = np.empty(_STRIP // 2, np.uint32)
    numbers = words.view(np.uint16)
    for b in range(inverses.shape[0]):
        first, last = b * high, min(b * high + high, rows)
        for left in range(0, cols, _STRIP):
            right = min(left + _STRIP, cols)
            largest[:] = zero
            for r in range(first, last):
                source = src[r, left:right]
                for i in range(source.size):
                    largest[i] = _larger(largest[i], source[i])
            for i in range(right - left):
                scale, inv = _scales(largest[i], unit, inverse, grids[1])
                inverses[b, left + i] = inv
                scales[i], factors[i] = scale, inv if fold else np.float32(1.0)
            used = words[: 4 * ((right - left + 7) // 8)]
            for r in range(first, last):
                if random:
                    _draw(used, row + np.uint64(r), left // 8, stream, k0, k1)
                source, out = src[r, left:right], dst[r, left:right]
                _round_row(source, out, scales, factors, numbers, random, grids[0])


@compile_loop
def _load_signed(src: np.ndarray, work: np.ndarray, signs: np.ndarray) -> None:
    """Up to 16 rows as float32, each with its sign; zeros for those that are missing."""
    for r in range(BLOCK):
        sign, v = signs[r], work[r]
        if r < src.shape[0]:
            source = src[r]
            for i in range(source.size):
                v[i] = float_of(source[i]) * sign
        else:
            v[:] = np.float32(0.0) * sign


@compile_loop
def _hadamard_loop(src: np.ndarray, dst: np.ndarray, signs: np.ndarray) -> None:
    rows, cols = src.shape
    work = np.empty((BLOCK, _STRIP), np.float32)
    for first in range(0, dst.shape[0], BLOCK):
        for left in range(0, cols, _STRIP):
            right = min(left + _STRIP, cols)
            _load_signed(src[first : first + BLOCK, left:right], work, signs)
            for half in (1, 2, 4, 8):
                for r in range(BLOCK):
                    if not r & half:
                        a, b = work[r, : right - left], work[r + half, : right - left]
                        for i in range(a.size):
                            a[i], b[i] = a[i] + b[i], a[i] - b[i]
            for r in range(BLOCK):
                v, out = work[r], dst[first + r, left:right]
                for i in range(out.size):
                    out[i] = _bits(v[i] * np.float32(0.25), out[i])


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """See `fp4.hadamard`."""
    source = x.detach().contiguous()
    rows, cols = source.shape
    count = -(-rows // BLOCK)
    out = torch.empty(count * BLOCK, cols, dtype=x.dtype)
    src, dst = bits_of(source).reshape(rows, cols), bits_of(out).reshape(-1, cols)

    def part(start: int, stop: int) -> None:
        span = slice(start * BLOCK, stop * BLOCK)
        _hadamard_loop(src[span], dst[span], _SIGNS)

    run_parts(count, source.numel(), part)
    return out


@cache
def _grids() -> Any:
    return rounding(E2M1), rounding(E4M3)


def round_blocks(
    x: torch.Tensor, block: tuple[int, int], scale: torch.Tensor, fold: bool, draw: Draw | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp4.round_blocks`."""
    source = x.detach().contiguous()
    (rows, cols), (high, wide) = source.shape, block
    out = torch.empty_like(source, dtype=torch.bfloat16)
    scale_inv = torch.empty(-(-rows // high), -(-cols // wide), dtype=torch.float32)
    src, dst = bits_of(source).reshape(rows, cols), bits_of(out).reshape(rows, cols)
    inverses, given = scale_inv.numpy(), np.float32(scale.item())
    unit, inverse = given * np.float32(1.0 / E2M1.max), np.float32(1.0) / given
    common = (src.dtype.type(0), fold, unit, inverse, _grids(), draw is not None)
    seed, stream, first_row = draw or Draw(0)
    key = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    loop = _column_loop if wide == 1 else _tile_loop

    def part(start: int, stop: int) -> None:
        span = slice(start * high, stop * high)
        place = (np.uint64(first_row + start * high), np.uint64(stream), *key)
        loop(src[span], dst[span], inverses[start:stop], high, *common, place)

    run_parts(inverses.shape[0], source.numel(), part)
    return out, scale_inv
