"""One scale for a tensor, as Triton kernels: magnitude, cast and transpose in one pass.

Bit for bit the results of `plain.py`.
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
    looping_grid,
    magnitude,
    narrowed,
    new_amax,
    value_of,
    widened,
)

_BLOCK = 4096  # elements of a flat piece
_TILE = 128  # rows and columns of a tile: both stores write whole cache lines


@jit
def amax_kernel(
    x: tl.tensor, amax: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr, EMULATE: tl.constexpr
) -> None:
    """The largest magnitude of a flat tensor."""
    largest = tl.zeros((BLOCK,), tl.int32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for step in range(0, tl.cdiv(size, BLOCK * programs)):
        i = (first + step * programs) * BLOCK + tl.arange(0, BLOCK)
        v = widened(tl.load(x + i, mask=i < size, other=0.0), EMULATE)
        largest = tl.maximum(largest, magnitude(v))
    tl.atomic_max(amax, tl.max(largest, axis=0))


@jit
def cast_kernel(
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    amax: tl.tensor,
    size: tl.tensor,
    HELD: tl.constexpr,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    OFFSET: tl.constexpr,
    WANT_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """A flat tensor cast to codes, or rounded to grid values held in bf16."""
    factor = tl.load(scale)
    largest = tl.zeros((BLOCK,), tl.int32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for step in range(0, tl.cdiv(size, BLOCK * programs)):
        i = (first + step * programs) * BLOCK + tl.arange(0, BLOCK)
        v = widened(tl.load(x + i, mask=i < size, other=0.0), EMULATE)
        if WANT_AMAX:
            largest = tl.maximum(largest, magnitude(v))
        if HELD:
            made = narrowed(grid_values(v * factor, MAX, FLOOR, OFFSET), out, EMULATE)
        else:
            made = codes_of(v * factor, E5M2, EMULATE)
        tl.store(out + i, made, mask=i < size)
    if WANT_AMAX:
        tl.atomic_max(amax, tl.max(largest, axis=0))


@jit
def cast_and_turn_kernel(
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    turned: tl.tensor,
    amax: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    E5M2: tl.constexpr,
    WANT_AMAX: tl.constexpr,
    TILE: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """A matrix cast to codes, and the codes transposed, from one read."""
    row = tl.program_id(0).to(tl.int64) * TILE
    col = tl.program_id(1).to(tl.int64) * TILE
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    v = widened(tl.load(x + r[:, None] * cols + c[None, :], mask=inside, other=0.0), EMULATE)
    if WANT_AMAX:
        tl.atomic_max(amax, tl.max(tl.max(magnitude(v), axis=1), axis=0))
    codes = codes_of(v * tl.load(scale), E5M2, EMULATE)
    tl.store(out + r[:, None] * cols + c[None, :], codes, mask=inside)
    tl.store(turned + c[None, :] * rows + r[:, None], codes, mask=inside)


@jit
def turn_kernel(
    codes: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    TILE: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """A matrix of bytes transposed."""
    row = tl.program_id(0).to(tl.int64) * TILE
    col = tl.program_id(1).to(tl.int64) * TILE
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    bytes_ = tl.load(codes + r[:, None] * cols + c[None, :], mask=inside, other=0)
    tl.store(turned + c[None, :] * rows + r[:, None], bytes_, mask=inside)


def amax(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.amax`."""
    source, largest = x.detach().contiguous(), new_amax(x)
    grid = looping_grid(source, triton.cdiv(source.numel(), _BLOCK))
    launch(amax_kernel, grid, source, largest, source.numel(), BLOCK=_BLOCK)
    return value_of(largest)


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels.round_to_grid`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    return out, _flat(source, scale, fmt, out, want_amax)


def cast(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool, want_turned: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `kernels.cast_once`."""
    source = x.detach().contiguous()
    codes = torch.empty_like(source, dtype=torch.uint8)
    if not want_turned:
        return codes.view(fmt.torch_dtype), None, _flat(source, scale, fmt, codes, want_amax)
    rows, cols = source.shape
    turned = torch.empty(cols, rows, dtype=torch.uint8, device=x.device)
    largest = new_amax(x)
    launch(
        cast_and_turn_kernel,
        _tiles(rows, cols),
        source,
        scale,
        codes,
        turned,
        largest,
        rows,
        cols,
        E5M2=fmt is E5M2_FORMAT,
        WANT_AMAX=want_amax,
        TILE=_TILE,
        num_warps=8,
    )
    kind = fmt.torch_dtype
    return codes.view(kind), turned.view(kind), value_of(largest) if want_amax else None


def turn(codes: torch.Tensor) -> torch.Tensor:
    """See `kernels.turn`."""
    rows, cols = codes.shape
    turned = torch.empty(cols, rows, dtype=torch.uint8, device=codes.device)
    source = codes.contiguous().view(torch.uint8)
    launch(turn_kernel, _tiles(rows, cols), source, turned, rows, cols, TILE=_TILE, num_warps=8)
    return turned.view(codes.dtype)


def _tiles(rows: int, cols: int) -> tuple[int, int]:
    return triton.cdiv(rows, _TILE), triton.cdiv(cols, _TILE)


def _flat(
    source: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, out: torch.Tensor, want_amax: bool
) -> torch.Tensor | None:
    """Cast into `out`: bytes, or bf16."""
    largest = new_amax(source)
    launch(
        cast_kernel,
        looping_grid(source, triton.cdiv(source.numel(), _BLOCK)),
        source,
        scale,
        out,
        largest,
        source.numel(),
        HELD=out.dtype != torch.uint8,
        E5M2=fmt is E5M2_FORMAT,
        **format_constants(fmt),
        WANT_AMAX=want_amax,
        BLOCK=_BLOCK,
    )
    return value_of(largest) if want_amax else None
