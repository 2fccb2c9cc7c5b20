"""Which classes a GPT model is made of. The only place that names a backend's leaf classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.backends.contract import Backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

if TYPE_CHECKING:
    from megatron.config import RunConfig


def gpt_layer_spec(config: RunConfig, backend: Backend) -> ModuleSpec:
    """One transformer layer."""
    head_norm = ModuleSpec(backend.norm) if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ModuleSpec(backend.layernorm_column_parallel_linear),
        core_attention=ModuleSpec(backend.core_attention),
        linear_proj=ModuleSpec(backend.row_parallel_linear),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=ModuleSpec(backend.layernorm_column_parallel_linear),
        linear_fc2=ModuleSpec(backend.row_parallel_linear),
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(SelfAttention, submodules=attention),
            mlp=ModuleSpec(MLP, submodules=mlp),
        ),
    )


def gpt_decoder_spec(config: RunConfig, backend: Backend) -> ModuleSpec:
    """All layers and the final norm."""
    layer = gpt_layer_spec(config, backend)
    return ModuleSpec(
        TransformerBlock,
        submodules=TransformerBlockSubmodules(
            layers=(layer,) * config.num_layers,
            final_layernorm=ModuleSpec(backend.norm),
        ),
    )
