"""Logits of models that are larger than memory: layer by layer, in both implementations.

Each layer is built with the weights that lie in the files, run, and dropped. Both implementations
of a layer get the same inputs, those that transformers' layer before it gave: over many wide layers
two chains of their own would drift apart by more than the tolerance through rounding alone, and a
small mistake could hide in that. The word embeddings and the output layer are looked up and
multiplied block by block; they are the same numbers on both sides, as the comparison of all tensors
has shown before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from megatron.config import RunConfig
from megatron.config.placement import Stage
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.training import hf_map, hf_probe
from megatron.training.hf_convert import config_of
from megatron.training.hf_rows import OUTSIDE, tensors_of
from megatron.training.hf_sources import HfSource, Source

_VOCABULARY = 8  # of models whose embeddings nobody looks at
_BLOCK_ROWS = 1 << 14  # rows of the output layer that are in memory at a time


class Streamed:
    """Two models, run side by side one layer at a time.

    Args:
        own: Where our weights come from.
        other: The HuggingFace directory.
        dtype: Weights are rounded to it first.
        transformers: The library.
    """

    def __init__(self, own: Source, other: HfSource, dtype: torch.dtype, transformers: Any) -> None:
        self._own, self._other, self._dtype = own, other, dtype
        self._gpt2 = other.model_type == "gpt2"
        self._library = transformers
        self._their_config = transformers.AutoConfig.from_pretrained(
            other.directory, local_files_only=True
        )
        self._their_config.quantization_config = None
        fields = {**own.fields, "vocab_size": _VOCABULARY}
        fields["untie_embeddings_and_output_weights"] = False
        self._config: RunConfig = config_of(fields, "fp32")

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor, str | None]:
        """Compute both models' logits ``[b, s, v]``.

        Returns:
            (ours, theirs, the first part that differs or None). With a difference the logits are
            those of the layer where it was found, and everything behind it is left out.
        """
        hidden = self._embedded(tokens)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        layers = self._own.fields["num_layers"]
        for number in range(layers):
            last = number == layers - 1
            layer, left, ours = self._run_ours(number, hidden, positions, last)
            other, right, theirs = self._run_theirs(number, hidden, positions, last)
            where = hf_probe.first_difference(left, right)
            if where is not None:
                return ours, theirs, where + hf_probe.wrong_expert(layer, other)
            hidden = theirs
            del layer, other
        head = hf_map.OUTPUT if self._untied() else hf_map.WORD_EMBEDDINGS
        return self._project(ours, head), self._project(theirs, head), None

    def _untied(self) -> bool:
        return bool(self._own.fields.get("untie_embeddings_and_output_weights"))

    def _hf_name(self, ours: str) -> str:
        names = {row.name: row.names[0] for row in self._other.rows() if not row.per_layer}
        return self._other.name_of(names[ours], OUTSIDE)

    def _embedded(self, tokens: Tensor) -> Tensor:
        def rows(name: str, numbers: list[int]) -> Tensor:
            weights, own = self._other.weights, self._hf_name(name)
            found = [weights.get(own, slice(n, n + 1)) for n in numbers]
            return torch.cat(found).to(self._dtype).float()

        hidden = rows(hf_map.WORD_EMBEDDINGS, tokens.flatten().tolist()).view(*tokens.shape, -1)
        if self._gpt2:
            positions = list(range(tokens.shape[1]))
            hidden = hidden + rows("embedding.position_embeddings.weight", positions)
        return hidden

    def _project(self, hidden: Tensor, head: str) -> Tensor:
        name, vocabulary = self._hf_name(head), self._own.fields["vocab_size"]
        blocks = []
        for start in range(0, vocabulary, _BLOCK_ROWS):
            rows = slice(start, min(start + _BLOCK_ROWS, vocabulary))
            weight = self._other.weights.get(name, rows).to(self._dtype).float()
            blocks.append(F.linear(hidden, weight))
        return torch.cat(blocks, dim=-1)

    def _run_ours(
        self, number: int, hidden: Tensor, positions: Tensor, last: bool
    ) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
        stage = Stage(0, number, number + 1, embedding=False, loss=last)
        build = _build(self._config, "meta")
        model = GPTModel(build, stages=[stage]).eval()
        if model.rotary is not None:
            model.rotary = RotaryEmbedding(build=_build(self._config, "cpu"))
        state = {}
        rows = self._own.rows()
        final = [one for one in tensors_of(rows, None) if one[0].name.startswith("decoder.final")]
        for row, at in [*tensors_of(rows, number), *(final if last else ())]:
            value = self._own.read(row, at)
            own = value if row.dtype else value.to(self._dtype)
            state[at.of(row.name)] = own.float()
        _assign(model, state)
        decoder: Any = model.decoder
        (layer,) = decoder.layers
        parts = hf_probe.our_layer(layer, number, hf_probe.sizes_of(model), self._gpt2)
        rotation = None if model.rotary is None else model.rotary(positions)
        with hf_probe.recorded(parts) as outputs:
            out = decoder(hidden.transpose(0, 1).contiguous(), rotation, stage=stage)
        return layer, outputs, out.transpose(0, 1)

    def _run_theirs(
        self, number: int, hidden: Tensor, positions: Tensor, last: bool
    ) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
        model = self._their_model(number)
        base = model.transformer if self._gpt2 else model.model
        (layer,) = base.h if self._gpt2 else base.layers
        parts = hf_probe.their_layer(layer, number, self._gpt2)
        parts["out"] = hf_probe.Part(layer, lambda o: o[0] if isinstance(o, tuple) else o)
        with hf_probe.recorded(parts) as outputs:
            normed = base(inputs_embeds=hidden, position_ids=positions).last_hidden_state
        out = outputs.pop("out")
        return layer, outputs, normed if last else out

    def _their_model(self, number: int) -> Any:
        """Transformers' model with this one layer, as its layer 0."""
        weights, own = self._other.weights, self._dtype
        of_layer, outside, first = self._prefixes(number)
        width = self._own.fields["hidden_size"]
        state: dict[str, Tensor] = {}
        for name in weights:
            if name.startswith(of_layer):
                value = weights.get(name)
                # What stays in fp32 whatever the others are converted to, a router's bias say.
                kept = name.endswith("e_score_correction_bias")
                state[first + name.removeprefix(of_layer)] = value if kept else value.to(own)
            elif name.startswith(outside):
                state[self._full(name)] = weights.get(name).to(own)
        empty = torch.zeros(_VOCABULARY, width)
        if self._gpt2:
            positions = self._their_config.n_positions
            state["transformer.wte.weight"] = empty
            state["transformer.wpe.weight"] = torch.zeros(positions, width)
        else:
            state["model.embed_tokens.weight"] = empty
        state["lm_head.weight"] = empty
        config = _one_layer(self._their_config, number)
        kind = getattr(self._library, self._their_config.architectures[0])
        return kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def _prefixes(self, number: int) -> tuple[str, str, str]:
        if not self._gpt2:
            return f"model.layers.{number}.", "model.norm.", "model.layers.0."
        name = self._other.name_of
        layer = name(f"transformer.h.{number}.", OUTSIDE)
        return layer, name("transformer.ln_f.", OUTSIDE), "transformer.h.0."

    def _full(self, name: str) -> str:
        bare = self._gpt2 and not name.startswith("transformer.")
        return f"transformer.{name}" if bare else name


def _build(config: RunConfig, device: str) -> Build:
    return Build.root(config, ParallelState.single(), NativeBackend(), torch.device(device))


def _assign(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a model on paper its weights; the embedding and the output layer stay there."""
    model.load_state_dict(state, strict=False, assign=True)
    missing = [
        n
        for n, t in [*model.named_parameters(), *model.named_buffers()]
        if t.is_meta and n.startswith("decoder.") and n not in state
    ]
    if missing:
        raise RuntimeError(f"no values for {missing}")


def _one_layer(config: Any, number: int) -> Any:
    """Transformers' configuration of a model whose only layer is like layer ``number``."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    own.vocab_size, own.pad_token_id = _VOCABULARY, None
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(own, name, None)
        if kinds:
            setattr(own, name, [kinds[number]])
    if hasattr(own, "mlp_only_layers"):
        step = getattr(own, "decoder_sparse_step", 1)
        dense = number in own.mlp_only_layers or (number + 1) % step != 0
        own.mlp_only_layers, own.decoder_sparse_step = ([0] if dense else []), 1
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = int(number < own.first_k_dense_replace)
    return own
