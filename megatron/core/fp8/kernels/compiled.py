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

from megatron.core.fp8.formats import Fp8Format, code_values
from megatron.core.fp8.kernels.plain import rounding_constants

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _numba_intrinsic

_PARALLEL_FROM = 1 << 18  # elements; below this a second thread costs more than it saves


@intrinsic
def _float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _round(typingctx: Any, v: Any, floor: Any, offset: Any) -> Any:
    """Round a clamped float32 to the grid; returns bits, sign of `v` kept.

    Written in LLVM terms so that 32-bit integers stay 32 bits wide and the loop vectorises.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, f32 = ir.IntType(32), ir.FloatType()
        value, low, add = args
        bits = builder.bitcast(value, i32)
        field = builder.and_(bits, ir.Constant(i32, 0x7F800000))
        field = builder.select(builder.icmp_unsigned(">", field, low), field, low)
        c = builder.bitcast(builder.add(field, add), f32)
        q = builder.bitcast(builder.fsub(builder.fadd(value, c), c), i32)
        sign = builder.and_(bits, ir.Constant(i32, 0x80000000))
        return builder.or_(q, sign)

    return types.uint32(types.float32, types.uint32, types.uint32), codegen


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first call, with the machine code cached on disk where a place is writable."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory to cache in
        return njit(nogil=True)(function)


@_compile
def _amax_bf16(src: np.ndarray) -> Any:
    largest = np.uint16(0)
    for i in range(src.size):
        a = src[i] & np.uint16(0x7FFF)
        a = a if a <= np.uint16(0x7F80) else np.uint16(0)
        largest = a if a > largest else largest
    return np.uint32(largest) << np.uint32(16)


@_compile
def _amax_f32(src: np.ndarray) -> Any:
    largest = np.uint32(0)
    for i in range(src.size):
        a = src[i] & np.uint32(0x7FFFFFFF)
        a = a if a <= np.uint32(0x7F800000) else np.uint32(0)
        largest = a if a > largest else largest
    return largest


@_compile
def _round_bf16(
    src: np.ndarray, dst: np.ndarray, scale: float, top: float, floor: int, offset: int
) -> Any:
    largest = np.uint16(0)
    for i in range(src.size):
        raw = src[i]
        a = raw & np.uint16(0x7FFF)
        a = a if a <= np.uint16(0x7F80) else np.uint16(0)
        largest = a if a > largest else largest
        v = _float_of(np.uint32(raw) << np.uint32(16)) * scale
        v = top if v > top else v
        v = -top if v < -top else v
        dst[i] = np.uint16(_round(v, floor, offset) >> np.uint32(16))
    return np.uint32(largest) << np.uint32(16)


@_compile
def _round_f32(
    src: np.ndarray, dst: np.ndarray, scale: float, top: float, floor: int, offset: int
) -> Any:
    largest = np.uint32(0)
    for i in range(src.size):
        raw = src[i]
        a = raw & np.uint32(0x7FFFFFFF)
        a = a if a <= np.uint32(0x7F800000) else np.uint32(0)
        largest = a if a > largest else largest
        v = _float_of(raw) * scale
        v = top if v > top else v
        v = -top if v < -top else v
        dst[i] = np.uint16(_round(v, floor, offset) >> np.uint32(16))
    return largest


@_compile
def _encode(
    src: np.ndarray, dst: np.ndarray, per_step: float, shift: int, rebias: int, limits: np.ndarray
) -> None:
    minimum, nan_code, inf_code = limits[0], limits[1], limits[2]
    for i in range(src.size):
        raw = np.uint32(src[i])
        a = raw & np.uint32(0x7FFF)
        small = np.uint32(np.int32(_float_of(a << np.uint32(16)) * per_step))
        code = (a >> shift) - rebias
        code = small if a < minimum else code
        code = inf_code if a == np.uint32(0x7F80) else code
        code = code | ((raw >> np.uint32(8)) & np.uint32(0x80))
        dst[i] = np.uint8(nan_code if a > np.uint32(0x7F80) else code)


@_compile
def _decode(src: np.ndarray, dst: np.ndarray, table: np.ndarray) -> None:
    for i in range(src.size):
        dst[i] = table[src[i]]


@cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process; keyed by process, because threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fp8-kernels")


def _run(size: int, body: Callable[[int, int], Any]) -> list[Any]:
    """Call `body(start, stop)` over `[0, size)`, one range a thread."""
    threads = torch.get_num_threads() if size >= _PARALLEL_FROM else 1
    if threads == 1:
        return [body(0, size)]
    step = -(-size // threads)
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(body, *span) for span in ranges[1:]]
    return [body(*ranges[0]), *(future.result() for future in others)]


def _flat(x: torch.Tensor) -> np.ndarray:
    """The tensor's bits as a flat unsigned array that shares memory."""
    kind = {2: torch.uint16, 4: torch.uint32, 1: torch.uint8}[x.element_size()]
    return x.view(-1).view(kind).numpy()


def _magnitude(bits: list[int]) -> torch.Tensor:
    return torch.tensor(max(int(b) for b in bits), dtype=torch.int32).view(torch.float32)


def amax(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.amax`."""
    src = _flat(x.detach().contiguous())
    loop = _amax_bf16 if x.dtype == torch.bfloat16 else _amax_f32
    return _magnitude(_run(src.size, lambda a, b: loop(src[a:b])))


@cache
def _constants(fmt: Fp8Format) -> tuple[Any, Any, Any]:
    floor, offset = rounding_constants(fmt)
    return np.float32(fmt.max), np.uint32(floor), np.uint32(offset)


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels.round_to_grid`. The magnitude costs nothing extra here."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    src, dst = _flat(source), _flat(out)
    factor, (top, floor, offset) = np.float32(scale.item()), _constants(fmt)
    loop = _round_bf16 if x.dtype == torch.bfloat16 else _round_f32
    bits = _run(src.size, lambda a, b: loop(src[a:b], dst[a:b], factor, top, floor, offset))
    return out, _magnitude(bits) if want_amax else None


def encode(held: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """See `kernels.encode`."""
    source = held.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.uint8)
    src, dst = _flat(source), _flat(out)
    per_step = np.float32(1.0 / fmt.min_subnormal)
    shift = np.uint32(7 - fmt.mantissa_bits)
    rebias = np.uint32((127 - fmt.bias) << fmt.mantissa_bits)
    minimum = (127 - fmt.bias + 1) << 7
    limits = np.array([minimum, fmt.nan_code, fmt.inf_code], dtype=np.uint32)
    _run(src.size, lambda a, b: _encode(src[a:b], dst[a:b], per_step, shift, rebias, limits))
    return out


@cache
def _table(fmt: Fp8Format) -> np.ndarray:
    return _flat(code_values(fmt).to(torch.bfloat16))


def decode(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """See `kernels.decode`."""
    source = codes.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    src, dst, table = _flat(source), _flat(out), _table(fmt)
    _run(src.size, lambda a, b: _decode(src[a:b], dst[a:b], table))
    return out
