"""Block quantization in plain torch, in slabs of rows that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels.plain import (
    chunk_size,
    restore_sign,
    round_chunk,
    working_memory,
)
from megatron.core.fp8.scales import ScaleRule, block_scale

_UPPER_HALF = torch.tensor(-0x10000, dtype=torch.int32)
_MAGNITUDE = torch.tensor(0x7FFF, dtype=torch.int16)
_BF16_NORMAL = 2.0**-126


def round_blocks(
    x: torch.Tensor, fmt: Fp8Format, block: tuple[int, int], rule: ScaleRule, fold: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.round_blocks`."""
    source = x.detach().contiguous()
    spans = list(slabs(source, block))
    amax = torch.cat([_amax(as_blocks(source[span], block)) for span in spans])
    scale, inverse = block_scale(amax, fmt.max, rule, torch.finfo(x.dtype).max)
    out = torch.empty_like(source, dtype=torch.bfloat16)
    cut = fold and (x.device.type != "cpu" or inverse.min() * fmt.min_subnormal < _BF16_NORMAL)
    first = 0
    for span in spans:
        part = as_blocks(source[span], block)
        last = first + part.shape[0]
        v, p, q = buffers(part)
        round_chunk(v.copy_(part).mul_(scale[first:last]), p, q, fmt)
        if fold:
            q.mul_(inverse[first:last])
            if cut:
                _cut(q)
        put(out[span], source[span], v, q)
        first = last
    return out, inverse[:, 0, :, 0]


def slabs(x: torch.Tensor, block: tuple[int, int]) -> Iterator[slice]:
    """Rows to work on at once: whole blocks."""
    rows, cols = x.shape
    step = -(-rows // block[0]) * block[0]
    if x.device.type == "cpu":
        step = max(1, chunk_size() // (block[0] * cols)) * block[0]
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def buffers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three fp32 tensors like `x` to work in."""
    if x.device.type != "cpu":
        v, p, q = torch.empty((3, *x.shape), device=x.device).unbind()
    else:
        v, p, q = (t.view(x.shape) for t in working_memory(x.numel()).first(x.numel()))
    return v, p, q


def _amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block, fp32 `[blocks down, 1, blocks across, 1]`."""
    v, p, _ = buffers(x)
    if x.dtype == torch.bfloat16:  # as integers: half the bytes, and in the same order
        bits = p.view(torch.int16).view(-1)[: x.numel()].view(x.shape)
        torch.bitwise_and(x.view(torch.int16), _MAGNITUDE.to(x.device), out=bits)
        largest = bits.amax((1, 3), keepdim=True).view(torch.bfloat16)
    else:
        largest = torch.abs(v.copy_(x), out=p).amax((1, 3), keepdim=True)
    # On a device, asking whether there is a NaN would wait for it.
    if x.device.type == "cpu" and not torch.isnan(largest).any():
        return largest.float()
    return v.copy_(x).abs_().nan_to_num_(0.0, float("inf")).amax((1, 3), keepdim=True)


def put(out: torch.Tensor, source: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Write grid values with the signs of the values they were made from."""
    rows, cols = source.shape
    v, q = (t.view(t.shape[0] * t.shape[1], -1)[:rows, :cols] for t in (v, q))
    if source.dtype == torch.bfloat16:  # half the bits to restore
        restore_sign(out.copy_(q), source)
    else:
        out.copy_(restore_sign(q, v))


def as_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """View as `[blocks down, rows of a block, blocks across, columns of a block]`.

    Where the last block of a direction is smaller, a copy is filled up with zeros, which change no
    magnitude.
    """
    rows, cols = x.shape
    high, wide = block
    down, across = -(-rows // high), -(-cols // wide)
    if (down * high, across * wide) != (rows, cols):
        whole = torch.zeros(down * high, across * wide, dtype=x.dtype, device=x.device)
        whole[:rows, :cols] = x
        x = whole
    return x.reshape(down, high, across, wide)


def _cut(v: torch.Tensor) -> None:
    """Drop in place the bits of fp32 values that bf16 does not have.

    Only products below bf16's smallest normal number, 2**-126, have any.
    """
    v.view(torch.int32).bitwise_and_(_UPPER_HALF.to(v.device))


def fold(data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Values held in bf16 times the power of two of their block, in bf16."""
    rows, cols = data.shape
    v = as_blocks(data, block) * scale_inv[:, None, :, None]
    _cut(v)
    return v.flatten(2).flatten(0, 1)[:rows, :cols].to(torch.bfloat16)
