"""What a checkpoint of Megatron-LM says beside its tensors: what is taken over, what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Arguments that change what the weights mean and have no counterpart here: name -> values that do
# not. An argument that a checkpoint does not have is as good as the first of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "quick_geglu": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "is_hybrid_model": (False, None),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
}


def check_known_model(common: Mapping[str, Any], directory: Path) -> None:
    """Refuse a model whose arguments ask for what this project's model does not compute.

    Args:
        common: The entry that all ranks share.
        directory: The checkpoint.

    Raises:
        CheckpointError: Lists these arguments.
    """
    args = common.get("args")
    values = vars(args) if isinstance(args, argparse.Namespace) else {}
    found = [
        f"--{name.replace('_', '-')} {values[name]}"
        for name, neutral in _NEUTRAL.items()
        if name in values and values[name] not in neutral
    ]
    if found:
        raise CheckpointError(
            complaint(
                "--load",
                directory,
                f"Its model was trained with {', '.join(found)}, which no model here computes",
                "Load a checkpoint of a model without",
            )
        )


def check_vocabulary(reader: Reader, vocab_size: int | None) -> None:
    """Refuse a checkpoint whose vocabulary is smaller than this run's.

    Raises:
        CheckpointError: Rows would be made up.
    """
    for key in _VOCABULARY:
        entry = reader.tensors.get(key)
        if entry is not None and vocab_size is not None and entry.shape[0] < vocab_size:
            raise CheckpointError(
                complaint(
                    "--load",
                    reader.directory,
                    f"{key} has {entry.shape[0]} rows with padding, and this run's vocabulary has "
                    f"{vocab_size} entries",
                    "Use the checkpoint's tokenizer",
                )
            )


def check_optimizer_form(common: Mapping[str, Any], reader: Reader) -> None:
    """Refuse optimizer state that only the ranks that wrote it could use.

    Raises:
        CheckpointError: Says how to get the other form.
    """
    metadata = common.get("content_metadata")
    kind = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, dict) else None
    by_rank = any(".distributed.dp_group_idx_" in key for key in (*reader.tensors, *reader.blobs))
    if by_rank or kind not in (None, "fully_reshardable"):
        raise CheckpointError(
            complaint(
                "--load",
                f"{reader.directory}, whose optimizer state is {kind or 'dp_reshardable'}",
                "It follows the ranks that wrote it and not the parameters",
                "Load it in Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, or "
                "pass --no-load-optim to load the weights alone",
            )
        )


def optimizer_scalars(common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return step count and loss scale from what Megatron-LM keeps beside the optimizer's tensors.

    Returns:
        None when the entry has neither.
    """
    found = common.get("optimizer")
    if isinstance(found, dict) and "optimizer" not in found and "param_groups" not in found:
        found = next(iter(found.values()), None)  # a chain: experts have an optimizer of their own
    if not isinstance(found, dict):
        return None
    inner = found.get("optimizer", found)
    steps = [group.get("step") for group in inner.get("param_groups") or ()]
    steps.append((inner.get("state") or {}).get("common_step"))
    known = [int(step) for step in steps if step is not None]
    return {"step": max(known)} if known else None


def schedule_here(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schedule's state with the place that Megatron-LM's had reached.

    Args:
        state: What the checkpoint has.
        own: This run's, whose shape counts.

    Returns:
        None when ``state`` is not Megatron-LM's.
    """
    if "lr" in state or "num_steps" not in state:
        return None
    return {**own, "num_samples": int(state["num_steps"])}
