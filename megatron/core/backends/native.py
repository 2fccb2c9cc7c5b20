"""The backend in plain PyTorch: runs on any device, with FP8 in hardware or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.core.backends.contract import (
    ColumnGroupedLinear,
    ColumnLinear,
    CoreAttention,
    NormFactory,
    RowGroupedLinear,
    RowLinear,
)
from megatron.core.errors import MegatronError, complaint
from megatron.core.tensor_parallel.grouped import (
    ColumnParallelGroupedLinear,
    RowParallelGroupedLinear,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.overlap import parts_in_use
from megatron.core.transformer.core_attention import NativeCoreAttention
from megatron.core.transformer.norms import Norm

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.mesh import ParallelState


class NativeBackend:
    """Leaf classes written in this project on top of torch alone."""

    name = "native"
    column_parallel_linear: ColumnLinear = ColumnParallelLinear
    row_parallel_linear: RowLinear = RowParallelLinear
    layernorm_column_parallel_linear: ColumnLinear = LayerNormColumnParallelLinear
    column_parallel_grouped_linear: ColumnGroupedLinear = ColumnParallelGroupedLinear
    row_parallel_grouped_linear: RowGroupedLinear = RowParallelGroupedLinear
    norm: NormFactory = Norm
    core_attention: CoreAttention = NativeCoreAttention

    def start_tp_overlap(self, config: RunConfig, mesh: ParallelState) -> str:
        """Check that the transport can send messages; there is nothing to set up.

        Raises:
            MegatronError: A setting is about another backend, or the transport cannot.
        """
        for flag, value, default in (
            ("--tp-comm-overlap-cfg", config.tp_comm_overlap_cfg, None),
            ("--tp-comm-bootstrap-backend", config.tp_comm_bootstrap_backend, "nccl"),
        ):
            if value != default:
                raise MegatronError(
                    complaint(
                        flag,
                        value,
                        "It is about Transformer Engine's userbuffers, and this run is on the"
                        " native backend, whose layers send messages",
                        f"Remove {flag}",
                    )
                )
        on_cuda = config.device != "cpu" and torch.cuda.is_available()
        if on_cuda and config.distributed_backend == "gloo":
            raise MegatronError(
                complaint(
                    "--tp-comm-overlap",
                    "--distributed-backend gloo on CUDA",
                    "gloo sends messages from host memory only",
                    "Remove one of them",
                )
            )
        return f"{parts_in_use(config)}, in messages between each two of {mesh.tp.size} ranks"

    def availability(self) -> tuple[bool, str]:
        """Always able to run; the reason names the torch that carries it."""
        return True, f"plain PyTorch {torch.__version__} runs on every device"
