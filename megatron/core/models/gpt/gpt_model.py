"""The GPT model: embedding, layers, projection onto the vocabulary, loss.

Shape legend: s sequence, b microbatch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.config.fp8 import recipe_of
from megatron.config.placement import Stage, whole_model
from megatron.core.fp8.precision import PrecisionRow, dtype_name, group_rows
from megatron.core.models.gpt.embedding import LanguageModelEmbedding, TiedWordEmbedding
from megatron.core.models.gpt.gpt_layer_specs import gpt_decoder_spec
from megatron.core.models.gpt.output_layer import OutputLayer
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.build import Build

_OUTSIDE_FP8 = (
    ("word_embeddings", "table lookup", "not an FP8 consumer: a lookup is no matrix product"),
)
_ROUTER = "not an FP8 consumer: --moe-router-dtype"
# Layers of torch's own, from somebody's specification: they multiply, and not in FP8.
_NO_FP8_PATH = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.MultiheadAttention)


class GPTModel(nn.Module):
    """A decoder-only transformer language model.

    A pipeline rank holds some stages of it. Its modules keep the names that they have in the whole
    model, so that a parameter's name never depends on the layout.

    Args:
        build: Configuration, mesh, backend, precision, random streams, device.
        decoder_spec: What the layers are made of; by default what the backend offers.
        stages: The pipeline stages of this rank; default the whole model in one.
    """

    embedding: LanguageModelEmbedding | TiedWordEmbedding | None
    output_layer: OutputLayer | None

    def __init__(
        self,
        build: Build,
        decoder_spec: ModuleSpec | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__()
        config = build.config
        self.config = config
        self.axis = build.mesh.tp
        self.auxiliary = build.auxiliary
        self._plain = dtype_name(build.params_dtype)
        self.vocab_size = config.vocab_size or config.padded_vocab_size
        self.tied = not config.untie_embeddings_and_output_weights
        self.spec = decoder_spec or gpt_decoder_spec(config, build.backend)
        self.stages = tuple(stages or (whole_model(config.num_layers),))
        self.pre_process = any(s.embedding for s in self.stages)
        self.post_process = any(s.loss for s in self.stages)
        self.embedding = None
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(build=build.at("embedding"))
            if self.tied and not self.post_process:
                weight: Any = self.embedding.word_embeddings.weight
                weight.shared_embedding = True
        elif self.tied and self.post_process:
            self.embedding = TiedWordEmbedding(build=build.at("embedding"))
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(build=build)
        self.decoder = build_module(self.spec, build=build.at("decoder"), stages=self.stages)
        self._received: Tensor | None = None
        self.output_layer = None
        if self.post_process:
            self.output_layer = OutputLayer(build=build.at("output_layer"), tied=self.tied)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        stage: int = 0,
    ) -> Tensor:
        """Compute the loss of every token, the logits, or what the next pipeline stage needs.

        Args:
            tokens: `[b, s]` token ids; on a context-parallel rank its two chunks of the sequence.
            position_ids: `[b, s]`; with a cache, positions that follow the cached ones.
            labels: `[b, s]` next tokens, or None.
            cache: Keys and values of earlier tokens, in generation; extended by these.
            document_starts: `[b, S]` on the CPU, where each position's document starts, for the
                whole sequence; None to look across documents.
            hidden: `[s or s/t, b, h]` from the stage before; None in the first stage.
            stage: Which of this rank's stages to run, counted from 0.

        Returns:
            In the last stage `[b, s]` fp32 losses if labels are given, else logits `[b, s, v/t]`;
            in the others `[s or s/t, b, h]`.
        """
        part = self.stages[stage]
        if hidden is None:
            hidden, self._received = self._received, None
        if isinstance(self.embedding, LanguageModelEmbedding) and part.embedding:
            hidden = self.embedding(tokens, position_ids)
        rotation = None if self.rotary is None else self.rotary(position_ids)
        hidden = self.decoder(hidden, rotation, cache, document_starts, stage=part)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if self.output_layer is None or not part.loss:
            return hidden
        shared: Tensor | None = None
        if isinstance(self.embedding, TiedWordEmbedding):
            shared = self.embedding.word_embeddings()
        elif self.tied:
            shared = self.shared_embedding_or_output_weight()
        logits: Tensor = self.output_layer(hidden, shared)  # [s, b, v/t]
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), self.axis, self.vocab_size, reuse_logits=True
        )
        return losses.t().contiguous()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set `hidden` of the next call, as Megatron's schedules do.

        Args:
            input_tensor: `[s or s/t, b, h]` from the stage before, alone or in a list of one.
        """
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        """The weight that the output layer multiplies with.

        Raises:
            TypeError: This rank holds neither the embedding nor the output layer.
        """
        weight: nn.Parameter | None = None
        if self.tied and self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
        elif self.output_layer is not None:
            weight = self.output_layer.weight
        if weight is None:
            raise TypeError("GPTModel: the output layer has no weight.")
        return weight

    def named_precision_rows(self) -> list[PrecisionRow]:
        """Which matrix product of which layer runs in which precision, in the model's order.

        What no FP8 recipe covers is listed too: the table is the whole model.
        """
        plain = self._plain
        rows: list[PrecisionRow] = []
        for path, module in self.named_modules():
            precision = getattr(module, "precision", None)
            if precision is not None:
                rows += precision.rows()
            if isinstance(module, Router):
                dtype = self.config.moe_router_dtype
                rows.append(PrecisionRow(path, "all", dtype, dtype, "matmul", _ROUTER))
            rows += group_rows(getattr(module, "precisions", ()), path)
            if isinstance(module, MoELayer):
                rows += module.precision_rows
            if isinstance(module, _NO_FP8_PATH):
                kind = f"torch.nn.{type(module).__name__}"
                recipe = recipe_of(self.config)
                family = "fp4" if recipe == "nvfp4" else "fp8"
                wanted = plain if recipe is None else f"{family} {recipe}"
                rows.append(PrecisionRow(path, "all", wanted, plain, kind, f"{kind}: no FP8 path"))
            for name, kernel, reason in _OUTSIDE_FP8:
                if path.endswith(name):
                    rows.append(PrecisionRow(path, "all", plain, plain, kernel, reason))
        return rows

    def set_is_first_microbatch(self) -> None:
        """Accept Megatron's hint; quantized weights are cached by version, so nothing changes."""
