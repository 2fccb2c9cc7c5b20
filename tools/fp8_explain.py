"""Explain FP8: its formats, the values around a number, and what each recipe does to a tensor.

    python tools/fp8_explain.py formats
    python tools/fp8_explain.py formats --codes e4m3
    python tools/fp8_explain.py value 0.3
    python tools/fp8_explain.py value 920 --scale 0.25 --around 2
    python tools/fp8_explain.py tensor activations.npy
    python tools/fp8_explain.py tensor model.safetensors --name lm_head.weight

formats: limits and numbers of codes; with --codes every code of one format that is not negative.

value: what a number is rounded to in each format, and the representable values around it.

tensor: the error of each recipe on a tensor in a .npy, .pt or .safetensors file, measured and as
expected of normal values (31.5 dB in E4M3, 25.5 dB in E5M2, where few of them are subnormal and
none saturates). A tensor is taken as rows of its last dimension. Of
recipes with blocks, `rows` has them along that dimension, `columns` across it, as for a weight
gradient, and `squares` is for weights. Gradients in nvfp4 are rounded `at random`.
"""

from __future__ import annotations

import argparse
import math
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import safetensors
import torch

from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E2M1, E4M3, E5M2, Fp8Format, code_value
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling, NVFP4Quantizer
from megatron.core.fp8.quantizers import BlockQuantizer, CurrentQuantizer
from megatron.core.fp8.recipe import (
    BlockRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.rounding_error import (
    RoundingError,
    decibels,
    mantissa_grid,
    measure,
    normal_sqnr,
)
from megatron.core.fp8.tensor import QuantizedTensor

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1)}
_USES = {
    "e4m3": "inputs, weights; gradients of some recipes",
    "e5m2": "gradients (hybrid)",
    "e2m1": "nvfp4",
}
_MOST_NAMES = 20


class ReadError(MegatronError):
    """The file holds nothing that can be explained."""


# -- formats --------------------------------------------------------------------------------------


def bits_of(fmt: Fp8Format, code: int) -> str:
    """A code as sign, exponent and mantissa, e.g. `0 0101 010`."""
    text = f"{code:0{fmt.bits}b}"
    return f"{text[0]} {text[1 : 1 + fmt.exponent_bits]} {text[1 + fmt.exponent_bits :]}"


def _codes(fmt: Fp8Format) -> range:
    return range(1 << fmt.bits)


def format_lines() -> list[str]:
    """The formats as a table."""
    rows = [
        (
            "format",
            "bits",
            "largest",
            "smallest normal",
            "smallest",
            "spacing",
            "numbers",
            "values",
            "infinities",
            "NaNs",
            "used for",
        )
    ]
    for fmt in FORMATS.values():
        values = [code_value(fmt, code) for code in _codes(fmt)]
        finite = [v for v in values if math.isfinite(v)]
        rows.append(
            (
                fmt.name,
                f"1+{fmt.exponent_bits}+{fmt.mantissa_bits}",
                f"{fmt.max:g}",
                f"2^{math.log2(fmt.min_normal):.0f}",
                f"2^{math.log2(fmt.min_subnormal):.0f}",
                f"2^-{fmt.mantissa_bits}",
                str(len(finite)),
                str(len(set(finite))),
                str(sum(map(math.isinf, values))),
                str(sum(map(math.isnan, values))),
                _USES.get(fmt.name, ""),
            )
        )
    return [
        *_aligned(rows, text=(0, 1, 10)),
        "bits: sign, exponent, mantissa. spacing: of neighbours, relative to their power of two.",
        "numbers: finite codes; values: different ones, since 0 has two codes.",
        "Casts round to nearest, ties to the even code, and saturate at the largest value.",
    ]


def code_lines(fmt: Fp8Format) -> list[str]:
    """Every code of a format that is not negative, with its value."""
    count = len(_codes(fmt)) // 2
    rows = [("code", "bits", "value")]
    rows += [(f"0x{c:02x}", bits_of(fmt, c), f"{code_value(fmt, c):.10g}") for c in range(count)]
    return _aligned(rows, text=(0, 1))


# -- value ----------------------------------------------------------------------------------------


def value_lines(x: float, scale: float, around: int) -> list[str]:
    """What a number becomes in each format, and its neighbourhood.

    Args:
        x: The number.
        scale: It is multiplied by this first.
        around: Representable values shown on either side.
    """
    scaled = torch.tensor([x]).mul(scale)
    lines = [f"x = {x:.10g}"]
    if scale != 1:
        lines = [f"x = {x:.10g}, times the scale {scale:.10g} is {scaled.item():.10g}"]
    for fmt in FORMATS.values():
        lines += ["", *_in_format(scaled, x, scale, fmt, around)]
    return lines


def _in_format(
    scaled: torch.Tensor, x: float, scale: float, fmt: Fp8Format, around: int
) -> Iterator[str]:
    if scaled.isnan() and fmt.nan_code == fmt.max_code:
        yield f"{fmt.name}: has no code for it"
        return
    held, _ = kernels.round_to_grid(scaled, torch.ones(()), fmt)
    code = int(kernels.encode(held, fmt).item())
    value, v = held.item(), scaled.item()
    text = f"{fmt.name}: rounds to {value:.10g} (0x{code:02x} = {bits_of(fmt, code)})"
    if scale != 1:
        text += f", read back as {value / scale:.10g}"
    if math.isfinite(v) and v and value:
        text += f", off by {100 * (value - v) / abs(v):+.2f} %"
    yield text + _remark(v, value, fmt)
    if not math.isfinite(v):
        return
    # Codes of one sign are in the order of their values; below 0 in the opposite one.
    line = [c for c in _codes(fmt) if math.isfinite(code_value(fmt, c))]
    half = len(_codes(fmt)) // 2
    line = [*reversed([c for c in line if c > half]), *(c for c in line if c < half)]
    place = line.index(code if code != half else 0)
    for near in line[max(0, place - around) : place + around + 1]:
        other = code_value(fmt, near)
        mark = ">" if near == line[place] else " "
        yield f"  {mark} 0x{near:02x}  {bits_of(fmt, near)}  {other:<14.10g} {other - v:+.6g}"


def _remark(v: float, value: float, fmt: Fp8Format) -> str:
    if math.isnan(v):
        return ": stays no number"
    if abs(v) > fmt.max:
        return f": saturates, the largest value is {fmt.max:g}"
    if v and not value:
        return f": underflows, the smallest value is {fmt.min_subnormal:g}"
    if value and abs(value) < fmt.min_normal:
        return f": subnormal, fewer than {fmt.mantissa_bits + 1} bits"
    return ""


# -- tensor ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to quantize a tensor.

    Attributes:
        name: What it is called.
        make: Quantizes `[rows, cols]`.
        nearest: Whether values are rounded to nearest, which the closed form takes for granted.
    """

    name: str
    make: Callable[[torch.Tensor], QuantizedTensor]
    nearest: bool = True


def _fixed(fmt: Fp8Format) -> Callable[[torch.Tensor], QuantizedTensor]:
    """With scale 1."""

    def make(x: torch.Tensor) -> QuantizedTensor:
        held, _ = kernels.round_to_grid(x, torch.ones(()), fmt)
        return QuantizedTensor(held, torch.ones(()), fmt)

    return make


def _current(recipe: Float8CurrentScaling, role: Role) -> Callable[[torch.Tensor], QuantizedTensor]:
    return CurrentQuantizer(recipe, role).rowwise


def _blocks(recipe: BlockRecipe, role: Role) -> BlockQuantizer:
    return BlockQuantizer(recipe, role, fold=False)


def _columns(quantizer: BlockQuantizer) -> Callable[[torch.Tensor], QuantizedTensor]:
    return lambda x: quantizer.colwise(x).t()


def cases() -> list[Case]:
    """Every recipe, in each format and direction that it has."""
    one, power = Float8CurrentScaling(), Float8CurrentScaling(power_2_scale=True)
    found = []
    for fmt, role in ((E4M3, Role.INPUT), (E5M2, Role.GRAD_OUTPUT)):
        found += [
            Case("delayed, first step", _fixed(fmt)),
            Case("delayed later, tensorwise", _current(one, role)),
            Case("tensorwise, power of two", _current(power, role)),
        ]
        for made in (Float8BlockScaling, MXFP8BlockScaling):
            hybrid = made(fp8_format="hybrid")  # type: ignore[arg-type]
            quantizer = _blocks(hybrid, role)
            found += [
                Case(f"{made.name}, rows", quantizer.rowwise),
                Case(f"{made.name}, columns", _columns(quantizer)),
            ]
        if fmt is E4M3:
            squares = _blocks(Float8BlockScaling(), Role.WEIGHT)
            found.append(Case("blockwise, squares", squares.rowwise))
    nvfp4 = NVFP4BlockScaling()
    for name, role in (
        ("rows", Role.INPUT),
        ("squares", Role.WEIGHT),
        ("rows, at random", Role.GRAD_OUTPUT),
    ):
        four_bits = NVFP4Quantizer(nvfp4, role, fold=False)
        found.append(Case(f"nvfp4, {name}", four_bits.rowwise, not four_bits.is_random))
    return found


def tensor_lines(x: torch.Tensor) -> list[str]:
    """What each recipe does to a tensor, as a table.

    Args:
        x: Any float type, not empty.
    """
    values = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)
    finite = values.double()[values.isfinite()]
    lines = [_describe(x, values, finite), ""]
    if not finite.numel() or not finite.abs().max():
        return [*lines, "There is nothing to measure: no value is finite and not 0."]
    head = ("recipe", "format", "scale", "SQNR dB", "if normal", "saturated", "to 0", "subnormal")
    rows = [head, _bf16_row(values)]
    for case in cases():
        made = case.make(values.float() if values.dtype == torch.float64 else values)
        rows.append((case.name, made.fmt.name, *_cells(measure(values, made), case.nearest)))
    return [*lines, *_aligned(rows, text=(0, 1))]


def _describe(x: torch.Tensor, values: torch.Tensor, finite: torch.Tensor) -> str:
    text = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}, {values.numel():,} elements"
    if finite.numel():
        size = finite.abs()
        small = size[size > 0]
        text += f"; amax {size.max():.6g}, rms {finite.square().mean().sqrt():.6g}"
        text += f", smallest {small.min():.6g}" if small.numel() else ""
        text += f", zeros {(size == 0).double().mean():.2%}"
    others = values.numel() - finite.numel()
    return text + (f"; {others:,} not finite, left out of the errors" if others else "")


def _bf16_row(values: torch.Tensor) -> tuple[str, ...]:
    finite = values[values.isfinite()].double()
    noise = (finite.to(torch.bfloat16).double() - finite).square().sum().item()
    measured = decibels(finite.square().sum().item(), noise)
    return ("bf16, for comparison", "", "", *_numbers(measured, normal_sqnr(mantissa_grid(7), 1.0)),
            "", "", "")  # fmt: skip


def _cells(error: RoundingError, nearest: bool) -> tuple[str, ...]:
    low, high = error.scales
    scale = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    shares = (error.saturated, error.underflow, error.subnormal)
    measured, closed = _numbers(error.sqnr_db, error.normal_sqnr_db)
    return (
        scale,
        measured,
        closed if nearest else "",
        *(f"{share:.3%}" if share else "-" for share in shares),
    )


def _numbers(*decibel: float) -> tuple[str, ...]:
    return tuple("exact" if math.isinf(x) else f"{x:.2f}" for x in decibel)


def _aligned(rows: Sequence[Sequence[str]], text: Sequence[int]) -> list[str]:
    """Rows as lines; columns other than `text` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- files ----------------------------------------------------------------------------------------


def load(path: Path, name: str | None) -> torch.Tensor:
    """Read a tensor.

    Args:
        path: A .npy, .pt, .pth or .safetensors file.
        name: Which one of several.

    Raises:
        ReadError: Says why.
    """
    readers = {".npy": _npy, ".pt": _torch, ".pth": _torch, ".safetensors": _safetensors}
    reader = readers.get(path.suffix)
    if reader is None:
        known = ", ".join(readers)
        raise ReadError(complaint(str(path), path.suffix or "no ending", "It is not known what"
                                   " kind of file this is", f"Give a {known} file"))  # fmt: skip
    try:
        found = reader(path, name)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, EOFError,
            zipfile.BadZipFile, safetensors.SafetensorError) as error:  # fmt: skip
        why = " ".join(str(error).split())[:200] or type(error).__name__
        fix = "Give a file with tensors; nothing else in it is unpacked"
        raise ReadError(complaint(str(path), "an unreadable file", why, fix)) from error
    return _checked(found, path, name)


def _npy(path: Path, name: str | None) -> object:
    del name
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        raise ValueError("It holds no array of numbers")
    return torch.from_numpy(np.ascontiguousarray(array))


def _torch(path: Path, name: str | None) -> object:
    del name
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(path: Path, name: str | None) -> object:
    with safetensors.safe_open(path, framework="pt") as opened:
        names = list(opened.keys())
        wanted = names[0] if name is None and len(names) == 1 else name
        if wanted in names:
            return {wanted: opened.get_tensor(wanted)}
        return dict.fromkeys(names)


def _flat(found: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, with dots in the names."""
    if not isinstance(found, Mapping):
        return {prefix: found}
    flat: dict[str, object] = {}
    for key, value in found.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _checked(found: object, path: Path, name: str | None) -> torch.Tensor:
    """The tensor asked for, if it is one of floating-point numbers."""
    flat = {k: v for k, v in _flat(found).items() if v is None or isinstance(v, torch.Tensor)}
    chosen = flat.get(name) if name is not None else None
    if name is None and len(flat) == 1:
        name, chosen = next(iter(flat.items()))
    if chosen is None:
        raise ReadError(_which(flat, path, name))
    tensor = chosen if isinstance(chosen, torch.Tensor) else torch.empty(0)
    if not tensor.is_floating_point() or not tensor.numel() or tensor.itemsize < 2:
        raise ReadError(
            complaint(
                f"{path}{f' --name {name}' if name else ''}",
                f"{list(tensor.shape)} {tensor.dtype}",
                "Errors are measured on numbers in fp64, fp32, fp16 or bf16, at least one",
                "Give such a tensor",
            )
        )
    return tensor


def _which(flat: Mapping[str, object], path: Path, name: str | None) -> str:
    names = [n for n in flat if n]
    if not flat:
        return complaint(str(path), "no tensor", "There is nothing to measure", "Give another file")
    if not names:
        why = "The file holds one tensor, which has no name"
        return complaint("--name", name, why, "Remove it")
    listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    why = f"{path} holds {len(names)} tensor{'s' if len(names) > 1 else ''}: {listed}"
    return complaint("--name", "nothing" if name is None else name, why, "Name one of them")


# -- command line ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = ToolParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="formats|value|tensor", required=True)
    formats = commands.add_parser("formats", help="limits and codes of the formats")
    formats.add_argument("--codes", choices=sorted(FORMATS), help="list the codes of one format")
    value = commands.add_parser("value", help="what a number becomes, and its neighbours")
    value.add_argument("x", type=float, help="the number")
    value.add_argument("--scale", type=float, default=1.0, help="multiply it by this first")
    value.add_argument("--around", type=int, default=4, help="neighbours on either side")
    tensor = commands.add_parser("tensor", help="the error of each recipe on a tensor")
    tensor.add_argument("file", type=Path, help="a .npy, .pt, .pth or .safetensors file")
    tensor.add_argument("--name", help="which tensor of several")
    args = parser.parse_args([_number(token) for token in (sys.argv[1:] if argv is None else argv)])
    try:
        for line in _lines(args):
            print(line)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


def _number(token: str) -> str:
    """A negative number such as -1e-4 with a space in front, which keeps it from being a flag."""
    try:
        float(token)
    except ValueError:
        return token
    return f" {token}" if token.startswith("-") else token


def _lines(args: argparse.Namespace) -> list[str]:
    if args.command == "formats":
        return code_lines(FORMATS[args.codes]) if args.codes else format_lines()
    if args.command == "tensor":
        return tensor_lines(load(args.file, args.name))
    if not math.isfinite(args.scale) or args.scale <= 0:
        why = "A scale multiplies magnitudes"
        raise ReadError(complaint("--scale", args.scale, why, "Give a positive number"))
    if args.around < 0:
        why = "It is a number of neighbours"
        raise ReadError(complaint("--around", args.around, why, "Give 0 or more"))
    return value_lines(args.x, args.scale, args.around)


if __name__ == "__main__":
    run_tool(main)
