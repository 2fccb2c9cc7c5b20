"""What comes before a cast, in the same pass: a norm, and SwiGLU. Triton kernels.

The values that are cast, and the casts, are bit for bit those of plain torch on the same row
statistics. The statistics themselves are sums, whose last bits depend on the order of addition, and
the exponential of SwiGLU is the device's own: there kernels and torch may differ by one unit in the
last place of fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import E5M2 as E5M2_FORMAT
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.plain import Normed
from megatron.core.fp8.kernels.triton_math import (
    codes_of,
    jit,
    launch,
    looping_grid,
    magnitude,
    narrowed,
    new_amax,
    value_of,
    widened,
)

WIDEST_ROW = 16384  # a row is held in registers
_BLOCK = 1024  # columns of SwiGLU's pieces


@jit
def norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    shift: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    mean_of: tl.tensor,
    inverse_of: tl.tensor,
    amax: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    eps: tl.tensor,
    CENTERED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    CAST: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """Rows normalised in fp32, then cast to codes or rounded once; keeps the row statistics."""
    c = tl.arange(0, BLOCK)
    inside = c < cols
    factor = widened(tl.load(weight + c, mask=inside, other=0.0), EMULATE)
    if ZERO_CENTERED:
        factor = factor + 1.0
    if SHIFTED:
        added = widened(tl.load(shift + c, mask=inside, other=0.0), EMULATE)
    if CAST:
        multiplier = tl.load(scale)
    width = cols.to(tl.float32)
    largest = tl.zeros((BLOCK,), tl.int32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for step in range(0, tl.cdiv(rows, programs)):
        row = first + step * programs
        here = c < tl.where(row < rows, cols, 0)
        v = widened(tl.load(x + row * cols + c, mask=here, other=0.0), EMULATE)
        if CENTERED:
            mean = tl.math.div_rn(tl.sum(v, axis=0), width)
            tl.store(mean_of + row, mean, mask=row < rows)
            v = tl.where(here, v - mean, 0.0)
        spread = tl.math.div_rn(tl.sum(v * v, axis=0), width)
        inverse = tl.math.div_rn(1.0, tl.math.sqrt_rn(spread + eps))
        tl.store(inverse_of + row, inverse, mask=row < rows)
        y = v * inverse * factor
        if SHIFTED:
            y = y + added
        if CAST:
            largest = tl.maximum(largest, tl.where(here, magnitude(y), 0))
            made = codes_of(y * multiplier, E5M2, EMULATE)
        else:
            made = narrowed(y, out, EMULATE)
            largest = tl.maximum(largest, tl.where(here, magnitude(widened(made, EMULATE)), 0))
        tl.store(out + row * cols + c, made, mask=here)
    tl.atomic_max(amax, tl.max(largest, axis=0))


@jit
def swiglu_kernel(
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    amax: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    KEEP: tl.constexpr,
    CAST: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """`silu(gate) * up` of `[gate; up]`, rounded to its type, and with `CAST` also cast."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    gate = widened(tl.load(x + row * 2 * cols + c, mask=inside, other=0.0), EMULATE)
    up = widened(tl.load(x + row * 2 * cols + cols + c, mask=inside, other=0.0), EMULATE)
    y = narrowed(tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up, out, EMULATE)
    if KEEP:
        tl.store(out + row * cols + c, y, mask=inside)
    if CAST:
        wide = widened(y, EMULATE)
        tl.atomic_max(amax, tl.max(tl.where(inside, magnitude(wide), 0), axis=0))
        tl.store(
            codes + row * cols + c, codes_of(wide * tl.load(scale), E5M2, EMULATE), mask=inside
        )


@jit
def swiglu_grad_kernel(
    x: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
) -> None:
    """The gradient of `[gate; up]` from that of `silu(gate) * up`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    gate = widened(tl.load(x + row * 2 * cols + c, mask=inside, other=0.0), EMULATE)
    up = widened(tl.load(x + row * 2 * cols + cols + c, mask=inside, other=0.0), EMULATE)
    dy = widened(tl.load(grad + row * cols + c, mask=inside, other=0.0), EMULATE)
    open_ = tl.math.div_rn(1.0, 1.0 + tl.exp(-gate))
    d_gate = dy * up * open_ * (1.0 + gate * (1.0 - open_))
    d_up = gate * open_ * dy
    tl.store(out + row * 2 * cols + c, narrowed(d_gate, out, EMULATE), mask=inside)
    tl.store(out + row * 2 * cols + cols + c, narrowed(d_up, out, EMULATE), mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    *,
    centered: bool,
    zero_centered: bool,
    scale: torch.Tensor | None,
    fmt: Fp8Format,
) -> Normed:
    """See `kernels.norm`."""
    rows, cols = x.shape
    source = x.detach().contiguous()
    cast = scale is not None
    out = torch.empty_like(source, dtype=torch.uint8 if cast else None)
    mean, inverse = torch.empty((2, rows, 1), device=x.device)
    largest = new_amax(x)
    block = triton.next_power_of_2(cols)
    launch(
        norm_kernel,
        looping_grid(source, rows),
        source,
        weight.detach(),
        weight if shift is None else shift.detach(),
        inverse if scale is None else scale,
        out,
        mean,
        inverse,
        largest,
        rows,
        cols,
        eps,
        CENTERED=centered,
        SHIFTED=shift is not None,
        ZERO_CENTERED=zero_centered,
        CAST=cast,
        E5M2=fmt is E5M2_FORMAT,
        BLOCK=block,
        num_warps=min(16, max(4, block // 1024)),
    )
    data = out.view(fmt.torch_dtype) if cast else out
    return Normed(data, value_of(largest), mean if centered else None, inverse)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.swiglu`."""
    source = x.detach().contiguous()
    out = source.new_empty(source.shape[0], source.shape[1] // 2)
    _launch_swiglu(source, out, out, out, new_amax(out), KEEP=True, CAST=False, E5M2=False)
    return out


def swiglu_and_cast(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`swiglu` cast with a scale: codes, their magnitude, and with `keep` the rounded values."""
    source = x.detach().contiguous()
    shape = (source.shape[0], source.shape[1] // 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    out = source.new_empty(shape if keep else 1)
    largest = new_amax(x)
    five = fmt is E5M2_FORMAT
    _launch_swiglu(source, scale, out, codes, largest, KEEP=keep, CAST=True, E5M2=five)
    return codes.view(fmt.torch_dtype), value_of(largest), out


def swiglu_grad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """See `kernels.swiglu_grad`."""
    source, dy = x.detach().contiguous(), grad.contiguous()
    out = torch.empty_like(source)
    rows, cols = dy.shape
    grid = (rows, triton.cdiv(cols, _BLOCK))
    launch(swiglu_grad_kernel, grid, source, dy, out, rows, cols, BLOCK=_BLOCK)
    return out


def _launch_swiglu(
    source: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    codes: torch.Tensor,
    largest: torch.Tensor,
    **options: bool,
) -> None:
    rows, cols = source.shape[0], source.shape[1] // 2
    grid = (rows, triton.cdiv(cols, _BLOCK))
    launch(
        swiglu_kernel, grid, source, scale, out, codes, largest, rows, cols, **options, BLOCK=_BLOCK
    )
