"""A scale for each block of a matrix, as Triton kernels. Bit for bit what `plain_blocks.py` does.

A tile is read once. Both directions of a matrix, along rows and along columns, come out of the same
read, the second one transposed as products want it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import E5M2 as E5M2_FORMAT
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.triton_math import (
    codes_of,
    format_constants,
    grid_values,
    jit,
    launch,
    magnitude,
    narrowed,
    widened,
)
from megatron.core.fp8.scales import ScaleRule

# By the length of a block: side of a tile, and warps that work on one.
_TILES = {128: (128, 8), 64: (64, 4), 32: (64, 4), 16: (64, 4)}
_ROW, _COL, _SQUARE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_E8M0 = tl.constexpr(ScaleRule.E8M0.value)
_POWER_OF_TWO = tl.constexpr(ScaleRule.POWER_OF_TWO.value)


@jit
def _power_of_two(biased: tl.tensor) -> tl.tensor:
    return tl.where(biased > 0, biased << 23, 0x400000).to(tl.float32, bitcast=True)


@jit
def scales_of(
    amax: tl.tensor, MAX: tl.constexpr, CAP: tl.constexpr, RULE: tl.constexpr
) -> tl.tensor:
    """Scale and inverse of blocks from their magnitudes (fp32); see `scales.block_scale`."""
    if RULE == _E8M0:
        bits = (amax * (1.0 / MAX)).to(tl.int32, bitcast=True)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = (mantissa > 0) & ((exponent != 0) | (mantissa > 0x400000))
        exponent = tl.minimum(exponent + up.to(tl.int32), 254)
        scale = _power_of_two(254 - exponent)
        inverse = _power_of_two(exponent)
    else:
        scale = tl.math.div_rn(tl.zeros_like(amax) + MAX, amax)
        scale = tl.where(scale == float("inf"), CAP, scale)
        if RULE == _POWER_OF_TWO:
            scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)
        inverse = tl.math.div_rn(tl.zeros_like(amax) + 1.0, scale)
    return scale, inverse


@jit
def _spread(
    of_blocks: tl.tensor, DIRECTION: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """A number for each block as one for each element of a tile."""
    if DIRECTION == _ROW:
        wide = tl.broadcast_to(of_blocks[:, :, None], (TILE, TILE // LENGTH, LENGTH))
    elif DIRECTION == _COL:
        wide = tl.broadcast_to(of_blocks[:, None, :], (TILE // LENGTH, LENGTH, TILE))
    else:
        wide = tl.broadcast_to(
            of_blocks[:, None, :, None], (TILE // LENGTH, LENGTH, TILE // LENGTH, LENGTH)
        )
    return tl.reshape(wide, (TILE, TILE))


@jit
def _largest(
    v: tl.tensor, DIRECTION: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The magnitude, fp32, of each block of a tile."""
    bits = magnitude(v)
    if DIRECTION == _ROW:
        largest = tl.max(tl.reshape(bits, (TILE, TILE // LENGTH, LENGTH)), axis=2)
    elif DIRECTION == _COL:
        largest = tl.max(tl.reshape(bits, (TILE // LENGTH, LENGTH, TILE)), axis=1)
    else:
        four = tl.reshape(bits, (TILE // LENGTH, LENGTH, TILE // LENGTH, LENGTH))
        largest = tl.max(tl.max(four, axis=3), axis=1)
    return largest.to(tl.float32, bitcast=True)


@jit
def _store_scales(
    inverse: tl.tensor,
    scale_inv: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    DIRECTION: tl.constexpr,
    TURNED: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the scales of a tile's blocks, transposed if asked."""
    high: tl.constexpr = 1 if DIRECTION == _ROW else LENGTH
    wide: tl.constexpr = 1 if DIRECTION == _COL else LENGTH
    i = row // high + tl.arange(0, TILE // high)
    j = col // wide + tl.arange(0, TILE // wide)
    down, across = tl.cdiv(rows, high), tl.cdiv(cols, wide)
    inside = (i < down)[:, None] & (j < across)[None, :]
    if TURNED:
        place = j[None, :] * down + i[:, None]
    else:
        place = i[:, None] * across + j[None, :]
    tl.store(scale_inv + place, inverse, mask=inside)


@jit
def _quantize_tile(
    v: tl.tensor,
    out: tl.tensor,
    scale_inv: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    DIRECTION: tl.constexpr,
    TURNED: tl.constexpr,
    HELD: tl.constexpr,
    FOLD: tl.constexpr,
    LENGTH: tl.constexpr,
    RULE: tl.constexpr,
    CAP: tl.constexpr,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    OFFSET: tl.constexpr,
    TILE: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """Quantize a tile in one direction and write it, transposed if asked."""
    scale, inverse = scales_of(_largest(v, DIRECTION, LENGTH, TILE), MAX, CAP, RULE)
    _store_scales(inverse, scale_inv, row, col, rows, cols, DIRECTION, TURNED, LENGTH, TILE)
    scaled = v * _spread(scale, DIRECTION, LENGTH, TILE)
    if HELD:
        value = grid_values(scaled, MAX, FLOOR, OFFSET)
        if FOLD:
            value = value * _spread(inverse, DIRECTION, LENGTH, TILE)
            # Bits that bf16 does not have are cut off, below its smallest normal number only.
            bits = value.to(tl.uint32, bitcast=True) & 0xFFFF0000
            value = bits.to(tl.float32, bitcast=True)
        made = narrowed(value, out, EMULATE)
    else:
        made = codes_of(scaled, E5M2, EMULATE)
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    if TURNED:
        place = c[None, :] * rows + r[:, None]
    else:
        place = r[:, None] * cols + c[None, :]
    tl.store(out + place, made, mask=inside)


@jit
def blocks_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scale_inv: tl.tensor,
    second: tl.tensor,
    second_inv: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    DIRECTION: tl.constexpr,
    TURNED: tl.constexpr,
    BOTH: tl.constexpr,
    HELD: tl.constexpr,
    FOLD: tl.constexpr,
    LENGTH: tl.constexpr,
    RULE: tl.constexpr,
    CAP: tl.constexpr,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    OFFSET: tl.constexpr,
    TILE: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """A matrix quantized in blocks; with `BOTH` also along its columns, transposed."""
    row = tl.program_id(0).to(tl.int64) * TILE
    col = tl.program_id(1).to(tl.int64) * TILE
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    v = widened(tl.load(x + r[:, None] * cols + c[None, :], mask=inside, other=0.0), EMULATE)
    _quantize_tile(
        v,
        out,
        scale_inv,
        row,
        col,
        rows,
        cols,
        DIRECTION,
        TURNED,
        HELD,
        FOLD,
        LENGTH,
        RULE,
        CAP,
        E5M2,
        MAX,
        FLOOR,
        OFFSET,
        TILE,
        EMULATE,
    )
    if BOTH:
        _quantize_tile(
            v,
            second,
            second_inv,
            row,
            col,
            rows,
            cols,
            _COL,
            True,
            HELD,
            FOLD,
            LENGTH,
            RULE,
            CAP,
            E5M2,
            MAX,
            FLOOR,
            OFFSET,
            TILE,
            EMULATE,
        )


def supports(block: tuple[int, int]) -> bool:
    """Whether these blocks fit the kernels' tiles."""
    return max(block) in _TILES and min(block) in (1, max(block))


def round_blocks(
    x: torch.Tensor, fmt: Fp8Format, block: tuple[int, int], rule: ScaleRule, fold: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.round_blocks`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    scale_inv = _new_scales(source, block)
    _launch(source, out, scale_inv, out, scale_inv, fmt, block, rule, HELD=True, FOLD=fold)
    return out, scale_inv


def cast_blocks(
    x: torch.Tensor, fmt: Fp8Format, block: tuple[int, int], rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.cast_blocks`."""
    source = x.detach().contiguous()
    turned = block[1] == 1
    codes, scale_inv = _new_codes(source, turned), _new_scales(source, block, turned)
    _launch(source, codes, scale_inv, codes, scale_inv, fmt, block, rule, TURNED=turned)
    codes = codes.view(fmt.torch_dtype)
    return (codes.t(), scale_inv.t()) if turned else (codes, scale_inv)


def cast_blocks_both(
    x: torch.Tensor, fmt: Fp8Format, length: int, rule: ScaleRule
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """See `kernels.cast_blocks_both`."""
    source = x.detach().contiguous()
    codes, scale_inv = _new_codes(source), _new_scales(source, (1, length))
    second, second_inv = _new_codes(source, True), _new_scales(source, (length, 1), True)
    _launch(source, codes, scale_inv, second, second_inv, fmt, (1, length), rule, BOTH=True)
    kind = fmt.torch_dtype
    return (codes.view(kind), scale_inv), (second.view(kind).t(), second_inv.t())


def _new_codes(x: torch.Tensor, turned: bool = False) -> torch.Tensor:
    shape = x.shape[::-1] if turned else x.shape
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _new_scales(x: torch.Tensor, block: tuple[int, int], turned: bool = False) -> torch.Tensor:
    shape = [-(-size // side) for size, side in zip(x.shape, block, strict=True)]
    return torch.empty(shape[::-1] if turned else shape, device=x.device)


def _launch(
    source: torch.Tensor,
    out: torch.Tensor,
    scale_inv: torch.Tensor,
    second: torch.Tensor,
    second_inv: torch.Tensor,
    fmt: Fp8Format,
    block: tuple[int, int],
    rule: ScaleRule,
    **options: bool,
) -> None:
    rows, cols = source.shape
    direction = _SQUARE if block[0] == block[1] else _ROW if block[0] == 1 else _COL
    tile, warps = _TILES[max(block)]
    chosen = {"TURNED": False, "BOTH": False, "HELD": False, "FOLD": False, **options}
    launch(
        blocks_kernel,
        (triton.cdiv(rows, tile), triton.cdiv(cols, tile)),
        source,
        out,
        scale_inv,
        second,
        second_inv,
        rows,
        cols,
        DIRECTION=direction.value,
        **chosen,
        LENGTH=max(block),
        RULE=rule.value,
        CAP=torch.finfo(source.dtype).max,
        E5M2=fmt is E5M2_FORMAT,
        **format_constants(fmt),
        TILE=tile,
        num_warps=warps,
    )
