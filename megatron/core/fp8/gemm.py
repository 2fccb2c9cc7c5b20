"""`gemm_nt`: the one matrix product, `y[M, N] = a[M, K] @ b[N, K]^T`, in every precision.

Operands in the FP8 type run on hardware (see `hardware.py`), others are emulated. The emulation
multiplies grid values (exact in bf16, their products exact in fp32), accumulates in fp32 and then
applies both inverse scales:

* `exact`: an fp32 product, scaled in fp32, rounded once to the output type.
* `fast`: a bf16 product where the CPU has bf16 instructions and the output is bf16. A library that
  rounds before it scales may differ from `exact` by one unit in the last place of bf16.
* `hopper`: summed up as Hopper's tensor cores do, see `accumulation`; one rounding.

In the first two, scales of blocks are applied to the operands instead, before the product. With
powers of two that is exact in bf16 and `fast` rounds once, too; with other scales both modes
multiply in fp32. Scaled values below 2**-126 or above the largest bf16 lose bits. FP4 values times
their block's scale are exact in bf16, too, and the scale of the tensor above them is applied to the
product as above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.capability import gemm_dtype
from megatron.core.fp8 import accumulation
from megatron.core.fp8.accumulation import HOPPER
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.hardware import multiply
from megatron.core.fp8.tensor import QuantizedTensor

EMULATIONS = ("fast", "exact", HOPPER)
_SAFE_ALPHA = (1e-37, 1e37)

_MIXED = "gemm_nt: got one quantized and one plain operand. Quantize both or none."

Operand = torch.Tensor | QuantizedTensor


def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    emulation: str = "fast",
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`a @ b.T (+ bias)`.

    Args:
        a: `[M, K]`.
        b: `[N, K]`; both quantized or both plain.
        out_dtype: Type of the result.
        bias: `[N]`, added before the result is rounded.
        emulation: `fast`, `exact` or `hopper`, for quantized operands without FP8 hardware.
        fast_accum: On hardware and with `hopper`: never go on in fp32 on the way.
        out: `[M, N]` in `out_dtype`, written to and returned.

    Returns:
        `[M, N]`.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if emulation == HOPPER and not _on_hardware(a, b):
            made = accumulation.multiply(a, b, split=not fast_accum)
            made = made if bias is None else made.add_(bias.float())
            return made.to(out_dtype) if out is None else _put(made, out)
        a, b = a.uniform(), b.uniform()
        if _on_hardware(a, b):
            product = multiply(a, b, out_dtype, bias, fast_accum, out)
            if product is not None:
                return product
        if _by_blocks(a, b):
            made = _plain(*_block_values(a, b, out_dtype, emulation), out_dtype, bias, out)
        else:
            made = _emulated(a, b, out_dtype, bias, emulation)
    elif isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor):
        raise TypeError(_MIXED)
    else:
        made = _plain(a, b, out_dtype, bias, out)
    return made.to(out_dtype) if out is None else _put(made, out)


@dataclass(frozen=True)
class Product:
    """`gemm_nt` with everything but `a` and `out` decided, for products that share `b`.

    Attributes:
        b: `[N, K]`.
        out_dtype: As in `gemm_nt`; so are the others.
    """

    b: Operand
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    emulation: str = "fast"
    fast_accum: bool = False

    def __call__(self, a: Operand, out: torch.Tensor | None = None) -> torch.Tensor:
        """`a @ b.T (+ bias)`, `[M, N]`."""
        return gemm_nt(
            a,
            self.b,
            out_dtype=self.out_dtype,
            bias=self.bias,
            emulation=self.emulation,
            fast_accum=self.fast_accum,
            out=out,
        )

    @property
    def width(self) -> int:
        """`N`."""
        return self.b.shape[0]

    def for_parts(self) -> Product:
        """The same product for an `a` that comes in parts: `b` is not converted for each of them.

        A row of the result does not depend on the other rows of `a`.
        """
        if isinstance(self.b, QuantizedTensor):
            if not self.b.is_held:
                return self
            if self.b.block is not None:
                return replace(self, b=ready(self.b))
            compute = _emulation_dtype(self.b.data, self.out_dtype, self.emulation)
            return replace(self, b=replace(self.b, data=self.b.data.to(compute)))
        return replace(self, b=self.b.to(_compute_dtype(self.b)))


def gemm_nt_accumulate(
    a: Operand, b: Operand, out: torch.Tensor, *, emulation: str = "fast"
) -> None:
    """`out += a @ b.T`, for weight gradients in fp32 `out` `[M, N]`.

    No rounding between the fp32 accumulator and `out`, unless the product itself runs in bf16.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if emulation == HOPPER and not _on_hardware(a, b):
            out.add_(accumulation.multiply(a, b, split=True))
            return
        a, b = a.uniform(), b.uniform()
        held = a.is_held and b.is_held
        if held and _by_blocks(a, b):
            _accumulate_blocks(a, b, out, emulation)
            return
        exact = emulation == "exact" or (held and _compute_dtype(a.data) == torch.float32)
        alpha = _alpha(a, b) if held and exact and out.dtype == torch.float32 else None
        if alpha is not None:
            out.addmm_(a.data.float(), b.data.float().t(), alpha=alpha)
            return
        dtype = torch.bfloat16 if held and not exact else out.dtype
        out.add_(gemm_nt(a, b, out_dtype=dtype, emulation=emulation))
        return
    if isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor):
        raise TypeError(_MIXED)
    compute = _compute_dtype(a)
    if out.dtype == compute:
        out.addmm_(a.to(compute), b.to(compute).t())
    else:
        out.add_(torch.mm(a.to(compute), b.to(compute).t()))


def ready(a: Operand) -> Operand:
    """`a` as it is multiplied here, so that several products share the conversion."""
    if isinstance(a, QuantizedTensor):
        if not a.is_held:
            return a
        if a.block is not None:
            return a.values(ready_dtype(a))
        return replace(a, data=a.data.to(ready_dtype(a)))
    return a.to(ready_dtype(a))


def ready_dtype(a: Operand) -> torch.dtype:
    """The type of the elements of `ready(a)`."""
    if isinstance(a, QuantizedTensor):
        if not a.is_held:
            return a.data.dtype
        blocks = a.block is not None and not a.folded and a.tensor_inv is None
        return torch.float32 if blocks else _compute_dtype(a.data)
    return _compute_dtype(a)


def kernel_name(
    a: Fp8Format,
    b: Fp8Format,
    *,
    emulation: str,
    device: torch.device,
    exact_in_bf16: bool = True,
    split: bool = True,
) -> str:
    """What emulates the product of two quantized operands, in words.

    Args:
        a: Format of the first operand.
        b: Format of the second.
        emulation: `fast`, `exact` or `hopper`.
        device: Where they are.
        exact_in_bf16: Whether a bf16 product computes what `fast` promises.
        split: Whether `hopper` goes on in fp32 every 128 products.
    """
    if emulation == HOPPER:
        kind = "split" if split else "fast"
        return f"emulated {a.name}x{b.name} GEMM, Hopper's {kind} accumulation"
    bf16 = gemm_dtype(torch.bfloat16, device) == torch.bfloat16
    fast = emulation == "fast" and bf16 and exact_in_bf16
    return f"emulated {a.name}x{b.name} {'bf16' if fast else 'fp32'} GEMM"


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return gemm_dtype(x.dtype, x.device)


def _emulation_dtype(held: torch.Tensor, out_dtype: torch.dtype, emulation: str) -> torch.dtype:
    """In which type grid values are multiplied."""
    fast = emulation == "fast" and out_dtype == torch.bfloat16
    return _compute_dtype(held) if fast else torch.float32


def _on_hardware(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return not a.is_held and not b.is_held


def _by_blocks(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return a.block is not None or b.block is not None


def _block_values(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, emulation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands times their scales, in the type to multiply in."""
    if emulation == "fast" and out_dtype == torch.bfloat16 and a.power_of_two and b.power_of_two:
        a, b = a.fold(), b.fold()
        return a.data.to(_compute_dtype(a.data)), b.data.to(_compute_dtype(b.data))
    return a.dequantize(), b.dequantize()


def _accumulate_blocks(
    a: QuantizedTensor, b: QuantizedTensor, out: torch.Tensor, emulation: str
) -> None:
    """`out += a @ b.T`; in `fast` mode the product is rounded to bf16 first, if it runs in bf16."""
    left, right = _block_values(a, b, torch.bfloat16, emulation)
    if left.dtype == right.dtype == out.dtype:
        out.addmm_(left, right.t())
    else:
        out.add_(_plain(left, right, torch.bfloat16, None, None))


def _put(made: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return made if made is out else out.copy_(made)


def _plain(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """In `out` if the product can be made there, else in the type that it was made in."""
    compute = _compute_dtype(a)
    # Widening is exact: the sum of the same products, rounded once.
    a, b = a.to(compute), b.to(compute)
    bias = None if bias is None else bias.to(compute)
    if out is None or not compute == out_dtype == out.dtype:
        return F.linear(a, b, bias)
    if bias is None:
        return torch.mm(a, b.t(), out=out)
    return torch.addmm(bias, a, b.t(), out=out)


def _alpha(a: QuantizedTensor, b: QuantizedTensor) -> float | None:
    """Both inverse scales as one factor of a CPU product.

    None where they must be applied one after the other: on a device, because reading them would
    wait for it, and at the edges of fp32, because 0 times their infinite product is NaN.
    """
    if a.data.device.type != "cpu":
        return None
    factor = float(a.scale_inv) * float(b.scale_inv)
    return factor if _SAFE_ALPHA[0] < factor < _SAFE_ALPHA[1] else None


def _emulated(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    emulation: str,
) -> torch.Tensor:
    a, b = a.hold(), b.hold()
    compute = _emulation_dtype(a.data, out_dtype, emulation)
    left, right = a.data.to(compute), b.data.to(compute).t()
    alpha = _alpha(a, b)
    if alpha is None:
        out = torch.mm(left, right).float().mul_(a.scale_inv).mul_(b.scale_inv)
        return out if bias is None else out.add_(bias.float())
    if bias is not None:
        return torch.addmm(bias.to(compute), left, right, alpha=alpha)
    return torch.addmm(left.new_zeros(1), left, right, beta=0, alpha=alpha)
