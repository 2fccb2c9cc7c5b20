"""The projection of the residual stream onto the vocabulary.

Shape legend: s sequence, b microbatch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.core.fp8.linear import linear
from megatron.core.shards import init_parameter, mark_sharded
from megatron.core.tensor_parallel.mappings import copy_to_region
from megatron.core.tensor_parallel.overlap import transfers_of
from megatron.core.transformer.initialization import init_methods

if TYPE_CHECKING:
    from megatron.core.build import Build


class OutputLayer(nn.Module):
    """Column-parallel product with its own weight, or with the word embedding's.

    With tied weights this module holds no parameter: the embedding's is passed to `forward`, so
    there is one tensor, one gradient and one optimizer state.

    Args:
        build: Configuration, mesh, precision, path.
        tied: Whether the weight is the word embedding's.
    """

    weight: nn.Parameter | None

    def __init__(self, *, build: Build, tied: bool) -> None:
        super().__init__()
        config = build.config
        self.axis = build.mesh.tp
        self.sequence_parallel = config.sequence_parallel and self.axis.size > 1
        self.precision = build.fp8.for_linear(build.path)
        self.transfers = transfers_of(config)
        self.weight = None
        if tied:
            return
        shape = (config.padded_vocab_size // self.axis.size, config.hidden_size)
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=build.params_dtype, device=build.device)
        )
        mark_sharded(self.weight, 0)
        init_parameter(
            self.weight,
            self.axis,
            init_methods(config).hidden,
            config.seed,
            f"{build.path}.weight",
            config.vocab_size,
        )

    def forward(self, hidden: Tensor, shared_weight: Tensor | None = None) -> Tensor:
        """Logits of every position.

        Args:
            hidden: `[s, b, h]`, or `[s/t, b, h]` with sequence parallelism.
            shared_weight: `[v/t, h]` of the word embedding, if tied.

        Returns:
            `[s, b, v/t]` in the type of the weight.
        """
        weight = self.weight if shared_weight is None else shared_weight
        if weight is None:
            raise TypeError("OutputLayer: a tied layer needs the word embedding's weight.")
        if self.sequence_parallel:
            return linear(
                hidden, weight, None, self.precision, gather=self.axis, transfers=self.transfers
            )
        return linear(copy_to_region(hidden, self.axis), weight, None, self.precision)
