"""Settings that a run takes from the checkpoint it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.draft import DEFAULT_MODEL
from megatron.config.problems import Problem
from megatron.config.schema import SPECS
from megatron.config.values import coerce

# Returns the flat configuration that a checkpoint (folder, step) was saved with, or None.
SavedConfig = Callable[[str, "int | None"], "Mapping[str, Any] | None"]
Inherited = tuple[dict[str, Any], list[str], list[Problem]]

# How the model computes may change between runs; what it is may not.
_FREE_MODEL_FIELDS = {
    "transformer_impl",
    "fp16",
    "bf16",
    "seq_length",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
}
_TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
# Sections that describe the training itself, not this particular run of it.
_RESUMED_SECTIONS = ("model", "training", "data")
_NOT_RESUMED = {"exit_interval", "exit_duration_in_mins", "data_cache_path"}


def _settable(saved: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return saved values that differ from the default."""
    return {
        name: saved[name]
        for name in names
        if saved.get(name) is not None and saved[name] != SPECS[name].default
    }


def _shape_problems(fields: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, spec in SPECS.items():
        if spec.section != "model" or name in _FREE_MODEL_FIELDS or name not in fields:
            continue
        try:
            given = coerce(spec, fields[name])
        except ValueError:
            continue  # finalize reports it
        if name in saved and given is not None and given != saved[name]:
            problems.append(
                Problem(
                    (spec.flag, "--use-checkpoint-args"),
                    f"{given}, and {saved[name]} in the checkpoint",
                    "The model's shape comes from the checkpoint",
                    f"Remove {spec.flag}, or load another checkpoint",
                )
            )
    return problems


def inherit(fields: Mapping[str, Any], saved_config: SavedConfig | None) -> Inherited:
    """Look up what the run takes from the checkpoint it loads.

    With --use-checkpoint-args that is the model's shape and the tokenizer. A run that names a
    checkpoint and no model size continues the saved one: model, schedule and data come from it
    wherever nothing was said.

    Args:
        fields: What was given by files and flags.
        saved_config: Returns the flat configuration in a checkpoint, or None.

    Returns:
        Inherited settings (to be overridden by ``fields``), notices and problems.
    """
    load = fields.get("load")
    wanted = fields.get("use_checkpoint_args") is True
    resumed = not wanted and not any(fields.get(name) is not None for name in DEFAULT_MODEL)
    if not isinstance(load, str) or not (wanted or resumed) or saved_config is None:
        return {}, [], []
    try:
        step = coerce(SPECS["ckpt_step"], fields.get("ckpt_step"))
    except ValueError:
        return {}, [], []  # finalize reports it
    saved = saved_config(load, step)
    if saved is None:
        return {}, [], _no_checkpoint(load, step) if wanted else []
    names = [
        name
        for name, spec in SPECS.items()
        if spec.section in _RESUMED_SECTIONS and not spec.setting.derived
    ]
    if wanted:
        names = [n for n in names if SPECS[n].section == "model" and n not in _FREE_MODEL_FIELDS]
    names = [n for n in names if n not in _NOT_RESUMED and n not in _TOKENIZER_FIELDS]
    if not any(fields.get(name) is not None for name in _TOKENIZER_FIELDS):
        names.extend(_TOKENIZER_FIELDS)
    problems = _shape_problems(fields, saved) if wanted else []
    what = "the model's shape comes" if wanted else "what was not given here comes"
    taken = {n: v for n, v in _settable(saved, names).items() if fields.get(n) is None}
    return _coherent(taken, fields), [f"--load {load}: {what} from the checkpoint"], problems


def _coherent(taken: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop inherited values that would contradict what was given."""
    drop: set[str] = set()
    if fields.get("train_iters") is not None:
        drop |= {n for n in SPECS if n.endswith("_samples")}
    if fields.get("train_samples") is not None or taken.get("train_samples") is not None:
        drop |= {"train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"}
    if fields.get("mock_data"):
        drop |= {"data_path", "split"}
    if fields.get("data_path"):
        drop |= {"mock_data", "split"}
    if fields.get("fp16"):
        drop.add("bf16")
    if fields.get("bf16"):
        drop |= {"fp16", "loss_scale", "initial_loss_scale", "min_loss_scale"}
        drop |= {"loss_scale_window", "hysteresis", "check_for_nan_in_loss_and_grad"}
    return {name: value for name, value in taken.items() if name not in drop}


def _no_checkpoint(load: str, step: int | None) -> list[Problem]:
    return [
        Problem(
            ("--use-checkpoint-args", "--load"),
            load if step is None else f"{load}, step {step}",
            "There is no checkpoint to take the model's shape from",
            "Correct --load, or give the model's flags and remove --use-checkpoint-args",
        )
    ]
