"""The FP8 formats and the FP4 format as data: bit layout, limits, and the value of every code.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0. E4M3 has no infinity: only the all-ones
code is reserved (NaN), so its largest value is 448. E5M2 follows IEEE 754 (infinity and NaN exist),
largest finite value 57344. E2M1: OCP Microscaling Formats 1.0; 16 codes, all of them numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Fp8Format:
    """One floating-point format of 8 or 4 bits.

    Attributes:
        name: `e4m3`, `e5m2` or `e2m1`.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the stored mantissa.
        bias: Exponent bias.
        max: Largest finite value; casts saturate here.
        max_code: Code of `max`.
        nan_code: The code that casts write for NaN (without sign, as the hardware does).
        inf_code: Code of infinity; `max_code` where the format has none.
        torch_dtype: The torch type with the same bytes; of E2M1, whose codes lie in a byte each,
            plain bytes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    nan_code: int
    inf_code: int
    torch_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        """Smallest normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3 = Fp8Format("e4m3", 4, 3, 7, 448.0, 0x7E, 0x7F, 0x7E, torch.float8_e4m3fn)
E5M2 = Fp8Format("e5m2", 5, 2, 15, 57344.0, 0x7B, 0x7F, 0x7C, torch.float8_e5m2)
# Without a code for NaN: casts write the largest value, as NVIDIA's conversion does.
E2M1 = Fp8Format("e2m1", 2, 1, 1, 6.0, 7, 7, 7, torch.uint8)


class FormatLimits(NamedTuple):
    """Largest values of the forward and the backward format."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which format the forward tensors (input, weight) and the gradients use."""

    E4M3 = FormatLimits(448.0, 448.0)
    E5M2 = FormatLimits(57344.0, 57344.0)
    HYBRID = FormatLimits(448.0, 57344.0)
    E2M1 = FormatLimits(6.0, 6.0)

    @property
    def forward(self) -> Fp8Format:
        """Format of inputs and weights."""
        return {Format.E5M2: E5M2, Format.E2M1: E2M1}.get(self, E4M3)

    @property
    def backward(self) -> Fp8Format:
        """Format of output gradients."""
        return {Format.E4M3: E4M3, Format.E2M1: E2M1}.get(self, E5M2)


def code_value(fmt: Fp8Format, code: int) -> float:
    """Value of one code, from the definition of the format.

    Args:
        fmt: The format.
        code: 0 to 255, or 15 with 4 bits.

    Returns:
        The value; NaN and infinities where the format has them.
    """
    negative = 1 << (fmt.bits - 1)
    sign, magnitude = -1.0 if code & negative else 1.0, code & (negative - 1)
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    if magnitude > fmt.max_code:
        infinite = fmt.exponent_bits == 5 and mantissa == 0
        return sign * float("inf") if infinite else float("nan")
    if exponent == 0:
        return sign * mantissa * fmt.min_subnormal
    return sign * 2.0 ** (exponent - fmt.bias) * (1.0 + mantissa / (1 << fmt.mantissa_bits))


@cache
def code_values(fmt: Fp8Format) -> torch.Tensor:
    """Values of all codes, fp32 `[256]`, or `[16]` with 4 bits. Treat as read-only."""
    codes = range(1 << fmt.bits)
    return torch.tensor([code_value(fmt, code) for code in codes], dtype=torch.float32)
