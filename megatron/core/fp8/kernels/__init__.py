"""Element-wise FP8 kernels: magnitude, rounding onto the grid, bytes.

Every function has one definition in plain torch (`plain*.py`). Where numba is installed, CPU
tensors take a compiled loop (`compiled*.py`) with bitwise the same results. `use` switches for
tests and measurements.
"""

from __future__ import annotations

import torch

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels import plain, plain_blocks, plain_fp4
from megatron.core.fp8.scales import ScaleRule

try:
    from megatron.core.fp8.kernels import compiled, compiled_blocks
except ImportError:  # numba is optional
    compiled = compiled_blocks = None  # type: ignore[assignment]

_enabled = compiled is not None


def implementation() -> str:
    """`compiled` or `plain`: what CPU tensors use now."""
    return "compiled" if _enabled else "plain"


def use(name: str) -> str:
    """Select `compiled` or `plain` for CPU tensors; returns the previous choice.

    Raises:
        ValueError: If numba is missing for `compiled`, or the name is unknown.
    """
    global _enabled
    if name not in ("compiled", "plain") or (name == "compiled" and compiled is None):
        raise ValueError(f"FP8 kernels: got {name}. Not available here. Use plain.")
    previous, _enabled = implementation(), name == "compiled"
    return previous


def set_threads(count: int | None) -> int | None:
    """Threads of the compiled loops; None, the default, follows torch. Returns the old setting."""
    return compiled.set_threads(count) if compiled is not None else None


def compiled_for(x: torch.Tensor) -> bool:
    """Whether a kernel takes its compiled loop for `x`."""
    return (
        _enabled
        and x.device.type == "cpu"
        and x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float32)
    )


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32 0-dim. NaN elements are ignored; 0 for an empty tensor."""
    if compiled_for(x):
        return compiled.amax(x)
    return plain.amax(x)


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, *, want_amax: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x * scale` rounded to the grid of `fmt`, held in bf16.

    Round to nearest, ties to even, one rounding from the fp32 product; saturating; NaN stays NaN;
    subnormals and the sign of zero are kept.

    Args:
        x: Any float type, any shape.
        scale: fp32, one element.
        fmt: Target format.
        want_amax: Also return `amax(x)`, found in the same pass.

    Returns:
        bf16 like `x` (contiguous), and the magnitude or None.
    """
    if compiled_for(x):
        return compiled.round_to_grid(x, scale, fmt, want_amax)
    return plain.round_to_grid(x, scale, fmt, want_amax)


def round_blocks(
    x: torch.Tensor,
    fmt: Fp8Format,
    block: tuple[int, int],
    rule: ScaleRule,
    *,
    fold: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each block of a matrix with a scale of its own.

    Magnitudes, rounding, saturation and NaN are as in `amax` and `round_to_grid`. The last blocks
    of a row or column may be smaller.

    Args:
        x: `[rows, cols]`, any float type.
        fmt: Target format.
        block: Rows and columns of a block; one of them is 1, or they are equal.
        rule: Scale of a block.
        fold: Multiply the grid values by the inverse scale of their block. Such products are
            exact in bf16 when scales are powers of two, except that bits below bf16's smallest
            normal number, 2**-126, are cut off.

    Returns:
        Values held in bf16 `[rows, cols]`, and the inverse scales, fp32 `[ceil(rows / block[0]),
        ceil(cols / block[1])]`.
    """
    if compiled_for(x):
        return compiled_blocks.round_blocks(x, fmt, block, rule, fold)
    if not x.numel():
        counts = (-(-size // side) for size, side in zip(x.shape, block, strict=True))
        return x.to(torch.bfloat16), torch.empty(*counts, device=x.device)
    return plain_blocks.round_blocks(x, fmt, block, rule, fold)


def fold_blocks(
    data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """What `round_blocks` gives with `fold`, from what it gives without."""
    return plain_blocks.fold(data, scale_inv, block)


def cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """As `round_to_grid`, but to the FP8 type: for devices that multiply FP8 in hardware."""
    return plain.cast(x, scale, fmt)


def encode(held: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes (uint8, like `held`) of grid values held in bf16."""
    if fmt.bits == 4:
        return plain_fp4.encode(held)
    if compiled_for(held):
        return compiled.encode(held, fmt)
    return plain.encode(held, fmt)


def decode(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Grid values, held in bf16, of codes (uint8)."""
    if fmt.bits == 4:
        return plain_fp4.decode(codes)
    if _enabled and codes.device.type == "cpu" and codes.numel() > 0:
        return compiled.decode(codes, fmt)
    return plain.decode(codes, fmt)
