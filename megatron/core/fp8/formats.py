"""The two FP8 formats as data: bit layout, limits, and the value of every code.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0. E4M3 has no infinity: only the all-ones
code is reserved (NaN), so its largest value is 448. E5M2 follows IEEE 754 (infinity and NaN exist),
largest finite value 57344.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit floating-point format.

    Attributes:
        name: `e4m3` or `e5m2`.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the stored mantissa.
        bias: Exponent bias.
        max: Largest finite value; casts saturate here.
        max_code: Code of `max`.
        nan_code: The code that casts write for NaN (without sign, as the hardware does).
        inf_code: Code of infinity; `max_code` where the format has none.
        torch_dtype: The torch type with the same bytes.
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
    def min_normal(self) -> float:
        """Smallest normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3 = Fp8Format("e4m3", 4, 3, 7, 448.0, 0x7E, 0x7F, 0x7E, torch.float8_e4m3fn)
E5M2 = Fp8Format("e5m2", 5, 2, 15, 57344.0, 0x7B, 0x7F, 0x7C, torch.float8_e5m2)


class FormatLimits(NamedTuple):
    """Largest values of the forward and the backward format."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which format the forward tensors (input, weight) and the gradients use."""

    E4M3 = FormatLimits(448.0, 448.0)
    E5M2 = FormatLimits(57344.0, 57344.0)
    HYBRID = FormatLimits(448.0, 57344.0)

    @property
    def forward(self) -> Fp8Format:
        """Format of inputs and weights."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def backward(self) -> Fp8Format:
        """Format of output gradients."""
        return E4M3 if self is Format.E4M3 else E5M2


def code_value(fmt: Fp8Format, code: int) -> float:
    """Value of one code, from the definition of the format.

    Args:
        fmt: The format.
        code: 0 to 255.

    Returns:
        The value; NaN and infinities where the format has them.
    """
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    if (code & 0x7F) > fmt.max_code:
        infinite = fmt.exponent_bits == 5 and mantissa == 0
        return sign * float("inf") if infinite else float("nan")
    if exponent == 0:
        return sign * mantissa * fmt.min_subnormal
    return sign * 2.0 ** (exponent - fmt.bias) * (1.0 + mantissa / (1 << fmt.mantissa_bits))


@cache
def code_values(fmt: Fp8Format) -> torch.Tensor:
    """Values of all 256 codes, fp32 `[256]`. Treat as read-only."""
    return torch.tensor([code_value(fmt, code) for code in range(256)], dtype=torch.float32)
