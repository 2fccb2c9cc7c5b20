"""Which HuggingFace tensors each of our tensors is made of, as tables.

Every row names one tensor of ours, the HuggingFace tensors behind it with their shapes, and the two
functions between them. All functions only move elements, so a round trip is bitwise.

Layouts (G query groups, r query heads per group, d head width, h hidden, f MLP width):

* fused QKV rows are, per group, r x d query rows, d key rows, d value rows;
* the gated MLP's first weight is ``[gate; up]``;
* GPT-2 stores its matrices transposed (``Conv1D``), and queries, keys and values one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.training import hf_moe
from megatron.training.hf_config import attention_sizes
from megatron.training.hf_rows import Join, Row, Split, halves, plain_row, stack

_LAYER = "decoder.layers.{i}."
_QKV = f"{_LAYER}self_attention.linear_qkv"
_PROJ = f"{_LAYER}self_attention.linear_proj"
_ATTENTION = f"{_LAYER}self_attention"
_FC1 = f"{_LAYER}mlp.linear_fc1"
_FC2 = f"{_LAYER}mlp.linear_fc2"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def _transpose_in(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].t()


def _transpose_out(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor.t()]


def interleave_qkv(tensors: Sequence[Tensor], groups: int, width: int) -> Tensor:
    """Fuse query, key and value rows group by group.

    Args:
        tensors: q ``[G * r * d, ...]``, k and v ``[G * d, ...]``.
        groups: G.
        width: d.

    Returns:
        ``[G * (r + 2) * d, ...]``.
    """
    parts = [t.reshape(groups, -1, width, *t.shape[1:]) for t in tensors]
    fused = torch.cat(parts, dim=1)
    return fused.reshape(-1, *tensors[0].shape[1:])


def split_qkv(fused: Tensor, groups: int, width: int) -> Sequence[Tensor]:
    """Take a fused weight or bias apart; the inverse of ``interleave_qkv``."""
    by_group = fused.reshape(groups, -1, width, *fused.shape[1:])
    heads = by_group.shape[1] - 2
    parts = torch.split(by_group, [heads, 1, 1], dim=1)
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def rows_for(fields: Mapping[str, Any], model_type: str) -> list[Row]:
    """Return the table of a model.

    Args:
        fields: Its settings by this project's field names.
        model_type: ``gpt2`` or a member of the Llama family.
    """
    if model_type == "gpt2":
        return _gpt2(fields)
    rows = _llama(fields)
    return hf_moe.with_experts(rows, fields, model_type) if fields.get("num_experts") else rows


def _llama(fields: Mapping[str, Any]) -> list[Row]:
    heads, groups, d = attention_sizes(fields)
    h, f, v = fields["hidden_size"], fields["ffn_hidden_size"], fields["vocab_size"]
    qkv: tuple[Join, Split] = (
        lambda t: interleave_qkv(t, groups, d),
        lambda t: split_qkv(t, groups, d),
    )
    qkv_rows = (heads * d, groups * d, groups * d)
    at, mlp = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
    projections = tuple(f"{at}{x}_proj" for x in "qkv")
    gated = (f"{mlp}gate_proj", f"{mlp}up_proj")

    def several(key: str, names: tuple[str, ...], end: str, shapes: Any, how: Any) -> Row:
        return Row(key + end, tuple(n + end for n in names), shapes, *how)

    rows = [
        plain_row(WORD_EMBEDDINGS, "model.embed_tokens.weight", (v, h)),
        plain_row(f"{_QKV}.layer_norm_weight", "model.layers.{i}.input_layernorm.weight", (h,)),
        several(_QKV, projections, ".weight", tuple((n, h) for n in qkv_rows), qkv),
        plain_row(f"{_PROJ}.weight", f"{at}o_proj.weight", (h, heads * d)),
        plain_row(
            f"{_FC1}.layer_norm_weight", "model.layers.{i}.post_attention_layernorm.weight", (h,)
        ),
        several(_FC1, gated, ".weight", ((f, h), (f, h)), (stack, halves)),
        plain_row(f"{_FC2}.weight", f"{mlp}down_proj.weight", (h, f)),
        plain_row("decoder.final_layernorm.weight", "model.norm.weight", (h,)),
    ]
    if fields.get("add_bias_linear") or fields.get("add_qkv_bias"):
        rows.append(several(_QKV, projections, ".bias", tuple((n,) for n in qkv_rows), qkv))
    if fields.get("add_bias_linear"):
        rows += [
            plain_row(f"{_PROJ}.bias", f"{at}o_proj.bias", (h,)),
            several(_FC1, gated, ".bias", ((f,), (f,)), (stack, halves)),
            plain_row(f"{_FC2}.bias", f"{mlp}down_proj.bias", (h,)),
        ]
    if fields.get("qk_layernorm"):
        rows += [
            plain_row(f"{_ATTENTION}.q_layernorm.weight", f"{at}q_norm.weight", (d,)),
            plain_row(f"{_ATTENTION}.k_layernorm.weight", f"{at}k_norm.weight", (d,)),
        ]
    if fields.get("untie_embeddings_and_output_weights"):
        rows.append(plain_row(OUTPUT, "lm_head.weight", (v, h)))
    return rows


def _gpt2(fields: Mapping[str, Any]) -> list[Row]:
    heads, _, d = attention_sizes(fields)
    h, f, v = fields["hidden_size"], fields["ffn_hidden_size"], fields["vocab_size"]
    positions = fields["max_position_embeddings"]
    layer = "transformer.h.{i}."

    def fuse(t: Sequence[Tensor]) -> Tensor:
        rows = t[0].t() if t[0].dim() == 2 else t[0]
        return interleave_qkv(rows.chunk(3, dim=0), heads, d)

    def unfuse(t: Tensor) -> Sequence[Tensor]:
        rows = torch.cat(list(split_qkv(t, heads, d)), dim=0)
        return [rows.t() if rows.dim() == 2 else rows]

    def conv(key: str, name: str, rows: int, columns: int) -> Row:
        return Row(key, (name,), ((rows, columns),), _transpose_in, _transpose_out)

    table = [
        plain_row(WORD_EMBEDDINGS, "transformer.wte.weight", (v, h)),
        plain_row("embedding.position_embeddings.weight", "transformer.wpe.weight", (positions, h)),
        Row(f"{_QKV}.weight", (f"{layer}attn.c_attn.weight",), ((h, 3 * h),), fuse, unfuse),
        Row(f"{_QKV}.bias", (f"{layer}attn.c_attn.bias",), ((3 * h,),), fuse, unfuse),
        conv(f"{_PROJ}.weight", f"{layer}attn.c_proj.weight", h, h),
        plain_row(f"{_PROJ}.bias", f"{layer}attn.c_proj.bias", (h,)),
        conv(f"{_FC1}.weight", f"{layer}mlp.c_fc.weight", h, f),
        plain_row(f"{_FC1}.bias", f"{layer}mlp.c_fc.bias", (f,)),
        conv(f"{_FC2}.weight", f"{layer}mlp.c_proj.weight", f, h),
        plain_row(f"{_FC2}.bias", f"{layer}mlp.c_proj.bias", (h,)),
    ]
    for part in ("weight", "bias"):
        table += [
            plain_row(f"{_QKV}.layer_norm_{part}", f"{layer}ln_1.{part}", (h,)),
            plain_row(f"{_FC1}.layer_norm_{part}", f"{layer}ln_2.{part}", (h,)),
            plain_row(f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}", (h,)),
        ]
    if fields.get("untie_embeddings_and_output_weights"):
        table.append(plain_row(OUTPUT, "lm_head.weight", (v, h)))
    return table
