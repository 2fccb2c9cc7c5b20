"""The kernels as compiled loops for CPU tensors (numba). Bitwise the results of `plain.py`.

The loops release the interpreter lock and run on as many threads as torch uses, each on its own
range. They are plain serial loops: numba's own thread pool does not survive a fork, which tests and
launchers rely on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _numba_intrinsic

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.plain import rounding_constants

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _numba_intrinsic

_PARALLEL_FROM = 1 << 18  # elements; below this a second thread costs more than it saves


# The bodies below are written in LLVM terms: numba widens small integers to 64 bits, which keeps
# the loops from vectorising (ten times slower).
_I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def _i32(value: int) -> ir.Constant:
    return ir.Constant(I32, value)


@intrinsic
def max_magnitude(typingctx: Any, largest: Any, raw: Any) -> Any:
    """The larger of a running magnitude and a value's, as bits; NaN counts as zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        running, bits = args
        infinity = 0x7F80 if signature.return_type == types.uint16 else 0x7F800000
        kind = bits.type
        mask = ir.Constant(kind, 0x7FFF if kind == I16 else 0x7FFFFFFF)
        a = builder.and_(bits, mask)
        is_nan = builder.icmp_unsigned(">", a, ir.Constant(kind, infinity))
        a = builder.select(is_nan, ir.Constant(kind, 0), a)
        return builder.select(builder.icmp_unsigned(">", a, running), a, running)

    return raw(raw, raw), codegen


def emit_grid_value(builder: Any, value: Any, constants: Any) -> Any:
    """A float32 times scale, clamped and rounded to the grid without its sign; its bits before."""
    scale, top, floor, offset = constants
    v = builder.fmul(value, scale)
    bottom = builder.fsub(ir.Constant(F32, -0.0), top)
    v = builder.select(builder.fcmp_ordered(">", v, top), top, v)  # NaN compares false and stays
    v = builder.select(builder.fcmp_ordered("<", v, bottom), bottom, v)
    bits = builder.bitcast(v, I32)
    field = builder.and_(bits, _i32(0x7F800000))
    field = builder.select(builder.icmp_unsigned(">", field, floor), field, floor)
    c = builder.bitcast(builder.add(field, offset), F32)
    return builder.fsub(builder.fadd(v, c), c), bits


def widened(builder: Any, raw: Any) -> Any:
    """The float32 of bf16 or fp32 bits."""
    if raw.type == I16:
        raw = builder.shl(builder.zext(raw, I32), _i32(16))
    return builder.bitcast(raw, F32)


@intrinsic
def _round_one(typingctx: Any, raw: Any, scale: Any, top: Any, floor: Any, offset: Any) -> Any:
    """One grid value (bf16 bits) from the bits of a bf16 or fp32 value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw_bits, *constants = args
        rounded, bits = emit_grid_value(builder, widened(builder, raw_bits), constants)
        q = builder.bitcast(rounded, I32)
        q = builder.or_(q, builder.and_(bits, _i32(0x80000000)))
        return builder.trunc(builder.lshr(q, _i32(16)), I16)

    return types.uint16(raw, types.float32, types.float32, types.uint32, types.uint32), codegen


@intrinsic
def _encode_one(
    typingctx: Any, raw: Any, per_step: Any, shift: Any, rebias: Any, minimum: Any, special: Any
) -> Any:
    """The code of a grid value held in bf16; `special` is the NaN code and 256 times inf's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, step, right, base, smallest, codes = args
        bits = builder.zext(bits, I32)
        a = builder.and_(bits, _i32(0x7FFF))
        value = builder.bitcast(builder.shl(a, _i32(16)), F32)
        is_small = builder.icmp_unsigned("<", a, smallest)
        value = builder.select(is_small, value, ir.Constant(F32, 0.0))
        small = builder.fptosi(builder.fmul(value, step), I32)
        code = builder.select(is_small, small, builder.sub(builder.lshr(a, right), base))
        is_inf = builder.icmp_unsigned("==", a, _i32(0x7F80))
        code = builder.select(is_inf, builder.lshr(codes, _i32(8)), code)
        code = builder.or_(code, builder.and_(builder.lshr(bits, _i32(8)), _i32(0x80)))
        is_nan = builder.icmp_unsigned(">", a, _i32(0x7F80))
        return builder.trunc(builder.select(is_nan, codes, code), _I8)

    kinds = (types.float32, types.uint32, types.uint32, types.uint32, types.uint32)
    return types.uint8(types.uint16, *kinds), codegen


@intrinsic
def _decode_one(
    typingctx: Any, raw: Any, step: Any, shift: Any, rebias: Any, minimum: Any, special: Any
) -> Any:
    """The grid value, as bf16 bits, of a code; `special` holds the NaN and inf codes as above."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, unit, left, base, smallest, codes = args
        code = builder.zext(code, I32)
        a = builder.and_(code, _i32(0x7F))
        small = builder.bitcast(builder.fmul(builder.sitofp(a, F32), unit), I32)
        small = builder.lshr(small, _i32(16))
        bits = builder.shl(builder.add(a, base), left)
        bits = builder.select(builder.icmp_unsigned("<", a, smallest), small, bits)
        largest = builder.lshr(codes, _i32(16))
        is_above = builder.icmp_unsigned(">", a, largest)
        is_inf = builder.icmp_unsigned(
            "==", a, builder.and_(builder.lshr(codes, _i32(8)), _i32(0xFF))
        )
        beyond = builder.select(is_inf, _i32(0x7F80), _i32(0x7FC0))
        bits = builder.select(is_above, beyond, bits)
        sign = builder.shl(builder.and_(code, _i32(0x80)), _i32(8))
        return builder.trunc(builder.or_(bits, sign), I16)

    kinds = (types.float32, types.uint32, types.uint32, types.uint32, types.uint32)
    return types.uint16(types.uint8, *kinds), codegen


def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first call, with the machine code cached on disk where a place is writable."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no directory to cache in
        return njit(nogil=True, error_model="numpy")(function)


@compile_loop
def _amax_loop(src: np.ndarray, zero: Any) -> Any:
    largest = zero
    for i in range(src.size):
        largest = max_magnitude(largest, src[i])
    return largest


@compile_loop
def _round_loop(
    src: np.ndarray, dst: np.ndarray, scale: Any, top: Any, floor: Any, offset: Any
) -> None:
    for i in range(src.size):
        dst[i] = _round_one(src[i], scale, top, floor, offset)


@compile_loop
def _round_amax_loop(
    src: np.ndarray, dst: np.ndarray, zero: Any, scale: Any, top: Any, floor: Any, offset: Any
) -> Any:
    largest = zero
    for i in range(src.size):
        largest = max_magnitude(largest, src[i])
        dst[i] = _round_one(src[i], scale, top, floor, offset)
    return largest


@compile_loop
def _encode_loop(
    src: np.ndarray, dst: np.ndarray, step: Any, shift: Any, base: Any, low: Any, special: Any
) -> None:
    for i in range(src.size):
        dst[i] = _encode_one(src[i], step, shift, base, low, special)


@compile_loop
def _decode_loop(
    src: np.ndarray, dst: np.ndarray, step: Any, shift: Any, base: Any, low: Any, special: Any
) -> None:
    for i in range(src.size):
        dst[i] = _decode_one(src[i], step, shift, base, low, special)


@cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process; keyed by process, because threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fp8-kernels")


_threads: int | None = None


def set_threads(count: int | None) -> int | None:
    """See `kernels.set_threads`."""
    global _threads
    previous, _threads = _threads, count
    return previous


def run_parts(size: int, elements: int, body: Callable[[int, int], Any]) -> list[Any]:
    """Call `body(start, stop)` over `[0, size)`, one range a thread.

    Args:
        size: Number of equal pieces of work.
        elements: Elements in all of them.
        body: Does a range of pieces.
    """
    threads = (_threads or torch.get_num_threads()) if elements >= _PARALLEL_FROM else 1
    threads = min(threads, size)
    if threads <= 1:
        return [body(0, size)]
    step = -(-size // threads)
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(body, *span) for span in ranges[1:]]
    return [body(*ranges[0]), *(future.result() for future in others)]


def bits_of(x: torch.Tensor) -> np.ndarray:
    """The tensor's bits as a flat unsigned array that shares memory."""
    kind = {2: torch.uint16, 4: torch.uint32, 1: torch.uint8}[x.element_size()]
    return x.view(-1).view(kind).numpy()


def _magnitude(parts: list[Any]) -> torch.Tensor:
    """fp32 0-dim from the bits of the largest magnitude of each range (bf16 or fp32 bits)."""
    largest = max(int(part) for part in parts)
    if parts[0].itemsize == 2:
        largest <<= 16
    return torch.tensor(largest, dtype=torch.int32).view(torch.float32)


def amax(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.amax`."""
    src = bits_of(x.detach().contiguous())
    kind = src.dtype.type
    return _magnitude(
        run_parts(src.size, src.size, lambda a, b: kind(_amax_loop(src[a:b], kind(0))))
    )


@cache
def rounding(fmt: Fp8Format) -> tuple[Any, Any, Any]:
    """What the loops need to know of a format to round to it."""
    floor, offset = rounding_constants(fmt)
    return np.float32(fmt.max), np.uint32(floor), np.uint32(offset)


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels.round_to_grid`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    src, dst = bits_of(source), bits_of(out)
    factor, constants = np.float32(scale.item()), rounding(fmt)
    if not want_amax:
        run_parts(
            src.size, src.size, lambda a, b: _round_loop(src[a:b], dst[a:b], factor, *constants)
        )
        return out, None
    kind = src.dtype.type

    def both(a: int, b: int) -> Any:
        return kind(_round_amax_loop(src[a:b], dst[a:b], kind(0), factor, *constants))

    return out, _magnitude(run_parts(src.size, src.size, both))


def _coding(fmt: Fp8Format, step: float) -> tuple[Any, ...]:
    """What the loops between held values and codes need to know of a format."""
    return (
        np.float32(step),
        np.uint32(7 - fmt.mantissa_bits),
        np.uint32((127 - fmt.bias) << fmt.mantissa_bits),
    )


@cache
def _encoding(fmt: Fp8Format) -> tuple[Any, ...]:
    low, special = (127 - fmt.bias + 1) << 7, fmt.nan_code | fmt.inf_code << 8
    return *_coding(fmt, 1.0 / fmt.min_subnormal), np.uint32(low), np.uint32(special)


@cache
def _decoding(fmt: Fp8Format) -> tuple[Any, ...]:
    has_inf = fmt.inf_code != fmt.max_code
    special = fmt.nan_code | (fmt.inf_code if has_inf else 0xFF) << 8 | fmt.max_code << 16
    return *_coding(fmt, fmt.min_subnormal), np.uint32(1 << fmt.mantissa_bits), np.uint32(special)


def encode(held: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """See `kernels.encode`."""
    source = held.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.uint8)
    src, dst, constants = bits_of(source), bits_of(out), _encoding(fmt)
    run_parts(src.size, src.size, lambda a, b: _encode_loop(src[a:b], dst[a:b], *constants))
    return out


def decode(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """See `kernels.decode`."""
    source = codes.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    src, dst, constants = bits_of(source), bits_of(out), _decoding(fmt)
    run_parts(src.size, src.size, lambda a, b: _decode_loop(src[a:b], dst[a:b], *constants))
    return out
