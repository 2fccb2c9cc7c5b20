"""The backend in plain PyTorch: runs on any device, with FP8 in hardware or emulated."""

from __future__ import annotations

import torch

from megatron.core.backends.contract import (
    ColumnLinear,
    CoreAttention,
    NormFactory,
    RowLinear,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.core_attention import NativeCoreAttention
from megatron.core.transformer.norms import Norm


class NativeBackend:
    """Leaf classes written in this project on top of torch alone."""

    name = "native"
    column_parallel_linear: ColumnLinear = ColumnParallelLinear
    row_parallel_linear: RowLinear = RowParallelLinear
    layernorm_column_parallel_linear: ColumnLinear = LayerNormColumnParallelLinear
    norm: NormFactory = Norm
    core_attention: CoreAttention = NativeCoreAttention

    def availability(self) -> tuple[bool, str]:
        """Always able to run; the reason names the torch that carries it."""
        return True, f"plain PyTorch {torch.__version__} runs on every device"
