"""The expert that every token passes: an ordinary MLP, perhaps behind a gate.

Shape legend: s local sequence, b microbatch, h hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.core.mesh import Axis
from megatron.core.shards import init_parameter
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.router import gate

if TYPE_CHECKING:
    from megatron.core.build import Build


class SharedExperts(MLP):
    """An MLP whose output may be multiplied by a learned gate between 0 and 1 of each token.

    Args:
        build: Configuration, mesh, path and the rest that the linear layers need.
        submodules: Their specifications.
    """

    gate_weight: nn.Parameter | None

    def __init__(self, *, build: Build, submodules: MLPSubmodules) -> None:
        config = build.config
        width = config.moe_shared_expert_intermediate_size
        super().__init__(build=build, submodules=submodules, ffn_hidden_size=width)
        self.gate_weight = None
        if not config.moe_shared_expert_gate:
            return
        self.gate_weight = nn.Parameter(
            torch.empty((1, config.hidden_size), dtype=build.params_dtype, device=build.device)
        )
        path, init = f"{build.path}.gate_weight", init_methods(config).hidden
        init_parameter(self.gate_weight, Axis.single("tp"), init, config.seed, path)
        if config.sequence_parallel and build.mesh.tp.size > 1:
            self.gate_weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[s or s/tp, b, h]` to the same shape, without the residual."""
        out = super().forward(hidden)
        if self.gate_weight is None:
            return out
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weight = gate(tokens, self.gate_weight, torch.float32).sigmoid()
        return (out.float() * weight.view(*hidden.shape[:-1], 1)).to(out.dtype)
