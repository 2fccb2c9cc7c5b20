"""What a checkpoint says about its model, compared with what this run says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.config.moe import layer_pattern
from megatron.config.schema import SPECS, flag_of
from megatron.core.dist_checkpointing import plain, schema
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, UnusableCheckpointError, complaint

TOKENIZER_DIRECTORY = "tokenizer"  # inside a checkpoint that a conversion made

# Fields that decide which tensors exist, their shapes, or what their values mean.
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)

# These may be changed on purpose when weights are tuned further (longer context, say).
_TUNABLE = {
    "max_position_embeddings",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "norm_epsilon",
}

# Of these None says something about the model, and it is not that a checkpoint does not know them.
_NONE_COUNTS = (
    "num_experts",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "rotary_seq_len_interpolation_factor",
)
_NONE_IS_ONE = _NONE_COUNTS[2:]

_MEGATRON_NAMES = {"norm_epsilon": "layernorm_epsilon"}


def read_common(reader: Reader) -> dict[str, Any]:
    """Return the entry that all ranks share, from our checkpoints and from Megatron-Core's.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    name = f"{reader.directory}: {schema.COMMON_KEY}"
    older = reader.directory / schema.COMMON_FILE  # Megatron-Core up to 0.18 has only this
    if reader.common is not None:
        common = reader.common
    elif schema.COMMON_KEY in reader.blobs:
        common = plain.load(reader.read_blob(schema.COMMON_KEY), name)
    elif older.is_file():
        common = plain.load(older.read_bytes(), str(older))
    else:
        raise UnusableCheckpointError(
            f"{name} is missing; it holds the iteration and the configuration"
        )
    tokenizer = reader.directory / TOKENIZER_DIRECTORY
    if tokenizer.is_dir() and isinstance(common.get("args"), argparse.Namespace):
        # The tokenizer that travels with the checkpoint, wherever both were moved to.
        common["args"].tokenizer_model = str(tokenizer)
        common["given"] = {**(common.get("given") or {}), "tokenizer_model": str(tokenizer)}
    return common


def saved_settings(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings stored in the common entry, by this project's field names.

    Fields that this project does not know, and values that are no plain values, are left out.
    """
    args = common.get("args")
    values = vars(args) if isinstance(args, argparse.Namespace) else {}
    known: dict[str, Any] = {}
    for name in SPECS:
        value = values.get(name, values.get(_MEGATRON_NAMES.get(name, name)))
        if name == "moe_layer_freq" and value is not None:
            known[name] = str(value)  # theirs may be a number or a list
        elif isinstance(value, (bool, int, float, str, list, tuple)):
            known[name] = list(value) if isinstance(value, tuple) else value
        elif name in _NONE_COUNTS and name in values:
            known[name] = None
    return known


def stacking_of(cfg: RunConfig) -> schema.Stacking:
    """Return which tensors of this run's model are stored together, as Megatron-Core decides it."""
    differ = cfg.num_experts is not None and cfg.moe_layer_freq != "1"
    return schema.Stacking(cfg.num_layers, cfg.num_experts or 0, differ)


def differences(saved: Mapping[str, Any], cfg: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the architecture fields that differ: name -> (saved, own)."""
    own = {name: getattr(cfg, name) for name in ARCHITECTURE}
    found = {
        name: (saved[name], own[name])
        for name in ARCHITECTURE
        if name in saved
        and (own[name] is not None or name in _NONE_COUNTS)
        and not _same(name, saved[name], own[name], cfg.num_layers)
        and not _no_effect(name, own)
    }
    # A model without experts has no number of them, in a checkpoint no entry either.
    experts = (saved.get("num_experts"), own["num_experts"])
    if "num_layers" in saved and experts.count(None) == 1:
        found = {name: pair for name, pair in found.items() if not name.startswith("moe_")}
        found["num_experts"] = experts
    return found


def _same(name: str, saved: Any, own: Any, num_layers: int) -> bool:
    if name in _NONE_IS_ONE:
        return bool((saved or 1) == (own or 1))
    if name != "moe_layer_freq" or saved == own:
        return bool(saved == own)
    try:
        return layer_pattern(saved, num_layers) == layer_pattern(own, num_layers)
    except ValueError:
        return False


def _no_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a field says nothing about the weights when the others have these values."""
    positions = values.get("position_embedding_type")
    if name.startswith("rotary_") or name == "use_rope_scaling":
        return bool(positions != "rope")
    if name == "rope_scaling_factor":
        return not (positions == "rope" and values.get("use_rope_scaling"))
    if name == "max_position_embeddings":
        return bool(positions != "learned_absolute")
    if name.startswith("moe_"):
        return values.get("num_experts") is None
    if name == "add_qkv_bias":
        return bool(values.get("add_bias_linear"))
    # With plain attention num_query_groups equals the heads and says all there is to say.
    return name == "group_query_attention"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def check_same_model(saved: Mapping[str, Any], cfg: RunConfig) -> list[str]:
    """Refuse a checkpoint of another model.

    Returns:
        Sentences about differences that ``--finetune`` permits.

    Raises:
        CheckpointError: Lists every difference.
    """
    found = differences(saved, cfg)
    lines = {
        name: f"{flag_of(name)} is {_shown(was)} in the checkpoint and {_shown(now)} in this run"
        for name, (was, now) in found.items()
    }
    refused = [n for n in found if not (cfg.finetune and n in _TUNABLE)]
    if refused:
        raise CheckpointError(
            complaint(
                "--load",
                cfg.load,
                f"The checkpoint is of another model: {'; '.join(lines[n] for n in refused)}",
                "Give the checkpoint's values, or take them over with --use-checkpoint-args",
            )
        )
    return [f"NOTE: {lines[n]}; allowed with --finetune" for n in found]


def adopt(cfg: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Take the model's shape from a checkpoint (``--use-checkpoint-args``).

    Flags that were given explicitly count: an equal value is fine, another value of an
    architecture field is refused, and no other field is taken from the checkpoint at all.

    Args:
        cfg: This run's configuration.
        saved: What ``saved_settings`` returned.

    Raises:
        CheckpointError: An explicit flag contradicts the checkpoint.
        ConfigError: The result cannot work.
    """
    given = cfg.given
    shape = [n for n in ARCHITECTURE if n in saved and not _no_effect(n, saved)]
    if saved.get("group_query_attention"):
        shape.append("group_query_attention")
    else:
        shape = [n for n in shape if n != "num_query_groups"]  # derived from the heads
    contradictions = [
        f"{flag_of(n)} is {saved[n]} in the checkpoint and {given[n]} on the command line"
        for n in shape
        if given.get(n) is not None
        and not _same(n, saved[n], given[n], saved.get("num_layers") or cfg.num_layers)
        and not (cfg.finetune and n in _TUNABLE)
    ]
    if contradictions:
        raise CheckpointError(
            complaint(
                "--use-checkpoint-args",
                cfg.load,
                "; ".join(contradictions),
                "Leave these flags out, or load another checkpoint",
            )
        )
    return cfg.replace(
        **{n: saved[n] for n in shape if given.get(n) is None},
        # Derived for a run that says nothing about its model, and lost once it does.
        use_checkpoint_opt_param_scheduler=cfg.use_checkpoint_opt_param_scheduler,
    )
