"""Scales from magnitudes, for recipes without a memory.

A scale multiplies when a tensor is quantized; its inverse multiplies when the tensor is read back.

Source: the formulas follow NVIDIA Transformer Engine's current, block and MX scaling; E8M0 is the
scale format of the OCP Microscaling specification 1.0, with the exponent rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

FLT_MAX = torch.finfo(torch.float32).max


class ScaleRule(Enum):
    """Which scale a block gets from its largest magnitude.

    Attributes:
        FP32: Format maximum over magnitude.
        POWER_OF_TWO: The same, rounded down to a power of two.
        E8M0: The inverse is the smallest power of two that keeps the block within the format.
    """

    FP32 = 0
    POWER_OF_TWO = 1
    E8M0 = 2


@dataclass(frozen=True)
class BlockScaling:
    """How the tensors of one role are divided into blocks.

    Attributes:
        length: Elements of a block along the dimension that a product sums over.
        square: Whether a block is `length` x `length`, not one row of `length`.
        rule: Scale of a block.
    """

    length: int
    square: bool
    rule: ScaleRule

    @property
    def row(self) -> tuple[int, int]:
        """Rows and columns of a block, for products along the rows of a matrix."""
        return (self.length if self.square else 1, self.length)


def current_scale(
    amax: torch.Tensor,
    fp8_max: float,
    power_2_scale: bool = False,
    epsilon: float = 0.0,
    cap: float = FLT_MAX,
) -> torch.Tensor:
    """Scale from the magnitude of the tensor or block itself.

    Args:
        amax: fp32, any shape.
        fp8_max: Largest value of the format.
        power_2_scale: Round down to a power of two.
        epsilon: Lower bound of `amax`.
        cap: The scale of a magnitude so small that the quotient overflows.

    Returns:
        fp32 like `amax`. 1 where `amax` is 0, infinite or NaN.
    """
    if amax.device.type == "cpu" and amax.numel() == 1:
        return _scale_of_one(amax, fp8_max, power_2_scale, epsilon, cap)
    bounded = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    # Not `fp8_max / bounded`: torch computes that as a reciprocal and a product, rounding twice.
    scale = (torch.full_like(bounded, fp8_max) / bounded).nan_to_num_(1.0, cap)
    if power_2_scale:
        scale = _floor_to_power_of_two(scale)
    return torch.where((bounded > 0) & torch.isfinite(bounded), scale, torch.ones_like(scale))


def _floor_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _scale_of_one(
    amax: torch.Tensor, fp8_max: float, power_2_scale: bool, epsilon: float, cap: float
) -> torch.Tensor:
    """`current_scale` of one number on the CPU, where a number is cheaper than six tensors.

    Dividing in fp64 and rounding to fp32 gives the fp32 quotient: 53 bits are more than twice 24.
    """
    value = amax.item()
    if value < epsilon:
        value = torch.full_like(amax, epsilon).item()
    if value != value or value in (0.0, float("inf")):
        return torch.ones_like(amax)
    scale = torch.full_like(amax, fp8_max / value, dtype=torch.float64).float()
    scale.nan_to_num_(1.0, cap)
    return _floor_to_power_of_two(scale) if power_2_scale else scale


def e8m0_scale(amax: torch.Tensor, fp8_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and inverse of MX blocks: powers of two that let no finite value saturate.

    Args:
        amax: fp32, any shape, not NaN.
        fp8_max: Largest value of the format.

    Returns:
        Scale and inverse, fp32 like `amax`. The inverse is `2**-127` for a magnitude of 0 and
        `2**127` for an infinite one.
    """
    quotient = amax * torch.tensor(1.0 / fp8_max, dtype=torch.float32, device=amax.device)
    bits = quotient.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + up.to(torch.int32)).clamp_(max=254)
    return power_of_two(254 - exponent), power_of_two(exponent)


def power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """`2 ** (biased - 127)`, fp32, of exponents from 0 to 254 (int32): what an E8M0 code means."""
    smallest = 0x400000  # 2**-127, a subnormal fp32
    return torch.where(biased > 0, biased << 23, smallest).to(torch.int32).view(torch.float32)


def to_e8m0(scale_inv: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (uint8) of powers of two."""
    return (scale_inv.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two, fp32, of E8M0 codes."""
    return power_of_two(codes.to(torch.int32))


def block_scale(
    amax: torch.Tensor, fp8_max: float, rule: ScaleRule, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and inverse of blocks.

    Args:
        amax: Largest magnitude of each block, fp32, any shape, not NaN.
        fp8_max: Largest value of the format.
        rule: Which scale.
        cap: As for `current_scale`: the largest number of the quantized tensor's type.
    """
    if rule is ScaleRule.E8M0:
        return e8m0_scale(amax, fp8_max)
    scale = current_scale(amax, fp8_max, rule is ScaleRule.POWER_OF_TWO, cap=cap)
    return scale, scale.reciprocal()
