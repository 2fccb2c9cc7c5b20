"""Quantized tensors on the wire: bytes plus scale instead of high-precision values."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather


def gather_rows(x: QuantizedTensor, axis: Axis) -> QuantizedTensor:
    """Concatenate every rank's rows; the payload is one byte an element.

    Args:
        x: This rank's `[rows, cols]`, quantized with one scale that all ranks share.
        axis: Ranks that take part.

    Returns:
        `[rows * axis.size, cols]`, in the form (held or FP8 type) of `x`.
    """
    if axis.size == 1:
        return x
    wire = x.to_fp8()
    codes = all_gather(wire.data.view(torch.uint8), axis)
    whole = replace(wire, data=codes.view(x.fmt.torch_dtype))
    return whole.hold() if x.is_held else whole
