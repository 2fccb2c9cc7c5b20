"""What a checkpoint knows of FP8: recipe, and scales and amax histories by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.schema import FP8_PREFIX
from megatron.core.dist_checkpointing.storage import Reader

_TENSOR = "tensor:"
_SETTINGS = ("fp8_", "fp4_", "first_last_layers_bf16")
_AT_ENDS = "num_layers_at_"  # says something where the one before is set


def fp8_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings about FP8 that are set, out of all of a run's."""
    names = (*_SETTINGS, _AT_ENDS) if settings.get("first_last_layers_bf16") else _SETTINGS
    return {
        name: value
        for name, value in sorted(settings.items())
        if name.startswith(names) and value not in (None, False)
    }


def fp8_layers(reader: Reader, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return layer -> name of a figure -> values.

    Scales are lists. Of an amax history, ``[length, tensors]``, all rows are returned.

    Args:
        reader: The checkpoint.
        state: What its common entry holds under ``fp8``.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in ("layers", "experts"):
        for layer, figures in (state.get(part) or {}).items():
            found[layer] = {name: _plain(reader, value) for name, value in _flat(figures)}
    return found


def _flat(figures: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(reader: Reader, value: Any) -> Any:
    """Read the tensor behind a reference; with replicas that differ, those of the first."""
    if not (isinstance(value, str) and value.startswith(_TENSOR)):
        return value
    return reader.read(FP8_PREFIX + value.removeprefix(_TENSOR)).tolist()
