"""A quantized tensor: grid values and the inverses of the scales that made them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import Fp8Format

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
SavedTensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class QuantizedTensor:
    """Values on the grid of an FP8 format, `x ~ data * scale_inv`.

    `data` is either in the FP8 type (on hardware, on the wire) or *held* in bf16: every value of
    both formats is a bf16 value, so a held tensor is the same numbers in twice the bytes, ready
    for a bf16 product. `to_fp8` and `hold` convert without any change of value.

    A tensor with a scale for each block may be *folded*: its data are already multiplied by the
    inverse scales. With powers of two that is exact in bf16 (see `kernels.round_blocks`), and with
    FP4 values.

    Attributes:
        data: `[rows, cols]`, FP8 type, bf16 or fp32.
        scale_inv: fp32. One element for `block` None, else one for each block.
        fmt: The format whose grid the values lie on.
        block: Rows and columns that share a scale; None means the whole tensor.
        power_of_two: Whether every scale of a block is a power of two.
        folded: Whether the data are multiplied by the inverse scales.
        tensor_inv: fp32 0-dim, a second inverse scale: of the whole tensor, above those of its
            FP4 blocks; None without. It is never folded.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Fp8Format
    block: tuple[int, int] | None = None
    power_of_two: bool = False
    folded: bool = False
    tensor_inv: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the data."""
        return self.data.shape

    @property
    def form(self) -> tuple[Fp8Format, tuple[int, int] | None, bool, bool]:
        """Everything but the tensors: `x` is `QuantizedTensor.of(x.tensors, x.form)`."""
        return self.fmt, self.block, self.power_of_two, self.folded

    @property
    def tensors(self) -> Tensors:
        """Data, inverse scales, and the inverse scale above them."""
        return self.data, self.scale_inv, self.tensor_inv

    @staticmethod
    def of(tensors: Tensors, form: tuple[Any, ...]) -> QuantizedTensor:
        """The tensor that has these tensors and this form."""
        data, scale_inv, tensor_inv = tensors
        return replace(QuantizedTensor(data, scale_inv, *form), tensor_inv=tensor_inv)

    @property
    def is_held(self) -> bool:
        """Whether the grid values are held in bf16 (or wider) instead of FP8 bytes."""
        return self.data.itemsize > 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The approximated tensor, in fp32 arithmetic, rounded once to `dtype`."""
        if self.tensor_inv is not None:
            return (self.fold().data.float() * self.tensor_inv).to(dtype)
        if self.folded:
            return self.data.to(dtype)
        return (self.hold().data.float() * self.expanded_scale_inv()).to(dtype)

    def uniform(self) -> QuantizedTensor:
        """The same values with one scale where there is one above those of the blocks."""
        if self.tensor_inv is None:
            return self
        return QuantizedTensor(self.fold().data, self.tensor_inv, self.fmt)

    def expanded_scale_inv(self) -> torch.Tensor:
        """`scale_inv` in a shape that broadcasts against the data."""
        if self.block is None:
            return self.scale_inv
        rows, cols = self.block
        full = self.scale_inv.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        return full[: self.shape[0], : self.shape[1]]

    def t(self) -> QuantizedTensor:
        """The transposed tensor; the same bits, no copy."""
        if self.block is None:
            return replace(self, data=self.data.t())
        return replace(
            self, data=self.data.t(), scale_inv=self.scale_inv.t(), block=self.block[::-1]
        )

    def to_fp8(self) -> QuantizedTensor:
        """The same values with `data` in the FP8 type (of FP4: a code a byte)."""
        if not self.is_held:
            return self
        data = self.data
        if self.folded:
            data = (data.float() / self.expanded_scale_inv()).to(torch.bfloat16)
        codes = kernels.encode(data, self.fmt)
        return replace(self, data=codes.view(self.fmt.torch_dtype), folded=False)

    def hold(self) -> QuantizedTensor:
        """The same values with `data` in bf16."""
        if self.is_held:
            return self
        codes = self.data.view(torch.uint8)
        if _is_turned(codes):  # stays so: the order in memory decides how a product is summed
            return replace(self, data=kernels.decode(codes.t(), self.fmt).t())
        return replace(self, data=kernels.decode(codes, self.fmt))

    def fold(self) -> QuantizedTensor:
        """The same values, multiplied by the inverse scales of their blocks.

        Raises:
            ValueError: If the products might not be exact in bf16.
        """
        if self.folded:
            return self
        if self.block is None or not (self.power_of_two or self.tensor_inv is not None):
            raise ValueError("QuantizedTensor.fold: needs a power-of-two scale for each block.")
        held = self.hold()
        if _is_turned(held.data):
            return held.t().fold().t()
        data = kernels.fold_blocks(held.data, self.scale_inv, self.block)
        return replace(self, data=data, folded=True)

    def values(self, dtype: torch.dtype) -> QuantizedTensor:
        """Folded, in a type that holds the products, to be multiplied and for nothing else.

        Args:
            dtype: bf16 where `fold` is exact; or fp32.
        """
        exact = self.folded or self.tensor_inv is not None
        data = self.fold().data.to(dtype) if exact else self.dequantize(dtype)
        return replace(self, data=data, folded=True)


def _is_turned(data: torch.Tensor) -> bool:
    """Whether a matrix lies in memory column by column."""
    return data.dim() == 2 and not data.is_contiguous() and data.t().is_contiguous()


def taken_apart(x: torch.Tensor | QuantizedTensor | None) -> tuple[SavedTensors, Any]:
    """An operand as three tensors, some of them None, and its form; for `save_for_backward`."""
    if isinstance(x, QuantizedTensor):
        return x.tensors, x.form
    return (x, None, None), None


def put_together(tensors: SavedTensors, form: Any) -> Any:
    """The operand that `taken_apart` took apart."""
    return tensors[0] if form is None else QuantizedTensor.of(tensors, form)  # type: ignore[arg-type]
