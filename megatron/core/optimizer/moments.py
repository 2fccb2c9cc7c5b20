"""How Adam's moments rest between updates: in fp32, bf16, fp16 or fp8.

* fp32 and bf16 as they are: both have the range that moments need.
* fp16 with one scale a tensor: a power of two that puts the largest magnitude near the top.
* fp8 (E4M3) with one scale for every 128 elements, a power of two again, as in the microscaling
  formats. The mean of squares rests as its root, which halves its range in powers of two.

Three bits behind the point are coarser than the change of a moment in one step: rounded to the
nearest number, a moment that shrinks by 0.1 % would never shrink. So fp8 is rounded up or down at
random, with the probabilities that make the mean right. The random numbers depend on the name of
the parameter and the number of the step alone, so that a run can be repeated and resumed.

Powers of two make storing what was stored change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn

_FP16_TOP = 15  # of 2 to 16: the largest magnitude lands in 2^14 .. 2^15
_FP8_TOP = 8  # 2^7 .. 2^8, below the largest number, 448
_FP8_LOWEST = -6  # exponent of the smallest normal number
_FP8_BITS = 3  # behind the point
_LOWEST_EXPONENT = -100  # an all but zero tensor needs no finer scale
_LOWEST_ROOT = -57  # the square of the smallest root below it is still a number
_ROUNDS_UP = 1.0 + 2.0**-11  # fp16 has 11 significant bits
_CHUNK = 1 << 15  # blocks that are rounded at a time, to need little memory


def scale_of(values: Tensor) -> Tensor:
    """Return the power of two by which an fp32 tensor is divided before it becomes fp16.

    The scale of stored values is never larger than the scale they were stored with, so that
    storing them again, after a checkpoint say, changes nothing.
    """
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    exponent = torch.frexp(amax * _ROUNDS_UP).exponent.clamp(min=_LOWEST_EXPONENT)
    return torch.ldexp(torch.ones_like(amax), exponent - _FP16_TOP)


def to_fp16(values: Tensor, squares: bool) -> tuple[Tensor, Tensor]:
    """Return fp16 values and their scale.

    Args:
        values: fp32.
        squares: Whether they are divided by: what is too small becomes the smallest number there
            is instead of zero. Rounding may make an update smaller, not huge.
    """
    scale = scale_of(values)
    values = values / scale
    if squares:
        tiny = torch.finfo(torch.float16).smallest_normal * 2.0**-10
        values = torch.where(values > 0, values.clamp(min=tiny), values)
    return values.half(), scale


def fp8_storage(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros: codes `[blocks, 128]` and the exponents int8 `[blocks]` of their scales."""
    blocks = -(-like.numel() // BLOCK)
    codes = torch.zeros(blocks, BLOCK, dtype=FP8, device=like.device)
    return codes, torch.zeros(blocks, dtype=torch.int8, device=like.device)


def to_fp8(
    values: Tensor,
    codes: Tensor,
    exponents: Tensor,
    squares: bool,
    noise: torch.Generator | None = None,
) -> None:
    """Store values.

    Args:
        values: fp32.
        codes: `[blocks, 128]`, written.
        exponents: int8 `[blocks]`, written.
        squares: Whether to store roots, none of them zero unless its square is.
        noise: Decides what is rounded up; None to round to the nearest number.
    """
    flat = values.reshape(-1)
    for first in range(0, len(codes), _CHUNK):
        part = flat[first * BLOCK : (first + _CHUNK) * BLOCK]
        rows = codes[first : first + _CHUNK]
        if part.numel() < rows.numel():
            part = torch.nn.functional.pad(part, (0, rows.numel() - part.numel()))
        part = part.view(rows.shape)
        if squares:
            part = part.sqrt()
        exponent = _block_exponents(part, _LOWEST_ROOT if squares else _LOWEST_EXPONENT)
        exponents[first : first + _CHUNK] = exponent
        scaled = part * _power_of_two(-exponent).unsqueeze(1)
        if noise is None:
            draw = torch.full((), 0.5, device=part.device)
        else:
            draw = torch.rand(part.shape, generator=noise, device=part.device)
        rounded = _round(scaled, draw)
        if squares:
            tiny = 2.0 ** (_FP8_LOWEST - _FP8_BITS)
            rounded = torch.where(part > 0, rounded.clamp(min=tiny), rounded)
        rows.copy_(rounded)


def from_fp8(codes: Tensor, exponents: Tensor, shape: torch.Size, squares: bool) -> Tensor:
    """Return stored values as fp32 of `shape`."""
    values = codes.float().mul_(_power_of_two(exponents.to(torch.int32)).unsqueeze(1))
    if squares:
        values.square_()
    return values.view(-1)[: shape.numel()].view(shape)


def _block_exponents(blocks: Tensor, lowest: int) -> Tensor:
    """Return the exponent of each block's scale, int32 `[blocks]`.

    A magnitude above 15/16 of a power of two may be rounded up to it.
    """
    amax = torch.frexp(blocks.abs().amax(dim=1))
    exponent = amax.exponent + (amax.mantissa > 0.9375)
    return exponent.clamp(lowest, 127) - _FP8_TOP


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to an int32 exponent of a normal fp32 number."""
    return ((exponent + 127) << 23).view(torch.float32)


def _round(values: Tensor, draw: Tensor) -> Tensor:
    """Round fp32 values below 256 to numbers of E4M3, up where the remainder exceeds `1 - draw`."""
    exponent = ((values.view(torch.int32) >> 23) & 0xFF) - 127
    step = exponent.clamp_(_FP8_LOWEST, 127 - _FP8_BITS) - _FP8_BITS
    steps = torch.floor(values.abs() * _power_of_two(-step) + draw)
    return torch.copysign(steps * _power_of_two(step), values)
