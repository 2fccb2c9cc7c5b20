"""The native backend's attention layer: random streams and ranks around the kernels.

Shape legend: s local sequence, t keys, S whole sequence, b microbatch, n local heads, g local
key/value groups, d head dimension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.transformer.attention_fp8 import Whole, fp8_attention
from megatron.core.transformer.attention_kernel import Block, causal_attention
from megatron.core.transformer.context_parallel import (
    ContextBlock,
    check_shards,
    comm_type,
    context_attention,
)
from megatron.core.transformer.context_parallel_fp8 import placement

if TYPE_CHECKING:
    from megatron.core.build import Build


class NativeCoreAttention(nn.Module):
    """Attention of one layer's local heads; with context parallelism, of all ranks' tokens.

    Args:
        build: Supplies head sizes, dropout and its random stream, the context-parallel ranks, and
            decides the precision.
        layer_number: 1-based number of the layer in the whole model.
    """

    def __init__(self, *, build: Build, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale = 1.0 / math.sqrt(build.config.kv_channels)
        self.dropout = build.config.attention_dropout
        self.axis = build.mesh.cp
        self.comm = comm_type(build.config, layer_number)
        two_levels = self.comm == "a2a+p2p"
        self._ring = build.mesh.cp_p2p if two_levels else self.axis
        self._inner = build.mesh.cp_a2a if two_levels else None
        self.precision = build.fp8.for_attention(build.path)
        self._exchange_in_fp8 = build.config.fp8_cp_exchange
        self._rng = build.rng
        self._path = build.path

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: `[s, b, n, d]`.
            key: `[t, b, g, d]`, t >= s; the queries are the last s of the t positions. t = s with
                context parallelism.
            value: `[t, b, g, d]`.
            document_starts: `[b, S]` on the CPU, where each position's document starts, for
                the whole sequence; None to look across documents.

        Returns:
            `[s, b, n * d]`.
        """
        dropout = self.dropout if self.training else 0.0
        seed = 0
        if dropout > 0.0:
            # Heads are split over tensor-parallel ranks, so each rank draws its own masks.
            seed = self._rng.generator(self._path, axis="tp").initial_seed()
        if self.axis.size == 1 and self.precision.active:
            offset = key.shape[0] - query.shape[0]
            block = Block(self.scale, offset, document_starts, dropout, seed)
            return fp8_attention(query, key, value, self.precision, Whole(block))
        if self.axis.size == 1:
            return causal_attention(
                query,
                key,
                value,
                scale=self.scale,
                dropout=dropout,
                seed=seed,
                starts=document_starts,
            )
        job = ContextBlock(self._ring, self.scale, document_starts, dropout, seed, self._inner)
        if not self.precision.active:
            return context_attention(query, key, value, job, self.comm)
        check_shards(query, key, job, self.comm)
        size = query.element_size()
        place = placement(self.comm, self.axis, job, self._exchange_in_fp8, size)
        return fp8_attention(query, key, value, self.precision, place)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        text = f"layer_number={self.layer_number}, scale={self.scale:.4g}, dropout={self.dropout}"
        return text if self.axis.size == 1 else f"{text}, cp={self.axis.size} {self.comm}"
