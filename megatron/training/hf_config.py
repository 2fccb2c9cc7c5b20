"""A HuggingFace ``config.json`` and this project's settings, one from the other.

Supported: the Llama family (``llama``, ``mistral``, ``qwen2``, ``qwen3``), its relatives with
experts (``mixtral``, ``qwen2_moe``, ``qwen3_moe``, ``glm4_moe``, see ``hf_moe``) and ``gpt2``.
Anything that this project's model cannot compute is refused by the name it has in ``config.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, UnusableCheckpointError, complaint
from megatron.training import hf_moe, hf_quantization

Fields = dict[str, Any]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **hf_moe.ARCHITECTURES,
    "gpt2": "GPT2LMHeadModel",
}

# The published Llama 3.1 rescaling, the only one whose constants the model knows.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_ROPE_THETA = 10000.0


class Refusals:
    """Collects everything a model has that cannot be converted, to report it at once."""

    def __init__(self, source: object) -> None:
        """Name where the values come from."""
        self.source = source
        self.lines: list[str] = []

    def check(self, good: bool, name: str, got: object, why: str) -> None:
        """Note ``name: got X. WHY`` unless ``good``."""
        if not good:
            self.lines.append(f"{name} is {got!r}: {why}")

    def settle(self) -> None:
        """Raise if anything was noted.

        Raises:
            CheckpointError: Lists every reason.
        """
        if self.lines:
            raise CheckpointError(
                complaint(
                    "--load-dir",
                    self.source,
                    "; ".join(self.lines),
                    "This model cannot be converted without changing what it computes",
                )
            )


def unusable(problem: str) -> UnusableCheckpointError:
    """The error for a damaged HuggingFace directory; `problem` names the file."""
    fix = "Download the directory again, or name another one"
    return UnusableCheckpointError(problem, "--load-dir", fix)


_MOST_LAYERS = 100_000  # their names are listed
_GPT2_SIZES = ("n_embd", "n_layer", "n_head", "vocab_size")
_GPT2_OPTIONAL = ("n_inner", "n_positions")
_LLAMA_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_LLAMA_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        CheckpointError: It is missing or unreadable.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            complaint(
                "--load-dir",
                directory,
                f"It has no readable config.json ({error.strerror})",
                "Name a directory in HuggingFace format",
            )
        ) from error
    except ValueError as error:
        raise unusable(f"{path} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise unusable(f"{path} holds no dictionary")
    return values


# ------------------------------------------------------------------------------- HF to our settings


def fields_from_hf(config: Mapping[str, Any], source: object = "config.json") -> Fields:
    """Translate a HuggingFace configuration.

    Args:
        config: The content of ``config.json``.
        source: Named in messages.

    Returns:
        Architecture settings by this project's field names.

    Raises:
        CheckpointError: The architecture or one of its options is not supported; lists all of them.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            complaint(
                "--load-dir",
                f"model_type {kind!r} (architectures {config.get('architectures')})",
                "There is no mapping for it",
                f"Supported are {', '.join(ARCHITECTURES)}",
            )
        )
    refused = Refusals(source)
    names = config.get("architectures") or [ARCHITECTURES[kind]]
    refused.check(
        ARCHITECTURES[kind] in names, "architectures", names, f"only {ARCHITECTURES[kind]} is known"
    )
    if config.get("quantization_config") is not None:
        for name, got, why in hf_quantization.unreadable(config["quantization_config"]):
            refused.check(False, f"quantization_config.{name}".rstrip("."), got, why)
    if not _numbers_fit(config, refused, gpt2=kind == "gpt2"):
        refused.settle()
    fields = _gpt2_fields(config, refused) if kind == "gpt2" else _llama_fields(config, refused)
    refused.settle()
    return fields


def _numbers_fit(config: Mapping[str, Any], refused: Refusals, *, gpt2: bool) -> bool:
    """Refuse sizes that are missing or of another type; all that follows computes with them."""
    sizes = (*_LLAMA_SIZES, *hf_moe.SIZES.get(config["model_type"], ()))
    wrong = [n for n in _GPT2_SIZES if gpt2 and not _is_size(config.get(n))]
    wrong += [n for n in sizes if not gpt2 and not _is_size(hf_moe.size_of(config, n))]
    for name in _GPT2_OPTIONAL if gpt2 else _LLAMA_OPTIONAL:
        if config.get(name) is not None and not _is_size(config[name]):
            wrong.append(name)
    for name in wrong:
        got = hf_moe.size_of(config, name)
        refused.check(False, name.split("|")[0], got, "a size is a whole number above 0")
    for name in ("rms_norm_eps", "layer_norm_epsilon"):
        value = config.get(name, 1e-6)
        if not isinstance(value, float):
            wrong.append(name)
            refused.check(False, name, value, "it is a number like 1e-05")
    layers = "n_layer" if gpt2 else "num_hidden_layers"
    if not wrong and config[layers] > _MOST_LAYERS:
        wrong.append(layers)
        refused.check(False, layers, config[layers], f"no model has more than {_MOST_LAYERS}")
    return not wrong


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _llama_fields(config: Mapping[str, Any], refused: Refusals) -> Fields:
    kind = config["model_type"]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    attention_bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    qkv_bias = kind == "qwen2" or (kind == "qwen2_moe" and config.get("qkv_bias", True))
    if kind == "glm4_moe":  # its attention_bias is that of queries, keys and values alone
        qkv_bias, attention_bias = attention_bias, False
    elif kind != "llama":
        refused.check(not attention_bias, "attention_bias", True, f"not supported for {kind}")
    refused.check(
        attention_bias == mlp_bias,
        "attention_bias",
        attention_bias,
        f"mlp_bias is {mlp_bias}, and biases are either everywhere or nowhere",
    )
    act = config.get("hidden_act", "silu")
    refused.check(act == "silu", "hidden_act", act, "the gated MLP uses silu")
    _refuse_sliding_window(config, refused)
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "group_query_attention": groups != heads,
        **({"num_query_groups": groups} if groups != heads else {}),
        "position_embedding_type": "rope",
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        "swiglu": True,
        "add_bias_linear": attention_bias,
        "add_qkv_bias": bool(qkv_bias),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "vocab_size": config["vocab_size"],
        **_rope_fields(config, refused),
        **(hf_moe.moe_fields(config, refused) if kind in hf_moe.ARCHITECTURES else {}),
    }


def _refuse_sliding_window(config: Mapping[str, Any], refused: Refusals) -> None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config["model_type"] in ("mistral", "mixtral"))
    refused.check(not (window and used), "sliding_window", window, "attention is over all tokens")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    refused.check(not kinds, "layer_types", sorted(kinds), "attention is over all tokens")


def _rope_fields(config: Mapping[str, Any], refused: Refusals) -> Fields:
    """Read both spellings: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters``."""
    merged = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        refused.check(isinstance(value, Mapping), name, value, "it is no dictionary")
        merged.update(value if isinstance(value, Mapping) else {})
    theta = merged["rope_theta"] if merged["rope_theta"] is not None else _DEFAULT_ROPE_THETA
    kind = merged.get("rope_type") or merged.get("type") or "default"
    share = merged.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = share or (0.5 if config["model_type"] == "glm4_moe" else 1.0)
    factor = merged.get("factor")
    numbers = {"rope_theta": theta, "partial_rotary_factor": share, "rope_scaling.factor": factor}
    wrong = {n: v for n, v in numbers.items() if v is not None and not _is_number(v)}
    for name, value in wrong.items():
        refused.check(False, name, value, "it is no number")
    if wrong:
        refused.settle()
    refused.check(float(theta).is_integer(), "rope_theta", theta, "--rotary-base is an integer")
    refused.check(
        share == 1.0 or config["model_type"] == "glm4_moe",
        "partial_rotary_factor",
        share,
        "the architecture rotates whole heads",
    )
    fields: Fields = {"rotary_base": int(theta), "rotary_percent": float(share)}
    if kind == "llama3":
        for name, value in LLAMA3_SCALING.items():
            got = merged.get(name)
            refused.check(got == value, f"rope_scaling.{name}", got, f"only {value} is supported")
        fields["use_rope_scaling"] = True
        fields["rope_scaling_factor"] = float(8.0 if factor is None else factor)
    elif kind == "linear":
        whole = factor is not None and factor >= 1 and float(factor).is_integer()
        why = "--rotary-seq-len-interpolation-factor is a whole number"
        refused.check(whole, "rope_scaling.factor", factor, why)
        fields["rotary_seq_len_interpolation_factor"] = int(factor or 1) if whole else 1
    else:
        known = "only default, linear and llama3 are supported"
        refused.check(kind == "default", "rope_type", kind, known)
    return fields


def _gpt2_fields(config: Mapping[str, Any], refused: Refusals) -> Fields:
    act = config.get("activation_function", "gelu_new")
    tanh = ("gelu_new", "gelu_pytorch_tanh")
    refused.check(
        act in tanh, "activation_function", act, f"only {' and '.join(tanh)} are supported"
    )
    refused.check(
        config.get("scale_attn_weights", True), "scale_attn_weights", False, "scores are scaled"
    )
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        refused.check(not config.get(name, False), name, True, "not supported")
    hidden = config["n_embd"]
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": config["n_head"],
        "kv_channels": hidden // config["n_head"],
        "group_query_attention": False,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": config.get("n_positions", 1024),
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "qk_layernorm": False,
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "vocab_size": config["vocab_size"],
    }


# ------------------------------------------------------------------------------- our settings to HF


def hf_from_fields(fields: Mapping[str, Any], dtype: str, source: object = "checkpoint") -> Fields:
    """Build the ``config.json`` of a model with these settings.

    Args:
        fields: Settings by this project's field names.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        source: Named in messages.

    Raises:
        CheckpointError: No supported HuggingFace architecture computes this model.
    """
    missing = [n for n in ("num_layers", "hidden_size", "vocab_size") if not fields.get(n)]
    if missing:
        raise CheckpointError(
            complaint(
                "--load-dir",
                source,
                f"Its configuration does not say {', '.join(missing)}",
                "Give --true-vocab-size when only the vocabulary size is unknown",
            )
        )
    refused = Refusals(source)
    absolute = fields.get("position_embedding_type") == "learned_absolute"
    config = _gpt2_config(fields, refused) if absolute else _llama_config(fields, refused)
    refused.settle()
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    config["vocab_size"] = fields["vocab_size"]
    config["tie_word_embeddings"] = not fields.get("untie_embeddings_and_output_weights", False)
    config["torch_dtype"] = dtype
    config["use_cache"] = True
    return config


def _require(
    fields: Mapping[str, Any], refused: Refusals, wanted: Iterator[tuple[str, Any]]
) -> None:
    for name, value in wanted:
        got = fields.get(name)
        refused.check(got in (value, None), name, got, f"the architecture needs {value!r}")


def _llama_config(fields: Mapping[str, Any], refused: Refusals) -> Fields:
    wanted = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "squared_relu": False,
    }
    _require(fields, refused, iter(wanted.items()))
    bias = bool(fields.get("add_bias_linear"))
    qkv_bias = bool(fields.get("add_qkv_bias")) and not bias
    qk_norm = bool(fields.get("qk_layernorm"))
    kind = "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
    if fields.get("num_experts"):
        kind = hf_moe.kind_of(fields)
        refused.check(
            not qkv_bias or kind in ("qwen2_moe", "glm4_moe"),
            "add_qkv_bias",
            True,
            f"{ARCHITECTURES[kind]} has none",
        )
        refused.check(
            not (qk_norm and kind == "qwen2_moe"),
            "qk_layernorm",
            True,
            "no supported architecture has it together with a gated shared expert",
        )
    else:
        refused.check(
            not (qk_norm and (bias or qkv_bias)),
            "qk_layernorm",
            True,
            "no supported architecture has it together with biases",
        )
    heads = fields["num_attention_heads"]
    width = fields.get("kv_channels") or fields["hidden_size"] // heads
    refused.check(
        kind not in ("qwen2", "qwen2_moe") or width * heads == fields["hidden_size"],
        "kv_channels",
        width,
        f"{kind}'s configuration has no head_dim, so the heads must fill hidden_size",
    )
    share = fields.get("rotary_percent", 1.0)
    refused.check(
        share == 1.0 or kind == "glm4_moe",
        "rotary_percent",
        share,
        "the architecture rotates whole heads",
    )
    config: Fields = {
        "model_type": kind,
        "hidden_size": fields["hidden_size"],
        "intermediate_size": fields["ffn_hidden_size"],
        "num_hidden_layers": fields["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": _groups(fields),
        "head_dim": width,
        "max_position_embeddings": fields["max_position_embeddings"],
        "rms_norm_eps": fields["norm_epsilon"],
        "hidden_act": "silu",
        "rope_theta": float(fields["rotary_base"]),
        "rope_scaling": None,
    }
    if kind == "llama":
        config.update({"attention_bias": bias, "mlp_bias": bias})
    if kind in ("qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if kind in hf_moe.ARCHITECTURES:
        config.update(hf_moe.moe_config(fields, kind, refused))
    stretched = fields.get("rotary_seq_len_interpolation_factor") or 1
    if stretched != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(stretched)}
    if fields.get("use_rope_scaling"):
        name = "rotary_seq_len_interpolation_factor"
        refused.check(stretched == 1, name, stretched, "not together with use_rope_scaling")
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": fields["rope_scaling_factor"],
            **LLAMA3_SCALING,
        }
    return config


def _groups(fields: Mapping[str, Any]) -> int:
    heads: int = fields["num_attention_heads"]
    return int(fields.get("num_query_groups") or heads) if _grouped(fields) else heads


def _grouped(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("group_query_attention"))


def _gpt2_config(fields: Mapping[str, Any], refused: Refusals) -> Fields:
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    wanted = {
        "normalization": "LayerNorm",
        "swiglu": False,
        "squared_relu": False,
        "qk_layernorm": False,
        "add_bias_linear": True,
        "kv_channels": hidden // heads,
    }
    _require(fields, refused, iter(wanted.items()))
    groups = _groups(fields)
    refused.check(groups == heads, "num_query_groups", groups, "every head has its own keys")
    ffn = fields["ffn_hidden_size"]
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": fields["num_layers"],
        "n_head": heads,
        "n_inner": None if ffn == 4 * hidden else ffn,
        "n_positions": fields["max_position_embeddings"],
        "layer_norm_epsilon": fields["norm_epsilon"],
        "activation_function": "gelu_new",
    }


def attention_sizes(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (heads, query groups, head width), all that splitting a fused QKV weight needs."""
    heads = fields["num_attention_heads"]
    return heads, _groups(fields), fields.get("kv_channels") or fields["hidden_size"] // heads
