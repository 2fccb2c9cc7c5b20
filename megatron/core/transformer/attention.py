"""Self-attention of one layer: norm and fused projection, positions, attention, projection back.

Shape legend: s sequence, b microbatch, h hidden, n local heads, g local key/value groups, d head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention_kernel import causal_attention
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.rotary import Rotation, apply_rotary, split_qkv
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.build import Build


@dataclass(frozen=True)
class SelfAttentionSubmodules:
    """The parts. `linear_qkv` brings its norm along; the head norms are None without them."""

    linear_qkv: ModuleSpec
    core_attention: ModuleSpec
    linear_proj: ModuleSpec
    q_layernorm: ModuleSpec | None = None
    k_layernorm: ModuleSpec | None = None


class SelfAttention(nn.Module):
    """Causal self-attention with multi-head or grouped-query heads.

    The rows of the fused projection are interleaved per key/value group: its query heads, its key,
    its value. Tensor-parallel ranks own whole groups.

    Args:
        build: Configuration, mesh, path and the rest that the leaf layers need.
        submodules: Their specifications.
        layer_number: 1-based number of the layer in the whole model.
    """

    def __init__(
        self, *, build: Build, submodules: SelfAttentionSubmodules, layer_number: int
    ) -> None:
        super().__init__()
        config = build.config
        init = init_methods(config)
        heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.layer_number = layer_number
        self.local_groups = groups // build.mesh.tp.size
        self.heads_per_group = heads // groups
        self.scale = d**-0.5
        self.recompute_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        self._rng, self._fp8 = build.rng, build.fp8
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (heads + 2 * groups) * d,
            build=build.at("linear_qkv"),
            init_method=init.hidden,
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        self.core_attention = build_module(
            submodules.core_attention, build=build.at("core_attention"), layer_number=layer_number
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * d,
            config.hidden_size,
            build=build.at("linear_proj"),
            init_method=init.output,
            bias=config.add_bias_linear,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if submodules.q_layernorm is not None and submodules.k_layernorm is not None:
            # Each rank normalizes its own heads only, so these gradients are partial sums.
            self.q_layernorm = build_module(
                submodules.q_layernorm, d, build=build.at("q_layernorm"), partial_gradient=True
            )
            self.k_layernorm = build_module(
                submodules.k_layernorm, d, build=build.at("k_layernorm"), partial_gradient=True
            )

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Attend, without the residual.

        Args:
            hidden: `[s or s/tp, b, h]`.
            rotation: Rotary positions of the s tokens, or None.
            cache: Keys and values of earlier tokens; extended by these s tokens.
            document_starts: `[b, S]`, where documents start in the whole sequence, or None.

        Returns:
            The shape of `hidden`.
        """
        query, key, value = self._project(hidden, rotation)
        if cache is not None:
            key, value = cache.extend(self.layer_number, key, value)
            context = causal_attention(query, key, value, scale=self.scale)
        elif self.recompute_core and self.training:
            context = checkpoint(
                self.core_attention,
                query,
                key,
                value,
                document_starts,
                rng=self._rng,
                fp8=self._fp8,
            )
        else:
            context = self.core_attention(query, key, value, document_starts)
        out: Tensor = self.linear_proj(context)[0]
        return out

    def _project(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query `[s, b, n, d]`, key and value `[s, b, g, d]`, normalized and rotated."""
        mixed, _ = self.linear_qkv(hidden)
        if self.q_layernorm is None or self.k_layernorm is None:
            return split_qkv(mixed, self.local_groups, self.heads_per_group, rotation)
        query, key, value = split_qkv(mixed, self.local_groups, self.heads_per_group, None)
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        return query, key, value
