"""One contiguous fp32 buffer for the gradients of many parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce_


class GradBuffer:
    """Gradients of parameters that are summed over the same ranks, in one flat tensor.

    Parameters lie in reverse order, which is roughly the order in which backward finishes them.
    Each gets `main_grad`, a view of its range.

    Attributes:
        flat: All gradients, fp32 `[elements]`.
        params: The parameters, in buffer order.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], axis: Axis, reduce_dtype: torch.dtype
    ) -> None:
        self.params = list(reversed(params))
        self.axis, self.reduce_dtype = axis, reduce_dtype
        elements = sum(p.numel() for p in self.params)
        device = self.params[0].device if self.params else None
        self.flat = torch.zeros(elements, dtype=torch.float32, device=device)
        start = 0
        for param in self.params:
            view = self.flat[start : start + param.numel()].view(param.shape)
            param.main_grad = view  # type: ignore[attr-defined]
            start += param.numel()

    def zero(self) -> None:
        """Forget all gradients."""
        self.flat.zero_()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply all gradients."""
        self.flat.mul_(factor)

    def all_reduce(self) -> None:
        """Sum over the ranks of the axis, on the wire in `reduce_dtype`."""
        if self.axis.size == 1 or not self.params:
            return
        if self.reduce_dtype == self.flat.dtype:
            all_reduce_(self.flat, self.axis)
        else:
            self.flat.copy_(all_reduce_(self.flat.to(self.reduce_dtype), self.axis))
