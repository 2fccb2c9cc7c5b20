"""Which tensors of a model have figures: those of linear layers, and those inside FP8 attention.

A tensor of attention counts as one of a layer of its own, `PATH.qkv` and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.fp8.amax import Slot
from megatron.core.fp8.attention import COLUMN_NAMES, AttentionTensor
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.stats import Watched

if TYPE_CHECKING:
    from megatron.core.fp8.state import Fp8State


class _Optional:
    """A tensor that a layer in FP8 need not cast."""

    active = False


def layers(state: Fp8State) -> dict[str, Watched]:
    """Everything that may cast, by path."""
    out: dict[str, Watched] = dict(state.layers)
    for path, layer in state.attention_layers.items():
        for tensor, name in COLUMN_NAMES.items():
            out[f"{path}.{name}"] = layer if tensor is AttentionTensor.QKV else _Optional()
    return out


def slots(state: Fp8State) -> Iterator[tuple[str, Role, Slot]]:
    """Path, role and column of everything with delayed scaling."""
    for path, layer in state.layers.items():
        if layer.slots is not None:
            for role in Role:
                yield path, role, layer.slots.of(role)
    for path, attention in state.attention_layers.items():
        if attention.slots is not None:
            for tensor, name in COLUMN_NAMES.items():
                if attention.is_delayed(tensor):
                    slot = Slot(attention.slots.book, path, *tensor.value)
                    yield f"{path}.{name}", tensor.role, slot
