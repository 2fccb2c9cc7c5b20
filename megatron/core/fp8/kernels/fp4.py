"""NVFP4 kernels. Each has one definition in plain torch and, with numba, a compiled loop.

Both give the same bits; `kernels.use` switches between them.
"""

from __future__ import annotations

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.kernels import plain_fp4
from megatron.core.fp8.kernels.plain_fp4 import BLOCK, Draw, global_scale, pack, unpack

try:
    from megatron.core.fp8.kernels import compiled_fp4
except ImportError:  # numba is optional
    compiled_fp4 = None  # type: ignore[assignment]

__all__ = ["BLOCK", "Draw", "global_scale", "hadamard", "pack", "round_blocks", "unpack"]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Mix each 16 rows of a matrix: `H diag(signs) x / 4`, with H the Hadamard matrix of order 16.

    The matrix is orthogonal, so a product of two matrices that sums over their rows stays what it
    was when both are mixed. Sums in fp32, in the order of the fast transform.

    Args:
        x: `[rows, cols]`, any float type.

    Returns:
        `[rows rounded up to 16, cols]`, the missing rows counted as zeros; bf16 for bf16, else
        fp32.
    """
    if not x.numel():
        rows = -(-x.shape[0] // BLOCK) * BLOCK
        return x.new_empty(rows, x.shape[1])
    if kernels.compiled_for(x):
        return compiled_fp4.hadamard(x)
    return plain_fp4.hadamard(x)


def round_blocks(
    x: torch.Tensor,
    block: tuple[int, int],
    scale: torch.Tensor,
    *,
    fold: bool = False,
    draw: Draw | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to E2M1 with a scale for each block, in E4M3, below one for the tensor.

    Saturating. A NaN makes the scale of its block NaN: E2M1 itself has none. The last blocks of a
    row or column may be smaller.

    Args:
        x: `[rows, cols]`, any float type.
        block: `(1, 16)`, `(16, 1)` or `(16, 16)`.
        scale: The tensor's, fp32, see `global_scale`.
        fold: Multiply the grid values by the inverse scale of their block, which is exact in bf16.
        draw: Random numbers to round with; default to nearest, ties to even.

    Returns:
        Values held in bf16 `[rows, cols]`, and the inverse scales of blocks, fp32 `[ceil(rows /
        block[0]), ceil(cols / block[1])]`. `x ~ values * inverse scale / scale`.
    """
    if kernels.compiled_for(x):
        return compiled_fp4.round_blocks(x, block, scale, fold, draw)
    if not x.numel():
        counts = (-(-size // side) for size, side in zip(x.shape, block, strict=True))
        return x.to(torch.bfloat16), torch.empty(*counts, device=x.device)
    return plain_fp4.round_blocks(x, block, scale, fold, draw)
