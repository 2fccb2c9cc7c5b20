"""Which classes a GPT model is made of. The only place that names a backend's leaf classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config.moe import moe_layers
from megatron.core.backends.contract import Backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExperts
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


def gpt_layer_spec(config: RunConfig, backend: Backend, layer_number: int = 1) -> ModuleSpec:
    """One transformer layer.

    Args:
        config: The configuration.
        backend: Supplies the leaf classes.
        layer_number: 1-based number of the layer in the whole model; some have experts.
    """
    head_norm = ModuleSpec(backend.norm) if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ModuleSpec(backend.layernorm_column_parallel_linear),
        core_attention=ModuleSpec(backend.core_attention),
        linear_proj=ModuleSpec(backend.row_parallel_linear),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    has_experts = moe_layers(config)[layer_number - 1]
    matrices = MLPSubmodules(
        linear_fc1=ModuleSpec(backend.layernorm_column_parallel_linear),
        linear_fc2=ModuleSpec(backend.row_parallel_linear),
    )
    dense = ModuleSpec(MLP, submodules=matrices)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(SelfAttention, submodules=attention),
            mlp=_experts(config, backend, layer_number) if has_experts else dense,
            pre_mlp_layernorm=ModuleSpec(backend.norm) if has_experts else None,
        ),
    )


def _experts(config: RunConfig, backend: Backend, layer_number: int) -> ModuleSpec:
    """The second half of a layer with experts; its norm stands alone, the router needs it too."""
    experts = MLPSubmodules(
        linear_fc1=ModuleSpec(backend.column_parallel_grouped_linear),
        linear_fc2=ModuleSpec(backend.row_parallel_grouped_linear),
    )
    shared = None
    if config.moe_shared_expert_intermediate_size is not None:
        matrices = MLPSubmodules(
            linear_fc1=ModuleSpec(backend.column_parallel_linear),
            linear_fc2=ModuleSpec(backend.row_parallel_linear),
        )
        shared = ModuleSpec(SharedExperts, submodules=matrices)
    return ModuleSpec(
        MoELayer,
        params={"layer_number": layer_number},
        submodules=MoESubmodules(ModuleSpec(GroupedMLP, submodules=experts), shared),
    )


def gpt_decoder_spec(config: RunConfig, backend: Backend) -> ModuleSpec:
    """All layers and the final norm."""
    numbers = range(1, config.num_layers + 1)
    return ModuleSpec(
        TransformerBlock,
        submodules=TransformerBlockSubmodules(
            layers=tuple(gpt_layer_spec(config, backend, number) for number in numbers),
            final_layernorm=ModuleSpec(backend.norm),
        ),
    )
