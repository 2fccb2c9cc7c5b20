"""What a model's own ``config.json`` said, kept through this project's checkpoints.

This project's settings describe what a model computes. A ``config.json`` says more (the start of
its sequences, its dropout, who made it), in the spelling of the library's version that wrote it.
A conversion keeps the file beside the tokenizer; on the way back everything in it that the model
does not contradict is written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.training.hf_config import ARCHITECTURES, fields_from_hf, hf_from_fields
from megatron.training.hf_moe import PREDICTING

# Left out: what names files that stay behind, and what is said anew.
_DROPPED = ("auto_map", "quantization_config", "transformers_version", "_name_or_path")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_DTYPES = ("torch_dtype", "dtype")


def read(path: Path) -> dict[str, Any]:
    """Read a kept configuration; nothing if it is not one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def restore(built: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model's settings into the ``config.json`` that it once had.

    Args:
        built: The ``config.json`` that its settings give.
        kept: The one it had; empty if there was none.

    Returns:
        ``kept`` with every value changed that says something else today, or ``built`` if the model
        is of another family by now.
    """
    try:
        before = hf_from_fields(fields_from_hf(without_quantization(kept)), "float32")
    except CheckpointError:
        return dict(built)
    if before["model_type"] != built["model_type"]:
        return dict(built)
    config = {n: v for n, v in kept.items() if n not in _DROPPED}
    changed = {n for n in built if before.get(n) != built[n]}
    if changed & set(_ROPE):
        config = {n: v for n, v in config.items() if n not in _ROPE}
        changed |= set(_ROPE) & set(built)
    config.update({n: built[n] for n in built if n in changed})
    config["architectures"] = [ARCHITECTURES[kept["model_type"]]]
    for name in _DTYPES:
        config.pop(name, None)
    spelling = [name for name in _DTYPES if name in kept] or ["torch_dtype"]
    config |= dict.fromkeys(spelling, built["torch_dtype"])
    if kept["model_type"] in PREDICTING:
        config["num_nextn_predict_layers"] = 0
    return config


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as that of the dequantized model."""
    return {n: v for n, v in config.items() if n != "quantization_config"}
