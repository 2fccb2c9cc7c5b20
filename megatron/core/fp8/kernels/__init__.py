"""Element-wise FP8 kernels: magnitude, rounding onto the grid, bytes.

Every function has one definition in plain torch (`plain*.py`). Where numba is installed, CPU
tensors take a compiled loop (`compiled*.py`) with bitwise the same results; `use` switches for
tests and measurements. Where Triton is, CUDA tensors take its kernels (`triton_*.py`, see
`device.py`), again with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.kernels import device as on_device
from megatron.core.fp8.kernels import plain, plain_blocks, plain_fp4
from megatron.core.fp8.kernels.plain import Normed as Normed
from megatron.core.fp8.scales import ScaleRule

try:
    from megatron.core.fp8.kernels import compiled, compiled_blocks
except ImportError:  # numba is optional
    compiled = compiled_blocks = None  # type: ignore[assignment]

WHAT = on_device.WHAT
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_enabled = compiled is not None
_interpreting = False
_triton_on_cuda = True


class Cast(NamedTuple):
    """What one pass over a matrix gives.

    Attributes:
        data: Codes in the FP8 type, like the matrix.
        turned: The same transposed, contiguous; or None.
        amax: Largest magnitude of the matrix, fp32 0-dim; or None.
    """

    data: torch.Tensor
    turned: torch.Tensor | None
    amax: torch.Tensor | None


def implementation() -> str:
    """`compiled`, `plain` or `triton`: what CPU tensors use now."""
    if _interpreting:
        return "triton"
    return "compiled" if _enabled else "plain"


def use(name: str) -> str:
    """Select the kernels of CPU tensors; returns the previous choice.

    Args:
        name: `compiled`, `plain`, or `triton` while Triton runs in its interpreter.

    Raises:
        ValueError: If the name is unknown, numba is missing for `compiled`, or Triton for `triton`.
    """
    global _enabled, _interpreting
    able = {"compiled": compiled is not None, "plain": True}
    if not (able.get(name, False) or (name == "triton" and on_device.is_interpreted())):
        raise ValueError(f"FP8 kernels: got {name}. Not available here. Use plain.")
    previous = implementation()
    _enabled, _interpreting = name == "compiled", name == "triton"
    return previous


def use_triton_on_cuda(wanted: bool) -> bool:
    """Choose whether CUDA tensors may take Triton's kernels; returns the previous choice."""
    global _triton_on_cuda
    previous, _triton_on_cuda = _triton_on_cuda, wanted
    return previous


def describe(device: torch.device, groups: Sequence[str] = on_device.GROUPS) -> dict[str, str]:
    """Why a device's tensors take the kernels they take, by group of kernels, in words."""
    if device.type != "cuda":
        apart = {"fused": f"one step after the other on {device.type}"}
        return {g: apart.get(g, f"{implementation()} kernels on {device.type}") for g in groups}
    if not _triton_on_cuda:
        return dict.fromkeys(groups, "plain torch: switched off")
    return {group: on_device.verdict(group, _indexed(device))[1] for group in groups}


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _triton_for(group: str, x: torch.Tensor) -> ModuleType | None:
    """Triton's kernels of a group, where this tensor takes them."""
    if x.numel() == 0 or x.dtype not in _FLOATS:
        return None
    return _triton_on(group, x.device)


def _triton_on(group: str, device: torch.device) -> ModuleType | None:
    if device.type == "cuda" and _triton_on_cuda:
        return on_device.verdict(group, device)[0]
    return on_device.module(group) if _interpreting and device.type == "cpu" else None


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
    largest: torch.Tensor = (_triton_for("casts", x) or plain).amax(x)
    return largest


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
    module = _triton_for("casts", x) or plain
    held, largest = module.round_to_grid(x, scale, fmt, want_amax)
    return held, largest


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
    module = _blocks_for(x, block) or plain_blocks
    held, scale_inv = module.round_blocks(x, fmt, block, rule, fold)
    return held, scale_inv


def _blocks_for(x: torch.Tensor, block: tuple[int, int]) -> ModuleType | None:
    fused = _triton_for("blocks", x)
    return fused if fused is not None and fused.supports(block) else None


def cast_blocks(
    x: torch.Tensor, fmt: Fp8Format, block: tuple[int, int], rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_blocks`, but to the FP8 type.

    Blocks that stand upright, `[length, 1]`, come as the transpose of a contiguous matrix, which is
    what products multiply.
    """
    fused = _blocks_for(x, block)
    if fused is not None:
        made, inverse = fused.cast_blocks(x, fmt, block, rule)
        return made, inverse
    held, scale_inv = round_blocks(x, fmt, block, rule)
    codes = encode(held, fmt).view(fmt.torch_dtype)
    return (turn(codes).t() if block[1] == 1 < block[0] else codes), scale_inv


def cast_blocks_both(
    x: torch.Tensor, fmt: Fp8Format, length: int, rule: ScaleRule
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`cast_blocks` along the rows of a matrix and along its columns."""
    fused = _blocks_for(x, (1, length))
    if fused is not None:
        row, col = fused.cast_blocks_both(x, fmt, length, rule)
        return row, col
    return cast_blocks(x, fmt, (1, length), rule), cast_blocks(x, fmt, (length, 1), rule)


def fold_blocks(
    data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """What `round_blocks` gives with `fold`, from what it gives without."""
    return plain_blocks.fold(data, scale_inv, block)


def cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """As `round_to_grid`, but to the FP8 type: for devices that multiply FP8 in hardware."""
    return cast_once(x, scale, fmt).data


def cast_once(
    x: torch.Tensor,
    scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    want_amax: bool = False,
    want_turned: bool = False,
) -> Cast:
    """Cast to the FP8 type; with one kernel for all that is wanted where there is one.

    Args:
        x: Any float type; `[rows, cols]` if it is to be transposed.
        scale: fp32, one element.
        fmt: Target format.
        want_amax: Find the magnitude, too.
        want_turned: Transpose, too.
    """
    fused = _triton_for("casts", x)
    if fused is not None:
        return Cast(*fused.cast(x, scale, fmt, want_amax, want_turned))
    data = plain.cast(x, scale, fmt)
    turned = turn(data) if want_turned else None
    return Cast(data, turned, amax(x) if want_amax else None)


def turn(codes: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix of FP8 or bytes, contiguous."""
    fused = _triton_on("casts", codes.device)
    if fused is not None and codes.numel() and codes.is_contiguous():
        turned: torch.Tensor = fused.turn(codes)
        return turned
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


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
    """A norm of the rows and what follows it, in one kernel, for an `x` that `can_norm`.

    Args:
        x: `[rows, cols]`.
        weight: `[cols]`.
        shift: `[cols]`, for layer norm, or None.
        eps: Added to the variance or mean square.
        centered: Layer norm; else RMS norm.
        zero_centered: Whether `weight` holds the factor minus one.
        scale: Cast the fp32 result with this scale. None: round it to the type of `x`.
        fmt: Target format of the cast.

    Raises:
        ValueError: There is no kernel for this `x`.
    """
    fused = _triton_for("fused", x) if can_norm(x) else None
    if fused is None:
        raise ValueError(f"kernels.norm: got {x.device}. No kernel. Ask can_norm first.")
    kinds = {"centered": centered, "zero_centered": zero_centered}
    made: Normed = fused.norm(x, weight, shift, eps, scale=scale, fmt=fmt, **kinds)
    return made


def can_norm(x: torch.Tensor) -> bool:
    """Whether `norm` has a kernel for rows like those of `x`."""
    fused = _triton_for("fused", x)
    return fused is not None and x.shape[-1] <= fused.WIDEST_ROW


def swiglu(x: torch.Tensor) -> torch.Tensor | None:
    """`silu(gate) * up` of rows `[gate; up]`, in fp32 with one rounding; None without a kernel."""
    fused = _triton_for("fused", x)
    return None if fused is None else fused.swiglu(x)


def swiglu_grad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `x` from that of `swiglu(x)`; None without a kernel."""
    fused = _triton_for("fused", x)
    return None if fused is None else fused.swiglu_grad(x, grad)


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
