"""Settings that a run takes over from the checkpoint it continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.data import TOKENIZER_FIELDS
from megatron.config.draft import DEFAULT_MODEL
from megatron.config.schema import SPECS
from megatron.config.values import coerce

# Returns the flat configuration that a checkpoint (folder, step) was saved with, or None.
SavedConfig = Callable[[str, "int | None"], "Mapping[str, Any] | None"]

# What describes the training itself. Precision in FP8, the layout, files and logs belong to one
# run of it: leaving the FP8 flags out goes on without FP8.
_CONTINUED = {"model", "moe", "training", "batch_size", "data", "data_mix"}
_NEVER = {
    "exit_interval",
    "exit_duration_in_mins",
    "data_cache_path",
    "padded_vocab_size",
    # What these files said was saved with the settings that they stand for.
    "data_args_path",
    "per_split_data_args_path",
    "data_mix_change",
    "num_dataset_builder_threads",
}
_CORPORA = {
    *("data_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("mock_data", "split", "multiple_validation_sets", "validation_set_names"),
}
_LOSS_SCALE = (
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "check_for_nan_in_loss_and_grad",
)


_SOURCES = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")


def _candidates() -> list[str]:
    names = [
        name
        for name, spec in SPECS.items()
        if spec.section in _CONTINUED and not spec.setting.derived and name not in _NEVER
    ]
    return [*names, "seed"]


def _contradicted(fields: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the names whose saved value would contradict what was given."""
    drop: set[str] = set()
    by_samples = fields.get("train_samples") is not None
    if fields.get("train_iters") is not None:
        drop |= {name for name in SPECS if name.endswith("_samples")}
    elif by_samples or saved.get("train_samples") is not None:
        drop |= {"train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"}
    sources = ("mock_data", *_SOURCES)
    if any(fields.get(name) for name in sources):
        drop |= _CORPORA
    if saved.get("step_batch_size_schedule") is not None:
        drop.add("global_batch_size")
    if fields.get("global_batch_size") is not None:
        drop.add("step_batch_size_schedule")
    if fields.get("step_batch_size_schedule") is not None:
        drop |= {"global_batch_size", "rampup_batch_size", "decrease_batch_size_if_needed"}
    if fields.get("train_iters") is not None:
        drop |= {"rampup_batch_size", "step_batch_size_schedule"}
    if fields.get("fp16"):
        drop.add("bf16")
    if fields.get("bf16"):
        drop |= {"fp16", *_LOSS_SCALE}
    if any(fields.get(name) is not None for name in TOKENIZER_FIELDS):
        drop |= set(TOKENIZER_FIELDS)
    return drop


def inherit(
    fields: Mapping[str, Any], saved_config: SavedConfig | None
) -> tuple[dict[str, Any], list[str]]:
    """Look up what a run that names a checkpoint and no model size takes over from it.

    Such a run continues the saved one: model, schedule, data and seed come from the checkpoint
    wherever nothing was said.

    Args:
        fields: What was given by files and flags.
        saved_config: Returns the flat configuration in a checkpoint, or None.

    Returns:
        Settings, to be overridden by ``fields``, and notices.
    """
    load = fields.get("load")
    if not isinstance(load, str) or saved_config is None or fields.get("use_checkpoint_args"):
        return {}, []
    if any(fields.get(name) is not None for name in DEFAULT_MODEL):
        return {}, []
    try:
        step = coerce(SPECS["ckpt_step"], fields.get("ckpt_step"))
    except ValueError:
        return {}, []  # finalize reports it
    saved = saved_config(load, step)
    if saved is None:
        return {}, []
    drop = _contradicted(fields, saved)
    taken = {
        name: saved[name]
        for name in _candidates()
        if saved.get(name) not in (None, SPECS[name].default)
        and fields.get(name) is None
        and name not in drop
    }
    return taken, [f"no model size was given: continuing the run saved in {load} as it was set up"]
