"""Which kernels CUDA tensors take, and why.

Triton's, where it is installed and a check on the device itself finds that they compute bit for bit
what plain torch computes on the CPU; else plain torch. Each group of kernels is checked once, when
it is first wanted, and the answer can be asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from megatron.core.capability import FP8_COMPUTE_CAPABILITY
from megatron.core.fp8.formats import E4M3, E5M2, Fp8Format
from megatron.core.fp8.kernels import plain, plain_blocks
from megatron.core.fp8.scales import ScaleRule

GROUPS = ("casts", "blocks", "fused")
#: Group of kernels -> what it does.
WHAT = {
    "casts": "cast, magnitude and transpose in one pass",
    "blocks": "both directions of block scales in one pass",
    "fused": "norm and cast in one pass, SwiGLU in one pass",
}
_ROWS, _COLS = 150, 72  # a second tile that is not full
_FEW = 6  # rows of each kind for a norm, which the interpreter does one by one


@functools.cache
def triton_version() -> str:
    """The installed release of Triton; empty without one that can be imported."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


@functools.cache
def module(group: str) -> ModuleType:
    """The kernels of a group; Triton must be there."""
    return importlib.import_module(f"megatron.core.fp8.kernels.triton_{group}")


def is_interpreted() -> bool:
    """Whether Triton is there and runs kernels in its interpreter, on CPU tensors."""
    return (
        bool(triton_version())
        and importlib.import_module("megatron.core.fp8.kernels.triton_math").is_interpreted()
    )


@functools.cache
def verdict(group: str, device: torch.device) -> tuple[ModuleType | None, str]:
    """The kernels that tensors on a CUDA device take, and the reason in words.

    Args:
        group: One of `GROUPS`.
        device: With an index.

    Returns:
        Triton's kernels; None for plain torch.
    """
    version = triton_version()
    if not version:
        return None, "plain torch: Triton is not installed"
    if is_interpreted():
        return None, "plain torch: TRITON_INTERPRET is set, so Triton runs on CPU tensors only"
    has_fp8 = torch.cuda.get_device_capability(device) >= FP8_COMPUTE_CAPABILITY
    try:
        kernels = module(group)
        wrong = [name for name, right in checks(group, device, has_fp8) if not right()]
    except Exception as error:  # of the compiler, the driver or a launch: all mean the same here
        text = str(error).strip().partition("\n")[0][:200]
        return None, f"plain torch: Triton {version} failed here: {type(error).__name__}: {text}"
    if wrong:
        listed = ", ".join(wrong)
        return None, f"plain torch: Triton {version} computes something else here ({listed})"
    return kernels, f"Triton {version}, checked against plain torch on this device"


def checks(
    group: str, device: torch.device, has_fp8: bool
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield what is compared on a device, each a name and a function that compares.

    Args:
        group: One of `GROUPS`.
        device: Where the kernels run.
        has_fp8: Whether the device converts to FP8; if not, only bf16 results are compared.
    """
    x = sample()
    if group == "casts":
        yield "magnitude", lambda: _same(module(group).amax(x.to(device)), plain.amax(x))
        for fmt in (E4M3, E5M2):
            yield f"{fmt.name} rounding", functools.partial(_check_rounding, x, fmt, device)
            if has_fp8:
                yield f"{fmt.name} cast", functools.partial(_check_cast, x, fmt, device)
    elif group == "blocks":
        for length, rule in ((128, ScaleRule.POWER_OF_TWO), (32, ScaleRule.E8M0)):
            for square in (False, True):
                if square and length == 32:
                    continue
                name = f"{rule.name} {'squares' if square else 'rows'} of {length}"
                args = (x, length, rule, square, device, has_fp8)
                yield name, functools.partial(_check_blocks, *args)
    else:
        x = torch.cat([x[:_FEW], x[-_FEW:]])
        yield "norm", functools.partial(_check_norm, x, device, has_fp8)
        yield "SwiGLU", functools.partial(_check_swiglu, x, device)


def sample() -> torch.Tensor:
    """A bf16 matrix of ordinary, tiny, huge, zero, infinite and NaN values, the same every time."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(_ROWS, _COLS, generator=generator)
    x *= 2.0 ** torch.randint(-12, 12, (_ROWS, 1), generator=generator)
    bits = torch.randint(-(2**15), 2**15, (_ROWS // 3, _COLS), generator=generator)
    x[: _ROWS // 3] = bits.to(torch.int16).view(torch.bfloat16).float()
    x[40, :5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    x[41] = 0.0
    return x.to(torch.bfloat16)


def _same(here: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether two tensors are the same bits, NaN apart, which has many."""
    here, there = here.detach().cpu(), there.detach().cpu()
    if here.dtype.itemsize == 1:
        return torch.equal(here.contiguous().view(torch.uint8), there.view(torch.uint8))
    nan = here.isnan()
    if not torch.equal(nan, there.isnan()):
        return False
    zero = torch.zeros((), dtype=here.dtype)
    here, there = (torch.where(nan, zero, t.contiguous()) for t in (here, there))
    return torch.equal(here, there) and torch.equal(here.signbit(), there.signbit())


def _check_rounding(x: torch.Tensor, fmt: Fp8Format, device: torch.device) -> bool:
    scale = torch.tensor(0.37)
    held, amax = module("casts").round_to_grid(x.to(device), scale.to(device), fmt, True)
    return _same(held, plain.round_to_grid(x, scale, fmt)[0]) and _same(amax, plain.amax(x))


def _check_cast(x: torch.Tensor, fmt: Fp8Format, device: torch.device) -> bool:
    scale = torch.tensor(0.37)
    want = plain.cast(x, scale, fmt)
    right = True
    for turned in (False, True):
        codes, twin, amax = module("casts").cast(x.to(device), scale.to(device), fmt, True, turned)
        right = right and _same(codes, want) and _same(amax, plain.amax(x))
        if turned:
            again = module("casts").turn(codes)
            right = right and _same(twin, want.t().contiguous()) and _same(again, twin)
    return right


def _check_blocks(
    x: torch.Tensor, length: int, rule: ScaleRule, square: bool, device: torch.device, fp8: bool
) -> bool:
    """Both directions, or squares, against values that are rounded on the CPU."""
    blocks, here = module("blocks"), x.to(device)
    shapes = [(length, length)] if square else [(1, length), (length, 1)]
    right, found = True, []
    for block in shapes:
        held, inverse = plain_blocks.round_blocks(x, E4M3, block, rule, True)
        got, got_inverse = blocks.round_blocks(here, E4M3, block, rule, True)
        right = right and _same(got, held) and _same(got_inverse, inverse)
        if fp8:
            plain_held, _ = plain_blocks.round_blocks(x, E4M3, block, rule, False)
            found.append((plain.encode(plain_held, E4M3), inverse))
            codes, scales = blocks.cast_blocks(here, E4M3, block, rule)
            right = right and _same(codes, found[-1][0]) and _same(scales, inverse)
    if fp8 and not square:
        both = blocks.cast_blocks_both(here, E4M3, length, rule)
        for (codes, scales), (want, inverse) in zip(both, found, strict=True):
            right = right and _same(codes, want) and _same(scales, inverse)
    return right


def _check_norm(x: torch.Tensor, device: torch.device, has_fp8: bool) -> bool:
    """What is cast, on the kernel's own row statistics; and those against fp64."""
    x = torch.where(x.float().abs() < 1e4, x, torch.ones_like(x))  # also NaN
    weight = x[0].clamp(0.5, 2.0)
    right = True
    for centered in (False, True):
        for scale in (None, torch.tensor(3.0)) if has_fp8 else (None,):
            shift = weight if centered else None
            made = module("fused").norm(
                x.to(device),
                weight.to(device),
                None if shift is None else shift.to(device),
                1e-5,
                centered=centered,
                zero_centered=False,
                scale=None if scale is None else scale.to(device),
                fmt=E4M3,
            )
            mean = None if made.mean is None else made.mean.cpu()
            y = plain.normalize(x, weight.float(), shift, mean, made.inverse.cpu())
            want = y.to(x.dtype) if scale is None else plain.cast(y, scale, E4M3)
            wide = (x.double() - x.double().mean(1, keepdim=True)) if centered else x.double()
            inverse = (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
            error = ((made.inverse.cpu() - inverse) / inverse).abs().max()
            right = right and _same(made.data, want) and bool(error < 1e-5)
            right = right and _same(made.amax, plain.amax(y if scale is not None else want))
    return right


def _check_swiglu(x: torch.Tensor, device: torch.device) -> bool:
    """Within a unit of bf16, because the exponential is the device's own.

    Where the gradient of the gate is near zero, large terms cancel; hence the second tolerance.
    """
    x = torch.where(x.float().abs() < 1e4, x, torch.ones_like(x)).clamp(-30, 30)
    width = x.shape[1] // 2
    gate, up = x[:, :width].float(), x[:, width:].float()
    want = torch.nn.functional.silu(gate) * up
    got = module("fused").swiglu(x.to(device)).cpu().float()
    dy = x[:, :width].float()
    d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    grad = module("fused").swiglu_grad(x.to(device), dy.to(x.dtype).to(device)).cpu().float()
    want_grad = torch.cat([d_gate, torch.nn.functional.silu(gate) * dy], 1)
    return all(
        bool(((a - b).abs() <= b.abs() * 2.0**-7 + 1e-3).all())
        for a, b in ((got, want), (grad, want_grad))
    )
