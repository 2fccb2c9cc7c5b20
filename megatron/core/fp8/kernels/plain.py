"""The kernels in plain torch, in chunks that stay in cache.

Rounding by arithmetic: let `e` be the exponent field of `v`, not below that of the format's
smallest normal value, and `c` the float with exponent `e + 23 - M` and mantissa 1.5. Then
`(v + c) - c` in fp32 is `v` rounded to `M` mantissa bits, ties to even, subnormals included.
"""

from __future__ import annotations

import threading

import torch

from megatron.core.fp8.formats import Fp8Format, code_values

_CHUNK = 1 << 16  # elements a thread works on at once: 256 KiB of fp32 a buffer
_EXPONENT = 0x7F800000

_scratch = threading.local()


def rounding_constants(fmt: Fp8Format) -> tuple[int, int]:
    """Exponent field of the smallest normal value, and what to add to a field to get `c`."""
    return (127 - fmt.bias + 1) << 23, ((23 - fmt.mantissa_bits) << 23) | 0x400000


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32 0-dim; NaN elements are ignored."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    largest = torch.maximum(-low, high).float()
    if x.device.type != "cpu":
        # Reading the value would wait for the device, so the NaN-free answer is always computed.
        return x.detach().abs().nan_to_num(0.0, float("inf")).amax().float()
    if torch.isnan(largest):
        return x.detach().abs().nan_to_num(0.0, float("inf")).amax().float()
    return largest


def _buffers(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 scratch chunks of this thread."""
    if not hasattr(_scratch, "pair"):
        _scratch.pair = torch.empty(2, _CHUNK)
    return _scratch.pair[0, :size], _scratch.pair[1, :size]


def _round_chunk(v: torch.Tensor, c: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Round fp32 `v` in place to the grid, `c` is scratch. Returns `v`."""
    floor, offset = rounding_constants(fmt)
    v.clamp_(-fmt.max, fmt.max)
    bits = c.view(torch.int32)
    torch.bitwise_and(v.view(torch.int32), _EXPONENT, out=bits)
    bits.clamp_(min=floor).add_(offset)
    rounded = torch.add(v, c).sub_(c)
    return torch.copysign(rounded, v, out=v)


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels.round_to_grid`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    largest = amax(source) if want_amax else None
    if source.device.type != "cpu":
        v = source.float() * scale
        return _round_chunk(v, torch.empty_like(v), fmt).to(torch.bfloat16), largest
    factor = float(scale)
    flat_in, flat_out = source.view(-1), out.view(-1)
    for start in range(0, flat_in.numel(), _CHUNK):
        part = flat_in[start : start + _CHUNK]
        v, c = _buffers(part.numel())
        v.copy_(part).mul_(factor)
        flat_out[start : start + _CHUNK].copy_(_round_chunk(v, c, fmt))
    return out, largest


def cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Multiply in fp32, saturate, convert to the FP8 type."""
    return (x.detach().float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.torch_dtype)


def encode(held: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes of grid values held in bf16.

    A bf16 value and an FP8 code hold sign, exponent and mantissa in the same order, so a normal
    value is shifted and re-biased; a subnormal one is its multiple of the smallest.
    """
    source = held.contiguous()
    bits = source.view(torch.int16).to(torch.int32) & 0xFFFF
    magnitude = bits & 0x7FFF
    shift = 7 - fmt.mantissa_bits
    normal = (magnitude >> shift) - ((127 - fmt.bias) << fmt.mantissa_bits)
    small = (source.abs().float() * (1.0 / fmt.min_subnormal)).nan_to_num(0.0).to(torch.int32)
    minimum = (127 - fmt.bias + 1) << 7
    code = torch.where(magnitude < minimum, small, normal)
    code = torch.where(magnitude == 0x7F80, torch.full_like(code, fmt.inf_code), code)
    code |= (bits >> 8) & 0x80
    code = torch.where(magnitude > 0x7F80, torch.full_like(code, fmt.nan_code), code)
    return code.to(torch.uint8)


def decode(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Grid values, held in bf16, of codes."""
    table = code_values(fmt).to(device=codes.device, dtype=torch.bfloat16)
    return table[codes.contiguous().to(torch.int32)]
