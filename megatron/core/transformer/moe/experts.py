"""The experts of one mixture-of-experts layer that this rank holds.

Shape legend: T tokens sent to this rank's experts, sorted by expert; h hidden; f local feed-forward
width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fp8.grouped import NOTHING, Arrivals
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.mlp import (
    MLPSubmodules,
    activation,
    row_blocks,
    widened,
)
from megatron.core.transformer.spec_utils import build_module

if TYPE_CHECKING:
    from megatron.core.build import Build


class GroupedMLP(nn.Module):
    """Every local expert: widening matrix, activation, narrowing matrix.

    Args:
        build: Configuration, mesh, path and the rest that the linear layers need.
        submodules: Specifications of the two groups of matrices.
        num_local_experts: Experts of this rank.
    """

    def __init__(self, *, build: Build, submodules: MLPSubmodules, num_local_experts: int) -> None:
        super().__init__()
        config = build.config
        init = init_methods(config)
        gated = 2 if config.swiglu else 1
        width = config.moe_ffn_hidden_size
        self.activation = weighted(None if config.swiglu else activation(config))
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            num_local_experts,
            config.hidden_size,
            gated * width,
            build=build.at("linear_fc1"),
            init_method=init.hidden,
            partition_stride=gated,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            num_local_experts,
            width,
            config.hidden_size,
            build=build.at("linear_fc2"),
            init_method=init.output,
        )

    def forward(
        self,
        x: Tensor,
        tokens_per_expert: Sequence[int],
        probs: Tensor,
        arrivals: Arrivals = NOTHING,
    ) -> Tensor:
        """Run the experts.

        Args:
            x: `[T, h]`, rows sorted by local expert.
            tokens_per_expert: Rows of each local expert; T and any count may be 0.
            probs: fp32 `[T]`, the router's weight of each row.
            arrivals: `x`, and later the gradient of the result, as they came in FP8.

        Returns:
            `[T, h]`, each row weighted; a partial sum over expert tensor-parallel ranks.
        """
        wide = self.linear_fc1(x, tokens_per_expert, Arrivals(x=arrivals.x))
        narrow: Tensor = self.linear_fc2(
            self.activation(wide, probs), tokens_per_expert, Arrivals(grad=arrivals.grad)
        )
        return narrow


def weighted(function: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor, Tensor], Tensor]:
    """An activation whose rows are multiplied by weights, in fp32 with one rounding.

    Args:
        function: The activation of an fp32 tensor; None for SwiGLU.

    Returns:
        A function of `x [T, w]` and fp32 weights `[T]`.
    """
    if function is None:
        return weighted_swiglu

    def weigh(x: Tensor, weights: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (function(wide) * weights.unsqueeze(-1)).to(x.dtype)

    return weigh


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight` for `x [T, 2f] = [gate; up]` and `weights [T]`.

    In fp32 with one rounding, and only the arguments are kept for the backward pass.
    """
    return _weighted_swiglu(x, weights)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        width = x.shape[1] // 2
        out = x.new_empty(x.shape[0], width)
        for block in row_blocks(x):
            gate, up = widened(x[block, :width]), widened(x[block, width:])
            out[block] = F.silu(gate).mul_(up).mul_(weights[block].unsqueeze(-1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weights = ctx.saved_tensors
        width = x.shape[1] // 2
        d_x, d_weights = torch.empty_like(x), torch.empty_like(weights)
        for block in row_blocks(x):
            gate, up, d_y = (
                widened(part) for part in (x[block, :width], x[block, width:], grads[0][block])
            )
            open_gate = F.silu(gate)
            d_weights[block] = (open_gate * up).mul_(d_y).sum(-1)
            d_y.mul_(weights[block].unsqueeze(-1))
            d_x[block, width:] = open_gate.mul_(d_y)
            d_x[block, :width] = torch.ops.aten.silu_backward(d_y.mul_(up), gate)
        return d_x, d_weights


_weighted_swiglu: Callable[[Tensor, Tensor], Tensor] = _WeightedSwiGLU.apply
