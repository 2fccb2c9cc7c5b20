"""Mixture-of-experts families: their part of ``config.json`` and of the tensor tables.

Supported are those whose routers this project's router computes exactly:

* ``mixtral``: a softmax over the chosen experts;
* ``qwen3_moe``: that, or a softmax over all experts; dense layers anywhere;
* ``qwen2_moe``: the same with a shared expert behind a gate;
* ``glm4_moe``: DeepSeek-V3's router (sigmoid scores, a correction bias for the choice, groups of
  experts) and a shared expert; the first layers may be dense.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron.config.moe import layer_pattern
from megatron.training.hf_rows import Row, gated_row, plain_row

if TYPE_CHECKING:
    from megatron.training.hf_config import Refusals

Fields = dict[str, Any]

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
# Sizes in config.json, beside those of every model; of names joined by "|" the first one there is.
SIZES = {
    "mixtral": ("num_local_experts|num_experts", "num_experts_per_tok"),
    "qwen2_moe": (
        "num_experts|num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    "qwen3_moe": (
        "num_experts|num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
    "glm4_moe": (
        "n_routed_experts|num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
    ),
}
PREDICTING = ("glm4_moe",)  # families whose files may have layers behind the last one
BALANCING = "moe_router_load_balancing_type"
_DENSE_FIRST = "first_k_dense_replace"
_SPARSE_LISTS = ("qwen2_moe", "qwen3_moe")  # name their dense layers one by one


def size_of(config: Mapping[str, Any], names: str) -> Any:
    """Return the first of several spellings that a configuration has, None without any."""
    return next((config[n] for n in names.split("|") if config.get(n) is not None), None)


# ------------------------------------------------------------------------------- HF to our settings


def moe_fields(config: Mapping[str, Any], refused: Refusals) -> Fields:
    """Translate what a mixture-of-experts model has beside a dense one.

    Args:
        config: The content of ``config.json``, whose sizes have been checked.
        refused: Receives what cannot be represented.
    """
    kind = config["model_type"]
    sizes = [size_of(config, names) for names in SIZES[kind]]
    experts, topk = sizes[:2]
    width = config["intermediate_size"] if kind == "mixtral" else sizes[2]
    refused.check(topk <= experts, "num_experts_per_tok", topk, f"there are {experts} experts")
    fields: Fields = {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": _pattern_text(_layers_with_experts(config, refused)),
    }
    if kind == "glm4_moe":
        return fields | _independent_router(config, topk, width, refused)
    normalized = kind == "mixtral" or bool(config.get("norm_topk_prob", False))
    fields["moe_router_score_function"] = "softmax"
    fields["moe_router_pre_softmax"] = not normalized
    refused.check(
        topk > 1 or not normalized,
        "num_experts_per_tok",
        topk,
        "normalised over one expert its weight is always 1, and no router could learn it",
    )
    if kind == "qwen2_moe":
        fields["moe_shared_expert_intermediate_size"] = sizes[3]
        fields["moe_shared_expert_gate"] = True
    return fields


def _independent_router(
    config: Mapping[str, Any], topk: int, width: int, refused: Refusals
) -> Fields:
    """DeepSeek-V3's router, and the shared expert that comes with it."""
    normalized = bool(config.get("norm_topk_prob", True))
    refused.check(
        normalized == (topk > 1),
        "norm_topk_prob",
        normalized,
        f"weights of {topk} experts are {'' if topk > 1 else 'not '}divided by their sum",
    )
    factor = float(config.get("routed_scaling_factor") or 1.0)
    fields: Fields = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": width * config["n_shared_experts"],
        **({"moe_router_topk_scaling_factor": factor} if factor != 1.0 else {}),
    }
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == chosen:
        return fields  # every group may be used
    refused.check(
        topk == 2 * chosen,
        "topk_group",
        chosen,
        f"groups are ranked by their two best experts, which needs num_experts_per_tok {2 * chosen}"
        f" instead of {topk}",
    )
    return fields | {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _layers_with_experts(config: Mapping[str, Any], refused: Refusals) -> tuple[bool, ...]:
    kind, layers = config["model_type"], range(config["num_hidden_layers"])
    pattern = tuple(True for _ in layers)
    if kind == "glm4_moe":
        pattern = tuple(i >= (config.get(_DENSE_FIRST) or 0) for i in layers)
    elif kind in _SPARSE_LISTS:
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        pattern = tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    refused.check(any(pattern), "num_hidden_layers", len(layers), "no layer has experts")
    return pattern


def _pattern_text(pattern: Sequence[bool]) -> str:
    """Spell which layers have experts as ``--moe-layer-freq`` does: ``([0]*1+[1]*3)``."""
    if all(pattern):
        return "1"
    runs = [(int(value), len(list(run))) for value, run in itertools.groupby(pattern)]
    return "(" + "+".join(f"[{value}]*{length}" for value, length in runs) + ")"


# ------------------------------------------------------------------------------- our settings to HF


def kind_of(fields: Mapping[str, Any]) -> str:
    """Return the family that comes nearest to a model with experts."""
    if (fields.get("moe_router_score_function") or "softmax") != "softmax":
        return "glm4_moe"
    if fields.get("moe_shared_expert_intermediate_size"):
        return "qwen2_moe"
    return "qwen3_moe" if fields.get("qk_layernorm") else "mixtral"


def moe_config(fields: Mapping[str, Any], kind: str, refused: Refusals) -> Fields:
    """Build the part of ``config.json`` about experts.

    Args:
        fields: Settings by this project's field names.
        kind: The family, from ``kind_of``.
        refused: Receives what the family does not have.
    """
    pattern = layer_pattern(str(fields.get("moe_layer_freq") or "1"), fields["num_layers"])
    topk, width = fields["moe_router_topk"], expert_width(fields)
    refused.check(
        "sinkhorn" not in (fields.get(BALANCING) or ()),
        BALANCING,
        "sinkhorn",
        "its weights are a softmax over all experts, or a sigmoid, that no such architecture has",
    )
    config: Fields = {"num_experts_per_tok": topk}
    if kind == "glm4_moe":
        return config | _glm4_config(fields, pattern, refused)
    for name in ("moe_router_enable_expert_bias", "moe_router_num_groups"):
        refused.check(not fields.get(name), name, fields.get(name), "the softmax router has none")
    factor = fields.get("moe_router_topk_scaling_factor") or 1.0
    refused.check(
        factor == 1.0, "moe_router_topk_scaling_factor", factor, "the architecture has none"
    )
    normalized = not fields.get("moe_router_pre_softmax")
    if kind == "mixtral":
        refused.check(
            normalized, "moe_router_pre_softmax", True, "without qk_layernorm only Mixtral is left"
        )
        refused.check(
            all(pattern), "moe_layer_freq", fields.get("moe_layer_freq"), "all layers have experts"
        )
        return config | {
            "num_local_experts": fields["num_experts"],
            "intermediate_size": width,
            "sliding_window": None,
        }
    config |= {
        "num_experts": fields["num_experts"],
        "moe_intermediate_size": width,
        "norm_topk_prob": normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has_experts in enumerate(pattern) if not has_experts],
        "use_sliding_window": False,
    }
    if kind == "qwen2_moe":
        gate = bool(fields.get("moe_shared_expert_gate"))
        refused.check(gate, "moe_shared_expert_gate", gate, "Qwen2-MoE's shared expert has a gate")
        config["shared_expert_intermediate_size"] = fields["moe_shared_expert_intermediate_size"]
        config["qkv_bias"] = bool(fields.get("add_qkv_bias"))
    return config


def _glm4_config(fields: Mapping[str, Any], pattern: Sequence[bool], refused: Refusals) -> Fields:
    wanted = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_gate": False,
    }
    for name, value in wanted.items():
        got = fields.get(name) or False
        refused.check(got == value, name, got, f"the architecture needs {value!r}")
    dense = pattern.index(True)
    refused.check(
        all(pattern[dense:]),
        "moe_layer_freq",
        fields.get("moe_layer_freq"),
        "only the first layers may be without experts",
    )
    width, shared = expert_width(fields), fields.get("moe_shared_expert_intermediate_size") or 0
    refused.check(
        shared > 0 and shared % width == 0,
        "moe_shared_expert_intermediate_size",
        shared or None,
        f"the architecture needs a shared expert whose width is a multiple of {width}",
    )
    topk = fields["moe_router_topk"]
    chosen = fields.get("moe_router_group_topk") or 1
    grouped = bool(fields.get("moe_router_num_groups"))
    refused.check(
        not grouped or topk == 2 * chosen,
        "moe_router_group_topk",
        chosen,
        f"the architecture ranks groups by two experts, which needs {topk / 2:g}",
    )
    return {
        "n_routed_experts": fields["num_experts"],
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "routed_scaling_factor": float(fields.get("moe_router_topk_scaling_factor") or 1.0),
        "norm_topk_prob": topk > 1,
        "n_group": fields.get("moe_router_num_groups") or 1,
        "topk_group": chosen,
        _DENSE_FIRST: dense,
        "use_qk_norm": bool(fields.get("qk_layernorm")),
        "attention_bias": bool(fields.get("add_qkv_bias")),
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": float(fields.get("rotary_percent", 1.0)),
    }


# ------------------------------------------------------------------------------- the tensors


@dataclass(frozen=True)
class _Names:
    """How a family calls the tensors of a layer with experts, below ``model.layers.{i}``."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""


_NAMES = {
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": _Names(shared="shared_expert"),
    "qwen3_moe": _Names(),
    "glm4_moe": _Names(shared="shared_experts"),
}


def expert_width(fields: Mapping[str, Any]) -> int:
    """Return the inner width of an expert."""
    return int(fields.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"])


def with_experts(rows: Sequence[Row], fields: Mapping[str, Any], kind: str) -> list[Row]:
    """Turn the table of a dense model into that of one with experts.

    Args:
        rows: The dense model's table.
        fields: Settings by this project's field names.
        kind: The family.
    """
    pattern = layer_pattern(str(fields.get("moe_layer_freq") or "1"), fields["num_layers"])
    dense = tuple(i for i, has_experts in enumerate(pattern) if not has_experts)
    sparse = tuple(i for i, has_experts in enumerate(pattern) if has_experts)
    table = []
    for row in rows:
        if ".mlp." not in row.name:
            table.append(row)
        elif dense:
            table.append(replace(row, layers=dense))
    return table + [replace(row, layers=sparse) for row in _expert_rows(fields, kind)]


def _expert_rows(fields: Mapping[str, Any], kind: str) -> list[Row]:
    names, ours, theirs = _NAMES[kind], "decoder.layers.{i}.mlp.", "model.layers.{i}."
    h, f, count = fields["hidden_size"], expert_width(fields), fields["num_experts"]
    block = f"{theirs}{names.block}."

    def pair(name: str, end: str, prefix: str, width: int) -> list[Row]:
        gate, up, down = (f"{prefix}.{n}.weight" for n in (names.gate, names.up, names.down))
        return [
            gated_row(f"{name}.linear_fc1.weight{end}", gate, up, (width, h)),
            plain_row(f"{name}.linear_fc2.weight{end}", down, (h, width)),
        ]

    norm = f"{theirs}post_attention_layernorm.weight"
    rows = [
        plain_row("decoder.layers.{i}.pre_mlp_layernorm.weight", norm, (h,)),
        plain_row(f"{ours}router.weight", f"{block}gate.weight", (count, h)),
    ]
    if fields.get("moe_router_enable_expert_bias"):
        bias = plain_row(
            f"{ours}router.expert_bias", f"{block}gate.e_score_correction_bias", (count,)
        )
        rows.append(replace(bias, dtype=torch.float32))
    for row in pair(f"{ours}experts", "{e}", f"{block}experts.{{e}}", f):
        rows.append(replace(row, num_experts=count))
    shared = fields.get("moe_shared_expert_intermediate_size")
    if shared:
        rows += pair(f"{ours}shared_experts", "", f"{block}{names.shared}", shared)
    if fields.get("moe_shared_expert_gate"):
        gate = f"{block}{names.shared}_gate.weight"
        rows.append(plain_row(f"{ours}shared_experts.gate_weight", gate, (1, h)))
    return rows
