"""One layer: attention and MLP, each added to the residual stream.

Shape legend: s local sequence, b microbatch, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.build import Build


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """The two halves of a layer, and the norm before the second if that does not bring its own."""

    self_attention: ModuleSpec
    mlp: ModuleSpec
    pre_mlp_layernorm: ModuleSpec | None = None


class TransformerLayer(nn.Module):
    """A pre-norm layer; the norms belong to the first linear layer of each half.

    Where the second half has experts, its norm stands alone.

    Args:
        build: Configuration, mesh, path and the rest that the parts need.
        submodules: Their specifications.
        layer_number: 1-based number of the layer in the whole model.
    """

    def __init__(
        self, *, build: Build, submodules: TransformerLayerSubmodules, layer_number: int
    ) -> None:
        super().__init__()
        config = build.config
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout
        self._sharded = config.sequence_parallel  # each rank holds its own part of the sequence
        self._rng, self._path = build.rng, build.path
        self.self_attention = build_module(
            submodules.self_attention, build=build.at("self_attention"), layer_number=layer_number
        )
        self.pre_mlp_layernorm: nn.Module | None = None
        if submodules.pre_mlp_layernorm is not None:
            self.pre_mlp_layernorm = build_module(
                submodules.pre_mlp_layernorm,
                config.hidden_size,
                build=build.at("pre_mlp_layernorm"),
            )
        self.mlp = build_module(submodules.mlp, build=build.at("mlp"))

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden: `[s or s/tp, b, h]`.
            rotation: Rotary positions of the whole local sequence, or None.
            cache: Keys and values of earlier tokens, in generation.
            document_starts: `[b, S]`, where documents start in the whole sequence, or None.

        Returns:
            The shape of `hidden`.
        """
        attended = self.self_attention(hidden, rotation, cache, document_starts)
        hidden = hidden + self._dropout(attended, "self_attention")
        norm = self.pre_mlp_layernorm
        normed = hidden if norm is None else norm(hidden)
        return hidden + self._dropout(self.mlp(normed), "mlp")

    def _dropout(self, x: Tensor, half: str) -> Tensor:
        return self._rng.dropout(
            x,
            self.hidden_dropout,
            f"{self._path}.{half}.hidden_dropout",
            sharded=self._sharded,
            training=self.training,
        )
