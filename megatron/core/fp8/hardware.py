"""Products of FP8 operands in hardware: which call multiplies what where, and is it right there?

`plan` is the table: a call for two operands on a target, or the reason why there is none.
`verdict` is the answer for a recipe on a device that is present: what the table offers is used only
if a small product on the device itself agrees with the emulation. What fails there is emulated,
with the reason in the precision table.

Layouts of scales that the calls want:

| scales | call | layout |
|---|---|---|
| one | `torch._scaled_mm` | one fp32 number |
| of rows | `torch._scaled_mm` | fp32 `[M, 1]` and `[1, N]` |
| 1 x 128 | `torch.nn.functional.scaled_mm` | fp32 `[M, K / 128]`, columns contiguous |
| 128 x 128 | the same | fp32 `[K / 128 up to a multiple of 4, N / 128]`, columns contiguous |
| 1 x 32 | `torch._scaled_mm` | E8M0 in tiles of 128 x 4, each turned to 32 x 16 |

Sources: torch 2.13, ScaledBlas.cpp and its meta functions; NVIDIA cuBLAS documentation, "Scaling
factors layouts".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.capability import FP8_COMPUTE_CAPABILITY, Target
from megatron.core.fp8.formats import E5M2, Fp8Format
from megatron.core.fp8.kernels import plain, plain_blocks
from megatron.core.fp8.recipe import BlockRecipe, DelayedScaling, Float8CurrentScaling, Recipe, Role
from megatron.core.fp8.scales import ScaleRule, to_e8m0
from megatron.core.fp8.tensor import QuantizedTensor

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {
    "fprop": (Role.INPUT, Role.WEIGHT),
    "dgrad": (Role.GRAD_OUTPUT, Role.WEIGHT),
    "wgrad": (Role.GRAD_OUTPUT, Role.INPUT),
}
_BLOCK, _MX = 128, 32
_ALIGNMENT = 16  # of K and N in torch._scaled_mm, and of a column of scales of blocks
# Small products, of odd sizes: several blocks, the last one of a row cut, a count of blocks that is
# no multiple of four. Errors are judged by the products of magnitudes.
_CHECKED = (40, 144, 624)
_TOLERANCE = 2.0**-7


class Form(Enum):
    """What shares a scale in an operand `[rows, K]`; the value is how people say it."""

    TENSOR = "one scale"
    ROW = "1 x K"
    STRIP = "1 x 128"
    SQUARE = "128 x 128"
    MX = "1 x 32"
    OTHER = "blocks of another size"


@dataclass(frozen=True)
class Plan:
    """How two operands are multiplied on a target.

    Attributes:
        call: `tensor`, `row`, `block` or `mx`; empty for emulation.
        kernel: The same in words.
        reason: Why it is emulated; empty if it is not.
    """

    call: str
    kernel: str
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether the products of a recipe run in hardware.

    Attributes:
        hardware: Whether they do.
        reason: Why not, or how that is known.
        kernels: What multiplies, by GEMM.
    """

    hardware: bool
    reason: str
    kernels: tuple[str, ...] = ()

    def kernel(self, gemm: str) -> str:
        """What multiplies in a GEMM, in words."""
        return self.kernels[GEMMS.index(gemm)]


def form_of(x: QuantizedTensor) -> Form:
    """The form of an operand."""
    if x.block is None:
        return Form.TENSOR
    known = {(1, _BLOCK): Form.STRIP, (_BLOCK, _BLOCK): Form.SQUARE, (1, _MX): Form.MX}
    if x.block in known and (x.block != (1, _MX) or x.power_of_two):
        return known[x.block]
    return Form.ROW if x.block[0] == 1 and x.block[1] == x.shape[1] else Form.OTHER


def form_for(recipe: Recipe, role: Role) -> Form:
    """The form that a recipe gives the operands of a role."""
    if isinstance(recipe, DelayedScaling | Float8CurrentScaling):
        return Form.TENSOR
    if not isinstance(recipe, BlockRecipe):
        return Form.OTHER
    blocks = recipe.blocks_of(role)
    if blocks.length == _BLOCK:
        return Form.SQUARE if blocks.square else Form.STRIP
    mx = blocks.length == _MX and not blocks.square and blocks.rule is ScaleRule.E8M0
    return Form.MX if mx else Form.OTHER


def plan(
    a: Form, b: Form, formats: tuple[Fp8Format, Fp8Format], power_of_two: bool, target: Target
) -> Plan:
    """The table.

    Args:
        a: Form of the first operand, `[M, K]`.
        b: Form of the second, `[N, K]`.
        formats: Their formats.
        power_of_two: Whether the scales of blocks are powers of two.
        target: Where they are multiplied.
    """
    names = "x".join(fmt.name for fmt in formats)
    why = _why_none(target, formats)
    if why:
        return Plan("", "", why)
    if a is b is Form.TENSOR:
        return Plan("tensor", f"_scaled_mm {names}")
    if a is b is Form.ROW:
        return Plan("row", f"_scaled_mm {names}, {a.value} scales")
    kernel = f"{names}, scales {a.value} and {b.value}"
    if a is b is Form.MX:
        why = _why_no_mx(target)
        return Plan("", "", why) if why else Plan("mx", f"_scaled_mm {kernel}")
    if a is not Form.STRIP or b not in (Form.STRIP, Form.SQUARE):
        return Plan("", "", "torch multiplies no operands with such scales")
    why = _why_no_blocks(target)
    if not why:
        return Plan("block", f"scaled_mm {kernel}")
    if power_of_two and not _why_no_mx(target):
        return Plan("mx", f"_scaled_mm {kernel}, as 1 x 32 E8M0")
    return Plan("", "", why)


def _why_none(target: Target, formats: tuple[Fp8Format, Fp8Format]) -> str:
    """Why nothing of FP8 runs in hardware; empty if something may."""
    if target.is_rocm:
        return "torch is built for ROCm, whose FP8 formats differ"
    if formats == (E5M2, E5M2):
        return "no device multiplies two E5M2 operands"
    if target.capability is not None and target.capability < FP8_COMPUTE_CAPABILITY:
        return f"{target.describe()} has no FP8 products, 8.9 and later have"
    return ""


def _why_no_blocks(target: Target) -> str:
    """Why there are no products with fp32 scales of blocks; empty if there are."""
    if target.capability is None:
        return _without_cuda(target)
    if target.capability[0] != 9:
        where = target.describe()
        return f"cuBLAS has products with fp32 scales of blocks on 9.x only, and this is {where}"
    if not target.has_scaled_mm:
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 has"
    if target.cuda is not None and target.cuda < (12, 9):
        return f"torch is built with CUDA {torch.version.cuda}; scales of blocks need 12.9"
    return ""


def _without_cuda(target: Target) -> str:
    if target.kind == "meta":
        return "on paper the device is not known, and not every one multiplies scales of blocks"
    return f"there are no products with scales of blocks on {target.kind}"


def _why_no_mx(target: Target) -> str:
    """Why there are no products with E8M0 scales; empty if there are."""
    if target.capability is None:
        return _without_cuda(target)
    if target.capability[0] < 10:
        return (
            f"products with E8M0 scales need compute capability 10.0, this is {target.describe()}"
        )
    if target.cuda is not None and target.cuda < (12, 8):
        return f"torch is built with CUDA {torch.version.cuda}; E8M0 scales need 12.8"
    return ""


def plans(recipe: Recipe, target: Target) -> dict[str, Plan]:
    """The table's answer for each GEMM of a recipe."""
    power_of_two = isinstance(recipe, BlockRecipe) and recipe.exact_in_bf16
    made = {}
    for gemm, roles in OPERANDS.items():
        a, b = (form_for(recipe, role) for role in roles)
        formats = (recipe.format_of(roles[0]), recipe.format_of(roles[1]))
        # In the weight gradient both operands have blocks along tokens, never squares.
        made[gemm] = plan(a, b, formats, power_of_two, target)
    return made


@functools.cache
def verdict(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Whether a recipe's products run in hardware on a device. Checks the device at first use.

    Args:
        recipe: The recipe.
        device: A device that is present, or `meta`.
        dtype: What products put out, beside fp32.
    """
    made = plans(recipe, Target.of(device))
    reasons = list(dict.fromkeys(one.reason for one in made.values() if one.reason))
    if reasons:
        return Verdict(False, "; ".join(reasons))
    kernels = tuple(one.kernel for one in made.values())
    if device.type != "cuda":
        return Verdict(True, f"assumed on {device.type}", kernels)
    power_of_two = isinstance(recipe, BlockRecipe) and recipe.exact_in_bf16
    for gemm, roles in OPERANDS.items():
        forms = tuple(form_for(recipe, role) for role in roles)
        formats = tuple(recipe.format_of(role) for role in roles)
        out_dtypes = (torch.float32, dtype) if gemm == "wgrad" else (dtype,)
        wrong = self_check(forms, formats, power_of_two, out_dtypes, device)
        if wrong:
            return Verdict(False, f"emulated: {made[gemm].kernel} failed its check here: {wrong}")
    return Verdict(True, "checked against the emulation on this device", kernels)


def self_check(
    forms: tuple[Form, ...],
    formats: tuple[Fp8Format, ...],
    power_of_two: bool,
    out_dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> str:
    """Multiply small matrices on the device and on the CPU.

    Args:
        forms: Of both operands.
        formats: Of both operands.
        power_of_two: Whether the scales of blocks are powers of two.
        out_dtypes: What to put out.
        device: Where.

    Returns:
        What is wrong; empty if nothing is.
    """
    m, n, k = _CHECKED
    pairs = zip((m, n), forms, formats, strict=True)
    a, b = (_example(rows, k, form, fmt, power_of_two) for rows, form, fmt in pairs)
    left, right = a.dequantize(torch.float64), b.dequantize(torch.float64)
    want, bound = left @ right.t(), left.abs() @ right.abs().t()
    for dtype in out_dtypes:
        try:
            here = multiply(_on(a, device), _on(b, device), dtype, None, False, None)
        except Exception as error:  # cuBLAS, the driver or torch refuse in many ways
            text = str(error).strip().partition("\n")[0][:200]
            return f"{type(error).__name__}: {text}"
        if here is None:
            return "there is no such call"
        off = float(((here.cpu().double() - want).abs() / bound).max())
        if not off < _TOLERANCE:
            return f"a result is off by {off:.1e} of the magnitudes in it ({dtype})"
    return ""


def _example(
    rows: int, cols: int, form: Form, fmt: Fp8Format, power_of_two: bool
) -> QuantizedTensor:
    """An operand whose scales differ by powers of two, so that a wrong place of one is noticed."""
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    if form is Form.TENSOR:
        scale = torch.tensor(3.0)
        return QuantizedTensor(plain.cast(x, scale, fmt), scale.reciprocal(), fmt)
    if form is Form.ROW:
        scale = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
        codes = plain.cast(x, scale, fmt)
        return QuantizedTensor(codes, scale.reciprocal(), fmt, (1, cols))
    length = _MX if form is Form.MX else _BLOCK
    block = (length if form is Form.SQUARE else 1, length)
    counts = [-(-size // side) for size, side in zip((rows, cols), block, strict=True)]
    spread = torch.exp2(torch.randint(-3, 4, counts, generator=generator).float())
    x *= spread.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :cols]
    rule = ScaleRule.POWER_OF_TWO if power_of_two else ScaleRule.FP32
    if form is Form.MX:
        rule = ScaleRule.E8M0
    held, inverse = plain_blocks.round_blocks(x, fmt, block, rule, False)
    codes = plain.encode(held, fmt).view(fmt.torch_dtype)
    return QuantizedTensor(codes, inverse, fmt, block, rule is not ScaleRule.FP32)


def _on(x: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    return QuantizedTensor(x.data.to(device), x.scale_inv.to(device), *x.form)


# -- the calls -----------------------------------------------------------------------------------


@functools.cache
def _call(
    a: Form, b: Form, formats: tuple[Fp8Format, Fp8Format], power_of_two: bool, device: torch.device
) -> str:
    return plan(a, b, formats, power_of_two, Target.of(device)).call


def multiply(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    fast_accum: bool,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """`a @ b.T (+ bias)` of operands in the FP8 type, with zeros added where a call needs that.

    Args:
        a: `[M, K]`.
        b: `[N, K]`.
        out_dtype: Type of the result.
        bias: `[N]`, added before the result is rounded.
        fast_accum: Accumulate with less than full fp32 precision; not with scales of blocks.
        out: `[M, N]` in `out_dtype`, written to and returned.

    Returns:
        `[M, N]`; None if there is no call for these operands here.
    """
    if a.block is b.block is None:
        call = "tensor"
    else:
        power_of_two = a.power_of_two and b.power_of_two
        key = (form_of(a), form_of(b), (a.fmt, b.fmt), power_of_two, a.data.device)
        call = _call(*key)
    if not call:
        return None
    m, k, n = *a.data.shape, b.data.shape[0]
    if m == 0 or k == 0:
        made = torch.zeros(m, n, dtype=out_dtype, device=a.data.device)
        made = made if bias is None else made + bias
    elif call in ("tensor", "row"):
        return _unpadded(a, b, out_dtype, bias, fast_accum, out)
    else:
        # Rounded once, behind the bias: no bias is passed where that was never seen to work.
        multiplied = _mx if call == "mx" else _blocks
        made = multiplied(a, b, out_dtype if bias is None else torch.float32)[:m, :n]
        if bias is not None:
            made = (made + bias.float()).to(out_dtype)
    # A part of a padded result is sent as it is, and only what is whole in memory can be.
    return made.contiguous() if out is None else out.copy_(made)


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """`x` `[r, c]` as bytes in a contiguous `[rows, cols]`, zeros around it."""
    if x.shape == (rows, cols):
        return x.contiguous()
    out = torch.zeros(rows, cols, dtype=torch.uint8, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
    return out.view(x.dtype)


def _unpadded(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    fast_accum: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """One scale for an operand, or for each of its rows; the bias is added by the call."""
    (m, k), n = a.data.shape, b.data.shape[0]
    wide_k, wide_n = up_to(k, _ALIGNMENT), up_to(n, _ALIGNMENT)
    left, right = padded(a.data, m, wide_k), padded(b.data, wide_n, wide_k)
    scale_a, scale_b = a.scale_inv, b.scale_inv
    if a.block is None:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        scale_a = scale_a.reshape(m, 1).contiguous()
        scale_b = F.pad(scale_b.reshape(1, n), (0, wide_n - n)).contiguous()
    # The kernel adds a bias of the output's type; it has none for fp32 outputs.
    fuses = bias is not None and bias.dtype == out_dtype != torch.float32
    fused = F.pad(bias, (0, wide_n - n)) if bias is not None and fuses else None
    finished = n == wide_n and (bias is None or fuses)
    # On paper the kernel has no form that writes into a tensor.
    arguments = {"out": out} if finished and out is not None and not out.is_meta else {}
    made = torch._scaled_mm(
        left,
        right.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=fused,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
        **arguments,
    )
    if not finished:
        made = made[:, :n]
        made = made if bias is None or fuses else made + bias
    if out is None:
        return made.contiguous()
    return made if made is out else out.copy_(made)


def _blocks(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """fp32 scales of 1 x 128 by 1 x 128 or 128 x 128; with rows and columns that were added."""
    left, right, *scales = block_arguments(a, b)
    multiplied: Callable[..., torch.Tensor] = F.scaled_mm
    return multiplied(left, right, *scales, output_dtype=out_dtype)


def block_arguments(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Any, ...]:
    """The operands of `torch.nn.functional.scaled_mm`, with scales as it wants them.

    Args:
        a: `[M, K]`, blocks of 1 x 128.
        b: `[N, K]`, blocks of 1 x 128 or 128 x 128.
    """
    kinds = F.ScalingType
    (m, k), n = a.data.shape, b.data.shape[0]
    m, k = up_to(m, _ALIGNMENT), up_to(k, _BLOCK)
    count = k // _BLOCK
    if b.block == (1, _BLOCK):
        n = up_to(n, _ALIGNMENT)
        scale_b, kind_b = columns(b.scale_inv, n, count), kinds.BlockWise1x128
    else:
        n = up_to(n, _BLOCK)
        # cuBLAS counts scales of K in fours; a layout without that gives wrong results silently.
        scale_b = columns(b.scale_inv.t(), up_to(count, 4), n // _BLOCK)
        kind_b = kinds.BlockWise128x128
    left, right = padded(a.data, m, k), padded(b.data, n, k)
    scale_a = columns(a.scale_inv, m, count)
    return left, right.t(), scale_a, kinds.BlockWise1x128, scale_b, kind_b


def columns(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales `[r, c]` as `[rows, cols]`, zeros added, a column after the other in memory."""
    if scales.shape == (rows, cols):
        return scales.t().contiguous().t()
    out = scales.new_zeros(cols, rows)
    out[: scales.shape[1], : scales.shape[0]] = scales.t()
    return out.t()


def _mx(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """E8M0 scales of 1 x 32; with rows and columns that were added."""
    left, right, scale_a, scale_b = mx_arguments(a, b)
    return torch._scaled_mm(left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


def mx_arguments(
    a: QuantizedTensor, b: QuantizedTensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of `torch._scaled_mm` with E8M0 scales; larger blocks are many of 1 x 32.

    Args:
        a: `[M, K]`, scales powers of two.
        b: `[N, K]`, the same.
    """
    (m, k), n = a.data.shape, b.data.shape[0]
    m, n, k = up_to(m, _ALIGNMENT), up_to(n, _ALIGNMENT), up_to(k, _MX)
    left, right = padded(a.data, m, k), padded(b.data, n, k)
    return left, right.t(), _mx_scales(a, m, k), _mx_scales(b, n, k)


def _mx_scales(x: QuantizedTensor, rows: int, cols: int) -> torch.Tensor:
    high, wide = x.block or (1, _MX)
    codes = to_e8m0(x.scale_inv)
    if (high, wide) != (1, _MX):
        codes = codes.repeat_interleave(high, 0)[: x.shape[0]]
        codes = codes.repeat_interleave(wide // _MX, 1)[:, : cols // _MX]
    return swizzled(codes, rows, cols // _MX).view(torch.float8_e8m0fnu)


def swizzled(codes: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales `[r, c]` in one byte each, in the order in which hardware reads them, flat.

    Tiles of 128 x 4, filled up with zeros and one after the other along a row; in a tile the scale
    of row `i` and column `j` lies at `(i % 32) * 16 + (i // 32) * 4 + j`.

    Args:
        codes: uint8, at most `[rows, cols]`.
        rows: Rows of the operand.
        cols: Scales of one of its rows.
    """
    high, wide = up_to(rows, 128), up_to(cols, 4)
    if codes.shape != (high, wide):
        whole = codes.new_zeros(high, wide)
        whole[: codes.shape[0], : codes.shape[1]] = codes
        codes = whole
    tiles = codes.view(high // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1)
