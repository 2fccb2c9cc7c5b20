"""Products as Hopper's FP8 tensor cores add them up, to study what that does to a model.

FP8 products are exact, their sums are not. One instruction takes 32 products of an output element
and what was summed before, in registers of 32 bits of which 22 are used:

1. All 33 addends are aligned to the largest exponent among them (a product's is the sum of its
   factors' exponents) and cut off, towards zero, 13 bits below its leading one.
2. Their sum is exact. It is normalised and cut off, towards zero, 13 bits behind its leading one.

With *fast accumulation* a whole row is summed like that. With *split accumulation* the sum of each
128 products is added to a sum in fp32, rounded to nearest, and starts anew; recipes with a scale
for each 128 elements multiply by it in between.

What is certain, and what is not. DeepSeek-AI ("DeepSeek-V3 technical report", 2024, section 3.5.2)
measured that 14 bits of each aligned product survive, advises to leave the tensor core every 128
products, and reports errors near 2 % without at K = 4096. Zhang et al. ("SageAttention2", 2024)
found the register to keep 13 bits behind the leading one. Xie et al. ("MMA-Sim", arXiv 2511.10909,
2025) describe the steps above and report bitwise agreement with the `wgmma` instructions of an
H100. None of it is documented by the vendor, and it has not been compared with hardware here. In
which order a library takes the instructions along K, and whether it cuts K between thread blocks,
differs between kernels; here they follow K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.tensor import QuantizedTensor

STEP = 32  # products that one instruction adds up
PROMOTION = 128  # products after which split accumulation goes on in fp32
FRACTION_BITS = 13  # behind the leading one
HOPPER = "hopper"

_EXPONENT = 0x7F800000
_KEPT = -(1 << (23 - FRACTION_BITS))
_SMALLEST = 2.0**-100  # far below any product of two formats, and its inverse is finite
_TILE = 1 << 13  # output elements that are computed at once


def emulation_of(config: Any) -> str:
    """How products are emulated in a run: `--fp8-emulation`, unless Hopper's sums are asked for."""
    hopper = config.fp8_emulate_accumulation == HOPPER
    return HOPPER if hopper else str(config.fp8_emulation)


def refuse_hardware(emulation: str, device: torch.device) -> None:
    """Refuse to emulate sums where there is hardware that forms them.

    Args:
        emulation: How products are emulated.
        device: Where they run, which has FP8 hardware.

    Raises:
        PrecisionError: Hopper's sums are to be emulated.
    """
    if emulation == HOPPER:
        raise PrecisionError(
            complaint(
                "--fp8-emulate-accumulation",
                f"{HOPPER} on {device}",
                "It has FP8 hardware, which sums products up in its own way",
                "Add --device cpu, or remove --fp8-emulate-accumulation",
            )
        )


def multiply(a: QuantizedTensor, b: QuantizedTensor, *, split: bool) -> torch.Tensor:
    """`a @ b.T` of quantized operands, scaled, as the module describes.

    Args:
        a: `[M, K]`.
        b: `[N, K]`.
        split: Whether to go on in fp32 every 128 products. Always so with a scale for each block.

    Returns:
        fp32 `[M, N]`.

    Raises:
        PrecisionError: For blocks that are no 128 elements along K, which Hopper cannot multiply.
    """
    by_blocks = a.block is not None or b.block is not None
    if by_blocks and {a.block and a.block[1], b.block and b.block[1]} != {PROMOTION}:
        raise PrecisionError(
            complaint(
                "--fp8-emulate-accumulation",
                HOPPER,
                f"Operands have scales for blocks of {a.block} and {b.block} elements, and this"
                " hardware has products for scales of 128 elements or of whole tensors only",
                "Use --fp8-recipe delayed, tensorwise or blockwise, or"
                " --fp8-emulate-accumulation fp32",
            )
        )
    a, b = a.to_fp8().hold(), b.to_fp8().hold()
    out = torch.empty(a.shape[0], b.shape[0], device=a.data.device)
    if out.is_meta:
        return out
    left, right = _Operand(a.data, a.fmt), _Operand(b.data, b.fmt)
    rows = max(1, _TILE // max(1, out.shape[1]))
    for start in range(0, out.shape[0], rows):
        span = slice(start, start + rows)
        sums = _partial_sums(left, right, span, PROMOTION if split or by_blocks else None)
        if by_blocks:
            out[span] = _scaled(sums, _block_scales(a)[span], _block_scales(b))
        else:
            total = _total(sums, out[span])
            out[span] = total.mul_(a.scale_inv).mul_(b.scale_inv)
    return out


class _Operand:
    """An operand along K, and the powers of two in its elements.

    Args:
        values: `[rows, K]`, on the grid of `fmt`.
        fmt: Its format.
    """

    def __init__(self, values: torch.Tensor, fmt: Fp8Format) -> None:
        missing = -values.shape[1] % STEP
        self.values = torch.nn.functional.pad(values.float(), (0, missing)).t().contiguous()
        smallest = torch.full_like(self.values, fmt.min_normal)
        powers = _power_of_two(self.values)
        # Subnormal numbers have the exponent of the smallest normal one; zeros have none.
        self.powers = torch.where(self.values == 0, powers, torch.maximum(powers, smallest))
        self.length = self.values.shape[0]


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two in each fp32 number; 0 in 0."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def _partial_sums(
    a: _Operand, b: _Operand, rows: slice, interval: int | None
) -> Iterator[torch.Tensor]:
    """Sums of `interval` products at a time, `[rows, N]`; of all of them for None."""
    count = len(range(*rows.indices(a.values.shape[1])))
    total = torch.zeros(count, b.values.shape[1], device=a.values.device)
    for start in range(0, a.length, STEP):
        span = slice(start, start + STEP)
        total = _instruction(a, b, rows, span, total)
        end = start + STEP
        if interval is not None and end % interval == 0 and end < a.length:
            yield total
            total = torch.zeros_like(total)
    yield total


def _instruction(
    a: _Operand, b: _Operand, rows: slice, span: slice, total: torch.Tensor
) -> torch.Tensor:
    """Add the products of one instruction to `total` `[rows, N]`."""
    largest = (a.powers[span, rows, None] * b.powers[span, None, :]).amax(0)
    largest = torch.maximum(largest, _power_of_two(total)).clamp_(min=_SMALLEST)
    unit = largest.mul(2.0**-FRACTION_BITS)
    inverse = unit.reciprocal()  # exact: a power of two
    products = a.values[span, rows, None] * b.values[span, None, :]
    # Whole numbers below 2^20 in all, so the order does not matter.
    added = products.mul_(inverse).trunc_().sum(0)
    added += total.mul(inverse).trunc_()
    added *= unit
    return (added.view(torch.int32) & _KEPT).view(torch.float32)


def _total(sums: Iterator[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor | None = None
    for one in sums:
        total = one if total is None else total + one
    return torch.zeros_like(like) if total is None else total


def _block_scales(x: QuantizedTensor) -> torch.Tensor:
    """Inverse scales `[rows, blocks along K]`."""
    high = 1 if x.block is None else x.block[0]
    return x.scale_inv.repeat_interleave(high, 0)[: x.shape[0]]


def _scaled(sums: Iterator[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum up blocks, each times its scales: a product in fp32, then a multiply-add."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for i, one in enumerate(sums):
        scaled = one.mul_(a[:, i, None]).double().mul_(b[None, :, i])
        total = scaled.add_(total).float()
    return total
