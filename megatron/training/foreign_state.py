"""What a checkpoint of Megatron-LM says beside its tensors: what is taken over, what is refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.core.dist_checkpointing.mp_reader import RankFilesReader
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

# What of Megatron-LM's schedule is which field of ours.
LR_NAMES = {"max_lr": "max_lr", "min_lr": "min_lr", "lr_warmup_steps": "warmup_samples",
       "lr_decay_steps": "decay_samples", "lr_decay_style": "style"}  # fmt: skip
WD_NAMES = {"start_wd": "start", "end_wd": "end", "wd_incr_steps": "incr_samples",
       "wd_incr_style": "style"}  # fmt: skip
_LR_ARGUMENTS = {"lr_warmup_init": "warmup_init", "lr_wsd_decay_style": "wsd_style"}
SCALER_NAMES = {"scale": "loss_scale", "growth_tracker": "good_steps",
           "hysteresis_tracker": "tolerance_left"}  # fmt: skip
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
# Entries that are taken over, say how others are stored, or are spoken of elsewhere.
_KNOWN = re.compile(
    r"^(args|checkpoint_version|iteration|optimizer|opt_param_scheduler|content_metadata|given|"
    r"num_floating_point_operations_so_far|rng_state|common_state|.*_extra_state\d*|"
    r"(chained_\d+\.)?optimizer\..*)$"
)


def check_known_model(common: Mapping[str, Any], directory: Path) -> None:
    """Refuse a model whose arguments ask for what this project's model does not compute.

    Args:
        common: The entry that all ranks share.
        directory: The checkpoint.

    Raises:
        CheckpointError: Lists these arguments.
    """
    values = _arguments(common)
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
    if isinstance(reader, RankFilesReader):
        raise CheckpointError(
            complaint(
                "--load",
                f"{reader.directory}, which is in format torch",
                "Its ranks' files keep the optimizer's state by the ranks that wrote them",
                "Load it in Megatron-LM and save it with --ckpt-format torch_dist and "
                "--dist-ckpt-optim-fully-reshardable, or pass --no-load-optim (or --finetune) to "
                "load the weights alone",
            )
        )
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
    found = _first_optimizer(common)
    steps = [group.get("step") for group in _groups(found)]
    steps.append((found.get("optimizer", found).get("state") or {}).get("common_step"))
    known = [int(step) for step in steps if step is not None]
    scaler = found.get("grad_scaler") or {}
    scale = {own: float(scaler[name]) for name, own in SCALER_NAMES.items() if name in scaler}
    return {"step": max(known), **scale} if known else None


def _first_optimizer(common: Mapping[str, Any]) -> Mapping[str, Any]:
    found = common.get("optimizer")
    if isinstance(found, dict) and "optimizer" not in found and "param_groups" not in found:
        found = next(iter(found.values()), None)  # a chain: experts have an optimizer of their own
    return found if isinstance(found, dict) else {}


def _groups(optimizer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return optimizer.get("optimizer", optimizer).get("param_groups") or ()


def schedule_here(
    state: Mapping[str, Any], own: Mapping[str, Any], common: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Return Megatron-LM's state of a schedule as one of this project.

    What it does not keep there, the start of the warm-up and the last phase of WSD, is in its
    arguments.

    Args:
        state: Its entry ``opt_param_scheduler``.
        own: What this run's schedule has, for what the checkpoint does not say.
        common: The entry that all ranks share.
        directory: The checkpoint.

    Raises:
        CheckpointError: Names what is missing.
    """
    missing = [name for name in ("num_steps", *LR_NAMES, *WD_NAMES) if name not in state]
    args = _arguments(common)
    lr = {**own["lr"], **{field: state[name] for name, field in LR_NAMES.items() if name in state}}
    for name, field in _LR_ARGUMENTS.items():
        if args.get(name) is not None:
            lr[field] = args[name]
    if args.get("lr_wsd_decay_samples") is not None:
        lr["wsd_decay_samples"] = args["lr_wsd_decay_samples"]
    elif args.get("lr_wsd_decay_iters") is not None and args.get("global_batch_size"):
        lr["wsd_decay_samples"] = args["lr_wsd_decay_iters"] * args["global_batch_size"]
    if lr["style"] == "WSD" and not lr["wsd_decay_samples"]:
        missing.append("lr_wsd_decay_iters (in args)")
    if missing:
        raise CheckpointError(
            complaint(
                "--load",
                f"{directory}, whose opt_param_scheduler has no {', '.join(missing)}",
                "The schedule of the run that wrote it is not known",
                "Pass --no-load-optim or --finetune, and this run's own schedule",
            )
        )
    wd = {**own["wd"], **{field: state[name] for name, field in WD_NAMES.items()}}
    return {"lr": lr, "wd": wd, "num_samples": int(state["num_steps"])}


def counters(common: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return Megatron-LM's counters by the names of `Progress`.

    Raises:
        CheckpointError: It is not known which samples were read.
    """
    args, iteration = _arguments(common), int(common.get("iteration") or 0)
    found = {n: args[n] for n in _COUNTERS if isinstance(args.get(n), int)}
    if iteration and "consumed_train_samples" not in found:
        raise CheckpointError(
            complaint(
                "--load",
                f"{directory}, of iteration {iteration}, whose args have no consumed_train_samples",
                "It is not known where in the data the run was",
                "Pass --finetune to start with the first sample",
            )
        )
    flops = common.get("num_floating_point_operations_so_far") or 0
    return {"iteration": iteration, "floating_point_operations_so_far": flops, **found}


def is_foreign(common: Mapping[str, Any]) -> bool:
    """Whether Megatron-LM wrote a checkpoint, by the entry that all ranks share."""
    return "progress" not in common


def left_out(common: Mapping[str, Any], blobs: Iterable[str], cfg: RunConfig) -> list[str]:
    """Say what a checkpoint of Megatron-LM has, or lacks, and a run goes on without.

    Of the random state whoever restores that speaks.

    Args:
        common: The entry that all ranks share.
        blobs: Keys of the other entries that are no tensors.
        cfg: The run's configuration.

    Returns:
        A line for each.
    """
    if not is_foreign(common):
        return []
    found = []
    if cfg.fp8_format is not None and cfg.fp8_recipe == "delayed":
        found.append("FP8 scales (_extra_state); they start fresh")
    if not cfg.no_load_optim:
        scaled = "loss_scale" in (optimizer_scalars(common) or {})
        if cfg.fp16 and cfg.loss_scale is None and not scaled:
            found.append("a loss scale, which it has none of; this run's first one is used")
        elif scaled and not cfg.fp16:
            found.append("the loss scale (grad_scaler), which this run has none of")
        if any(group.get("is_decoupled_lr") for group in _groups(_first_optimizer(common))):
            found.append("--decoupled-lr; all parameters have the rate of --lr")
    kinds = {key.partition("/")[0] for key in blobs} | set(common)
    found += [kind for kind in sorted(kinds) if not _KNOWN.search(kind)]
    return [f"  NOTE: not taken over from Megatron-LM: {one}" for one in found]


def _arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    args = common.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}
