"""The GPT model: embedding, layers, projection onto the vocabulary, loss.

Shape legend: s sequence, b microbatch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.fp8.precision import PrecisionRow
from megatron.core.models.gpt.embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import gpt_decoder_spec
from megatron.core.models.gpt.output_layer import OutputLayer
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.build import Build

_OUTSIDE_FP8 = (
    ("word_embeddings", "table lookup", "not an FP8 consumer: a lookup is no matrix product"),
    ("core_attention", "softmax attention", "not an FP8 consumer: the recipes cover linear layers"),
)


class GPTModel(nn.Module):
    """A decoder-only transformer language model.

    Args:
        build: Configuration, mesh, backend, precision, random streams, device.
        decoder_spec: What the layers are made of; by default what the backend offers.
    """

    def __init__(self, build: Build, decoder_spec: ModuleSpec | None = None) -> None:
        super().__init__()
        config = build.config
        self.config = config
        self.axis = build.mesh.tp
        self.vocab_size = config.vocab_size or config.padded_vocab_size
        self.tied = not config.untie_embeddings_and_output_weights
        self.spec = decoder_spec or gpt_decoder_spec(config, build.backend)
        self.embedding = LanguageModelEmbedding(build=build.at("embedding"))
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(build=build)
        self.decoder = build_module(self.spec, build=build.at("decoder"))
        self.output_layer = OutputLayer(build=build.at("output_layer"), tied=self.tied)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of every token, or the logits.

        Args:
            tokens: `[b, s]` token ids; on a context-parallel rank its two chunks of the sequence.
            position_ids: `[b, s]`; with a cache, positions that follow the cached ones.
            labels: `[b, s]` next tokens, or None.
            cache: Keys and values of earlier tokens, in generation; extended by these.
            document_starts: `[b, S]` on the CPU, where each position's document starts, for the
                whole sequence; None to look across documents.

        Returns:
            `[b, s]` fp32 losses if labels are given, else logits `[b, s, v/t]`.
        """
        hidden = self.embedding(tokens, position_ids)
        rotation = None if self.rotary is None else self.rotary(position_ids)
        hidden = self.decoder(hidden, rotation, cache, document_starts)
        if cache is not None:
            cache.advance(tokens.shape[1])
        shared = self.embedding.word_embeddings.weight if self.tied else None
        logits: Tensor = self.output_layer(hidden, shared)  # [s, b, v/t]
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), self.axis, self.vocab_size, reuse_logits=True
        )
        return losses.t().contiguous()

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        """The weight that the output layer multiplies with."""
        weight = self.embedding.word_embeddings.weight if self.tied else self.output_layer.weight
        if weight is None:
            raise TypeError("GPTModel: the output layer has no weight.")
        return weight

    def named_precision_rows(self) -> list[PrecisionRow]:
        """Which matrix product of which layer runs in which precision, in the model's order.

        What no FP8 recipe covers is listed too: the table is the whole model.
        """
        plain = self.output_layer.precision.row().delivered
        rows: list[PrecisionRow] = []
        for path, module in self.named_modules():
            precision = getattr(module, "precision", None)
            if precision is not None:
                rows += precision.rows()
            for name, kernel, reason in _OUTSIDE_FP8:
                if path.endswith(name):
                    rows.append(PrecisionRow(path, "all", plain, plain, kernel, reason))
        return rows

    def set_is_first_microbatch(self) -> None:
        """Accept Megatron's hint; quantized weights are cached by version, so nothing changes."""
