"""NVFP4 in plain torch: Hadamard transform, scales in two levels, stochastic rounding, packing.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), and the formulas
of Transformer Engine's recipe. Random bits: Philox4x32 of Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011), who found no flaw with seven rounds or more.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from megatron.core.fp8.formats import E2M1, E4M3, code_values
from megatron.core.fp8.kernels.plain import chunk_size, round_chunk
from megatron.core.fp8.kernels.plain_blocks import as_blocks, buffers, put, slabs
from megatron.core.fp8.scales import FLT_MAX

BLOCK = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUMBERS_A_CALL = 8  # of 16 bits
_WORD = 0xFFFFFFFF
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)


class Draw(NamedTuple):
    """Which random numbers a matrix is rounded with; each depends on its element's place only.

    Attributes:
        seed: 0 to 2**63 - 1.
        stream: Tells apart matrices with one seed.
        first_row: Number of the matrix's first row in the whole of which it is a part.
    """

    seed: int
    stream: int = 0
    first_row: int = 0


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale that puts a tensor's magnitude at the largest product of block scale and value.

    Args:
        amax: fp32 0-dim, not NaN.

    Returns:
        fp32 0-dim: `448 * 6 / amax`, at most the largest fp32; 1 for a magnitude of 0 or infinity.
    """
    scale = torch.full_like(amax, E4M3.max * E2M1.max).div_(amax).clamp_(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    return torch.tensor(SIGNS, dtype=torch.float32, device=device).view(1, BLOCK, 1)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """See `fp4.hadamard`."""
    source = x.detach().contiguous()
    rows, cols = source.shape
    count = -(-rows // BLOCK)
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    out = torch.empty(count * BLOCK, cols, dtype=kind, device=x.device)
    for span in slabs(source, (BLOCK, 1)):
        v = as_blocks(source[span], (BLOCK, 1)).squeeze(3).float() * _signs(x.device)
        shape = v.shape
        for half in (1, 2, 4, 8):
            pairs = v.view(-1, 2, half, cols)
            v = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        first = span.start
        out[first : first + shape[0] * BLOCK] = v.view(-1, cols).mul_(0.25)
    return out


def random_bits(rows: int, cols: int, draw: Draw, device: torch.device) -> torch.Tensor:
    """Uniform numbers from 0 to 65535, int32 `[rows, cols]`: a function of the arguments alone.

    Eight neighbours of a row share a call of Philox, with the counter (their number in the row,
    the row, the stream, 0) and the seed as its key.
    """
    groups = -(-cols // _NUMBERS_A_CALL)
    words = torch.empty(rows, groups, 4, dtype=torch.int32, device=device)
    column = torch.arange(groups, device=device)[None, :]
    step = rows
    if device.type == "cpu":
        step = max(1, chunk_size() // (4 * groups))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        row = torch.arange(draw.first_row + first, draw.first_row + last, device=device)
        counter = (column, row[:, None], torch.tensor(draw.stream), torch.tensor(0))
        for word, value in enumerate(philox(counter, draw.seed)):
            words[first:last, :, word] = value
    halves = words.view(torch.int16).view(rows, groups * _NUMBERS_A_CALL)[:, :cols]
    return halves.to(torch.int32) & 0xFFFF


def philox(counter: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Philox4x32-7.

    Args:
        counter: Four words, int64 tensors that broadcast.
        seed: The key, 64 bits.

    Returns:
        Four words, int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # The high word of a product may be negative as a signed number; the mask mends that.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (b >> 32 & _WORD) ^ c1 ^ k0, (a >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = b & _WORD, a & _WORD
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def round_blocks(
    x: torch.Tensor, block: tuple[int, int], scale: torch.Tensor, fold: bool, draw: Draw | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp4.round_blocks`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source, dtype=torch.bfloat16)
    unit, inverse = scale * (1.0 / E2M1.max), scale.reciprocal()
    inverses = []
    for span in slabs(source, block):
        part = as_blocks(source[span], block)
        v, p, q = buffers(part)
        magnitude = torch.abs(v.copy_(part), out=p).amax((1, 3), keepdim=True)  # NaN stays
        inverses.append(_block_scales(magnitude, unit))
        v.mul_((inverses[-1] * inverse).reciprocal_().clamp_(max=FLT_MAX))
        if draw is None:
            round_chunk(v, p, q, E2M1)
        else:
            here = draw._replace(first_row=draw.first_row + span.start)
            bits = random_bits(source[span].shape[0], source.shape[1], here, x.device)
            _round_at_random(v, p, q, as_blocks(bits, block))
        if fold:
            q.mul_(inverses[-1])
        put(out[span], source[span], v, q)
    return out, torch.cat(inverses)[:, 0, :, 0]


def _block_scales(magnitude: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Inverse scales of blocks relative to the tensor's, on the grid of E4M3."""
    v = (magnitude * unit).contiguous()
    return round_chunk(v, torch.empty_like(v), torch.empty_like(v), E4M3)


def _round_at_random(
    v: torch.Tensor, p: torch.Tensor, q: torch.Tensor, bits: torch.Tensor
) -> torch.Tensor:
    """Magnitudes of one of the two grid values next to fp32 `v`, the nearer the likelier.

    Up where `bits` is below the 16-bit fraction of the way up; half a unit makes that fair.
    """
    v.clamp_(-E2M1.max, E2M1.max)
    field = p.view(torch.int32)
    torch.bitwise_and(v.view(torch.int32), _EXPONENT.to(v.device), out=field)
    field.clamp_(min=127 << 23)
    p.mul_(0.5)  # the distance of neighbours, a power of two: division by it is exact
    torch.abs(v, out=q).div_(p)
    low = q.floor()
    up = bits + 0.5 < q.sub_(low).mul_(65536.0)
    return torch.mul(low.add_(up), p, out=q)


def encode(held: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of grid values held in bf16; NaN becomes the largest value."""
    twice = (held.abs().float() * 2.0).nan_to_num_(12.0).clamp_(max=12.0)
    table = _codes(held.device)
    codes = table.index_select(0, twice.reshape(-1).to(torch.int32)).view(held.shape)
    negative = torch.signbit(held) & ~torch.isnan(held)
    return codes | (negative.to(torch.uint8) << 3)


@cache
def _codes(device: torch.device) -> torch.Tensor:
    """Code of each magnitude by twice its value."""
    table = torch.zeros(13, dtype=torch.uint8)
    for code, value in enumerate(code_values(E2M1)[:8].tolist()):
        table[int(2 * value)] = code
    return table.to(device)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Grid values, held in bf16, of codes (uint8)."""
    values = _values(codes.device)
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _values(device: torch.device) -> torch.Tensor:
    return code_values(E2M1).to(device=device, dtype=torch.bfloat16)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last dimension, the first in the low half; `[n, ceil(k / 2)]`."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` codes of each line of `pack`'s result."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)[..., :count]
