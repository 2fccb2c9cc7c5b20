"""The kernels in plain torch, in chunks that stay in cache.

Rounding by arithmetic: let `p` be the power of two in `v`, not below the format's smallest normal
value, and `c = 1.5 * 2**(23 - M) * p`. Then `(v + c) - c` in fp32 is `v` rounded to `M` mantissa
bits, ties to even, subnormals included.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache

import torch

from megatron.core.fp8.formats import Fp8Format, code_values

_CHUNK = 1 << 16  # elements a thread works on at once: 256 KiB of fp32 a buffer
# As tensors: a Python number would be wrapped anew at every call.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_SIGN_16 = torch.tensor(-0x8000, dtype=torch.int16)
_SIGN_32 = torch.tensor(-0x80000000, dtype=torch.int32)

_local = threading.local()


def rounding_constants(fmt: Fp8Format) -> tuple[int, int]:
    """Exponent field of the smallest normal value, and what to add to a field to get `c`."""
    return (127 - fmt.bias + 1) << 23, ((23 - fmt.mantissa_bits) << 23) | 0x400000


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32 0-dim; NaN elements are ignored."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    values = x.detach()
    if x.device.type == "cpu":
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).float().abs_()  # of zeros it may be -0
        if not torch.isnan(largest):
            return largest
    # On a device, asking whether there is a NaN would wait for it.
    return values.abs().nan_to_num_(0.0, float("inf")).amax().float()


class _Scratch:
    """Working memory of one thread for chunks of `size` elements."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.v, self.p, self.q = torch.empty(3, size).unbind()

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three chunks, shortened to `count` elements."""
        return self.v[:count], self.p[:count], self.q[:count]


def chunk_size() -> int:
    """Elements worked on at once, by all threads together."""
    return _CHUNK * torch.get_num_threads()


def working_memory(size: int) -> _Scratch:
    """This thread's scratch for chunks of at least `size` elements. Fresh memory would be slow."""
    scratch: _Scratch | None = getattr(_local, "scratch", None)
    if scratch is None or scratch.size < size:
        scratch = _local.scratch = _Scratch(size)
    return scratch


def round_chunk(v: torch.Tensor, p: torch.Tensor, q: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Grid values of fp32 `v`; `v` is clamped in place, `p` and `q` are scratch. Returns `q`.

    A negative value that rounds to zero becomes +0.
    """
    smallest, _ = rounding_constants(fmt)
    factor = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    v.clamp_(-fmt.max, fmt.max)  # NaN passes
    bits = p.view(torch.int32)
    torch.bitwise_and(v.view(torch.int32), _EXPONENT.to(v.device), out=bits)
    bits.clamp_(min=smallest)
    torch.add(v, p, alpha=factor, out=q)  # the product is exact: p is a power of two
    return q.sub_(p, alpha=factor)


def restore_sign(
    rounded: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Give `rounded` the sign bits of `source`, same type, in place; returns it."""
    kind, mask = (
        (torch.int16, _SIGN_16) if source.dtype == torch.bfloat16 else (torch.int32, _SIGN_32)
    )
    bits = None if scratch is None else scratch.view(kind)[: source.numel()]
    sign = torch.bitwise_and(source.view(kind), mask.to(source.device), out=bits)
    rounded.view(kind).bitwise_or_(sign)
    return rounded


def round_to_grid(
    x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, want_amax: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels.round_to_grid`."""
    source = x.detach().contiguous()
    largest = amax(source) if want_amax else None
    if source.device.type != "cpu":
        v = source.float() * scale
        p, q = torch.empty_like(v), torch.empty_like(v)
        restore_sign(round_chunk(v, p, q, fmt), v, p)
        return q.to(torch.bfloat16), largest
    out = torch.empty_like(source, dtype=torch.bfloat16)
    factor, size = float(scale), chunk_size()
    scratch = working_memory(size)
    parts = torch.split(source.view(-1), size)
    for part, rounded in zip(parts, torch.split(out.view(-1), size), strict=True):
        v, p, q = scratch.first(part.numel())
        v.copy_(part).mul_(factor)
        round_chunk(v, p, q, fmt)
        if part.dtype == torch.bfloat16:  # half the bits to restore
            restore_sign(rounded.copy_(q), part, p)
        else:
            restore_sign(q, v, p)
            rounded.copy_(q)
    return out, largest


def cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Multiply in fp32, saturate, convert to the FP8 type."""
    made = (x.detach().float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.torch_dtype)
    _drop_sign_of_nan(made.view(torch.uint8), fmt)
    return made


def encode(held: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes of grid values held in bf16. Torch's cast is exact on grid values."""
    source = held.contiguous()
    return _drop_sign_of_nan(source.to(fmt.torch_dtype).view(torch.uint8), fmt)


def _drop_sign_of_nan(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Torch's casts keep it, FP8 hardware does not."""
    return codes.masked_fill_(codes == fmt.nan_code | 0x80, fmt.nan_code)


def decode(codes: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Grid values, held in bf16, of codes: a table, which is faster than torch's own cast."""
    source = codes.contiguous()
    table = _table(fmt, source.device)
    return table.index_select(0, source.view(-1).to(torch.int32)).view(source.shape)


@cache
def _table(fmt: Fp8Format, device: torch.device) -> torch.Tensor:
    return code_values(fmt).to(device=device, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Normed:
    """What a kernel returns that norms and casts.

    Attributes:
        data: Codes in the FP8 type, or values in the type of the input, `[rows, cols]`.
        amax: Largest magnitude of what was cast or of the rounded values, fp32 0-dim.
        mean: fp32 `[rows, 1]`; None for an RMS norm.
        inverse: One over deviation or root mean square, fp32 `[rows, 1]`.
    """

    data: torch.Tensor
    amax: torch.Tensor
    mean: torch.Tensor | None
    inverse: torch.Tensor


def normalize(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor | None,
    mean: torch.Tensor | None,
    inverse: torch.Tensor,
) -> torch.Tensor:
    """A norm from its row statistics: `(x - mean) * inverse * factor + shift` in fp32.

    Args:
        x: `[rows, cols]`, any float type.
        factor: fp32 `[cols]`.
        shift: `[cols]` or None.
        mean: fp32 `[rows, 1]`; None for an RMS norm.
        inverse: fp32 `[rows, 1]`.
    """
    y = x.float() if mean is None else x.float() - mean
    y = y * inverse * factor
    return y if shift is None else y + shift.float()
