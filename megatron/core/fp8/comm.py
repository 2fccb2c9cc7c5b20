"""How a linear layer's rows travel between ranks that hold parts of a sequence.

Quantized tensors travel as bytes. One scale for the tensor is one that all ranks share; scales of
blocks travel behind the bytes of their rows. `Transfers` says when: here each transfer is waited
for, `tensor_parallel.overlap` multiplies meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron.core.comm_log import AS_IT_IS, Packing
from megatron.core.fp8.formats import E4M3
from megatron.core.fp8.gemm import Operand, Product, ready
from megatron.core.fp8.kernels import fp4
from megatron.core.fp8.scales import from_e8m0, to_e8m0
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter


def to_wire(rows: Operand) -> torch.Tensor:
    """What is sent of `[rows, cols]`: the tensor, or the bytes of a quantized one.

    With scales for blocks, a line of what is sent is a row of blocks: the bytes of all its rows,
    then its scales, powers of two in one byte each. FP4 travels as two codes a byte and scales in
    E4M3; the scale of the tensor is one that all ranks share.
    """
    if not isinstance(rows, QuantizedTensor):
        return rows.contiguous()
    codes = rows.to_fp8().data.view(torch.uint8)
    if rows.block is None:
        return codes
    scales = rows.scale_inv.contiguous()
    lines = codes.reshape(scales.shape[0], rows.block[0] * codes.shape[1])
    if rows.tensor_inv is not None:
        lines, packed = fp4.pack(lines), scales.to(E4M3.torch_dtype).view(torch.uint8)
    else:
        packed = to_e8m0(scales) if rows.power_of_two else scales.view(torch.uint8)
    return torch.cat([lines, packed], dim=1)


def packing_of(rows: Operand, itemsize: int) -> Packing:
    """What the lines that `to_wire` makes stand for.

    Args:
        rows: What is sent.
        itemsize: Bytes of an element if it were not quantized.
    """
    if not isinstance(rows, QuantizedTensor):
        return AS_IT_IS
    if rows.block is None:
        return Packing(1, 0, itemsize)
    elements = rows.block[0] * rows.shape[1]
    if rows.tensor_inv is not None:
        scales = rows.scale_inv.shape[1]
        return Packing(-(-elements // 2) + scales, scales, elements * itemsize)
    scales = rows.scale_inv.shape[1] * (1 if rows.power_of_two else 4)
    return Packing(elements + scales, scales, elements * itemsize)


def tensor_of(rows: Operand) -> torch.Tensor:
    """The elements of `[rows, cols]`."""
    return rows.data if isinstance(rows, QuantizedTensor) else rows


def is_uniform(rows: Operand) -> bool:
    """Whether the elements have one scale, or none."""
    return not isinstance(rows, QuantizedTensor) or rows.block is None


def from_wire(sent: torch.Tensor, like: Operand) -> Operand:
    """The rows that `sent` stands for, in the form (plain, held or FP8 type) of `like`."""
    if not isinstance(like, QuantizedTensor):
        return sent
    if like.block is not None:
        return from_lines(sent, like)
    rows = replace(like, data=sent.view(like.fmt.torch_dtype))
    return rows.hold() if like.is_held else rows


def from_lines(sent: torch.Tensor, like: QuantizedTensor) -> QuantizedTensor:
    """The rows of blocks that the lines `sent` stand for, in the form of `like`."""
    high, cols = (like.block or (1, 1))[0], like.shape[1]
    count = high * cols
    width = -(-count // 2) if like.tensor_inv is not None else count
    codes, packed = sent[:, :width], sent[:, width:].contiguous()
    if like.tensor_inv is not None:
        codes, scale_inv = fp4.unpack(codes, count), packed.view(E4M3.torch_dtype).float()
    else:
        scale_inv = from_e8m0(packed) if like.power_of_two else packed.view(torch.float32)
    data = codes.reshape(-1, cols).view(like.fmt.torch_dtype)
    rows = replace(like, data=data, scale_inv=scale_inv, folded=False)
    if not like.is_held:
        return rows
    rows = rows.hold()
    return rows.fold() if like.folded else rows


def gather_rows(rows: Operand, axis: Axis, itemsize: int = 2) -> Operand:
    """Concatenate every rank's rows.

    Args:
        rows: This rank's `[rows, cols]`; if quantized, with one scale that all ranks share, or
            with blocks of which none reaches over the last row.
        axis: Ranks that take part.
        itemsize: For the log: bytes of an element if it were not quantized.

    Returns:
        `[rows * axis.size, cols]`, in the form of `rows`.
    """
    if axis.size == 1:
        return rows
    return from_wire(all_gather(to_wire(rows), axis.packed(packing_of(rows, itemsize))), rows)


class Transfers:
    """Transfers and products one after the other.

    A result that comes as a function is waited for when it is called, once.
    """

    def gather_then_multiply(
        self, rows: Operand, axis: Axis, product: Product
    ) -> tuple[torch.Tensor, Callable[[], Operand]]:
        """Multiply every rank's rows.

        Args:
            rows: This rank's `[m, K]`.
            axis: Ranks that hold the others.
            product: What is done with them.

        Returns:
            `[m * axis.size, N]`, and all rows, `[m * axis.size, K]`.
        """
        whole = ready(gather_rows(rows, axis, product.out_dtype.itemsize))
        return product(whole), lambda: whole

    def multiply_then_scatter(self, rows: Operand, axis: Axis, product: Product) -> torch.Tensor:
        """Multiply all rows, sum the results over the ranks, keep this rank's part of them.

        Args:
            rows: `[m * axis.size, K]`.
            axis: Ranks whose results are added.
            product: Of one rank.

        Returns:
            `[m, N]`.
        """
        return reduce_scatter(product(rows), axis)

    def start_input_grad(
        self, rows: Operand, axis: Axis, product: Product
    ) -> Callable[[], torch.Tensor]:
        """As `multiply_then_scatter`, for an input gradient: other work may come before its end."""
        dx = reduce_scatter(product(rows), axis)
        return lambda: dx

    def start_gather(self, rows: Operand, axis: Axis, itemsize: int = 2) -> Callable[[], Operand]:
        """Fetch every rank's rows, `[m * axis.size, K]`; other work may come before they arrive.

        `itemsize` is that of `gather_rows`.
        """
        return lambda: gather_rows(rows, axis, itemsize)


PLAIN = Transfers()


@dataclass(frozen=True)
class Sharding:
    """Which rows a linear layer starts from and ends with.

    Attributes:
        gather: Axis over which the input's rows are split; the layer works on all of them.
        scatter: Axis over which the output is summed; each rank keeps its part of the rows.
        transfers: How they travel.
    """

    gather: Axis | None = None
    scatter: Axis | None = None
    transfers: Transfers = PLAIN

    @property
    def is_local(self) -> bool:
        """Whether nothing travels."""
        return self.gather is None and self.scatter is None

    def multiply(self, rows: Operand, product: Product) -> torch.Tensor:
        """The layer's forward product."""
        if self.gather is not None:
            return self.transfers.gather_then_multiply(rows, self.gather, product)[0]
        if self.scatter is not None:
            return self.transfers.multiply_then_scatter(rows, self.scatter, product)
        return product(rows)

    def input_grad(
        self, rows: Operand, product: Product
    ) -> tuple[Callable[[], torch.Tensor], Callable[[], Operand]]:
        """The product for the input's gradient, and the rows of the output's gradient.

        Args:
            rows: The output's gradient as autograd hands it over.
            product: Of all its rows.

        Returns:
            The input's gradient, and all rows of the output's for the weight's gradient.
        """
        if self.scatter is not None:
            dx, whole = self.transfers.gather_then_multiply(rows, self.scatter, product)
            return lambda: dx, whole
        if self.gather is not None:
            return self.transfers.start_input_grad(rows, self.gather, product), lambda: rows
        dx = product(rows)
        return lambda: dx, lambda: rows
