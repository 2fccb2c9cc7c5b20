"""The feed-forward half of a transformer layer, and its activations.

Shape legend: s local sequence, b microbatch, h hidden, f local feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fp8 import kernels
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.build import Build

_BLOCK_ELEMENTS = 2**16  # fp32 temporaries of one block of rows stay in the L2 cache


@dataclass(frozen=True)
class MLPSubmodules:
    """The two matrices. `linear_fc1` brings its norm along."""

    linear_fc1: ModuleSpec
    linear_fc2: ModuleSpec


class MLP(nn.Module):
    """Norm, widening matrix, activation, narrowing matrix.

    Args:
        build: Configuration, mesh, path and the rest that the linear layers need.
        submodules: Their specifications.
        ffn_hidden_size: Width between the matrices; default the configuration's.
    """

    def __init__(
        self, *, build: Build, submodules: MLPSubmodules, ffn_hidden_size: int | None = None
    ) -> None:
        super().__init__()
        config = build.config
        width = ffn_hidden_size or config.ffn_hidden_size
        init = init_methods(config)
        gated = 2 if config.swiglu else 1
        self.activation = activation(config)
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size,
            gated * width,
            build=build.at("linear_fc1"),
            init_method=init.hidden,
            bias=config.add_bias_linear,
            partition_stride=gated,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            config.hidden_size,
            build=build.at("linear_fc2"),
            init_method=init.output,
            bias=config.add_bias_linear,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """`[s or s/tp, b, h]` to the same shape, without the residual."""
        wide, _ = self.linear_fc1(hidden)
        narrow: Tensor = self.linear_fc2(self.activation(wide))[0]
        return narrow


def activation(config: RunConfig) -> Callable[[Tensor], Tensor]:
    """The activation that a configuration asks for.

    With biases, GELU is the tanh approximation, and without them the exact one: that is what
    Megatron's default fusions compute, and GPT-2's weights expect the former.
    """
    if config.swiglu:
        return swiglu
    if config.squared_relu:
        return squared_relu
    return gelu_tanh if config.add_bias_linear else F.gelu


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0) ** 2` (So et al., Primer, 2021)."""
    positive = F.relu(x)
    return positive * positive


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` for `x [..., 2f] = [gate; up]` (Shazeer, GLU Variants, 2020).

    In fp32 with one rounding, and only `x` is kept for the backward pass. In one kernel each way
    where there is one.
    """
    return _swiglu(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        rows = x.reshape(-1, x.shape[-1])
        width = rows.shape[1] // 2
        fused = kernels.swiglu(rows)
        if fused is not None:
            return fused.view(*x.shape[:-1], width)
        out = rows.new_empty(rows.shape[0], width)
        for block in row_blocks(rows):
            gate, up = widened(rows[block, :width]), widened(rows[block, width:])
            out[block] = F.silu(gate).mul_(up)
        return out.view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        width = rows.shape[1] // 2
        d_out = grads[0].reshape(-1, width)
        fused = kernels.swiglu_grad(rows, d_out)
        if fused is not None:
            return fused.view(x.shape)
        d_rows = torch.empty_like(rows)
        for block in row_blocks(rows):
            gate, up, d_y = (
                widened(part) for part in (rows[block, :width], rows[block, width:], d_out[block])
            )
            d_rows[block, width:] = F.silu(gate).mul_(d_y)
            d_rows[block, :width] = torch.ops.aten.silu_backward(d_y.mul_(up), gate)
        return d_rows.view(x.shape)


_swiglu: Callable[[Tensor], Tensor] = _SwiGLU.apply


def widened(x: Tensor) -> Tensor:
    """A copy that may be written to, in fp32 or wider."""
    wider = torch.promote_types(x.dtype, torch.float32)
    return x.to(wider, copy=True)


def row_blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows: cache-sized on a CPU, all at once elsewhere."""
    count = rows.shape[0]
    on_cpu = rows.device.type == "cpu"
    step = max(1, _BLOCK_ELEMENTS // rows.shape[1]) if on_cpu else max(count, 1)
    for start in range(0, count, step):
        yield slice(start, start + step)
