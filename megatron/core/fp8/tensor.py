"""A quantized tensor: grid values and the inverse of the scale that made them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import Fp8Format


@dataclass(frozen=True)
class QuantizedTensor:
    """Values on the grid of an FP8 format, `x ~ data * scale_inv`.

    `data` is either in the FP8 type (on hardware, on the wire) or *held* in bf16: every value of
    both formats is a bf16 value, so a held tensor is the same numbers in twice the bytes, ready
    for a bf16 product. `to_fp8` and `hold` convert without any change of value.

    Attributes:
        data: `[rows, cols]`, FP8 type or bf16.
        scale_inv: fp32. One element for `block` None.
        fmt: The format whose grid the values lie on.
        block: Rows and columns that share a scale; None means the whole tensor.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Fp8Format
    block: tuple[int, int] | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the data."""
        return self.data.shape

    @property
    def is_held(self) -> bool:
        """Whether the grid values are held in bf16 (or wider) instead of FP8 bytes."""
        return self.data.itemsize > 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The approximated tensor, in fp32 arithmetic, rounded once to `dtype`."""
        return (self.hold().data.float() * self.expanded_scale_inv()).to(dtype)

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
        """The same values with `data` in the FP8 type."""
        if not self.is_held:
            return self
        codes = kernels.encode(self.data, self.fmt)
        return replace(self, data=codes.view(self.fmt.torch_dtype))

    def hold(self) -> QuantizedTensor:
        """The same values with `data` in bf16."""
        if self.is_held:
            return self
        return replace(self, data=kernels.decode(self.data.view(torch.uint8), self.fmt))
