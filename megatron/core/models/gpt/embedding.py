"""Token and position embeddings: where a batch becomes a residual stream.

Shape legend: s sequence, b microbatch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.errors import DataError, complaint
from megatron.core.mesh import Axis
from megatron.core.shards import init_parameter
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import split
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.rotary import shared_row

if TYPE_CHECKING:
    from megatron.core.build import Build


class PositionEmbedding(nn.Module):
    """A learned vector for every position, the same on every tensor-parallel rank.

    Args:
        count: Number of positions.
        build: Configuration, mesh, path.
    """

    def __init__(self, count: int, *, build: Build) -> None:
        super().__init__()
        config = build.config
        self.weight = nn.Parameter(
            torch.empty(count, config.hidden_size, dtype=build.params_dtype, device=build.device)
        )
        path = f"{build.path}.weight"
        init = init_methods(config).hidden
        init_parameter(self.weight, Axis.single("tp"), init, config.seed, path)
        if config.sequence_parallel:  # each rank looks up its own part of the sequence
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, positions: Tensor) -> Tensor:
        """`[s, b or 1]` positions to `[s, b or 1, h]`.

        Raises:
            DataError: A position is beyond the table (checked on a CPU only: looking at the values
                would stall an accelerator).
        """
        count = self.weight.shape[0]
        if positions.device.type == "cpu" and positions.numel() and int(positions.max()) >= count:
            raise DataError(
                complaint(
                    "position_ids",
                    int(positions.max()),
                    f"--max-position-embeddings gives the model positions 0 to {count - 1}",
                    "Shorten the sequence or train with more positions",
                )
            )
        # Widened so that a position used by several sequences sums its gradient in fp32.
        return F.embedding(positions, self.weight.float()).to(self.weight.dtype)


class SharedTable(VocabParallelEmbedding):
    """A table that is only multiplied with. Calling it lets hooks on the use of its weight run."""

    def forward(self) -> Tensor:  # type: ignore[override]
        """The weight, `[v/t, h]`."""
        return self.weight


class TiedWordEmbedding(nn.Module):
    """The last pipeline stage's copy of the word embedding, which its output layer multiplies with.

    Same name, same initial values and the sum of both gradients on both sides: the copies stay
    equal, and a checkpoint holds them once.

    Args:
        build: Configuration, mesh, path.
    """

    def __init__(self, *, build: Build) -> None:
        super().__init__()
        self.word_embeddings = word_embedding(build, SharedTable)
        weight: Any = self.word_embeddings.weight
        weight.shared_embedding = True
        weight.shared = True  # sums over the model count the first stage's copy


def word_embedding(
    build: Build, kind: type[VocabParallelEmbedding] = VocabParallelEmbedding
) -> VocabParallelEmbedding:
    """The table of word vectors below the embedding at `build.path`."""
    config = build.config
    return kind(
        config.padded_vocab_size,
        config.hidden_size,
        build=build.at("word_embeddings"),
        init_method=init_methods(config).hidden,
        reduce_scatter_embeddings=True,
    )


class LanguageModelEmbedding(nn.Module):
    """Word embedding, learned positions if the model has them, dropout.

    Args:
        build: Configuration, mesh, random streams, path.
    """

    def __init__(self, *, build: Build) -> None:
        super().__init__()
        config = build.config
        self.axis = build.mesh.tp
        self.sequence_parallel = config.sequence_parallel and self.axis.size > 1
        self.hidden_dropout = config.hidden_dropout
        self._rng, self._path = build.rng, build.path
        self.word_embeddings = word_embedding(build)
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings, build=build.at("position_embeddings")
            )

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embed a batch.

        Args:
            tokens: `[b, s]`.
            position_ids: `[b, s]`.

        Returns:
            `[s, b, h]`, or `[s/t, b, h]` with sequence parallelism.
        """
        hidden: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            positions = shared_row(position_ids).t()
            if self.sequence_parallel:
                positions = split(positions, self.axis)
            hidden = hidden + self.position_embeddings(positions)
        return self._rng.dropout(
            hidden,
            self.hidden_dropout,
            f"{self._path}.hidden_dropout",
            sharded=self.sequence_parallel,
            training=self.training,
        )
