"""Norms that stand alone: the final one, and those of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.norm_functions import layer_norm, rms_norm

if TYPE_CHECKING:
    from megatron.core.build import Build


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as `--normalization` says.

    Args:
        size: Length of the last dimension.
        build: Supplies kind, epsilon, dtype and device.
        partial_gradient: Whether each tensor-parallel rank sees only a part of the input, so that
            the weight's gradient has to be summed over the ranks. None: under sequence parallelism.
    """

    def __init__(self, size: int, *, build: Build, partial_gradient: bool | None = None) -> None:
        super().__init__()
        config = build.config
        self.eps = config.norm_epsilon
        self.zero_centered = config.apply_layernorm_1p
        zeros = torch.zeros(size, dtype=build.params_dtype, device=build.device)
        self.weight = nn.Parameter(zeros.clone() if self.zero_centered else zeros + 1)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(zeros)
        if config.sequence_parallel if partial_gradient is None else partial_gradient:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x [..., size]` in fp32 and round once to its dtype."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)
        return layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{self.weight.numel()}, {kind}, eps={self.eps}"
