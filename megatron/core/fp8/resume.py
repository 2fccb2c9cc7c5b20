"""What becomes of saved scaling state when layers run in another precision than before.

A checkpoint says how every layer ran. A layer that had delayed scaling and has it again keeps its
scales and its history; one whose recipe is new starts fresh; state of a layer that needs none any
more is dropped. Everything that differs is told, layers that changed alike in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.core.errors import CheckpointError, complaint
from megatron.core.fp8.policy import HIGH_PRECISION

_DELAYED = "delayed"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def recipe_of(summary: str) -> str:
    """Name of the recipe in a layer's `Decision.summary`; `none` for high precision."""
    return "none" if summary == HIGH_PRECISION else summary.split()[0]


def format_of(summary: str) -> str:
    """Name of the format in a layer's `Decision.summary`."""
    return summary.split()[1]


def precision_before(state: Mapping[str, Any], layers: Iterable[str]) -> dict[str, str]:
    """How the layers of a checkpoint ran.

    Args:
        state: What `Fp8State.state_dict` returned; empty without FP8.
        layers: Layers to ask for, groups of experts as one.

    Returns:
        Layer -> `Decision.summary`; without layers that the checkpoint does not know.
    """
    if not state or state["recipe"] == "none":
        return dict.fromkeys(layers, HIGH_PRECISION)
    saved = state.get("precision")
    if saved is None:
        return dict.fromkeys(layers, f"{state['recipe']} {state['format']}")
    return {layer: str(saved[layer]) for layer in layers if layer in saved}


def refuse_unknown(own: Iterable[str], before: Mapping[str, str]) -> None:
    """Require that the checkpoint knows every layer whose scales have to come from somewhere.

    Raises:
        CheckpointError: Layers are missing, all listed.
    """
    missing = [layer for layer in own if layer not in before]
    if missing:
        raise CheckpointError(
            complaint(
                "FP8 state",
                f"{len(before)} layers, without {', '.join(missing)}",
                "The checkpoint says nothing about these layers of the model",
                "Load a checkpoint of this model, or start with fresh FP8 state",
            )
        )


def ignored(state: Mapping[str, Any]) -> list[str]:
    """Say that a run without FP8 has no use for a saved state; nothing if there is none."""
    saved = state.get("recipe", "none")
    if saved == "none":
        return []
    return [f"FP8 state: saved with recipe {saved}, this run is not in FP8; it is ignored."]


def sentences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what changed, for the log.

    Args:
        before: Layer -> `Decision.summary` in the checkpoint.
        now: The same of this run.
    """
    changes: dict[tuple[str, str], list[str]] = {}
    for layer, summary in now.items():
        if layer in before and {before[layer], summary} != {HIGH_PRECISION}:
            changes.setdefault((before[layer], summary), []).append(layer)
    kinds = {(recipe_of(old), recipe_of(new)) for old, new in changes}
    if len(kinds) == 1:
        (old_recipe, new_recipe) = kinds.pop()
        if old_recipe != new_recipe and new_recipe != "none":
            return [_all_changed(old_recipe, new_recipe)]
    return [_some_changed(old, new, layers) for (old, new), layers in changes.items() if old != new]


def _all_changed(old: str, new: str) -> str:
    """Every layer that is or was in FP8 changed its recipe in the same way."""
    after = (
        "the first step quantizes with scale 1 and every later one with fresh scales"
        if new == _DELAYED
        else "this recipe needs no state"
    )
    if old == "none":
        return f"FP8 state: the checkpoint has none; {after}."
    return f"FP8 state: saved with recipe {old}, this run uses {new}; it is dropped, {after}."


def _some_changed(old: str, new: str, layers: Sequence[str]) -> str:
    had, has = recipe_of(old) == _DELAYED, recipe_of(new) == _DELAYED
    what = ""
    if had and has:
        converted = HIGH_PRECISION not in (old, new) and format_of(old) != format_of(new)
        what = "; scales were converted" if converted else "; scales are kept"
    elif had:
        what = "; scales are dropped"
    elif has:
        what = "; scales start at 1"
    return f"FP8 state: {_grouped(layers)}: saved with {old}, this run uses {new}{what}."


def _grouped(layers: Sequence[str]) -> str:
    """Paths with ranges of layer numbers: `decoder.layers.0-3.mlp.linear_fc1`."""
    numbers: dict[str, list[int]] = {}
    for layer in layers:
        found = _LAYER.search(layer)
        name = layer if found is None else _LAYER.sub("{}", layer, count=1)
        numbers.setdefault(name, [])
        if found is not None:
            numbers[name].append(int(found[0]))
    return ", ".join(name.format(_ranges(own)) for name, own in numbers.items())


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
