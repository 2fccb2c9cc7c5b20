"""Arithmetic that the Triton kernels share, and how they are launched.

Kernels run compiled on CUDA devices, or in Triton's interpreter on CPU tensors. The interpreter's
own casts to FP8 and to and from bf16 are wrong, so there `EMULATE` casts by integer arithmetic,
which is bit for bit what the hardware does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.plain import rounding_constants

# With a type: a decorator without one would hide those of the functions.
jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Programs of one kernel that loops over its work: enough to keep every multiprocessor busy, few
# enough that their atomic maxima do not queue up.
_PROGRAMS_A_PROCESSOR = 8
_INFINITY = tl.constexpr(0x7F800000)


@jit
def magnitude(v: tl.tensor) -> tl.tensor:
    """Bits of `|v|` (fp32) as int32, which are in the order of the values; 0 for NaN."""
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > _INFINITY, 0, bits)


@jit
def _codes_by_integers(
    v: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr
) -> tl.tensor:
    """What the hardware's saturating cast does, in integer arithmetic."""
    bits = v.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    a = bits & 0x7FFFFFFF
    smallest: tl.constexpr = (127 - BIAS + 1) << 23
    shift: tl.constexpr = 23 - MANTISSA
    # Normal results: half a unit less the last bit kept is what ties to even need.
    odd = (a >> shift) & 1
    normal = ((a + ((1 << (shift - 1)) - 1) + odd) >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormal ones: adding this number makes fp32 round at the format's smallest step.
    step: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    step_bits: tl.constexpr = (127 - BIAS + 1 + 23 - MANTISSA) << 23
    small = (a.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True) - step_bits
    code = tl.where(a < smallest, small, normal)
    code = tl.where(code > MAX_CODE, MAX_CODE, code) | sign
    return tl.where(a > _INFINITY, 0x7F, code).to(tl.uint8)


@jit
def codes_of(v: tl.tensor, E5M2: tl.constexpr, EMULATE: tl.constexpr) -> tl.tensor:
    """Codes (uint8) of fp32 values: saturated, to nearest, ties to even, NaN without its sign."""
    if EMULATE:
        if E5M2:
            codes = _codes_by_integers(v, 2, 15, 0x7B)
        else:
            codes = _codes_by_integers(v, 3, 7, 0x7E)
    else:
        if E5M2:
            v = tl.clamp(v, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            v = tl.clamp(v, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@jit
def grid_values(
    v: tl.tensor, MAX: tl.constexpr, FLOOR: tl.constexpr, OFFSET: tl.constexpr
) -> tl.tensor:
    """fp32 values rounded to a format's grid, still in fp32; see `plain.round_chunk`."""
    v = tl.where(v > MAX, MAX, v)  # NaN compares false and stays
    v = tl.where(v < -MAX, -MAX, v)
    bits = v.to(tl.uint32, bitcast=True)
    field = tl.maximum(bits & _INFINITY, FLOOR)
    c = (field + OFFSET).to(tl.float32, bitcast=True)
    rounded = ((v + c) - c).to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    return rounded.to(tl.float32, bitcast=True)


@jit
def widened(v: tl.tensor, EMULATE: tl.constexpr) -> tl.tensor:
    """Values of a 16-bit or 32-bit float type in fp32."""
    if EMULATE and v.dtype == tl.bfloat16:
        wide = (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = v.to(tl.float32)
    return wide


@jit
def narrowed(v: tl.tensor, like: tl.tensor, EMULATE: tl.constexpr) -> tl.tensor:
    """fp32 values rounded once to the type of what a pointer points to."""
    kind: tl.constexpr = like.dtype.element_ty
    if EMULATE and kind == tl.bfloat16:
        bits = v.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        bits = tl.where((bits & 0x7FFFFFFF) > _INFINITY, quiet, up)
        out = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        out = v.to(kind)
    return out


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return type(magnitude).__name__ == "InterpretedFunction"


def format_constants(fmt: Fp8Format) -> dict[str, Any]:
    """Compile-time arguments that describe a format to `grid_values`."""
    floor, offset = rounding_constants(fmt)
    return {"MAX": fmt.max, "FLOOR": floor, "OFFSET": offset}


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def looping_grid(x: torch.Tensor, pieces: int) -> tuple[int]:
    """Programs for a kernel that loops over `pieces` of work on the device of `x`."""
    most = _processors(x.device.index) * _PROGRAMS_A_PROCESSOR if x.is_cuda else 4
    return (min(pieces, most),)


def launch(
    kernel: Any, grid: tuple[int, ...], x: torch.Tensor, *args: Any, **constants: Any
) -> None:
    """Run a kernel on the device of `x`.

    A product and a sum are never fused into one rounding: the bits would differ from plain torch.
    """
    constants = {"num_warps": 4, "enable_fp_fusion": False, **constants}
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    with torch.cuda.device(x.device) if elsewhere else nullcontext():
        kernel[grid](x, *args, **constants, EMULATE=is_interpreted())


def new_amax(x: torch.Tensor) -> torch.Tensor:
    """Where kernels collect the bits of a largest magnitude: int32, one element, zero."""
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def value_of(amax: torch.Tensor) -> torch.Tensor:
    """The magnitude, fp32 0-dim, that was collected."""
    return amax.view(torch.float32).view(())
