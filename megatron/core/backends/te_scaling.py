"""FP8 state of Transformer Engine's layers, moved once per optimizer step.

Left alone, Transformer Engine updates delayed-scaling histories whenever its outermost autocast
ends, that is once per microbatch, and reduces the maxima of every layer each time. The project
updates once per optimizer step, so that gradient accumulation does not change the arithmetic and
a recomputed forward quantizes with the scales of the first one. Each layer therefore enters FP8
inside an autocast that is itself switched off: Transformer Engine updates only when the *outermost*
context was enabled. `update_scales` then asks for the update by its public name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.backends.te_calls import Library, autocast
from megatron.core.errors import CheckpointError, complaint

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS = ("scale", "amax_history")


@contextmanager
def fp8_region(library: Library, recipe: Any, group: ProcessGroup | None) -> Iterator[None]:
    """Run Transformer Engine's modules in FP8 without moving any scale.

    Args:
        library: Transformer Engine.
        recipe: Its recipe object.
        group: Ranks that agree on delayed-scaling maxima; None if this process is alone, and then
            the recipe must not ask for a reduction, because Transformer Engine would take None
            for all processes there are.
    """
    with (
        autocast(library, enabled=False, recipe=recipe, group=group),
        autocast(library, enabled=True, recipe=recipe, group=group),
    ):
        # Reading the mark clears it. The module that finds it set would update the gradients'
        # scales in its backward pass.
        library.manager.is_first_fp8_module()
        yield


def update_scales(library: Library) -> None:
    """Reduce the recorded maxima over their groups and derive the next scales.

    Collective over each layer's amax group. Layers whose maximum is zero did not run and keep both
    history and scale.
    """
    library.manager.reduce_and_update_fp8_tensors(forward=True)
    library.manager.reduce_and_update_fp8_tensors(forward=False)


@contextmanager
def recorded_maxima_kept(module: Any) -> Iterator[None]:
    """Leave no trace of the block in the delayed-scaling maxima of `module`.

    Transformer Engine records maxima in every forward; those of an evaluation would enter the next
    training update.
    """
    slots = [state.amax_history[0] for state in delayed_states(module).values()]
    saved = [slot.clone() for slot in slots]
    try:
        yield
    finally:
        with torch.no_grad():
            for slot, before in zip(slots, saved, strict=True):
                slot.copy_(before)


def delayed_states(module: Any) -> dict[str, Any]:
    """The delayed-scaling states of a module by direction; empty before the first FP8 forward."""
    found = {}
    for direction in DIRECTIONS:
        state = module.fp8_meta.get(direction)
        if state is not None and all(hasattr(state, name) for name in TENSORS):
            found[direction] = state
    return found


def export_state(module: Any) -> dict[str, torch.Tensor]:
    """Copy a module's scales and histories, as `scaling_fwd.scale`, `scaling_fwd.amax_history`, ...

    Plain tensors, so that a checkpoint holds no pickled objects. Empty for a module that has not
    run in FP8, or whose recipe keeps no state.
    """
    return {
        f"{direction}.{name}": getattr(state, name).detach().clone()
        for direction, state in delayed_states(module).items()
        for name in TENSORS
    }


def import_state(module: Any, state: Mapping[str, torch.Tensor], path: str) -> None:
    """Write saved scales and histories into a module whose FP8 state exists.

    A history of another length keeps its newest rows. Transformer Engine's quantizers hold views
    of these tensors, so the values are copied into them and the tensors stay.

    Raises:
        CheckpointError: The saved tensors are for another number of columns.
    """
    with torch.no_grad():
        for direction, live in delayed_states(module).items():
            scale = state.get(f"{direction}.scale")
            history = state.get(f"{direction}.amax_history")
            if scale is None or history is None:
                continue
            columns = live.scale.shape[0]
            if scale.shape != live.scale.shape or history.shape[1:] != live.amax_history.shape[1:]:
                raise CheckpointError(
                    complaint(
                        f"FP8 state {path}.{direction}",
                        f"{scale.shape[0]} columns",
                        f"The layer has {columns} columns",
                        "Load a checkpoint of the same model, or drop its FP8 state",
                    )
                )
            live.scale.copy_(scale)
            live.amax_history.copy_(fit_history(history, live.amax_history.shape[0]))


def fit_history(history: torch.Tensor, length: int) -> torch.Tensor:
    """Change the number of rows of a history `[rows, columns]`, keeping the newest.

    Row 0 collects the current step's maximum; rows 1.. are past steps, the newest last.
    """
    current, past = history[:1], history[1:]
    keep = min(length - 1, past.shape[0])
    newest = past[past.shape[0] - keep :]
    empty = history.new_zeros((length - 1 - keep, history.shape[1]))
    return torch.cat([current, empty, newest])
